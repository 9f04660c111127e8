"""Rules between the values of a configuration, once each value is right by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.field_checks import Problem, shown

TrainConfig = Any  # that of `config`, which imports this file

TASKS = ("text", "causal-lm", "classification", "seq2seq")
BEST = ("", "none", "loss", "accuracy", "mcc", "f1", "f1_binary")  # f1 is the mean over classes
SCORES = BEST[3:]  # of classes alone
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


def between(config: TrainConfig) -> Iterator[Problem]:
    """Rules between values, once each value is right by itself."""
    yield from _unused_with_model(config) if config.model else _sizes_that_do_not_divide(config)
    if config.from_scratch and not config.model:
        yield Problem(
            ("from_scratch",),
            "from_scratch = true: needs model. Without it the Llama always starts from random weights.",
        )
    if config.tokenizer and _is_set(config, "vocab_size"):
        yield _unused(config, "vocab_size", "tokenizer")
    yield from _around_the_task(config)
    yield from _around_auto(config)
    for words in switch_syntax.problems(config.switch, config.steps) if not config.epochs else ():  # known later
        yield Problem(("switch", "steps"), f"switch = {shown(config.switch)}: {words}")
    if not config.token_budget and config.batch_size % config.micro_batches:
        yield Problem(
            ("micro_batches", "batch_size"),
            f"micro_batches = {config.micro_batches}: must divide batch_size = {config.batch_size}.",
        )
    if config.compress_activations and config.compile:
        yield Problem(
            ("compress_activations", "compile"),
            "compress_activations = true: has no place in a compiled model, where the compiler fixes what is kept. "
            "Remove one of compress_activations and compile.",
        )
    if config.cuda_graph and config.checkpointing != "none":
        yield Problem(
            ("cuda_graph", "checkpointing"),
            f"cuda_graph = true: cannot be had with checkpointing = {config.checkpointing!r}, which keeps the state of random "
            "numbers on the host. Remove one of them.",
        )
    if config.master and not config.precision.startswith("bf16-o"):
        yield Problem(
            ("master", "precision"),
            f"master = {config.master!r}: has no effect with precision = {config.precision!r}, whose weights are float32. "
            "Remove it, or take precision bf16-o2.",
        )
    if config.embedding_states == "same" and config.states == "fp32":
        yield _unused(config, "embedding_states", "states")
    if config.min_learning_rate > config.learning_rate:
        yield Problem(
            ("min_learning_rate", "learning_rate"),
            f"min_learning_rate = {config.min_learning_rate}: must not exceed learning_rate = {config.learning_rate}.",
        )


def _around_auto(config: TrainConfig) -> Iterator[Problem]:
    if "auto" not in (config.recipe, *config.layers_recipe.values()):
        return
    if config.save:
        yield _unused(config, "save", "recipe" if config.recipe == "auto" else "recipes")


def _around_the_task(config: TrainConfig) -> Iterator[Problem]:
    for key, tasks in BELONGS.items():
        if config.task not in tasks and _is_set(config, key):
            yield _unused(config, key, "task")
    if config.epochs and _is_set(config, "steps"):
        yield _unused(config, "steps", "epochs")
    if config.best in SCORES and config.task != "classification":
        yield Problem(("best",), f"best = {config.best!r}: is measured by classification alone. Take best = 'loss'.")
    if config.task != "text":
        yield from _around_tables(config)


def _around_tables(config: TrainConfig) -> Iterator[Problem]:
    if not config.model:
        yield Problem(("task",), f"task = {config.task!r}: needs model, a folder or hub name of the model to train.")
    if config.data == _default(config, "data"):
        yield Problem(
            ("data", "task"), f"task = {config.task!r}: needs data, a table with examples (JSONL, CSV, TSV or Parquet)."
        )
    if config.validation_data and _is_set(config, "validation_fraction"):
        yield _unused(config, "validation_fraction", "validation_data")
    if config.token_budget and _is_set(config, "batch_size"):
        yield _unused(config, "batch_size", "token_budget")
    if config.max_length == 1:
        yield Problem(("max_length",), "max_length = 1: leaves no token to predict. Set at least 2, or 0.")
    if config.messages_column:
        for key in ("prompt_column", "completion_column"):
            if _is_set(config, key):
                yield _unused(config, key, "messages_column")
    elif _is_set(config, "train_on"):
        yield Problem(("train_on",), f"train_on = {config.train_on!r}: needs messages_column, the column with chats.")
    if config.packing:
        yield from _around_packing(config)


def _around_packing(config: TrainConfig) -> Iterator[Problem]:
    if config.packing % 16:
        yield Problem(("packing",), f"packing = {config.packing}: must be a multiple of 16, as 8-bit products want.")
    if config.token_budget and config.token_budget < config.packing:
        yield Problem(
            ("token_budget", "packing"),
            f"token_budget = {config.token_budget}: holds no row of packing = {config.packing}. Raise it, or shorten rows.",
        )


def _unused_with_model(config: TrainConfig) -> Iterator[Problem]:
    for key in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size"):
        if _is_set(config, key):
            yield _unused(config, key, "model")


def _unused(config: TrainConfig, key: str, because: str) -> Problem:
    return Problem(
        (key,),
        f"{key} = {shown(getattr(config, key))}: has no effect with {because} = {shown(getattr(config, because))}. "
        "Remove one of them.",
    )


def _default(config: TrainConfig, name: str) -> Any:
    return config.__dataclass_fields__[name].default


def _is_set(config: TrainConfig, name: str) -> bool:
    return bool(getattr(config, name) != _default(config, name))


def _sizes_that_do_not_divide(config: TrainConfig) -> Iterator[Problem]:
    if config.hidden_size % (2 * config.heads):  # rotary embeddings turn pairs, so the width of a head is even
        yield Problem(
            ("hidden_size", "heads"),
            f"hidden_size = {config.hidden_size}: must be a multiple of 2 * heads = {2 * config.heads}.",
        )
    if config.kv_heads and config.heads % config.kv_heads:
        yield Problem(("kv_heads", "heads"), f"kv_heads = {config.kv_heads}: must divide heads = {config.heads}.")
