"""Every setting of a training run, once: its key, type, default, rule and help.

TOML keys, command-line flags, `narrowgauge train --help` and RUN/config.toml are all read off `TrainConfig`, so a new
setting is one entry here. The key `hidden_size` is the flag `--hidden-size`; `layers_recipe` alone is spelled `recipes`
on both sides, because in a file it is a table. Rules that need one value stand beside it; rules between values are in
`_between`. Names of recipes are checked later, by `narrowgauge.recipes`, because this file does without torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError, closest
from narrowgauge.train import switches

MAX_INT = 2**63 - 1  # the largest integer that TOML promises, and that torch takes as a seed
TABLE = Mapping[str, str]  # the one type of setting besides bool, int, float and str
OPTIMIZERS = ("adamw", "lion", "sgd")
STATES = ("fp32", "8bit", "fp8", "fp8-lm", "4bit")
MASTERS = ("fp32", "fp16-scaled", "bf16-remainder", "stochastic")
PRECISIONS = ("fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; an open end excludes its bound."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def refuse(self, value: float) -> str:
        """The rule in words if `value` breaks it, else ''."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return "" if above and below else str(self)

    def __str__(self) -> str:
        if not (self.open_low or self.open_high):
            return f"from {self.low} to {self.high}"
        low = f"above {self.low}" if self.open_low else f"at least {self.low}"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high}"


@dataclass(frozen=True)
class OneOf:
    """A few names."""

    names: tuple[str, ...]

    def refuse(self, value: str) -> str:
        if value in self.names:
            return ""
        near = closest(value, self.names, limit=1)
        return f"{self}{f'. Closest: {near}' if near else ''}"

    def __str__(self) -> str:
        return "one of " + ", ".join(repr(name) for name in self.names)


@dataclass(frozen=True)
class Matching:
    """Text of a form that `words` describe."""

    pattern: str
    words: str

    def refuse(self, value: str) -> str:
        return "" if re.fullmatch(self.pattern, value) else str(self)

    def __str__(self) -> str:
        return self.words


NOT_EMPTY = Matching(r"(?s).+", "not empty")
COUNT = Range(1, 2**31 - 1)
COUNT_OR_ZERO = Range(0, 2**31 - 1)


def setting(group: str, default: Any, help: str, rule: Range | OneOf | Matching | None = None, key: str = "") -> Any:
    """One entry of the table. A mutable default is a type such as `dict`, called for each configuration."""
    metadata = {"group": group, "help": help, "rule": rule, "key": key}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata, hash=False)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A validated configuration. Vary one with `dataclasses.replace`; ConfigError lists every rule that is broken."""

    model: str = setting("model", "", "Local folder or hub name of a causal LM; empty: a Llama of the sizes below.")
    from_scratch: bool = setting("model", False, "With model: take its configuration, but start from random weights.")
    hidden_size: int = setting("model", 320, "Width of the residual stream.", Range(2, 2**20))
    layers: int = setting("model", 6, "Transformer blocks.", Range(1, 4096))
    heads: int = setting("model", 8, "Attention heads.", Range(1, 4096))
    kv_heads: int = setting("model", 0, "Heads of keys and values; 0: as many as heads.", Range(0, 4096))
    intermediate_size: int = setting(
        "model", 0, "Width of the MLP; 0: 8/3 of hidden_size, rounded up to a multiple of 64.", Range(0, 2**22)
    )
    sequence_length: int = setting("model", 256, "Tokens of a sequence.", Range(2, 2**22))

    data: str = setting(
        "data",
        "stdlib",
        "Text to learn: a file, a folder or a data set's name; stdlib: Python's own sources.",
        NOT_EMPTY,
    )
    column: str = setting("data", "", "Column or JSON key that holds the text; empty: the only one, or 'text'.")
    tokenizer: str = setting(
        "data", "", "Folder or hub name of a tokenizer; empty: the model's, or a BPE trained here."
    )
    vocab_size: int = setting("data", 4096, "Size of the BPE that is trained here.", Range(257, 2**24))
    validation_fraction: float = setting(
        "data", 0.05, "Share of the documents held out for validation.", Range(0, 0.5, open_low=True)
    )
    cache: str = setting("data", "", "Folder of tokenized data; empty: `cache` beside the run folder.")

    recipe: str = setting(
        "precision", "fp8-current", "Number formats of the matrix products of every Linear.", NOT_EMPTY
    )
    layers_recipe: TABLE = setting(  # noqa: RUF009 (it returns a dataclasses.field)
        "precision", dict, "Other recipes for the layers that a pattern names, as 'lm_head=bf16'.", key="recipes"
    )
    switch: str = setting(
        "precision", "", "Wider recipes later in the run, as 'fp8-current@80%' or 'layers.0.*=bf16@240:forward'."
    )
    precision: str = setting("precision", "amp-bf16", "Numbers outside the recipe.", OneOf(PRECISIONS))
    save: str = setting(
        "precision", "", "What a Linear keeps for its backward pass; empty: as the recipe says.",
        OneOf(("", "original", "quantized")),
    )  # fmt: skip

    steps: int = setting("training", 300, "Optimizer steps.", COUNT)
    batch_size: int = setting("training", 16, "Sequences of an optimizer step.", Range(1, 2**20))
    micro_batches: int = setting("training", 1, "Parts into which a batch is cut to save memory.", Range(1, 2**20))
    learning_rate: float = setting("training", 1e-3, "Peak learning rate.", Range(0, 1, open_low=True))
    min_learning_rate: float = setting("training", 0.0, "Learning rate after the last step.", Range(0, 1))
    warmup_steps: int = setting("training", 20, "Steps over which the learning rate rises.", COUNT_OR_ZERO)
    optimizer: str = setting("training", "adamw", "Rule of the updates.", OneOf(OPTIMIZERS))
    states: str = setting("training", "fp32", "Numbers of the optimizer's moments.", OneOf(STATES))
    embedding_states: str = setting(
        "training", "fp32", "Moments of embeddings: float32, or the same as all.", OneOf(("fp32", "same"))
    )
    master: str = setting(
        "training",
        "",
        "What keeps the low bits of 16-bit weights; empty: as the precision says.",
        OneOf(("", *MASTERS)),
    )
    weight_decay: float = setting("training", 0.1, "Decoupled weight decay of AdamW.", Range(0, 1))
    beta1: float = setting("training", 0.9, "Decay of the first moment; SGD's momentum.", Range(0, 1, open_high=True))
    beta2: float = setting(
        "training", 0.95, "AdamW's decay of the second moment; Lion's of its only one.", Range(0, 1, open_high=True)
    )
    epsilon: float = setting("training", 1e-8, "AdamW's guard against division by zero.", Range(0, 1, open_low=True))
    clip: float = setting("training", 1.0, "Largest norm of the gradient; 0: not clipped.", Range(0, 1e6))
    freeze: str = setting(
        "training", "", "Patterns of layers and parameters that do not train, as embed*,layers.0-3; empty: none."
    )
    checkpointing: str = setting(
        "training", "none", "What is computed again in backward: none, full, every-N, selective or budget:512MiB.",
        Matching(r"none|full|selective|every-[1-9]\d{0,3}|budget:\d+(\.\d+)? ?(B|[KMG]iB)?",
                 "one of 'none', 'full', 'every-2', 'selective' or 'budget:512MiB'"),
    )  # fmt: skip
    compress_activations: bool = setting("training", False, "Keep what blocks save for backward in E4M3.")
    seed: int = setting("training", 0, "Decides weights, order of the data and stochastic rounding.", Range(0, MAX_INT))
    device: str = setting(
        "training", "auto", "auto, cpu, cuda or cuda:N.",
        Matching(r"auto|cpu|cuda(:\d{1,3})?", "one of 'auto', 'cpu', 'cuda' or 'cuda:N'"),
    )  # fmt: skip
    threads: int = setting("training", 0, "Threads of the CPU; 0: as torch decides.", Range(0, 4096))
    compile: bool = setting("training", False, "Compile the model with torch.compile.")

    output: str = setting("run", "runs/latest", "Run folder.", NOT_EMPTY)
    resume: bool = setting("run", False, "Continue the run in the run folder from its newest checkpoint.")
    eval_every: int = setting("run", 50, "Steps between evaluations; 0: only after the last step.", COUNT_OR_ZERO)
    eval_tokens: int = setting("run", 32768, "Validation tokens of an evaluation, at most.", COUNT)
    checkpoint_every: int = setting(
        "run", 100, "Steps between checkpoints; 0: only after the last step.", COUNT_OR_ZERO
    )
    keep: int = setting("run", 2, "Checkpoints kept, the newest.", COUNT)
    log_every: int = setting("run", 10, "Steps between lines on the console.", COUNT)
    tensor_every: int = setting("run", 50, "Steps between tensor statistics; 0: none.", COUNT_OR_ZERO)
    tensorboard: bool = setting("run", False, "Write TensorBoard events to the run folder too.")
    compare: str = setting("run", "", "Recipe of a second run on the same data to compare with, as bf16; empty: none.")
    sample_tokens: int = setting(
        "run", 64, "Tokens of the sample written at each evaluation; 0: none.", Range(0, 2**20)
    )
    prompt: str = setting("run", "", "Text that the sample continues.")

    def __post_init__(self) -> None:
        problems = [problem for each in fields(self) if (problem := _refuse(each, getattr(self, each.name)))]
        problems = problems or list(_between(self))
        if problems:
            raise InvalidSettings(problems)


@dataclass(frozen=True)
class Problem:
    """A broken rule, and the keys whose values break it."""

    keys: tuple[str, ...]
    words: str


class InvalidSettings(ConfigError):
    """One line for each broken rule. `problems` lets the reader of a file add the line that each value came from."""

    def __init__(self, problems: Iterable[Problem], origins: Mapping[str, str] | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(_place(problem, origins or {}) + problem.words for problem in self.problems))


def _place(problem: Problem, origins: Mapping[str, str]) -> str:
    place = next((origins[key] for key in problem.keys if key in origins), "")
    return f"{place}: " if place else ""


def key_of(each: Field[Any]) -> str:
    """The key of a setting in a file; with dashes, its flag."""
    return str(each.metadata["key"] or each.name)


def by_key() -> dict[str, Field[Any]]:
    return {key_of(each): each for each in fields(TrainConfig)}


def _refuse(each: Field[Any], value: Any) -> Problem | None:
    key, rule = key_of(each), each.metadata["rule"]
    words = _refuse_type(each.type, value)
    if not words and rule:
        broken = rule.refuse(value)
        words = f"must be {broken}" if broken else ""
    return Problem((key,), f"{key} = {shown(value)}: {words}.") if words else None


def _refuse_type(kind: Any, value: Any) -> str:
    """Why `value` is not of type `kind`, or ''. A bool is no number, and a float is no whole number."""
    if kind is bool:
        return "" if isinstance(value, bool) else "must be true or false"
    if kind is int:
        return "" if isinstance(value, int) and not isinstance(value, bool) else "must be a whole number"
    if kind is float:
        return "" if _is_finite_number(value) else "must be a finite number"
    if kind is str:
        return _refuse_text(value)
    return _refuse_table(value)


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _refuse_text(value: Any) -> str:
    if not isinstance(value, str):
        return "must be text"
    if "\0" in value:
        return "must not contain a zero byte"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "must be valid Unicode"  # a flag whose bytes were not UTF-8
    return ""


def _refuse_table(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "must be a table of pattern = recipe"
    for pattern, recipe in value.items():
        words = _refuse_text(pattern) or _refuse_text(recipe)
        if isinstance(recipe, Mapping):
            words = f'must hold recipes as text; write a pattern with dots in quotes: "{pattern}..." = "bf16"'
        if words or not pattern or not recipe:
            return words or "must have no empty pattern or recipe"
    return ""


def _between(config: TrainConfig) -> Iterator[Problem]:
    """Rules between values, once each value is right by itself."""
    yield from _unused_with_model(config) if config.model else _sizes_that_do_not_divide(config)
    if config.from_scratch and not config.model:
        yield Problem(
            ("from_scratch",),
            "from_scratch = true: needs model. Without it the Llama always starts from random weights.",
        )
    if config.tokenizer and config.vocab_size != _default("vocab_size"):
        yield _unused(config, "vocab_size", "tokenizer")
    for words in switches.problems(config.switch, config.steps):
        yield Problem(("switch", "steps"), f"switch = {shown(config.switch)}: {words}")
    if config.batch_size % config.micro_batches:
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


def _unused_with_model(config: TrainConfig) -> Iterator[Problem]:
    for key in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size"):
        if getattr(config, key) != _default(key):
            yield _unused(config, key, "model")


def _unused(config: TrainConfig, key: str, because: str) -> Problem:
    return Problem(
        (key,),
        f"{key} = {shown(getattr(config, key))}: has no effect with {because} = {shown(getattr(config, because))}. "
        "Remove one of them.",
    )


def _default(name: str) -> Any:
    return TrainConfig.__dataclass_fields__[name].default


def _sizes_that_do_not_divide(config: TrainConfig) -> Iterator[Problem]:
    if config.hidden_size % (2 * config.heads):  # rotary embeddings turn pairs, so the width of a head is even
        yield Problem(
            ("hidden_size", "heads"),
            f"hidden_size = {config.hidden_size}: must be a multiple of 2 * heads = {2 * config.heads}.",
        )
    if config.kv_heads and config.heads % config.kv_heads:
        yield Problem(("kv_heads", "heads"), f"kv_heads = {config.kv_heads}: must divide heads = {config.heads}.")


def shown(value: Any) -> str:
    """A value as the user wrote it in the file, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"{'-' if value < 0 else ''}a number of {int(math.log10(abs(value))) + 1} digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def resolved(config: TrainConfig) -> TrainConfig:
    """The same run with the sizes that depend on others written out: kv_heads, intermediate_size, cache."""
    return replace(
        config,
        cache=config.cache or str(Path(config.output).parent / "cache"),
        **({} if config.model else _llama_sizes(config)),
    )


def _llama_sizes(config: TrainConfig) -> dict[str, Any]:
    return {
        "kv_heads": config.kv_heads or config.heads,
        "intermediate_size": config.intermediate_size or math.ceil(8 * config.hidden_size / 3 / 64) * 64,
    }
