"""Does a model learn less from batches by length, and why? One plain loop, the orders of its batches side by side.

    python -m benchmarks.batch_order [--tasks question-answering] [--seeds 0 1 2 3 4]
    python -m benchmarks.batch_order --tasks multi30k --data MULTI30K_FOLDER --rows 8000 --steps 500 --learning-rate 3e-3 --batch-size 32
    python -m benchmarks.batch_order --tasks multi30k --data MULTI30K_FOLDER --rows 8000 --batch-size 32 --padding 1 2 4 8

    shuffled    at random
    length      by length: `data.plan` without strata
    constant    as `length`, but the loss of a step is divided by the targets of a mean step: no target weighs more than another
    stratified  by length, every batch with the data's share of each label: `data.plan` with `examples.strata`
    shares      at random, but with as many examples of each stratum in a batch as `length` has: its labels without its lengths

Made data (`made_tasks`, `plain_others`) and a BERT of two layers at random, for translation a Marian. multi30k: English to German and the
Marian of `study_translation`; multi30k-completion: the German as a Llama's completion of the English. float32, AdamW, 16 examples a step
where nothing else is asked.
loss: held out, at the end. swing: of the first stratum's share from batch to batch, its deviation over that of the binomial distribution.
A plain loop without narrow products: it is about data alone.
--padding: trains nothing; the padding of the first epoch's plan, in both orders, cut into so many micro-batches (batch_padding.jsonl).
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

ORDERS = ("shuffled", "length", "constant", "stratified", "shares")
REAL = ("multi30k", "multi30k-completion")
METRICS = ("loss", "swing", "padding", "processor_s")


def main() -> None:
    options = _options()
    if options.padding:
        _paddings(options)
        return
    for task in options.tasks:
        orders = [
            order
            for order in options.orders
            if order not in ORDERS[3:]
            or task not in ("tagging", "multiple-choice", "translation", *REAL)
        ]
        settings = {
            "task": task, "steps": options.steps, "rows": options.rows, "learning_rate": options.learning_rate,
            "batch_size": options.batch_size, "data": str(options.data or ""),
        }  # fmt: skip
        experiment = Experiment(
            run,
            orders,
            options.seeds,
            settings,
            options.output / f"{task}-{options.steps}-{options.learning_rate}-{options.batch_size}",
        )
        rows = summarize(experiment.results(1), METRICS, orders[0])
        for row in rows:
            row |= {"task": task, "settings": settings | {"data": Path(settings["data"]).name}} | {
                "interval": verdict(task, row["loss_differences"])["interval"]
            }
        record(
            "batch_order",
            [{"order": row.pop("recipe"), **row} for row in [dict(row) for row in rows]],
            options.results,
        )
        print(
            f"{task}\n{markdown(rows, METRICS)}\n95 %: {[row['interval'] for row in rows]}",
            flush=True,
        )


def _paddings(options: argparse.Namespace) -> None:
    from narrowgauge.data import Batching, plan

    for task in options.tasks:
        with tempfile.TemporaryDirectory() as name:
            lengths = prepared(
                task, options.seeds[0], options.rows, Path(name), str(options.data or "")
            )[1].lengths
        settings = {"task": task, "rows": options.rows, "batch_size": options.batch_size}
        rows = [
            settings
            | {"order": order, "micro_batches": parts, "padding_percent": round(padding.percent, 2)}
            for order in ("shuffled", "length")
            for parts in options.padding
            for padding in [
                plan(
                    lengths,
                    Batching(batch_size=options.batch_size, order=order),
                    micro_batches=parts,
                ).padding.planned
            ]
        ]
        record("batch_padding", rows, options.results.with_name("batch_padding.jsonl"))
        for row in rows:
            print(
                f"{task}, {row['order']}, {row['micro_batches']} micro-batches: {row['padding_percent']} % padding"
            )


def run(
    order: str,
    seed: int,
    task: str,
    steps: int,
    rows: int,
    learning_rate: float,
    batch_size: int,
    data: str,
) -> dict[str, float]:
    import torch

    from narrowgauge import data as tables

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model, train, held, tokenizer = prepared(task, seed, rows, Path(name), data)
        batches = ordered(order, train, seed, steps, batch_size)
        collate = tables.Collator(pad_id=tables.pad_id_of(tokenizer), multiple=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1, (step + 1) / 15) * (1 + math.cos(math.pi * step / steps)) / 2,
        )
        targets = np.asarray(
            [
                tables.count_targets([collate([train[place]])], train.kind)
                for place in range(len(train))
            ]
        )
        mean = float(targets.mean()) * len(batches[0])
        positions, began = 0, time.process_time()
        for places in batches:
            batch = collate([train[place] for place in places])
            positions += batch["input_ids"].numel()
            count = mean if order == "constant" else tables.count_targets([batch], train.kind)
            tables.step_loss(model, batch, train.kind, count).backward()
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
        found = {
            "loss": total / count,
            "padding": 100 * (1 - tokens / positions),
            "processor_s": spent,
        }
        return found | {"swing": _swing(batches, train.strata)}


def ordered(order: str, train: Any, seed: int, steps: int, size: int) -> list[list[int]]:
    """The examples of each step, epoch after epoch."""
    from narrowgauge.data import Batching, plan

    draw, found, epoch = np.random.default_rng(seed), [], 0
    batching = Batching(batch_size=size, seed=seed)
    while len(found) < steps:
        strata = train.strata if order == "stratified" else None
        by_length = [step[0] for step in plan(train.lengths, batching, epoch, strata=strata).steps]
        mixed = draw.permutation(len(train))
        if order == "shuffled":
            by_length = [
                mixed[start : start + size].tolist() for start in range(0, len(mixed), size)
            ]
        elif order == "shares":
            left = {
                each: mixed[train.strata[mixed] == each].tolist()
                for each in np.unique(train.strata)
            }
            by_length = [
                [left[each].pop() for each in train.strata[places]] for places in by_length
            ]
        found += by_length
        epoch += 1
    return found[:steps]


def _swing(batches: list[list[int]], strata: Any) -> float:
    if strata is None:
        return 0.0
    first = strata == 0
    share = float(first.mean())
    full = [places for places in batches if len(places) == len(batches[0])]
    return float(
        np.std([first[places].mean() for places in full])
        / math.sqrt(share * (1 - share) / len(full[0]))
    )


def prepared(
    task: str, seed: int, rows: int, place: Path, folder: str = ""
) -> tuple[Any, Any, Any, Any]:
    """The model, the examples of both sides, and the tokenizer."""
    import torch

    from benchmarks import plain_others, plain_trainer, study_translation
    from narrowgauge import data

    settings = {"rows": rows, "held_out": 400}
    auto: Any
    if task in REAL:
        torch.manual_seed(seed)
        study_translation.prepare(Path(folder), place, rows)
        model, train, held = place / "model", place / "train.jsonl", place / "val.jsonl"
        auto = plain_others.AUTO["seq2seq"] if task == "multi30k" else _llama(model)
    elif task in ("regression", "translation"):
        kind = "seq2seq" if task == "translation" else task
        model, train, held = plain_others.prepare(kind, place, seed, settings)
        auto = plain_others.AUTO[kind]
    else:
        auto = plain_trainer.AUTO[task]
        names = {
            "id2label": dict(enumerate(TAGS)),
            "label2id": {tag: number for number, tag in enumerate(TAGS)},
        }
        model = made_tasks.save_encoder(
            place / "encoder", auto, seed, **(names if task == "tagging" else {})
        )
        train = made_tasks.write(place / "train.jsonl", task, rows, 1000 + seed)
        held = made_tasks.write(place / "held.jsonl", task, 400, 1)
    columns: Any = {
        "question-answering": data.Questions(stride=8), "tagging": data.Tagging(tags=TAGS), "multiple-choice": data.Choices(),
        "regression": data.Regression(), "translation": data.Seq2Seq(), "multi30k": data.Seq2Seq(source="en", target="de"),
        "multi30k-completion": data.Completion(prompt="en", completion="de"),
    }[task]  # fmt: skip
    limits = {
        "question-answering": data.Limits(max_length=32), "multi30k": data.Limits(max_length=48, too_long="truncate"),
        "multi30k-completion": data.Limits(max_length=96, too_long="truncate"),
    }.get(task, data.Limits())  # fmt: skip
    tokenizer = data.load(model)
    sides = [
        data.prepare_examples(side, columns, tokenizer, cache=place / "cache", limits=limits)
        for side in (train, held)
    ]
    return auto.from_pretrained(model).train(), sides[0], sides[1], tokenizer


def _llama(folder: Path) -> Any:
    """A Llama at random in place of the folder's model, and the class that reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(sizes).save_pretrained(folder)
    return AutoModelForCausalLM


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.batch_order", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    tasks = ["question-answering", "regression", "tagging", "multiple-choice", "translation"]
    parser.add_argument("--tasks", nargs="+", choices=[*tasks, *REAL], default=tasks)
    parser.add_argument(
        "--data",
        type=Path,
        help="for multi30k: the folder with train.en, train.de, val.en and val.de",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="examples of a step")
    parser.add_argument(
        "--orders",
        nargs="+",
        choices=ORDERS,
        default=list(ORDERS),
        help="the first is the reference of the pairs",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument(
        "--padding",
        type=int,
        nargs="+",
        metavar="MICRO_BATCHES",
        help="count padding instead of training",
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/batch_order"))
    parser.add_argument("--results", type=Path, default=RESULTS / "batch_order.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
