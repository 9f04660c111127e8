"""Every setting of a training run, once: its key, type, default, rule and help; and the rules between settings.

TOML keys, command-line flags, `narrowgauge train --help` and RUN/config.toml are all read off `TrainConfig`, so a new
setting is one entry here. The key `hidden_size` is the flag `--hidden-size`; `layers_recipe` alone is spelled `recipes`
on both sides, because in a file it is a table. Names of recipes are checked later, by `narrowgauge.recipes`, because this
file does without torch, for a quick --help.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.diagnose.guard import settings as guard_settings
from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.config import parallel_syntax, recipe_syntax, switch_syntax

TASKS = ("text", "causal-lm", "classification", "seq2seq")
WRITING = ("text", "causal-lm", "seq2seq")  # tasks whose models write samples
Problem = tuple[tuple[str, ...], str]  # the keys whose values break a rule; the message
TABLE = Mapping[str, str]  # the one type of setting besides bool, int, float and str


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


@dataclass(frozen=True)
class OneOrPair:
    """One of `names`, or two of `parts` as "first/second"."""

    names: tuple[str, ...]
    parts: tuple[str, ...]

    def refuse(self, value: str) -> str:
        pair = value.split("/")
        if value in (*self.names, *self.parts) or (len(pair) == 2 and set(pair) <= set(self.parts)):
            return ""
        wrong = next((part for part in pair if part not in self.parts), value)
        near = closest(wrong, (*self.names, *self.parts), limit=1)
        return f"{self}{f'. Closest: {near}' if near else ''}"

    def __str__(self) -> str:
        pair = f"a pair of {', '.join(map(repr, self.parts))}, as '{self.parts[2]}/{self.parts[1]}'"
        return f"one of {', '.join(map(repr, self.names))}, or {pair}"


NOT_EMPTY = Matching(r"(?s).+", "not empty")
COUNT = Range(1, 2**31 - 1)
COUNT_OR_ZERO = Range(0, 2**31 - 1)
Rule = Range | OneOf | OneOrPair | Matching


def setting(
    group: str, default: Any, help: str, rule: Rule | None = None, key: str = "", tasks: Sequence[str] = TASKS
) -> Any:  # fmt: skip
    """One entry of the table, which means something in these tasks. A mutable default is a type such as `dict`."""
    metadata = {"group": group, "help": help, "rule": rule, "key": key, "tasks": tasks}
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
    return ((key,), f"{key} = {shown(value)}: {reason}.") if reason else None


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
        words = _refuse_text(pattern) or _refuse_text(recipe) or recipe_syntax.refuse(recipe)
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


# The table

BEST = ("", "none", "loss", "accuracy", "mcc", "f1", "f1_binary")  # f1 is the mean over classes
SCORES = BEST[3:]  # of classes alone
MAX_INT = 2**63 - 1  # the largest integer that TOML promises, and that torch takes as a seed
FUSED_SAVES = ("exact", "fp8", "int8")  # of `fuse`, beside those of recipes
NO_RECIPE = "none"  # an ordinary Linear, in the numbers of the precision
MODEL, DATA, TASK, PRECISION, TRAINING, RUN = (
    partial(setting, group) for group in ("model", "data", "task", "precision", "training", "run")
)
TABLES, CHATS, CLASSES, PAIRS = (  # settings of the tasks on tables: of all of them, and of one
    partial(TASK, tasks=tasks) for tasks in (TASKS[1:], ("causal-lm",), ("classification",), ("seq2seq",))
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A validated configuration. Vary one with `dataclasses.replace`; ConfigError lists every rule that is broken."""

    # fmt: off
    model: str = MODEL("", "Local folder or hub name of a model; empty: a Llama of the sizes below.")
    from_scratch: bool = MODEL(False, "With model: take its configuration, but start from random weights.")
    hidden_size: int = MODEL(320, "Width of the residual stream.", Range(2, 2**20))
    layers: int = MODEL(6, "Transformer blocks.", Range(1, 4096))
    heads: int = MODEL(8, "Attention heads.", Range(1, 4096))
    kv_heads: int = MODEL(0, "Heads of keys and values; 0: as many as heads.", Range(0, 4096))
    intermediate_size: int = MODEL(0, "Width of the MLP; 0: 8/3 of hidden_size, rounded up to a multiple of 64.", Range(0, 2**22))
    sequence_length: int = MODEL(256, "Tokens of a sequence.", Range(2, 2**22), tasks=TASKS[:1])

    data: str = DATA("stdlib", "Text to learn: a file, a folder or a data set's name; stdlib: Python's own sources. With a task: a table.",
        NOT_EMPTY)
    column: str = DATA("", "Column or JSON key that holds the text; empty: the only one, or 'text'.", tasks=TASKS[:1])
    tokenizer: str = DATA("", "Folder or hub name of a tokenizer; empty: the model's, or a BPE trained here.")
    vocab_size: int = DATA(4096, "Size of the BPE that is trained here.", Range(257, 2**24), tasks=TASKS[:1])
    validation_fraction: float = DATA(0.05, "Share of the documents held out for validation.", Range(0, 0.5, open_low=True))
    cache: str = DATA("", "Folder of tokenized data; empty: `cache` beside the run folder.")

    task: str = TASK("text", "What is learnt: running text, or the examples of a table.", OneOf(TASKS))
    validation_data: str = TABLES("", "Table to validate on; empty: validation_fraction of the rows of data.")
    prompt_column: str = CHATS("prompt", "causal-lm: column with the prompt.", NOT_EMPTY)
    completion_column: str = CHATS("completion", "causal-lm: column with what follows it.", NOT_EMPTY)
    messages_column: str = CHATS("", "causal-lm: column with chats; empty: prompts and completions.")
    train_on: str = CHATS("answers", "Of a chat: all answers, or the last.", OneOf(("answers", "last")))
    text_column: str = CLASSES("text", "classification: column with the text.", NOT_EMPTY)
    pair_column: str = CLASSES("", "classification: column with a second text; empty: none.")
    label_column: str = CLASSES("label", "classification: column with the class.", NOT_EMPTY)
    classes: str = CLASSES("", "Names of the classes with commas, or their number; empty: those of the data.")
    source_column: str = PAIRS("source", "seq2seq: column with what is read.", NOT_EMPTY)
    target_column: str = PAIRS("target", "seq2seq: column with what is written.", NOT_EMPTY)
    columns: str = TABLES("", "Names, with commas, of the columns of CSV and TSV without a header row.")
    max_length: int = TABLES(0, "Tokens of an example, at most; 0: as many as the model knows.", COUNT_OR_ZERO)
    too_long: str = TABLES("error", "Examples above max_length or the token budget.", OneOf(("error", "truncate", "skip")))
    no_target: str = TABLES("error", "Examples of which nothing is learnt.", OneOf(("error", "skip")))
    token_budget: int = TABLES(0, "Positions (rows x width) of an optimizer step; 0: batch_size rows instead.", COUNT_OR_ZERO)
    packing: int = CHATS(0, "causal-lm: tokens of a row that several examples fill; 0: pad each.", COUNT_OR_ZERO)
    length_buckets: int = TABLES(10, "Widths that batches are padded to, at most.", Range(1, 512))
    pad_multiple: int = TABLES(8, "Widths are multiples of it.", OneOf((1, 2, 4, 8, 16, 32, 64, 128)))
    epochs: int = TASK(0, "Passes over the data, instead of steps; 0: steps.", COUNT_OR_ZERO)
    best: str = TASK("",
        "Metric whose best checkpoint is kept and exported; empty: loss, mcc of classes, none of text; none: the last is exported.",
        OneOf(BEST))

    recipe: str = PRECISION("fp8-current",
        "Number formats of the matrix products of every Linear; auto: the fastest for each, by a measurement; none: as the "
        "precision has them.", NOT_EMPTY)
    layers_recipe: TABLE = PRECISION(  # noqa: RUF009 (it returns a dataclasses.field)
        dict, "Other recipes for the layers that a pattern names, as 'lm_head=bf16', or some products, as 'layers.1.*=bf16:backward'.",
        key="recipes")
    switch: str = PRECISION("", "Wider recipes later in the run, as 'fp8-current@80%' or 'layers.0.*=bf16@240:forward'.")
    precision: str = PRECISION("amp-bf16", "Numbers outside the recipe.", OneOf(("fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3")))
    keep_float32: str = PRECISION("",
        "What keeps float32 weights and arithmetic in a 16-bit model, as norms,softmax,embeddings,lm_head; empty: as the precision has it.",
        Matching(r"|[^,\s]+( ?, ?[^,\s]+)*", "names with commas, as 'norms,softmax'"))
    fuse: bool = PRECISION(False, "Norms and activations cast what they compute for the Linears that read it.")
    save: str = PRECISION("",
        "What is kept for backward. By a Linear: original or quantized; empty: as the recipe says. By fused norms and activations "
        "(fuse): exact, or fp8 or int8 with gradients that are near.", OneOf(("", "original", "quantized", *FUSED_SAVES)))

    steps: int = TRAINING(300, "Optimizer steps.", COUNT)
    batch_size: int = TRAINING(16, "Sequences or examples of an optimizer step.", Range(1, 2**20))
    micro_batches: int = TRAINING(1, "Parts into which a batch, or what a rank has of it, is cut to save memory.", Range(1, 2**20))
    learning_rate: float = TRAINING(1e-3, "Peak learning rate.", Range(0, 1, open_low=True))
    min_learning_rate: float = TRAINING(0.0, "Learning rate after the last step.", Range(0, 1))
    warmup_steps: int = TRAINING(20, "Steps over which the learning rate rises.", COUNT_OR_ZERO)
    optimizer: str = TRAINING("adamw", "Rule of the updates.", OneOf(("adamw", "lion", "sgd")))
    states: str = TRAINING("fp32", "Numbers of the optimizer's moments; 'first/second': of each.",
        OneOrPair(("fp32", "8bit", "fp8", "fp8-lm", "4bit"), ("fp32", "fp16", "8bit", "fp8", "e4m3", "4bit")))
    embedding_states: str = TRAINING("fp32", "Moments of embeddings: float32, or the same as all.", OneOf(("fp32", "same")))
    master: str = TRAINING("", "What keeps the low bits of 16-bit weights; empty: as the precision says.",
        OneOf(("", "fp32", "fp16-scaled", "bf16-remainder", "stochastic")))
    weight_decay: float = TRAINING(0.1, "Decoupled weight decay of AdamW.", Range(0, 1))
    beta1: float = TRAINING(0.9, "Decay of the first moment; SGD's momentum.", Range(0, 1, open_high=True))
    beta2: float = TRAINING(0.95, "AdamW's decay of the second moment; Lion's of its only one.", Range(0, 1, open_high=True))
    epsilon: float = TRAINING(1e-8, "AdamW's guard against division by zero.", Range(0, 1, open_low=True))
    clip: float = TRAINING(1.0, "Largest norm of the gradient; 0: not clipped.", Range(0, 1e6))
    step_in_backward: bool = TRAINING(False, "Step each parameter as soon as its gradient is whole, and free it; sums of several "
        "micro-batches are held in FP8.")
    clip_by: str = TRAINING("", "What a step in backward is clipped by: the norm of the step before, of a first forward and backward pass, "
        "or each parameter's own.", OneOf(("", "previous", "two-pass", "parameter")))
    held_gradients: str = TRAINING("16bit", "How gradients of matrices wait for the step: as they are, or in FP8.", OneOf(("16bit", "fp8")))
    freeze: str = TRAINING("", "Patterns of layers and parameters that do not train, as embed*,layers.0-3; empty: none.")
    checkpointing: str = TRAINING("none", "What backward computes again: none, selective, full, every-N, sqrt, budget:512MiB, or auto.",
        Matching(r"none|full|selective|sqrt|auto|every-[1-9]\d{0,3}|budget:\d+(\.\d+)? ?(B|[KMG]iB)?",
                 "one of 'none', 'selective', 'full', 'every-N' (as 'every-2'), 'sqrt', 'auto' or 'budget:512MiB'"))
    loss: str = TRAINING("chunks", "Logits of the loss: chunks of tokens; slices of the vocabulary too, again in backward; or whole.",
        OneOf(("chunks", "slices", "whole")), tasks=WRITING)
    compress_activations: bool = TRAINING(False, "Keep what blocks save for backward in E4M3.")
    seed: int = TRAINING(0, "Decides weights, order of the data and stochastic rounding.", Range(0, MAX_INT))
    device: str = TRAINING("auto", "auto, cpu, cuda or cuda:N.",
        Matching(r"auto|cpu|cuda(:\d{1,3})?", "one of 'auto', 'cpu', 'cuda' or 'cuda:N'"))
    parallel: str = TRAINING("", "How ranks of torchrun share a run, as fsdp=4, tp=2,sp or fsdp=2,pp=2; empty: dp, a copy on each.")
    schedule: str = TRAINING("1F1B", "Order of work in the stages of a pipeline (pp), as torch calls it.",
        OneOf(("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")))
    gradients: str = TRAINING("16bit", "How gradients travel between ranks.", OneOf(("16bit", "fp8", "fp8-lm")))
    weights: str = TRAINING("16bit", "What ranks with shards gather of weights: as they are, or codes.", OneOf(("16bit", "codes")))
    activations: str = TRAINING("16bit", "How activations and their gradients travel, of pp and sp.", OneOf(("16bit", "fp8")))
    threads: int = TRAINING(0, "Threads of the CPU; 0: as torch decides.", Range(0, 4096))
    keep_freed: bool = TRAINING(True, "On a CPU, memory that a step frees is kept for the next, where the C library is glibc.")
    compile: bool = TRAINING(False, "Compile the model with torch.compile.")
    cuda_graph: bool = TRAINING(False, "Launch steps as CUDA graphs, on a GPU.")

    output: str = RUN("runs/latest", "Run folder.", NOT_EMPTY)
    resume: bool = RUN(False, "Continue the run in the run folder from its newest checkpoint.")
    parent: str = RUN("", "Start a branch: go on from another run's checkpoint, with its settings but for those given here. RUN, RUN@STEP "
        "or RUN@best.", key="from")
    eval_every: int = RUN(50, "Steps between evaluations; 0: only after the last step.", COUNT_OR_ZERO)
    eval_wide: bool = RUN(True, "Score a second time with the products of Linears in 16 bits, where the recipe has them narrow.")
    eval_tokens: int = RUN(32768, "Validation tokens of an evaluation, at most.", COUNT)
    checkpoint_every: int = RUN(100, "Steps between checkpoints; 0: only after the last step.", COUNT_OR_ZERO)
    keep: int = RUN(2, "Checkpoints kept, the newest.", COUNT)
    log_every: int = RUN(10, "Steps between lines on the console.", COUNT)
    digest_every: int = RUN(100, "Steps between comparisons of what all ranks hold alike; 0: none.", COUNT_OR_ZERO)
    timeout_s: float = RUN(600.0, "Seconds that a rank waits for the others before it takes one for dead.", Range(1, 86400))
    tensor_every: int = RUN(50, "Steps between tensor statistics; 0: none.", COUNT_OR_ZERO)
    launches_at: int = RUN(30, "Step whose idle time on a GPU is measured, or the next if its tensors are read; 0: none.", COUNT_OR_ZERO)
    plan: str = RUN("auto", "Whether memory is planned before the first step: auto, on a GPU.", OneOf(("auto", "always", "never")))
    tensorboard: bool = RUN(False, "Write TensorBoard events to the run folder too.")
    guard: str = RUN("", "Checks against short stretches in BF16 from the run's own state, as every=2000,steps=100,margin=0.25%,then=stay; "
        "empty: none.")
    compare: str = RUN("", "Recipe of a second run on the same data to compare with, as bf16; empty: none.")
    sample_tokens: int = RUN(64, "Tokens of the sample written at each evaluation; 0: none.", Range(0, 2**20), tasks=WRITING)
    prompt: str = RUN("", "Text that the sample continues.", tasks=WRITING)
    # fmt: on

    def __post_init__(self) -> None:
        problems = [problem for each in fields(self) if (problem := refuse(each, getattr(self, each.name)))]
        problems = problems or list(_cross_checks(self))
        if problems:
            raise InvalidSettings(problems)


class InvalidSettings(ConfigError):
    """One line for each broken rule. `problems` lets the reader of a file add the line that each value came from."""

    def __init__(self, problems: Iterable[Problem], origins: Mapping[str, str] | None = None) -> None:
        self.problems = tuple(problems)
        lines = []
        for keys, message in self.problems:
            place = next(filter(None, map((origins or {}).get, keys)), "")
            lines.append(f"{place}: {message}" if place else message)
        super().__init__("\n".join(lines))


def by_key() -> dict[str, Field[Any]]:
    return {key_of(each): each for each in fields(TrainConfig)}


def resolved(config: TrainConfig) -> TrainConfig:
    """The same run with the sizes that depend on others written out: kv_heads, intermediate_size, cache."""
    sizes: dict[str, Any] = {} if config.model else {
        "kv_heads": config.kv_heads or config.heads,
        "intermediate_size": config.intermediate_size or math.ceil(8 * config.hidden_size / 3 / 64) * 64,
    }  # fmt: skip
    return replace(config, cache=config.cache or str(Path(config.output).parent / "cache"), **sizes)


# Rules between settings, once each value is right by itself

Check = tuple[object, str, str]  # true if the rule is broken; the keys that break it, with spaces; the message
SIZES = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size")


def _cross_checks(config: TrainConfig) -> Iterator[Problem]:
    """Every rule that is broken."""
    for key, because in _without_effect(config):
        value, reason = shown(getattr(config, key)), shown(getattr(config, because))
        name = key_of(config.__dataclass_fields__[because])
        yield ((key,), f"{key} = {value}: has no effect with {name} = {reason}. Remove one of them.")
    for broken, keys, message in (*_task_checks(config), *_training_checks(config)):
        if broken:
            yield (tuple(keys.split()), message)


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, the other setting that makes it meaningless), of keys that were set."""
    auto = "recipe" if config.recipe == "auto" else "layers_recipe"
    is_auto = "auto" in (config.recipe, *config.layers_recipe.values())
    is_table = config.task != "text"
    pairs: list[tuple[object, str, str]] = [
        *((config.model, key, "model") for key in SIZES),
        (config.tokenizer, "vocab_size", "tokenizer"),
        *((config.task not in each.metadata["tasks"], each.name, "task") for each in fields(config)),
        (config.epochs, "steps", "epochs"),
        (is_table and config.validation_data, "validation_fraction", "validation_data"),
        (is_table and config.token_budget, "batch_size", "token_budget"),
        *((config.messages_column, key, "messages_column") for key in ("prompt_column", "completion_column")),
        (is_auto and config.save not in FUSED_SAVES, "save", auto),
        (config.states == "fp32", "embedding_states", "states"),
        (not config.step_in_backward, "clip_by", "step_in_backward"),
        (config.clip == 0, "clip_by", "clip"),
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


def _excluded_in_backward(c: TrainConfig) -> Iterator[Check]:
    """By steps in backward, and by gradients that wait in FP8."""
    scaling = ("precision", c.precision == "amp-fp16", "whose loss scaling looks at all gradients before the step")
    excluded = {
        ("step_in_backward", c.step_in_backward): (
            ("compile", c.compile, "whose backward pass computes all gradients before it gives any"),
            ("cuda_graph", c.cuda_graph, "which captures the step apart from the backward pass"),
            ("held_gradients", c.held_gradients == "fp8", "since it holds none"),
            scaling,
        ),
        ("held_gradients", c.held_gradients == "fp8"): (
            ("cuda_graph", c.cuda_graph, "which captures the step with gradients at fixed places"),
            scaling,
        ),
    }
    for (key, applies), others in excluded.items():
        for other, is_broken, why in others:
            value = shown(getattr(c, key))
            yield (applies and is_broken, f"{key} {other}",
                   f"{key} = {value}: does not work with {other} = {shown(getattr(c, other))}, {why}. Remove one of them.")  # fmt: skip


def _training_checks(c: TrainConfig) -> list[Check]:
    problems = () if c.epochs else switch_syntax.problems(c.switch, c.steps)  # of epochs the steps are known later
    return [
        *((True, "parallel", f"parallel = {shown(c.parallel)}: {message}") for message in parallel_syntax.problems(c.parallel)),
        *((True, "guard", f"guard = {shown(c.guard)}: {message}")
          for message in guard_settings.problems(c.guard, 0 if c.epochs else c.steps, c.warmup_steps)),
        (c.guard and c.compare, "guard compare",
         f"guard = {shown(c.guard)}: judges the run without a second one, which compare = {shown(c.compare)} trains. Remove one."),
        (c.guard and c.cuda_graph, "guard cuda_graph",
         f"guard = {shown(c.guard)}: cuda_graph = true replays the products of the recipe, and graphs of a stretch in BF16 want memory of "
         "their own. Remove one of them."),
        *((True, "switch steps", f"switch = {shown(c.switch)}: {message}") for message in problems),
        (not c.token_budget and c.batch_size % c.micro_batches, "micro_batches batch_size",
         f"micro_batches = {c.micro_batches}: must divide batch_size = {c.batch_size}."),
        (c.save in FUSED_SAVES and not c.fuse, "save fuse",
         f"save = {c.save!r}: says what fused norms and activations keep, and fuse is off. Add fuse = true, or remove save."),
        (c.save in FUSED_SAVES and c.compile, "save compile",
         f"save = {c.save!r}: in a compiled model the compiler decides what is kept for backward. Remove one of save and compile."),
        (c.save in FUSED_SAVES[1:] and c.compress_activations, "save compress_activations",
         f"save = {c.save!r}: compress_activations = true encodes once more what is in 8 bits already. Remove one of them."),
        (c.compress_activations and c.compile, "compress_activations compile",
         "compress_activations = true: a compiled model cannot use it, because the compiler decides what is kept for backward. "
         "Remove one of compress_activations and compile."),
        (c.loss == "slices" and parallel_syntax.names(c.parallel, "tp"), "loss parallel",
         f"loss = 'slices': parallel = {shown(c.parallel)} cuts the words of the head among ranks, and each has its part of the "
         "gradient already. Remove loss."),
        (c.checkpointing == "auto" and "auto" in (c.recipe, *c.layers_recipe.values()), "checkpointing recipe",
         "checkpointing = 'auto': counts a step before the run, and recipe = 'auto' is chosen by measurements in it. Name one of the two."),
        (c.cuda_graph and c.checkpointing != "none", "cuda_graph checkpointing",
         f"cuda_graph = true: does not work with checkpointing = {c.checkpointing!r}, which keeps the generator's "
         "state on the host. Remove one of them."),
        (c.master and not c.precision.startswith("bf16-o"), "master precision",
         f"master = {c.master!r}: has no effect with precision = {c.precision!r}, whose weights are float32. "
         "Remove it, or take precision bf16-o2."),
        (c.step_in_backward and c.clip and not c.clip_by, "step_in_backward clip",
         f"step_in_backward = true: clip = {c.clip} wants the norm of the whole gradient, which is known only after the last layer has "
         "stepped. Choose clip_by = 'previous' (the norm of the step before), 'two-pass' (a forward and backward pass more), 'parameter' "
         "(each by its own norm), or clip = 0."),
        *_excluded_in_backward(c),
        ("/" in c.states and c.optimizer != "adamw", "states optimizer",
         f"states = {c.states!r}: names two moments, and {c.optimizer} keeps one. Give one, as states = "
         f"{c.states.partition('/')[0]!r}."),
        (c.keep_float32 and not c.precision.startswith("bf16-o"), "keep_float32 precision",
         f"keep_float32 = {c.keep_float32!r}: has no effect with precision = {c.precision!r}, whose weights are float32. "
         "Remove it, or take precision bf16-o2."),
        (c.min_learning_rate > c.learning_rate, "min_learning_rate learning_rate",
         f"min_learning_rate = {c.min_learning_rate}: must not exceed learning_rate = {c.learning_rate}."),
    ]  # fmt: skip
