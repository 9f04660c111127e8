"""Adapters over a narrow frozen base beside the same adapters over a bf16 base: losses, bytes per frozen weight, merges.

    python -m benchmarks.adapters --data DATA_FOLDER [--minutes 8] [--variants lora] [--share 0/2] [--finished]

--share trains a part of the runs and records nothing, for several processes; finished runs are not repeated.

A Llama of 1 M parameters (width 128, four blocks) is pre-trained in bf16 on plays and captions. Each run adapts it by
`narrowgauge train --lora`, with the same seeds and batches over every base:

    python       running text of another kind: modules of Python's standard library
    cloze        classification as a prompt: which of eight nouns was taken out of an English caption
    translation  an English caption, then the German one

`untrained` is the loss of each base before the first step: what the rounding of weights costs, and in 16-bit products.

The variants (DoRA, rsLoRA, PiSSA) stand beside the same variant over bf16, on the translations. PiSSA changes the base, so its base
is no codes: its products cast the changed weights. The verdicts are those of `narrowgauge study`, with its positive control.

Merges: the model that a run merged computes logits; a wide copy gets the adapters from peft over the decoded base and is converted
anew. Both must be equal to the bit. DATA_FOLDER holds tinyshakespeare.txt and multi30k (Elliott et al. 2016).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, record
from narrowgauge import cli, convert, describe
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL
from narrowgauge.ops.registry import device_facts
from narrowgauge.report import groups
from narrowgauge.train import adapter, adapter_state
from narrowgauge.train.attention import use_float32_attention
from narrowgauge.train.evaluation.saved import SavedRun

NOUNS = ("man", "woman", "boy", "girl", "dog", "people", "men", "child")
MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "difflib",
    "inspect",
    "pathlib",
    "tarfile",
    "typing",
    "subprocess",
    "unittest.mock",
)
BASES = ("bf16", "fp8-block", "nvfp4", "mxfp4", "int8", "nvfp4-46", POSITIVE_CONTROL)
OF_VARIANTS = ("bf16", "fp8-block", "nvfp4")
UNTRAINED = "untrained"  # adapters as they begin, whose change is zero: the loss is the base's own
VARIANTS = {
    "lora": "r=8", "dora": "r=8,dora", "rslora": "r=8,rslora", "pissa": "r=8,init=pissa", UNTRAINED: "r=8",
}  # fmt: skip
MERGED = ("fp8-block", "nvfp4")
TASKS = ("python", "cloze", "translation")
SIZES = "--model.hidden-size 128 --model.layers 4 --model.heads 4 --model.intermediate-size 256 --model.sequence-length 128"
PRETRAINING = (
    f"{SIZES} --recipe bf16 --data.vocab-size 1024 --batch.size 8 --training.steps 600 --optimizer.learning-rate 3e-3 "
    "--optimizer.warmup-steps 50 --device.threads 1 --evaluation.every 200 --evaluation.tokens 16384 --log.tensor-every 0"
)
ADAPTING = (
    "--training.steps {steps} --optimizer.warmup-steps 10 --optimizer.learning-rate 5e-3 --batch.size 8 --device.threads 1 "
    "--evaluation.every {steps} --evaluation.tokens 3000 --evaluation.sample-tokens 0 --no-evaluation.wide --log.tensor-every 0"
)
OF_TASK = {
    "python": "--task text --data {folder}/python.txt --model.sequence-length 48",
    "cloze": "--task causal-lm --data {folder}/cloze.jsonl --data.validation-data {folder}/cloze-held.jsonl --task.best none",
    "translation": "--task causal-lm --data {folder}/translation.jsonl --data.validation-data {folder}/translation-held.jsonl "
    "--data.max-length 64 --data.too-long skip --task.best none",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    task: str
    variant: str
    base: str
    seed: int

    def folder(self, output: Path) -> Path:
        return output / self.task / self.variant / f"{self.base}-seed{self.seed}"

    def arguments(self, output: Path, steps: int) -> list[str]:
        """Command line of the run. `--base` holds codes; PiSSA and the control cast wide weights."""
        is_coded = self.variant != "pissa" and self.base not in ("bf16", POSITIVE_CONTROL)
        base = f"--base {self.base}" if is_coded else f"--recipe {self.base}"
        is_untrained = self.variant == UNTRAINED
        merge = "--merge" if is_coded and self.base in MERGED and not is_untrained else ""
        settings = ADAPTING.format(steps=1 if is_untrained else steps)
        if is_untrained:
            settings = settings.replace("rate 5e-3", "rate 1e-12").replace("--no-eval", "--eval")
        return (
            f"train --model {output}/base/final --lora {VARIANTS[self.variant]} {base} {merge} --training.seed {self.seed} "
            f"{OF_TASK[self.task].format(folder=output)} {settings} --data.cache {output}/cache "
            f"--output {self.folder(output)}"
        ).split()  # fmt: skip


def planned(seeds: Sequence[int]) -> Iterator[Run]:
    """All runs, the most telling first."""
    for bases in (OF_VARIANTS, ("mxfp4", "int8"), ("nvfp4-46",)):
        for seed in seeds:
            for task in TASKS:
                yield from (Run(task, "lora", base, seed) for base in bases)
    for seed in seeds:
        for variant in ("dora", "rslora", "pissa"):
            yield from (Run("translation", variant, base, seed) for base in OF_VARIANTS)
    for seed in seeds:
        yield from (Run(task, "lora", POSITIVE_CONTROL, seed) for task in TASKS)
    for task in TASKS:
        yield from (Run(task, UNTRAINED, base, seeds[0]) for base in BASES[:-1])


def main() -> None:
    options = _options()
    began_s, output = time.monotonic(), options.output
    prepare(options.data, output)
    if not (output / "base" / "final").is_dir():
        _narrowgauge(
            f"train --data {output}/pretraining --output {output}/base {PRETRAINING}".split()
        )
    runs = [
        run
        for run in planned(options.seeds)
        if run.variant in options.variants and run.base in options.bases
    ]
    part, parts = map(int, options.share.split("/"))
    if options.finished:
        runs = [run for run in runs if (run.folder(output) / "final").is_dir()]
    for run in runs[part::parts]:
        if (run.folder(output) / "final").is_dir():
            continue
        if time.monotonic() - began_s > 60 * options.minutes:
            sys.exit("Out of minutes. Go on with the same command.")
        shutil.rmtree(run.folder(output), ignore_errors=True)  # what a stopped run has left
        started_s = time.process_time()
        _narrowgauge(run.arguments(output, options.steps))
        print(f"{run}: {time.process_time() - started_s:.0f} s of processor time", flush=True)
    if parts > 1:
        return
    settings = {
        "steps": options.steps,
        "pretraining": PRETRAINING,
        "adapting": ADAPTING,
        "tasks": OF_TASK,
    }
    found = [
        {"part": "loss", "task": task, "variant": variant, "settings": settings, **row}
        for task in TASKS
        for variant in VARIANTS
        for row in compared(
            [run for run in runs if (run.task, run.variant) == (task, variant)], output
        )
    ]
    found += [
        {"part": "merge", "task": run.task, "variant": run.variant, "recipe": run.base, "seed": run.seed, **merged(run.folder(output))}
        for run in runs
        if (run.folder(output) / "merged").is_dir()
    ]  # fmt: skip
    record("adapters", found, options.results)
    for row in found:
        print(shown(row))


def prepare(data: Path, output: Path) -> None:
    """Text of the pre-training and the three tasks, once. No caption is in two of them."""
    if (output / "translation-held.jsonl").exists():
        return
    (output / "pretraining").mkdir(parents=True, exist_ok=True)
    names = ("train.en", "train.de", "val.en", "val.de")
    read = {name: (data / "multi30k" / name).read_text(encoding="utf-8") for name in names}
    lines = {name: text.splitlines() for name, text in read.items()}
    shutil.copy(data / "tinyshakespeare.txt", output / "pretraining")
    _write(output / "pretraining" / "en.txt", lines["train.en"][:10_000])
    _write(output / "pretraining" / "de.txt", lines["train.de"][10_000:20_000])
    sources = [
        Path(__import__(name, fromlist=["_"]).__file__).read_text(encoding="utf-8")
        for name in MODULES
    ]
    _write(output / "python.txt", sources)
    for name, english, german in (
        ("", lines["train.en"][20_000:], lines["train.de"][20_000:]),
        ("-held", lines["val.en"], lines["val.de"]),
    ):
        _write(output / f"cloze{name}.jsonl", map(_row, *zip(*cloze(english), strict=True)))
        both = zip(english[:4_000], german[:4_000], strict=True)
        _write(
            output / f"translation{name}.jsonl",
            [_row(f"{one} =", f" {other}") for one, other in both],
        )


def cloze(captions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(caption without its noun, the noun) of captions that hold exactly one of the eight."""
    for words in map(str.split, captions):
        found = [word for word in words if word in NOUNS]
        if len(found) == 1:
            yield " ".join("?" if word in NOUNS else word for word in words) + " =", f" {found[0]}"


def _row(prompt: str, completion: str) -> str:
    return json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False)


def _write(path: Path, lines: Any) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _narrowgauge(arguments: list[str]) -> None:
    """The command line in this process: an import of torch and transformers costs as much as a run."""
    if code := cli.main(arguments):
        sys.exit(f"narrowgauge {' '.join(arguments)}: exit code {code}")


def compared(runs: Sequence[Run], output: Path) -> Iterator[dict[str, Any]]:
    """A row for each base: its loss, and the verdict beside bf16's."""
    if not runs:
        return
    found = groups.gather([run.folder(output) for run in runs], reference="bf16", metric="loss")
    verdicts = {each.runs.name: each for each in found.verdicts()}
    for group in found.groups:
        values = list(found.runs_of(group).finite.values())
        row: dict[str, Any] = {
            "recipe": group.name,
            "values": values,
            "loss": sum(values) / len(values),
            **codes(group.runs[0].run),
        }
        last = group.runs[0].of("eval")[-1]
        if "wide" in last:  # the same weights in 16-bit products
            row["wide"] = last["wide"]["loss"]
        if (each := verdicts.get(group.name)) is not None:
            numbers = each.numbers()
            row |= {
                key: numbers[key]
                for key in (
                    "outcome",
                    "verdict",
                    "seeds",
                    "differences",
                    "mean",
                    "low",
                    "high",
                    "margin",
                )
            }
            row["control_seen"] = each.assay.control is not None and each.assay.control.told
        yield row


def codes(run: dict[str, Any]) -> dict[str, float]:
    """Weights held as codes, and their bytes with scales, from the sentences of run.json."""
    for words in run["memory"]:
        if found := re.match(r"(\d+) frozen weights are held as codes, ([\d.]+) bytes each", words):
            return {"coded_weights": int(found[1]), "bytes_per_weight": float(found[2])}
    return {}


@torch.no_grad()
def merged(folder: Path) -> dict[str, Any]:
    """Logits of the merged model beside those of a fresh cast of the merged weights, and of RUN/merged."""
    from transformers import AutoModelForCausalLM

    saved = SavedRun.open(folder, torch.device("cpu"))
    (path,) = saved.paths("newest")
    model, _, _ = saved.model(path)
    # Wide: peft's own sum over what the codes decode to, layer by layer.
    weights = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer"):
            weights[f"{name}.weight"] = wide_sum(layer)
    ids = torch.arange(256)[None] * 3 % model.config.vocab_size
    report = adapter.merge(model.eval())
    recipes = {row.name: row.recipe for row in describe(model) if row.recipe != "none"}
    ours = model(ids).logits
    read = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    plain = read.state_dict() | weights
    fresh = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    fresh.load_state_dict(plain)
    # As the run computes them: its head in bf16, and attention in float32 where the CPU has no bfloat16.
    for each in (read, fresh):
        convert(each.eval(), recipes)
        if not device_facts("cpu", None).bf16_gemm:
            use_float32_attention(each)
    logits, of_folder = fresh(ids).logits, read(ids).logits
    assert adapter_state.adapters_of(model) is None and report.is_coded
    return {
        "logits": logits.numel(), "unequal": int((ours != logits).sum()), "unequal_of_folder": int((of_folder != ours).sum()),
        "largest": float((ours - logits).abs().max()), "survives": report.survives, "error": report.error,
    }  # fmt: skip


def wide_sum(layer: Any) -> torch.Tensor:
    """The decoded base weight plus the adapter's change, by peft, without a cast."""
    base = layer.get_base_layer()
    decoded = base.weight.detach().clone()
    plain = torch.nn.Linear(base.in_features, base.out_features, bias=False)
    plain.weight.data = decoded
    held, layer.base_layer = layer.base_layer, plain
    try:
        layer.merge(safe_merge=True, adapter_names=[adapter.NAME])
        found = plain.weight.detach().clone()
        layer.unmerge()
    finally:
        layer.base_layer = held
    return found


def shown(row: dict[str, Any]) -> str:
    head = f"{row['task']}, {row['variant']}, {row['recipe']}"
    if row["part"] == "merge":
        return f"{head}, seed {row['seed']}: {row['unequal']} of {row['logits']:,} logits unequal, {row['survives']:.1%} survives"
    words = f"{head}: {row['loss']:.4f}"
    if "wide" in row:
        words += f" ({row['wide']:.4f} in 16 bits)"
    if "mean" in row:
        known = row["low"] is not None  # an interval takes two seeds
        interval = f", {row['low']:+.4f} to {row['high']:+.4f}" if known else ""
        words += f" ({row['mean']:+.4f}{interval}, {row['outcome']} within {row['margin']:.4f})"
    return words + (
        f", {row['bytes_per_weight']:.3f} bytes per frozen weight"
        if "bytes_per_weight" in row
        else ""
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--results", type=Path, default=RESULTS / "adapters.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--bases", nargs="+", default=BASES, choices=BASES)
    parser.add_argument(
        "--share", default="0/1", help="train the runs I, I + N, ... of all, as I/N"
    )
    parser.add_argument(
        "--finished", action="store_true", help="train nothing; record the runs that are finished"
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="begin no run after so many minutes"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
