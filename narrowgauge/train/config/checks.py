"""Rules of one setting, and rules between settings, with the message for each. Imports no torch, for a quick --help."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, NamedTuple

from narrowgauge.errors import closest
from narrowgauge.train.config import switch_syntax

TABLE = Mapping[str, str]  # the one type of setting besides bool, int, float and str


class Problem(NamedTuple):
    """A broken rule, and the keys whose values break it, with spaces between."""

    keys: str
    message: str


# Rules of one setting


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; an open end excludes its bound."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def refuse(self, value: float) -> str:
        """The rule in words if `value` breaks it, else ''."""
        is_end = (self.open_low and value == self.low) or (self.open_high and value == self.high)
        return "" if self.low <= value <= self.high and not is_end else str(self)

    def __str__(self) -> str:
        if not (self.open_low or self.open_high):
            return f"from {self.low} to {self.high}"
        low = f"above {self.low}" if self.open_low else f"at least {self.low}"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high}"


@dataclass(frozen=True)
class OneOf:
    """A few names, or numbers."""

    names: tuple[str, ...] | tuple[int, ...]

    def refuse(self, value: str | int) -> str:
        if value in self.names:
            return ""
        near = closest(str(value), map(str, self.names), limit=1) if isinstance(value, str) else ""
        return f"{self}{f'. Closest: {near}' if near else ''}"

    def __str__(self) -> str:
        return "one of " + ", ".join(repr(name) for name in self.names)


@dataclass(frozen=True)
class Matching:
    """Text that matches a regular expression; `description` says which, for messages."""

    pattern: str
    description: str

    def refuse(self, value: str) -> str:
        return "" if re.fullmatch(self.pattern, value) else self.description

    def __str__(self) -> str:
        return self.description


NOT_EMPTY = Matching(r"(?s).+", "not empty")
COUNT = Range(1, 2**31 - 1)
COUNT_OR_ZERO = Range(0, 2**31 - 1)


def setting(group: str, default: Any, help: str, rule: Range | OneOf | Matching | None = None, key: str = "") -> Any:
    """One entry of the table. A mutable default is a type such as `dict`, called for each configuration."""
    metadata = {"group": group, "help": help, "rule": rule, "key": key}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata, hash=False)
    return field(default=default, metadata=metadata)


def key_of(each: Field[Any]) -> str:
    """The key of a setting in a file; with dashes, its flag."""
    return str(each.metadata["key"] or each.name)


def refuse(each: Field[Any], value: Any) -> Problem | None:
    """What is wrong with the value of a setting: its type, or what its rule forbids."""
    key, rule = key_of(each), each.metadata["rule"]
    reason = _refuse_type(each.type, value)
    if not reason and rule and (broken := rule.refuse(value)):
        reason = f"must be {broken}"
    return Problem(key, f"{key} = {shown(value)}: {reason}.") if reason else None


def _refuse_type(kind: Any, value: Any) -> str:
    """Why `value` is not of type `kind`, or ''. A bool is no number, and a float is no whole number."""
    if kind is str:
        return _refuse_text(value)
    if kind is TABLE:
        return _refuse_table(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        return "" if isinstance(value, bool) else "must be true or false"
    if kind is int:
        return "" if is_number and isinstance(value, int) else "must be a whole number"
    return "" if is_number and abs(value) <= sys.float_info.max else "must be a finite number"


def _refuse_text(value: Any) -> str:
    if not isinstance(value, str):
        return "must be text"
    if "\0" in value:
        return "must not contain a zero byte"
    # A flag whose bytes were not UTF-8 has surrogates.
    return "must be valid Unicode" if re.search("[\ud800-\udfff]", value) else ""


def _refuse_table(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "must be a table of pattern = recipe"
    for pattern, recipe in value.items():
        if isinstance(recipe, Mapping):
            return f'must hold recipes as text; write a pattern with dots in quotes: "{pattern}..." = "bf16"'
        words = _refuse_text(pattern) or _refuse_text(recipe)
        if words or not pattern or not recipe:
            return words or "must have no empty pattern or recipe"
    return ""


def shown(value: Any) -> str:
    """A value as the user wrote it in the file, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"{'-' if value < 0 else ''}a number of {int(math.log10(abs(value))) + 1} digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Rules between settings, once each value is right by itself

TrainConfig = Any  # the class in `settings`, which imports this file
Check = tuple[object, str, str]  # true if the rule is broken; the keys that break it; the message

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
        yield Problem(key, f"{key} = {value}: has no effect with {name} = {reason}. Remove one of them.")
    for broken, keys, message in (*_task_checks(config), *_training_checks(config)):
        if broken:
            yield Problem(keys, message)


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


def _task_checks(c: TrainConfig) -> list[Check]:
    """Of the model and the data."""
    is_table = c.task != "text"
    return [
        (c.from_scratch and not c.model, "from_scratch",
         "from_scratch = true: needs model. Without it the Llama always starts from random weights."),
        # Rotary embeddings turn pairs, so the width of a head is even.
        (not c.model and c.hidden_size % (2 * c.heads), "hidden_size heads",
         f"hidden_size = {c.hidden_size}: must be a multiple of 2 * heads = {2 * c.heads}."),
        (not c.model and c.kv_heads and c.heads % c.kv_heads, "kv_heads heads",
         f"kv_heads = {c.kv_heads}: must divide heads = {c.heads}."),
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
    problems = () if c.epochs else switch_syntax.problems(c.switch, c.steps)  # of epochs the steps are known later
    return [
        *((True, "switch steps", f"switch = {shown(c.switch)}: {message}") for message in problems),
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
