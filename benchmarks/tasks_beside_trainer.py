"""Does each task of `narrowgauge train` learn as much as a plain script on transformers.Trainer with the same settings?

    python -m benchmarks.tasks_beside_trainer [--seeds 0 1 2 3]

Made data (`made_tasks`, `plain_others`) and digits, models of two layers, float32 Linears on both sides (recipe none), the same weights to
begin with, rates, decay and steps. With --order length the Trainer has the same batches as well (answers, tags and choices alone), else it
shuffles rows while narrowgauge groups them by length. Both models are scored by the plain script (`plain_trainer`, `plain_others`), and
what narrowgauge's own evaluation said of its model stands beside it. Seeds are paired; the interval is Student's. "equivalent": shown to be
within a margin (two one-sided tests, 5 %) that was written down before the runs: 0.01 of a score, 0.02 of accuracy on 397 digits, 2 BLEU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.made_tasks import ROWS, save_encoder, write
from benchmarks.paired import Experiment, markdown, summarize

PLAIN, OURS = "trainer", "narrowgauge"
OTHERS = {
    "regression": "pearson",
    "image-classification": "accuracy",
    "seq2seq": "bleu",
}  # in `plain_others`
OWN_METRIC = {"question-answering": "f1", "tagging": "f1", "multiple-choice": "accuracy", **OTHERS}
MARGINS = {"image-classification": 0.02, "seq2seq": 2.0}  # of the others 0.01
TAGS = ("O", "B-cold", "B-warm", "I-cold", "I-warm")


def main() -> None:
    options = _options()
    settings = {
        "steps": options.steps, "batch_size": 16, "learning_rate": 2e-3, "warmup_steps": 15, "weight_decay": 0.01, "betas": (0.9, 0.999),
        "max_length": 32, "stride": 8, "rows": 1200, "held_out": 400, "order": options.order,
    }  # fmt: skip
    for task in options.tasks:
        experiment = Experiment(
            run,
            [PLAIN, OURS],
            options.seeds,
            {"task": task, "settings": settings},
            options.output / f"{task}-{options.order}",
        )
        rows = summarize(experiment.results(options.jobs), ("score", "own_score"), PLAIN)
        for row in rows:
            row |= {"task": task, "metric": OWN_METRIC[task]} | verdict(
                task, row["score_differences"]
            )
        record(
            "tasks_beside_trainer", [row | {"settings": settings} for row in rows], options.results
        )
        print(
            f"{task}, {OWN_METRIC[task]}\n{markdown(rows, ('score', 'own_score'))}\n95 % of the difference: {rows[-1]['interval']}, "
            f"equivalent within {rows[-1]['margin']}: p = {rows[-1]['p_equivalent']:.4f}"
        )


def run(recipe: str, seed: int, task: str, settings: dict[str, Any]) -> dict[str, float]:
    """One side of a pair; `recipe` is PLAIN or OURS. score: by the plain script; own_score: by narrowgauge's evaluation of its run."""
    import torch

    from benchmarks import plain_others, plain_trainer

    plain: Any = plain_others if task in OTHERS else plain_trainer
    torch.set_num_threads(1)
    settings = settings | {"seed": seed}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if task in OTHERS:
            folder, train, held_out = plain_others.prepare(task, place, seed, settings)
            return _pair(plain, recipe, task, folder, train, held_out, place, settings)
        labels = (
            {
                "id2label": dict(enumerate(TAGS)),
                "label2id": {tag: number for number, tag in enumerate(TAGS)},
            }
            if task == "tagging"
            else {}
        )
        folder = save_encoder(place / "encoder", plain.AUTO[task], seed, **labels)
        train, held_out = (
            write(place / "train.jsonl", task, settings["rows"], 1000 + seed),
            write(place / "held.jsonl", task, settings["held_out"], 1),
        )
        return _pair(plain, recipe, task, folder, train, held_out, place, settings)


def _pair(
    plain: Any,
    recipe: str,
    task: str,
    folder: Path,
    train: Path,
    held_out: Path,
    place: Path,
    settings: dict[str, Any],
) -> dict[str, float]:
    if recipe == PLAIN:
        given = (
            {"batches": by_length(task, folder, train, place, settings)}
            if settings["order"] == "length"
            else {}
        )
        model = plain.train(task, folder, train, place / "out", settings, **given)
        found = plain.score(task, model, folder, held_out, settings)
        return {"score": found, "own_score": found}
    own = ours(task, folder, train, held_out, place / "run", settings)
    model = plain.AUTO[task].from_pretrained(place / "run" / "final").eval()
    return {"score": plain.score(task, model, folder, held_out, settings), "own_score": own}


def by_length(
    task: str, folder: Path, train: Path, place: Path, settings: dict[str, Any]
) -> list[list[int]]:
    """The examples of each step of narrowgauge's run on answers, tags or choices."""
    from narrowgauge import data

    columns = {
        "question-answering": lambda: data.Questions(stride=settings["stride"]),
        "tagging": lambda: data.Tagging(tags=TAGS),
        "multiple-choice": data.Choices,
    }
    limits = data.Limits(
        max_length=settings["max_length"] if task == "question-answering" else None
    )
    examples = data.prepare_examples(
        train, columns[task](), data.load(folder), cache=place / "order", limits=limits
    )
    sampler = data.LengthBatchSampler(
        examples.lengths, data.Batching(batch_size=settings["batch_size"], seed=settings["seed"])
    )
    found: list[list[int]] = []
    while len(found) < settings["steps"]:
        found += sampler
    return found[: settings["steps"]]


def ours(
    task: str, folder: Path, train: Path, held_out: Path, output: Path, settings: dict[str, Any]
) -> float:
    from narrowgauge.diagnose.runs import read_metrics
    from narrowgauge.train import loop
    from narrowgauge.train.config.settings import TrainConfig

    shared = {
        key: settings[key]
        for key in (
            "steps",
            "batch_size",
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "seed",
        )
    }
    from benchmarks import plain_others

    shared["betas"] = tuple(settings["betas"])  # a list if the settings came from a file
    own = plain_others.own_settings(task, settings)
    own |= (
        {"max_length": settings["max_length"], "stride": settings["stride"]}
        if task == "question-answering"
        else {}
    )
    code = loop.run(TrainConfig(
        task=task, model=str(folder), data=str(train), validation_data=str(held_out), output=str(output), recipe="none",
        precision="fp32", threads=1, device="cpu", eval_every=0, checkpoint_every=0, tensor_every=0, best="none",
        eval_tokens=2**30, **shared, **own,
    ))  # fmt: skip
    assert code == 0, f"the run ended with exit code {code}"
    [found] = [
        event for event in read_metrics(output / "metrics.jsonl") if event["event"] == "eval"
    ]
    return float(found[OWN_METRIC[task]])


def verdict(task: str, differences: list[float]) -> dict[str, Any]:
    """interval: 95 % of the mean, Student's, [] of fewer than two; p_equivalent: of a true mean beyond the margin."""
    from narrowgauge.diagnose.paired_tests import half_width, p_equivalent

    margin, middle, half = (
        MARGINS.get(task, 0.01),
        statistics.mean(differences),
        half_width(differences),
    )
    interval = [] if half is None else [middle - half, middle + half]
    return {
        "interval": interval,
        "margin": margin,
        "p_equivalent": p_equivalent(differences, margin),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tasks_beside_trainer", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--tasks", nargs="+", choices=[*ROWS, *OTHERS], default=[*ROWS, *OTHERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--order", choices=("length", "shuffled"), default="shuffled", help="batches of the Trainer"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/tasks_beside_trainer"))
    parser.add_argument("--results", type=Path, default=RESULTS / "tasks_beside_trainer.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
