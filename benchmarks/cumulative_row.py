"""One row of the cumulative table: a fine-tune in transformers.Trainer with some of narrowgauge's techniques in it.

Everything is a library call that works in any loop, so that the loop stays the same in all rows: the collator, the sampler, the
optimizer and the loss are handed to the Trainer, and the model is changed before the Trainer sees it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is in use.

    padding        fixed, to max_length; longest of a batch; buckets of narrowgauge's sampler; packed rows of max_length
    accumulation   micro-batches of a step; the examples of a step stay the same
    recipe         of every Linear, under bfloat16 autocast; '' is plain float32
    states         of narrowgauge's AdamW; '' is torch's fused one
    cached         examples from narrowgauge's cache, which is there; else tokenized here, one row per call
    """

    name: str
    padding: str = "longest"
    cached: bool = False
    accumulation: int = 1
    freeze: str = ""
    chunked: bool = False
    checkpointing: str = "none"
    compressed: bool = False
    recipe: str = ""
    states: str = ""
    in_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """kind "causal-lm" (columns prompt, completion) or "classification" (text, label); folder has train and validation.jsonl.

    model   a folder with weights and tokenizer
    """

    kind: str
    folder: str
    model: str
    max_length: int
    batch_size: int
    learning_rate: float
    steps: int
    threads: int


Example = dict[str, Any]


def measure_row(row: Row, task: Task, seed: int) -> dict[str, float]:
    """Trains and returns the columns of the table. For a process of its own: the peak of memory is the process's."""
    import torch
    import transformers

    import narrowgauge  # noqa: F401  (part of the baseline)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)
    baseline = _restart_peak()
    began_s = time.monotonic()
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.model)
    examples = _examples(row, task, tokenizer, "train")
    read_s = time.monotonic() - began_s
    transformers.set_seed(seed)
    model = _model(row, task)
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(row, task, seed, model, tokenizer, examples, counts, folder)
        trainer.train()
        optimizer = trainer.optimizer
    peak = _peak()
    found = {
        "peak_bytes": peak - baseline, "optimizer_bytes": _optimizer_bytes(optimizer),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "read_s": read_s, "first_step_s": counts.first_s - began_s, "train_s": counts.last_s - counts.begin_s,
        "examples_per_s": counts.examples / (counts.last_s - counts.begin_s),
        "tokens_per_s": counts.tokens / (counts.last_s - counts.begin_s),
        "cpu_s_per_1000_tokens": 1000 * (counts.last_cpu_s - counts.begin_cpu_s) / counts.tokens,
        "padding": 1 - counts.tokens / counts.positions,
    }  # fmt: skip
    model.zero_grad(set_to_none=True)
    found["saved_bytes"] = _saved_bytes(row, task, model, counts.largest)
    return found | _metric(task, model, tokenizer)


# ---- data ---------------------------------------------------------------------------------------------------------------


class Counts:
    """What the collator was given, and when steps ended. The Trainer draws one batch ahead, so what it drew last may be unused."""

    def __init__(self) -> None:
        self.examples = self.tokens = self.positions = 0
        self.largest: dict[str, Any] = {}
        self.begin_s = self.first_s = self.last_s = self.begin_cpu_s = self.last_cpu_s = 0.0
        self._drawn: list[tuple[int, int, int]] = []

    def collating(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(items: Sequence[Any]) -> Any:
            flat = [one for item in items for one in ([item] if isinstance(item, dict) else item)]
            batch = dict(collate(items))
            tokens, positions = (
                sum(len(one["input_ids"]) for one in flat),
                batch["input_ids"].numel(),
            )
            if not self.largest or positions > self.largest["input_ids"].numel():
                self.largest = dict(batch)
            self._drawn.append((len(flat), tokens, positions))
            return batch

        return counted

    def take(self, batches: int) -> None:
        """The first `batches` of what was drawn are those that were trained on."""
        for examples, tokens, positions in self._drawn[:batches]:
            self.examples, self.tokens, self.positions = (
                self.examples + examples, self.tokens + tokens, self.positions + positions,
            )  # fmt: skip


def _examples(row: Row, task: Task, tokenizer: Any, part: str) -> Any:
    file = Path(task.folder) / f"{part}.jsonl"
    if row.cached:
        from narrowgauge.data import Classification, Completion, prepare_examples

        columns: Any = Completion() if task.kind == "causal-lm" else Classification(classes=2)
        return prepare_examples(file, columns, tokenizer, cache=Path(task.folder) / "cache")
    encode = _completion if task.kind == "causal-lm" else _classified
    return [
        encode(json.loads(line), tokenizer)
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def _completion(row: Mapping[str, Any], tokenizer: Any) -> Example:
    prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    answer = [
        *tokenizer(row["completion"], add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def _classified(row: Mapping[str, Any], tokenizer: Any) -> Example:
    return {"input_ids": tokenizer(row["text"])["input_ids"], "labels": int(row["label"])}


def _collate(
    row: Row, task: Task, tokenizer: Any, widths: tuple[int, ...] | None
) -> Callable[[Any], Any]:
    """narrowgauge's collator pads as transformers' do: to the longest of a batch, to one width, or to the sampler's."""
    from narrowgauge.data import Collator, pad_id_of

    if row.padding == "fixed":
        widths = (task.max_length,)
    return Collator(pad_id=pad_id_of(tokenizer), widths=widths, multiple=1, tokens_multiple=1)


# ---- model and Trainer --------------------------------------------------------------------------------------------------


def _model(row: Row, task: Task) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    import narrowgauge as ng
    from narrowgauge.ops.registry import device_facts
    from narrowgauge.train.attention import use_float32_attention

    auto = AutoModelForCausalLM if task.kind == "causal-lm" else AutoModelForSequenceClassification
    model = auto.from_pretrained(task.model, dtype=torch.float32).train()
    model.config.use_cache = False
    if row.freeze:
        ng.memory.freeze(model, row.freeze)
    if row.recipe:
        ng.convert(model, row.recipe)
        if not device_facts("cpu", None).bf16_gemm:
            use_float32_attention(model)
    if row.compressed:
        ng.memory.compress_activations(model)
    ng.memory.checkpoint(model, row.checkpointing)
    return model


def _trainer(
    row: Row,
    task: Task,
    seed: int,
    model: Any,
    tokenizer: Any,
    examples: Any,
    counts: Counts,
    folder: str,
) -> Any:
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    import narrowgauge as ng
    from narrowgauge.data import Batching, LengthBatchSampler

    rows = task.batch_size // row.accumulation
    batching = Batching(batch_size=rows, multiple=1, tokens_multiple=1, seed=seed)
    if row.padding == "packed":
        mean = sum(len(one["input_ids"]) for one in examples) / len(examples)
        packed = max(1, round(task.batch_size * mean / task.max_length / row.accumulation))
        batching = Batching(
            batch_size=packed, row_length=task.max_length, tokens_multiple=1, seed=seed
        )

    class Counting(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if row.padding in ("fixed", "longest"):
                return super().get_train_dataloader()
            sampler = LengthBatchSampler([len(one["input_ids"]) for one in examples], batching)
            collate = counts.collating(_collate(row, task, tokenizer, sampler.widths))
            return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate)

        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            if not row.chunked:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            total, count = _chunked(model, inputs)
            return total / (count if num_items_in_batch is None else num_items_in_batch)

    arguments = TrainingArguments(
        folder, max_steps=task.steps, per_device_train_batch_size=rows, gradient_accumulation_steps=row.accumulation,
        learning_rate=task.learning_rate, bf16=bool(row.recipe), use_cpu=True, seed=seed, report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="no", dataloader_pin_memory=False, max_grad_norm=0.0 if row.in_backward else 1.0,
    )  # fmt: skip
    optimizer = None
    if row.states:
        optimizer = ng.optim.AdamW(
            model, lr=task.learning_rate, weight_decay=0.0, states=row.states, seed=seed
        )  # type: ignore[arg-type]
    if row.in_backward:
        from narrowgauge.optim.step_in_backward import in_backward

        assert optimizer is not None
        in_backward(optimizer, accumulation=row.accumulation)
    collate = counts.collating(_collate(row, task, tokenizer, None))
    trainer = Counting(
        model=model,
        args=arguments,
        train_dataset=examples,
        data_collator=collate,
        optimizers=(optimizer, None),
    )
    trainer.add_callback(_clock(counts, row))
    return trainer


def _clock(counts: Counts, row: Row) -> Any:
    from transformers import TrainerCallback

    import narrowgauge as ng

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            counts.begin_s, counts.begin_cpu_s = time.monotonic(), time.process_time()

        def on_step_end(
            self, arguments: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            if row.recipe:
                ng.advance(model)
            counts.last_s, counts.last_cpu_s = time.monotonic(), time.process_time()
            counts.first_s = counts.first_s or counts.last_s
            if state.global_step == state.max_steps:
                counts.take(state.max_steps * row.accumulation)

    return Clock()


def _chunked(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Sum of the loss and number of targets, without the whole logits."""
    from narrowgauge.memory import chunked_cross_entropy
    from narrowgauge.train.tasks import task_class

    others = {name: value for name, value in inputs.items() if name != "labels"}
    hidden = model.model(**others, use_cache=False).last_hidden_state
    return chunked_cross_entropy(
        hidden, model.lm_head.weight, task_class("causal-lm").align_labels(inputs["labels"])
    )


# ---- columns ------------------------------------------------------------------------------------------------------------


def _restart_peak() -> int:
    """Bytes resident now, from which on the peak is counted. Linux alone has both."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _resident("VmRSS")


def _peak() -> int:
    return _resident("VmHWM")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _optimizer_bytes(optimizer: Any) -> int:
    import torch

    states = getattr(optimizer, "optimizer", optimizer).state.values()  # accelerate wraps it
    return sum(
        x.numel() * x.element_size()
        for state in states
        for x in state.values()
        if isinstance(x, torch.Tensor)
    )


def _saved_bytes(row: Row, task: Task, model: Any, batch: Mapping[str, Any]) -> int:
    """What forward and loss keep for backward, of the largest micro-batch that was drawn."""
    import torch
    from torch import nn

    from narrowgauge.memory import saved_bytes

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            if row.chunked:
                return _chunked(self.model, inputs)[0]
            return self.model(**inputs).loss

    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(row.recipe)):
        return saved_bytes(Loss(), dict(batch)).total


def _metric(task: Task, model: Any, tokenizer: Any) -> dict[str, float]:
    """The validation loss per target of a language model; correlation and area under the ROC curve of a classifier.

    In the row's own forward. The area needs no threshold, so it says something of a short run too.
    """
    import torch

    from narrowgauge.data import count_targets, step_loss
    from narrowgauge.train.tasks.confusion import Confusion

    plain = Row(name="")
    examples = _examples(plain, task, tokenizer, "validation")
    collate = _collate(plain, task, tokenizer, None)
    batches = [collate(examples[start : start + 16]) for start in range(0, len(examples), 16)]
    model.eval()
    with torch.no_grad():
        if task.kind == "causal-lm":
            total = count_targets(batches, "causal-lm")
            return {
                "loss": sum(float(step_loss(model, batch, "causal-lm", total)) for batch in batches)
            }
        confusion, margins, truth = Confusion(2), [], []
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch).logits
            confusion.count(logits.argmax(-1), labels)
            margins.append(logits[:, 1] - logits[:, 0])
            truth.append(labels)
    return {
        "mcc": float(confusion.metrics()["mcc"]),
        "auc": area_under_roc(torch.cat(margins), torch.cat(truth)),
    }


def area_under_roc(scores: Any, labels: Any) -> float:
    """How often a positive example has the larger score of a pair with a negative one; a tie is half. Tensors of one axis."""
    positive, negative = scores[labels == 1][:, None], scores[labels == 0]
    return float(((positive > negative).double() + (positive == negative).double() / 2).mean())
