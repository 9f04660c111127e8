"""All settings of a training run: key, type, default, rule and help text.

TOML keys, command-line flags, `narrowgauge train --help` and RUN/config.toml all derive from
`TrainConfig`, so a new setting is one entry here or in `data_settings`. The key `hidden_size`
becomes the flag `--hidden-size`. Two fields have another key: `layers_recipe` is `recipes`, a table
in a file, and `parent` is `from`, a Python keyword.

Recipe names are checked later by `narrowgauge.recipes`: this file imports no torch, so that --help
is quick.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.diagnose import guard_settings
from narrowgauge.errors import ConfigError
from narrowgauge.optim.rules import RULES
from narrowgauge.train.config import parallel_syntax, switch_syntax
from narrowgauge.train.config.data_checks import task_checks
from narrowgauge.train.config.data_settings import GENERATING, TASKS, DataSettings
from narrowgauge.train.config.rules import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_EMPTY,
    TABLE,
    Check,
    Matching,
    OneOf,
    OneOrPair,
    Problem,
    Range,
    has_effect,
    is_set,
    key_of,
    refuse,
    setting,
    shown,
)  # fmt: skip

__all__ = [
    "FUSED_SAVES", "GENERATING", "NO_RECIPE", "TABLE", "TASKS", "InvalidSettings", "OneOf", "OneOrPair", "TrainConfig", "by_key", "key_of",
    "replace", "resolved", "shown",
]  # fmt: skip

MAX_INT = 2**63 - 1  # largest integer that TOML guarantees and torch accepts as a seed
FUSED_SAVES = ("exact", "fp8", "int8")  # values of `save` for fused norms and activations
UNSET, AS_THE_RULE = -1.0, "-1: as the rule of the updates has it in a run."
# Numbers of rules without such an option. They are written to config.toml and have no effect.
WITHOUT_OPTION = {"betas": (0.9, 0.95), "momentum": 0.9, "eps": 1e-8}
NO_RECIPE = "none"  # plain nn.Linear in the dtype of `precision`
PRECISION, TRAINING, RUN = (partial(setting, group) for group in ("precision", "training", "run"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataSettings):
    """Validated, immutable configuration of a run; derive variants with `dataclasses.replace`.

    Raises ConfigError with one line for each broken rule.
    """

    # fmt: off
    recipe: str = PRECISION("fp8-current",
        "Number formats of the matrix products of every Linear; auto: the fastest for each, by a measurement; none: as the "
        "precision has them.", NOT_EMPTY)
    layers_recipe: TABLE = PRECISION(  # noqa: RUF009 (it returns a dataclasses.field)
        dict, "Other recipes for the layers that a pattern names, as 'lm_head=bf16', or some products, as 'layers.1.*=bf16:backward'.",
        key="recipes")
    embedding_codes: str = PRECISION("", "Rows of embeddings are looked up as such codes, with a learned step (LSQ); empty: as they are.",
        OneOf(("", "int4", "int8")))
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
    optimizer: str = TRAINING("adamw", "Rule of the updates.", OneOf(tuple(RULES)))
    states: str = TRAINING("fp32", "Numbers of the optimizer's moments; 'first/second': of each.",
        OneOrPair(("fp32", "8bit", "fp8", "fp8-lm", "4bit"), ("fp32", "fp16", "8bit", "fp8", "e4m3", "4bit")))
    embedding_states: str = TRAINING("fp32", "Moments of embeddings: float32, or the same as all.", OneOf(("fp32", "same")))
    master: str = TRAINING("", "What keeps the low bits of 16-bit weights; empty: as the precision says.",
        OneOf(("", "fp32", "fp16-scaled", "bf16-remainder", "stochastic")))
    weight_decay: float = TRAINING(0.1, "Weight decay of matrices, as the rule of the updates has it.", Range(0, 1))
    beta1: float = TRAINING(UNSET, f"First beta, or the momentum; {AS_THE_RULE}", Range(0, 1, open_high=True, unset=UNSET))
    beta2: float = TRAINING(UNSET, f"Second beta; {AS_THE_RULE}", Range(0, 1, open_high=True, unset=UNSET))
    epsilon: float = TRAINING(UNSET, f"Guard against division by zero; {AS_THE_RULE}", Range(0, 1, open_low=True, unset=UNSET))
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
        OneOf(("chunks", "slices", "whole")), tasks=GENERATING)
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
    on_spike: str = RUN("", "A spike of the loss: warn says whether data or format are to blame; skip also leaves the batch of data out.",
        OneOf(("", "warn", "skip")))
    compare: str = RUN("", "Recipe of a second run on the same data to compare with, as bf16; empty: none.")
    sample_tokens: int = RUN(64, "Tokens of the sample written at each evaluation; 0: none.", Range(0, 2**20), tasks=GENERATING)
    prompt: str = RUN("", "Text that the sample continues.", tasks=GENERATING)
    # fmt: on

    def __post_init__(self) -> None:
        problems = [
            problem for each in fields(self) if (problem := refuse(each, getattr(self, each.name)))
        ]
        # Rules between settings assume values that are valid one by one.
        problems = problems or list(_cross_checks(self))
        if problems:
            raise InvalidSettings(problems)


class InvalidSettings(ConfigError):
    """ConfigError with one line for each broken rule.

    problems  (keys, message) of each broken rule
    origins   {key: file and line, or flag}, prepended to a message
    """

    def __init__(
        self, problems: Iterable[Problem], origins: Mapping[str, str] | None = None
    ) -> None:
        self.problems = tuple(problems)
        # One line per problem, each with the file line or flag of the first key that has one.
        lines = []
        for keys, message in self.problems:
            place = next(filter(None, map((origins or {}).get, keys)), "")
            lines.append(f"{place}: {message}" if place else message)
        # The code names the first key: "config.guard".
        code = (
            f"config.{self.problems[0][0][0]}"
            if self.problems and self.problems[0][0]
            else "config.settings"
        )
        super().__init__("\n".join(lines), code=code)


def by_key() -> dict[str, Field[Any]]:
    """Fields of `TrainConfig` by their key in a file."""
    return {key_of(each): each for each in fields(TrainConfig)}


def resolved(config: TrainConfig) -> TrainConfig:
    """The same configuration with derived defaults: sizes, cache, and numbers of the rule."""
    is_vit = TASKS[config.task].source == "images"
    # 8/3 gives a gated MLP with three matrices the parameters of an ungated one with 4x width.
    usual = 4 * config.hidden_size if is_vit else math.ceil(8 * config.hidden_size / 3 / 64) * 64
    sizes: dict[str, Any] = (
        {} if config.model else {"intermediate_size": config.intermediate_size or usual}
    )
    if not config.model and not is_vit:
        sizes["kv_heads"] = config.kv_heads or config.heads
    cache = config.cache or str(Path(config.output).parent / "cache")
    return replace(config, cache=cache, **sizes, **numbers_of_rule(config))


def numbers_of_rule(config: TrainConfig) -> dict[str, Any]:
    """beta1, beta2 and epsilon of a run: the settings, or the rule's own where they are unset."""
    rule = RULES[config.optimizer]
    own = {**WITHOUT_OPTION, **rule.options, **rule.run_options}
    beta1, beta2 = own["betas"]
    if "momentum" in rule.options:
        beta1 = own["momentum"]
    defaults = {"beta1": beta1, "beta2": beta2, "epsilon": own["eps"]}
    given = {name: getattr(config, name) for name in defaults}
    return {name: defaults[name] if value == UNSET else value for name, value in given.items()}


# Rules between settings, checked after each value on its own

SIZES = (
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "intermediate_size",
    "vocab_size",
    "patch_size",
)


def _cross_checks(config: TrainConfig) -> Iterator[Problem]:
    """Yields every rule that the configuration breaks."""
    for key, because in _without_effect(config):
        value, reason = shown(getattr(config, key)), shown(getattr(config, because))
        name = key_of(config.__dataclass_fields__[because])
        yield (
            (key,),
            f"{key} = {value}: has no effect with {name} = {reason}. Remove one of them, or give the one that a file sets its default.",
        )
    for broken, keys, message in (*task_checks(config), *_training_checks(config)):
        if broken:
            yield (tuple(keys.split()), message)


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, other setting that makes it meaningless) for keys that differ from their default."""
    auto = "recipe" if config.recipe == "auto" else "layers_recipe"
    is_auto = "auto" in (config.recipe, *config.layers_recipe.values())
    is_table = config.task != "text"
    pairs: list[tuple[object, str, str]] = [
        *((config.model, key, "model") for key in SIZES),
        (config.tokenizer, "vocab_size", "tokenizer"),
        *((not has_effect(each, config.task), each.name, "task") for each in fields(config)),
        (config.epochs, "steps", "epochs"),
        (is_table and config.validation_data, "validation_fraction", "validation_data"),
        (is_table and config.token_budget, "batch_size", "token_budget"),
        *(
            (config.messages_column, key, "messages_column")
            for key in ("prompt_column", "completion_column")
        ),
        # "auto" selects recipes with their own choice of what a Linear saves.
        (is_auto and config.save not in FUSED_SAVES, "save", auto),
        (config.states == "fp32", "embedding_states", "states"),
        (not config.step_in_backward, "clip_by", "step_in_backward"),
        (config.clip == 0, "clip_by", "clip"),
    ]
    # dict.fromkeys removes duplicates and keeps the order.
    yield from dict.fromkeys(
        (key, because) for applies, key, because in pairs if applies and is_set(config, key)
    )


def _excluded_in_backward(c: TrainConfig) -> Iterator[Check]:
    """Combinations that step_in_backward, or held gradients in FP8, do not support."""
    # GradScaler must see every gradient to decide if a step overflowed.
    scaling = (
        "precision",
        c.precision == "amp-fp16",
        "whose loss scaling looks at all gradients before the step",
    )
    excluded = {
        ("step_in_backward", c.step_in_backward): (
            (
                "compile",
                c.compile,
                "whose backward pass computes all gradients before it gives any",
            ),
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
    # With `epochs`, the number of steps is known only after the data are read.
    problems = () if c.epochs else switch_syntax.problems(c.switch, c.steps)
    return [
        *((True, "parallel", f"parallel = {shown(c.parallel)}: {message}") for message in parallel_syntax.problems(c.parallel)),
        *((True, "guard", f"guard = {shown(c.guard)}: {message}")
          for message in guard_settings.problems(c.guard, 0 if c.epochs else c.steps, c.warmup_steps)),
        (c.guard and c.compare, "guard compare",
         f"guard = {shown(c.guard)}: judges the run without a second one, which compare = {shown(c.compare)} trains. Remove one."),
        (c.guard and c.cuda_graph, "guard cuda_graph",
         f"guard = {shown(c.guard)}: cuda_graph = true replays the products of the recipe, and graphs of a stretch in BF16 want memory of "
         "their own. Remove one of them."),
        (c.on_spike and c.cuda_graph, "on_spike cuda_graph",
         f"on_spike = {shown(c.on_spike)}: cuda_graph = true replays the products of the recipe, and BF16, which judges spikes, is another "
         "graph. Remove one of them."),
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
        ("/" in c.states and len(RULES[c.optimizer].moments) < 2, "states optimizer",
         f"states = {c.states!r}: names two moments, and {c.optimizer} keeps one. Give one, as states = "
         f"{c.states.partition('/')[0]!r}."),
        (c.keep_float32 and not c.precision.startswith("bf16-o"), "keep_float32 precision",
         f"keep_float32 = {c.keep_float32!r}: has no effect with precision = {c.precision!r}, whose weights are float32. "
         "Remove it, or take precision bf16-o2."),
        (c.min_learning_rate > c.learning_rate, "min_learning_rate learning_rate",
         f"min_learning_rate = {c.min_learning_rate}: must not exceed learning_rate = {c.learning_rate}."),
    ]  # fmt: skip
