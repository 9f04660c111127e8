"""One fine-tuning run of an encoder on CoLA, in each of the ways that `cola_speed` compares.

`trainer-*` is transformers.Trainer as it comes: its sampler, DataCollatorWithPadding, torch's fused AdamW. `ours-run` is
`narrowgauge train --task classification`, called as a library; `ours-in-trainer` is transformers.Trainer with narrowgauge's
sampler, collator and optimizer. Learning rate, warm-up, half cosine, weight decay of matrices, clipping, batch size and dropout
are the same in all. (The Trainer's schedule counts its steps from 0 and ours from 1.)
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.finetune_cola import LONGEST, PARTS, evaluate, read


@dataclass(frozen=True)
class Variant:
    """padding: "fixed" to 128, "dynamic" to the longest of a batch, or "buckets" of narrowgauge's sampler."""

    padding: str
    bf16: bool = False
    grouped: bool = False
    trainer: bool = True


VARIANTS = {
    "trainer-fixed128-fp32": Variant("fixed"),
    "trainer-dynamic-bf16": Variant("dynamic", bf16=True),
    "trainer-dynamic-fp32": Variant("dynamic"),
    "trainer-grouped-bf16": Variant("dynamic", bf16=True, grouped=True),
    "trainer-grouped-fp32": Variant("dynamic", grouped=True),
    "ours-in-trainer": Variant("buckets"),
    "ours-run": Variant("buckets", trainer=False),
}
FIXED = 128
WARM_UP = 0.1  # of the steps
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run needs besides its variant.

    examples   train on the first so many; 0: all
    steps      at most; 0: all of the epochs
    precision  of `ours-run`: fp32, or amp-bf16 on a CPU that multiplies it
    """

    data: str
    encoder: str
    epochs: int
    batch_size: int
    learning_rate: float
    threads: int
    examples: int = 0
    steps: int = 0
    precision: str = "fp32"
    recipe: str = "none"
    states: str = "fp32"
    fuse: bool = False

    def total_steps(self, count: int) -> int:
        steps = self.epochs * -(-count // self.batch_size)
        return min(steps, self.steps) if self.steps else steps


def run(name: str, seed: int, job: Job, *, scored: bool) -> dict[str, float]:
    """Trains; returns the seconds of its steps, and of the processor in them, examples per second, and if scored both correlations."""
    import torch
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = (_trainer if VARIANTS[name].trainer else _own)(
            VARIANTS[name], seed, job, Path(folder)
        )
    model, tokenizer = found.pop("model"), found.pop("tokenizer")
    found["examples_per_s"] = found["examples"] / found["train_s"]
    if scored:
        for part, file in PARTS.items():
            found[f"{part}_mcc"] = evaluate(model, Path(job.data) / file, tokenizer)
    return found


def _trainer(variant: Variant, seed: int, job: Job, folder: Path) -> dict[str, Any]:
    """transformers.Trainer, timed from the first step's data to the last step's end."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
        set_seed,
    )

    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(job.encoder)
    model = AutoModelForSequenceClassification.from_pretrained(job.encoder, num_labels=2)
    model.float()
    rows = read(Path(job.data) / "in_domain_train.tsv", tokenizer)
    rows = rows[: job.examples] if job.examples else rows
    marks: dict[str, tuple[float, float, int]] = {}

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            marks["begin"] = (time.monotonic(), time.process_time(), 0)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            marks["end"] = (time.monotonic(), time.process_time(), state.global_step)

    trainer = _make_trainer(variant, seed, job, folder, model, tokenizer, rows)
    trainer.add_callback(Clock())
    trainer.train()
    (began_s, began_cpu_s, _), (ended_s, ended_cpu_s, steps) = marks["begin"], marks["end"]
    whole, rest = divmod(steps, -(-len(rows) // job.batch_size))
    examples = whole * len(rows) + rest * job.batch_size
    return {
        "model": model, "tokenizer": tokenizer, "train_s": ended_s - began_s, "cpu_s": ended_cpu_s - began_cpu_s,
        "examples": examples, "steps": steps,
    }  # fmt: skip


def _make_trainer(
    variant: Variant,
    seed: int,
    job: Job,
    folder: Path,
    model: Any,
    tokenizer: Any,
    rows: list[tuple[list[int], int]],
) -> Any:
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    from narrowgauge.data import Batching, Collator, LengthBatchSampler, pad_id_of
    from narrowgauge.optim import AdamW, groups

    total = job.total_steps(len(rows))
    arguments = TrainingArguments(
        str(folder), num_train_epochs=job.epochs, max_steps=total, per_device_train_batch_size=job.batch_size, seed=seed,
        learning_rate=job.learning_rate, lr_scheduler_type="cosine", warmup_steps=_warm_up(total),
        weight_decay=WEIGHT_DECAY, max_grad_norm=1.0, bf16=variant.bf16, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="no", dataloader_pin_memory=False, **_grouping(variant),
    )  # fmt: skip
    examples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label} for ids, label in rows
    ]
    shared = {"model": model, "args": arguments, "train_dataset": examples}
    if variant.padding != "buckets":
        fixed = {"padding": "max_length", "max_length": FIXED} if variant.padding == "fixed" else {}
        return Trainer(**shared, data_collator=DataCollatorWithPadding(tokenizer, **fixed))

    class Bucketed(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            lengths = [len(ids) for ids, _ in rows]
            sampler = LengthBatchSampler(
                lengths, Batching(batch_size=job.batch_size, multiple=1, seed=seed)
            )
            collate = Collator(pad_id=pad_id_of(tokenizer), widths=sampler.widths)
            return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate)

    optimizer = AdamW(
        groups(model, weight_decay=WEIGHT_DECAY), lr=job.learning_rate, states=job.states, seed=seed,  # type: ignore[arg-type]
    )  # fmt: skip
    return Bucketed(**shared, optimizers=(optimizer, None))


def _grouping(variant: Variant) -> Mapping[str, Any]:
    """The Trainer's own grouping by length, in the spelling of its release."""
    from transformers import TrainingArguments

    if not variant.grouped:
        return {}
    if "group_by_length" in TrainingArguments.__dataclass_fields__:  # transformers 4
        return {"group_by_length": True}
    return {"train_sampling_strategy": "group_by_length"}


def _warm_up(total: int) -> int:
    return max(1, round(WARM_UP * total))


def _own(variant: Variant, seed: int, job: Job, folder: Path) -> dict[str, Any]:
    """`narrowgauge train`, timed by its own log: the sum of its steps, drawing of data included."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from narrowgauge.diagnose.runs import read_metrics
    from narrowgauge.errors import NarrowgaugeError
    from narrowgauge.train import loop

    processor = _Processor()
    with processor:
        code = loop.run(_settings(seed, job, folder))
    if code:
        raise NarrowgaugeError(f"cola_variants: the run ended with exit code {code}. Run it again.")
    steps = [
        event
        for event in read_metrics(folder / "run" / "metrics.jsonl")
        if event["event"] == "step"
    ]
    return {
        "model": AutoModelForSequenceClassification.from_pretrained(folder / "run" / "final"),
        "tokenizer": AutoTokenizer.from_pretrained(job.encoder),
        "train_s": steps[-1]["elapsed_s"], "cpu_s": processor.spent_s,
        "examples": sum(event["examples"] for event in steps), "steps": len(steps),
    }  # fmt: skip


class _Processor:
    """Processor seconds of the run's steps alone; evaluation, checkpoint and export are outside of both clocks."""

    def __enter__(self) -> None:
        from narrowgauge.train.trainer import Trainer

        self.spent_s, self._kept = 0.0, Trainer._optimizer_step

        def timed(trainer: Trainer) -> Any:
            began_s = time.process_time()
            try:
                return self._kept(trainer)
            finally:
                self.spent_s += time.process_time() - began_s

        Trainer._optimizer_step = timed  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from narrowgauge.train.trainer import Trainer

        Trainer._optimizer_step = self._kept  # type: ignore[method-assign]


def _settings(seed: int, job: Job, folder: Path) -> Any:
    from narrowgauge.train.config.settings import TrainConfig

    count = _write(Path(job.data) / "in_domain_train.tsv", folder / "train.jsonl", job.examples)
    _write(Path(job.data) / PARTS["in_domain"], folder / "validation.jsonl", 0)
    total = job.total_steps(count)
    return TrainConfig(
        task="classification", model=job.encoder, data=str(folder / "train.jsonl"),
        validation_data=str(folder / "validation.jsonl"), max_length=LONGEST, too_long="truncate", pad_multiple=1,
        batch_size=job.batch_size, steps=total, learning_rate=job.learning_rate, warmup_steps=_warm_up(total),
        weight_decay=WEIGHT_DECAY, betas=(0.9, 0.999), recipe=job.recipe, precision=job.precision, states=job.states, fuse=job.fuse,
        seed=seed, device="cpu", threads=job.threads, output=str(folder / "run"), best="none", eval_every=0, checkpoint_every=0,
        tensor_every=0, log_every=50,
    )  # fmt: skip


def _write(source: Path, target: Path, examples: int) -> int:
    """CoLA's lines as JSONL; returns how many."""
    lines = source.read_text(encoding="utf-8").splitlines()
    fields = [line.split("\t") for line in (lines[:examples] if examples else lines)]
    rows = [json.dumps({"text": field[3], "label": int(field[1])}) + "\n" for field in fields]
    target.write_text("".join(rows), encoding="utf-8")
    return len(rows)
