"""Does a model learn less from batches by length, and why? One plain loop, the orders of its batches side by side.

    python -m benchmarks.batch_order [--tasks question-answering] [--seeds 0 1 2 3 4]

    shuffled    at random
    length      by length: `data.plan` without strata
    stratified  by length, every batch with the data's share of each label: `data.plan` with `examples.strata`
    shares      at random, but with as many examples of each stratum in a batch as `length` has: its labels without its lengths

Made data (`made_tasks`, `plain_others`) and a BERT of two layers at random, for translation a Marian. float32, AdamW, 16 examples a step.
loss: held out, at the end. swing: of the first stratum's share from batch to batch, its deviation over that of the binomial distribution.
A plain loop without narrow products: it is about data alone.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import made_tasks
from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, markdown, summarize
from benchmarks.tasks_beside_trainer import TAGS, verdict

ORDERS = ("shuffled", "length", "stratified", "shares")
METRICS = ("loss", "swing", "padding", "processor_s")


def main() -> None:
    options = _options()
    for task in options.tasks:
        orders = [
            order
            for order in options.orders
            if order not in ORDERS[2:] or task not in ("tagging", "multiple-choice", "translation")
        ]
        settings = {"task": task, "steps": options.steps, "rows": options.rows, "learning_rate": options.learning_rate}
        experiment = Experiment(
            run, orders, options.seeds, settings, options.output / f"{task}-{options.steps}-{options.learning_rate}"
        )
        rows = summarize(experiment.results(1), METRICS, orders[0])
        for row in rows:
            row |= {"task": task, "settings": settings} | {
                "interval": verdict(task, row["loss_differences"])["interval"]
            }
        record(
            "batch_order", [{"order": row.pop("recipe"), **row} for row in [dict(row) for row in rows]], options.results
        )
        print(f"{task}\n{markdown(rows, METRICS)}\n95 %: {[row['interval'] for row in rows]}", flush=True)


def run(order: str, seed: int, task: str, steps: int, rows: int, learning_rate: float) -> dict[str, float]:
    import torch

    from narrowgauge import data as tables

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model, train, held, tokenizer = prepared(task, seed, rows, Path(name))
        batches = ordered(order, train, seed, steps)
        collate = tables.Collator(pad_id=tables.pad_id_of(tokenizer), multiple=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / 15) * (1 + math.cos(math.pi * step / steps)) / 2
        )
        positions, began = 0, time.process_time()
        for places in batches:
            batch = collate([train[place] for place in places])
            positions += batch["input_ids"].numel()
            tables.step_loss(model, batch, train.kind, tables.count_targets([batch], train.kind)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        spent, total, count = time.process_time() - began, 0.0, 0
        model.eval()
        with torch.no_grad():
            for places in tables.sorted_batches(held.lengths, batch_size=64):
                batch = collate([held[place] for place in places])
                count += tables.count_targets([batch], held.kind)
                total += float(tables.step_loss(model, batch, held.kind, 1))
        tokens = sum(int(train.tokens[places].sum()) for places in batches)
        found = {"loss": total / count, "padding": 100 * (1 - tokens / positions), "processor_s": spent}
        return found | {"swing": _swing(batches, train.strata)}


def ordered(order: str, train: Any, seed: int, steps: int, size: int = 16) -> list[list[int]]:
    """The examples of each step, epoch after epoch."""
    from narrowgauge.data import Batching, plan

    draw, found, epoch = np.random.default_rng(seed), [], 0
    batching = Batching(batch_size=size, seed=seed)
    while len(found) < steps:
        strata = train.strata if order == "stratified" else None
        by_length = [step[0] for step in plan(train.lengths, batching, epoch, strata=strata).steps]
        mixed = draw.permutation(len(train))
        if order == "shuffled":
            by_length = [mixed[start : start + size].tolist() for start in range(0, len(mixed), size)]
        elif order == "shares":
            left = {each: mixed[train.strata[mixed] == each].tolist() for each in np.unique(train.strata)}
            by_length = [[left[each].pop() for each in train.strata[places]] for places in by_length]
        found += by_length
        epoch += 1
    return found[:steps]


def _swing(batches: list[list[int]], strata: Any) -> float:
    if strata is None:
        return 0.0
    first = strata == 0
    share = float(first.mean())
    full = [places for places in batches if len(places) == len(batches[0])]
    return float(np.std([first[places].mean() for places in full]) / math.sqrt(share * (1 - share) / len(full[0])))


def prepared(task: str, seed: int, rows: int, place: Path) -> tuple[Any, Any, Any, Any]:
    """The model, the examples of both sides, and the tokenizer."""
    from benchmarks import plain_others, plain_trainer
    from narrowgauge import data

    settings = {"rows": rows, "held_out": 400}
    if task in ("regression", "translation"):
        kind = "seq2seq" if task == "translation" else task
        model, train, held = plain_others.prepare(kind, place, seed, settings)
        auto: Any = plain_others.AUTO[kind]
    else:
        auto = plain_trainer.AUTO[task]
        names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: number for number, tag in enumerate(TAGS)}}
        model = made_tasks.save_encoder(place / "encoder", auto, seed, **(names if task == "tagging" else {}))
        train = made_tasks.write(place / "train.jsonl", task, rows, 1000 + seed)
        held = made_tasks.write(place / "held.jsonl", task, 400, 1)
    columns: Any = {
        "question-answering": data.Questions(stride=8), "tagging": data.Tagging(tags=TAGS), "multiple-choice": data.Choices(),
        "regression": data.Regression(), "translation": data.Seq2Seq(),
    }[task]  # fmt: skip
    limits = data.Limits(max_length=32 if task == "question-answering" else None)
    tokenizer = data.load(model)
    sides = [
        data.prepare_examples(side, columns, tokenizer, cache=place / "cache", limits=limits) for side in (train, held)
    ]
    return auto.from_pretrained(model), sides[0], sides[1], tokenizer


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.batch_order", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    tasks = ["question-answering", "regression", "tagging", "multiple-choice", "translation"]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument(
        "--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="the first is the reference of the pairs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/batch_order"))
    parser.add_argument("--results", type=Path, default=RESULTS / "batch_order.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
