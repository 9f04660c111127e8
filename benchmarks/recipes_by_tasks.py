"""Every recipe on every task, in small: the difference to bf16 over seeds, in one table.

    python -m benchmarks.recipes_by_tasks [--tasks digits tagging] [--recipes bf16 fp8-current] [--seeds 0 1 2 3 4]

Each run has two layers of width 64 from random weights, 16 examples a step, AdamW at 2e-3 with a cosine: a few seconds. What is finished is
not repeated, so the same command goes on. Products of Linears alone are narrow, in the evaluation too. Seeds are paired: weights,
batches and their order are bf16's. NAME/int4 has embeddings of INT4 too, with a learned
step. Table: mean of the paired difference and its 95 % interval (Student).

    digits       scikit-learn's 8 x 8 pixels, a ViT; accuracy
    tagging      made sentences (`made_tasks`); accuracy of words
    answers      made questions, windows of 32 tokens; windows with the right first and last token
    numbers      made regression (`plain_others`); Pearson's correlation
    translation  made sentences, a Marian of two and two layers; nats per target token
    characters   Llama on bytes of Python's own sources, from scratch; nats per byte
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, Figures, summarize

RECIPES = (
    "bf16", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4", "int8", "int4-hq-bs", "int4-hq-lss", "int4-lsq-luq",
    "bf16/int4", "int4-hq-bs/int4",
)  # fmt: skip
STEPS = {
    "tagging": 120,
    "numbers": 120,
    "digits": 240,
    "answers": 160,
    "characters": 120,
    "translation": 240,
}
NO_CODES = ("digits", "translation")  # without embeddings, and with positions that are computed
HIGHER_IS_BETTER = ("digits", "tagging", "answers", "numbers")
ROWS = 16  # examples of a step
Batch = dict[str, Any]


def main() -> None:
    options = _options()
    tables = []
    for task in options.tasks:
        settings = {"task": task, "steps": STEPS[task]}
        names = [name for name in options.recipes if "/" not in name or task not in NO_CODES]
        experiment = Experiment(run, names, options.seeds, settings, options.output / task)
        rows = summarize(experiment.results(1), ("score", "processor_s"), options.recipes[0])
        for row in rows:
            row |= {
                "task": task,
                "interval": interval(row["score_differences"]),
                "settings": settings,
            }
        record("recipes_by_tasks", rows, options.results)
        tables.append((task, rows))
    print(table(tables))


def run(recipe: str, seed: int, task: str, steps: int) -> dict[str, float]:
    import torch

    import narrowgauge as ng

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as name:
        model, batches, loss_of, score = TASKS[task](seed, steps, Path(name))
        linears, _, codes = recipe.partition("/")
        ng.convert(model, linears, embeddings=codes or None).train()  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1, (step + 1) / 15) * (1 + math.cos(math.pi * step / steps)) / 2,
        )
        began = time.process_time()
        for batch in batches:
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ng.advance(model)
            schedule.step()
            optimizer.zero_grad()
        spent = time.process_time() - began
        model.eval()
        with torch.no_grad():
            return {"score": score(model), "processor_s": spent}


Made = tuple[
    Any, Iterator[Batch], Callable[[Any, Batch], Any], Callable[[Any], float]
]  # model, batches, loss, score


def of_table(kind: str, score_of: Callable[[Any, Any], float]) -> Callable[[int, int, Path], Made]:
    """A task on made rows, by `benchmarks.batch_order`."""

    def made(seed: int, steps: int, place: Path) -> Made:
        from benchmarks.batch_order import ordered, prepared
        from narrowgauge import data

        model, train, held, tokenizer = prepared(kind, seed, 1200, place)
        collate = data.Collator(pad_id=data.pad_id_of(tokenizer), multiple=8)
        order = "stratified" if train.strata is not None else "length"
        batches = [
            collate([train[index] for index in step])
            for step in ordered(order, train, seed, steps, ROWS)
        ]
        tests = [
            collate([held[index] for index in part])
            for part in data.sorted_batches(held.lengths, batch_size=64)
        ]

        def loss(model: Any, batch: Batch) -> Any:
            return data.step_loss(model, batch, train.kind, data.count_targets([batch], train.kind))

        def score(model: Any) -> float:
            outputs = [
                model(**{name: each for name, each in batch.items() if name != "labels"})
                for batch in tests
            ]
            return score_of(outputs, tests)

        return model, iter(batches), loss, score

    return made


def _words(outputs: Any, tests: list[Batch]) -> float:
    found = [
        (out.logits.argmax(-1) == batch["labels"])[batch["labels"] >= 0]
        for out, batch in zip(outputs, tests, strict=True)
    ]
    return float(np.mean(np.concatenate([each.numpy() for each in found])))


def _answers(outputs: Any, tests: list[Batch]) -> float:
    from narrowgauge.train.tasks.question_answering import span_scores

    found = [
        (span_scores(out, batch["attention_mask"]).argmax(-1) == batch["labels"]).all(-1)
        for out, batch in zip(outputs, tests, strict=True)
    ]
    return float(np.mean(np.concatenate([each.numpy() for each in found])))


def _numbers(outputs: Any, tests: list[Batch]) -> float:
    found = [np.concatenate([each.flatten().numpy() for each in side]) for side in
        ([out.logits for out in outputs], [batch["labels"] for batch in tests])]  # fmt: skip
    return float(np.corrcoef(*found)[0, 1])


def digits(seed: int, steps: int, place: Path) -> Made:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    from benchmarks.digits import HELD_OUT, load

    pixels, labels = load()
    training = len(pixels) - HELD_OUT
    sizes = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    draw = np.random.default_rng(seed)
    chosen = (torch.from_numpy(draw.permutation(training)[:ROWS]) for _ in range(steps))
    batches = ({"pixel_values": pixels[part], "labels": labels[part]} for part in chosen)

    def score(model: Any) -> float:
        found = model(pixel_values=pixels[training:]).logits.argmax(-1)
        return float((found == labels[training:]).double().mean())

    return (
        ViTForImageClassification(sizes),
        batches,
        lambda model, batch: model(**batch).loss,
        score,
    )


def translation(seed: int, steps: int, place: Path) -> Made:
    from transformers import AutoModelForSeq2SeqLM

    from benchmarks import plain_others
    from benchmarks.batch_order import ordered
    from narrowgauge import data

    folder, train_file, held_file = plain_others.prepare(
        "seq2seq", place, seed, {"rows": 1200, "held_out": 200}
    )
    tokenizer = data.load(folder)
    train, held = (
        data.prepare_examples(side, data.Seq2Seq(), tokenizer, cache=place / "cache")
        for side in (train_file, held_file)
    )
    collate = data.Collator(pad_id=data.pad_id_of(tokenizer), multiple=8)
    batches = [
        collate([train[index] for index in step])
        for step in ordered("shuffled", train, seed, steps, ROWS)
    ]
    tests = [
        collate([held[index] for index in part])
        for part in data.sorted_batches(held.lengths, batch_size=64)
    ]

    def score(model: Any) -> float:
        total = sum(float(data.step_loss(model, batch, "seq2seq", 1)) for batch in tests)
        return total / data.count_targets(tests, "seq2seq")

    def loss(model: Any, batch: Batch) -> Any:
        return data.step_loss(model, batch, "seq2seq", data.count_targets([batch], "seq2seq"))

    return AutoModelForSeq2SeqLM.from_pretrained(folder), iter(batches), loss, score


def characters(seed: int, steps: int, place: Path) -> Made:
    import argparse as source

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    text = torch.tensor(list(Path(source.__file__).read_bytes()))
    cut, length = len(text) * 9 // 10, 64
    sizes = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    draw = np.random.default_rng(seed)

    def windows(first: int, last: int, count: int) -> Any:
        return torch.stack(
            [
                text[at : at + length]
                for at in np.random.default_rng(0).integers(first, last - length, count)
            ]
        )

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            ids = torch.stack(
                [text[at : at + length] for at in draw.integers(0, cut - length, ROWS)]
            )
            yield {"input_ids": ids, "labels": ids}

    held = windows(cut, len(text), 64)
    return (
        LlamaForCausalLM(sizes), batches(), lambda model, batch: model(**batch).loss,
        lambda model: float(model(input_ids=held, labels=held).loss),
    )  # fmt: skip


TASKS: dict[str, Callable[[int, int, Path], Made]] = {
    "digits": digits, "tagging": of_table("tagging", _words), "answers": of_table("question-answering", _answers),
    "numbers": of_table("regression", _numbers), "translation": translation, "characters": characters,
}  # fmt: skip


def interval(differences: list[float]) -> list[float]:
    """Of the mean, Student's, 95 %; [] of fewer than two, or of none at all."""
    from narrowgauge.diagnose.paired_tests import half_width

    half = half_width(differences)
    middle = float(np.mean(differences)) if differences else 0.0
    return [] if half is None else [middle - half, middle + half]


def table(tables: list[tuple[str, list[Figures]]]) -> str:
    """A row per recipe; of scores in points of a hundred."""
    names = {row["recipe"]: None for _, rows in tables for row in rows}
    lines = [
        "| | " + " | ".join(task for task, _ in tables) + " |",
        "|---" * (1 + len(tables)) + "|",
    ]
    for name in names:
        cells = []
        for task, rows in tables:
            scale, places = (100, 1) if task in HIGHER_IS_BETTER else (1, 4)
            row = next((row for row in rows if row["recipe"] == name), None)
            if row is None:
                cells.append("")
            elif row["recipe"] == row["reference"]:
                cells.append(
                    f"{scale * row['score']:.{places}f} ± {scale * row['score_deviation']:.{places}f}"
                )
            else:
                ends = " to ".join(f"{scale * end:+.{places}f}" for end in row["interval"])
                cells.append(f"{scale * row['score_difference']:+.{places}f} ({ends})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.recipes_by_tasks", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(STEPS))
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        help="the first is the reference of the pairs",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("runs/recipes_by_tasks"))
    parser.add_argument("--results", type=Path, default=RESULTS / "recipes_by_tasks.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
