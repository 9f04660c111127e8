"""Rules between the values of a configuration, once each value is right by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.field_checks import Problem, key_of, shown

TrainConfig = Any  # the class in `settings`, which imports this file
Check = tuple[object, str, str]  # true if the rule is broken; the keys that break it, with spaces; the message

TASKS = ("text", "causal-lm", "classification", "seq2seq")
BEST = ("", "none", "loss", "accuracy", "mcc", "f1", "f1_binary")  # f1 is the mean over classes
SCORES = BEST[3:]  # of classes alone
SIZES = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size")
FROM_TABLES = (
    "validation_data", "columns", "max_length", "too_long", "no_target", "token_budget", "length_buckets", "pad_multiple",
)  # fmt: skip
# Settings -> the tasks in which they mean something.
BELONGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("prompt_column", "completion_column", "messages_column", "train_on", "packing"), ("causal-lm",)),
    **dict.fromkeys(("text_column", "pair_column", "label_column", "classes"), ("classification",)),
    **dict.fromkeys(("source_column", "target_column"), ("seq2seq",)),
    **dict.fromkeys(("prompt", "sample_tokens"), ("text", "causal-lm", "seq2seq")),
    **dict.fromkeys(FROM_TABLES, TASKS[1:]),
    **dict.fromkeys(("sequence_length", "column", "vocab_size"), ("text",)),
}


def cross_checks(config: TrainConfig) -> Iterator[Problem]:
    """Every rule that is broken."""
    for key, because in _without_effect(config):
        value, reason = shown(getattr(config, key)), shown(getattr(config, because))
        name = key_of(config.__dataclass_fields__[because])
        yield Problem((key,), f"{key} = {value}: has no effect with {name} = {reason}. Remove one of them.")
    for broken, keys, message in (*_model_checks(config), *_task_checks(config), *_training_checks(config)):
        if broken:
            yield Problem(tuple(keys.split()), message)


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, the other setting that makes it meaningless), of keys that were set."""
    auto = "recipe" if config.recipe == "auto" else "layers_recipe"
    is_auto = "auto" in (config.recipe, *config.layers_recipe.values())
    is_table = config.task != "text"
    pairs: list[tuple[object, str, str]] = [
        *((config.model, key, "model") for key in SIZES),
        (config.tokenizer, "vocab_size", "tokenizer"),
        *((config.task not in tasks, key, "task") for key, tasks in BELONGS.items()),
        (config.epochs, "steps", "epochs"),
        (is_table and config.validation_data, "validation_fraction", "validation_data"),
        (is_table and config.token_budget, "batch_size", "token_budget"),
        *((config.messages_column, key, "messages_column") for key in ("prompt_column", "completion_column")),
        (is_auto, "save", auto),
        (config.states == "fp32", "embedding_states", "states"),
    ]
    yield from dict.fromkeys((key, because) for applies, key, because in pairs if applies and _is_set(config, key))


def _is_set(config: TrainConfig, name: str) -> bool:
    return bool(getattr(config, name) != config.__dataclass_fields__[name].default)


def _model_checks(c: TrainConfig) -> list[Check]:
    return [
        (c.from_scratch and not c.model, "from_scratch",
         "from_scratch = true: needs model. Without it the Llama always starts from random weights."),
        # Rotary embeddings turn pairs, so the width of a head is even.
        (not c.model and c.hidden_size % (2 * c.heads), "hidden_size heads",
         f"hidden_size = {c.hidden_size}: must be a multiple of 2 * heads = {2 * c.heads}."),
        (not c.model and c.kv_heads and c.heads % c.kv_heads, "kv_heads heads",
         f"kv_heads = {c.kv_heads}: must divide heads = {c.heads}."),
    ]  # fmt: skip


def _task_checks(c: TrainConfig) -> list[Check]:
    is_table = c.task != "text"
    return [
        (c.best in SCORES and c.task != "classification", "best",
         f"best = {c.best!r}: is measured by classification alone. Take best = 'loss'."),
        (is_table and not c.model, "task", f"task = {c.task!r}: needs model, a folder or hub name of the model to train."),
        (is_table and not _is_set(c, "data"), "data task",
         f"task = {c.task!r}: needs data, a table with examples (JSONL, CSV, TSV or Parquet)."),
        (is_table and c.max_length == 1, "max_length", "max_length = 1: leaves no token to predict. Set at least 2, or 0."),
        (is_table and not c.messages_column and _is_set(c, "train_on"), "train_on",
         f"train_on = {c.train_on!r}: needs messages_column, the column with chats."),
        (is_table and c.packing % 16, "packing", f"packing = {c.packing}: must be a multiple of 16, as 8-bit products want."),
        (is_table and c.packing and 0 < c.token_budget < c.packing, "token_budget packing",
         f"token_budget = {c.token_budget}: holds no row of packing = {c.packing}. Raise it, or shorten rows."),
    ]  # fmt: skip


def _training_checks(c: TrainConfig) -> list[Check]:
    switch_problems = (
        () if c.epochs else switch_syntax.problems(c.switch, c.steps)
    )  # with epochs, steps are known later
    return [
        *((True, "switch steps", f"switch = {shown(c.switch)}: {message}") for message in switch_problems),
        (not c.token_budget and c.batch_size % c.micro_batches, "micro_batches batch_size",
         f"micro_batches = {c.micro_batches}: must divide batch_size = {c.batch_size}."),
        (c.compress_activations and c.compile, "compress_activations compile",
         "compress_activations = true: a compiled model cannot use it, because the compiler decides what is kept for backward. "
         "Remove one of compress_activations and compile."),
        (c.cuda_graph and c.checkpointing != "none", "cuda_graph checkpointing",
         f"cuda_graph = true: does not work with checkpointing = {c.checkpointing!r}, which keeps the generator's "
         "state on the host. Remove one of them."),
        (c.master and not c.precision.startswith("bf16-o"), "master precision",
         f"master = {c.master!r}: has no effect with precision = {c.precision!r}, whose weights are float32. "
         "Remove it, or take precision bf16-o2."),
        (c.min_learning_rate > c.learning_rate, "min_learning_rate learning_rate",
         f"min_learning_rate = {c.min_learning_rate}: must not exceed learning_rate = {c.learning_rate}."),
    ]  # fmt: skip
