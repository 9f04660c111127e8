"""All settings of a training run: key, type, default, rule and help text.

TOML keys, command-line flags, `narrowgauge train --help` and RUN/config.toml all derive from
`TrainConfig`. Each of its base classes holds the settings of one TOML table. A new setting is one
entry in the module of its table. `hidden_size` of the table `[model]` becomes the flag
`--model.hidden-size`. In Python all settings are fields of `TrainConfig`.

Recipe names are checked later by `narrowgauge.recipes`: this file imports no torch, so that --help
is quick.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrowgauge.diagnose import guard_settings
from narrowgauge.errors import ConfigError
from narrowgauge.optim.rules import RULES
from narrowgauge.train.config import augment_syntax, parallel_syntax, switch_syntax
from narrowgauge.train.config.adapter_settings import AdapterSettings, adapter_checks
from narrowgauge.train.config.data_checks import task_checks
from narrowgauge.train.config.data_settings import GENERATING, DataSettings
from narrowgauge.train.config.machine_settings import (
    DeviceSettings,
    MemorySettings,
    ParallelSettings,
)
from narrowgauge.train.config.merged_settings import MERGED
from narrowgauge.train.config.optimizer_settings import (
    UNSET,
    WARMUP_STABLE_DECAY,
    WITHOUT_OPTION,
    OptimizerSettings,
    TrainingSettings,
)
from narrowgauge.train.config.recipe_settings import FUSED_SAVES, NO_RECIPE, RecipeSettings
from narrowgauge.train.config.rules import (
    NUMBERS,
    TABLE,
    Check,
    OneOf,
    OneOrPair,
    Problem,
    former_key,
    former_path,
    has_effect,
    is_set,
    key_of,
    path_of,
    refuse,
    shown,
)
from narrowgauge.train.config.run_settings import (
    CheckpointSettings,
    EvaluationSettings,
    GuardTable,
    LogSettings,
    RunSettings,
)
from narrowgauge.train.config.task_entries import TASKS

__all__ = [
    "FUSED_SAVES", "GENERATING", "NO_RECIPE", "NUMBERS", "TABLE", "TASKS", "InvalidSettings", "OneOf", "OneOrPair", "TrainConfig",
    "by_path", "differences", "former_key", "key_of", "key_of_name", "path_of", "replace", "resolved", "shown",
]  # fmt: skip


# Python lists the fields of the last base first.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    GuardTable, LogSettings, CheckpointSettings, EvaluationSettings, ParallelSettings, DeviceSettings, MemorySettings,
    OptimizerSettings, TrainingSettings, AdapterSettings, RecipeSettings, DataSettings, RunSettings,
):  # fmt: skip
    """Validated, immutable configuration of a run; derive variants with `dataclasses.replace`.

    Each base is one table of a file. Raises ConfigError with one line for each broken rule.
    """

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

    problems  (names of fields, message) of each broken rule
    origins   {field or unknown key: file and line, or flag}, prepended to a message
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
        # The code names the first setting, by its former key: "config.guard".
        first = self.problems[0][0][:1] if self.problems else ()
        code = f"config.{former_path(_path(first[0]))}" if first else "config.settings"
        super().__init__("\n".join(lines), code=code)


def by_path() -> dict[str, Field[Any]]:
    """Fields of `TrainConfig` by their full name, such as "model.layers"."""
    return {path_of(each): each for each in fields(TrainConfig)}


def key_of_name(name: str) -> str:
    """Name in a file of a field, or of a part as "columns.text"; `name` itself if it is none.

    A part that was a setting of its own before, as "betas.beta1", has the name of its field.
    """
    field, _, part = name.partition(".")
    each = TrainConfig.__dataclass_fields__.get(field)
    if each and field in MERGED and part in MERGED[field].kinds:
        return key_of(each)
    if each is None or (part and not each.metadata["parts"]):
        return name
    return f"{key_of(each)}.{part}" if part else key_of(each)


def _path(name: str) -> str:
    """As `key_of_name`, but the full name of a field."""
    each = TrainConfig.__dataclass_fields__.get(name)
    return path_of(each) if each else key_of_name(name)


def differences(
    config: TrainConfig, before: TrainConfig, owner: str, is_kept: Callable[[Field[Any]], bool]
) -> list[str]:
    """ "key = value, but OWNER has value" for each setting that differs and should be the same.

    is_kept  true for the fields that are compared
    """
    return [
        f"{key} = {shown(own)}, but {owner} has {shown(its)}"
        for each in fields(TrainConfig)
        if is_kept(each)
        for key, own, its in _differing(
            each, getattr(config, each.name), getattr(before, each.name)
        )
    ]


def _differing(each: Field[Any], own: Any, its: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, own value, other value) of a setting, or of its parts, that differs."""
    if each.type is TABLE and each.metadata["parts"]:
        for part in dict.fromkeys((*own, *its)):
            if own.get(part, "") != its.get(part, ""):
                yield f"{key_of(each)}.{part}", own.get(part, ""), its.get(part, "")
    elif own != its:
        yield key_of(each), own, its


def resolved(config: TrainConfig) -> TrainConfig:
    """The same configuration with derived defaults: columns, sizes, cache, numbers of the rule."""
    is_vit = TASKS[config.task].source == "images"
    # 8/3 gives a gated MLP with three matrices the parameters of an ungated one with 4x width.
    usual = 4 * config.hidden_size if is_vit else math.ceil(8 * config.hidden_size / 3 / 64) * 64
    sizes: dict[str, Any] = (
        {} if config.model else {"intermediate_size": config.intermediate_size or usual}
    )
    if not config.model and not is_vit:
        sizes["kv_heads"] = config.kv_heads or config.heads
    cache = config.cache or str(Path(config.output).parent / "cache")
    augment = str(augment_syntax.parse(config.augment))
    columns = {name: config.column_of(name) for name in TASKS[config.task].columns}
    # Codes of the base are those of one recipe, which computes with them as well.
    sizes |= {"recipe": config.base} if config.base else {}
    return replace(
        config, cache=cache, columns=columns, augment=augment, **sizes, **numbers_of_rule(config)
    )


def numbers_of_rule(config: TrainConfig) -> dict[str, Any]:
    """betas and epsilon of a run: the settings, or the rule's own where they are unset."""
    rule = RULES[config.optimizer]
    own = {**WITHOUT_OPTION, **rule.options, **rule.run_options}
    beta1, beta2 = own["betas"]
    if "momentum" in rule.options:
        beta1 = own["momentum"]
    given = (*config.betas, config.epsilon)
    beta1, beta2, epsilon = (
        default if value == UNSET else value
        for value, default in zip(given, (beta1, beta2, own["eps"]), strict=True)
    )
    return {"betas": (beta1, beta2), "epsilon": epsilon}


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
        known = config.__dataclass_fields__
        name, own = key_of(known[because]), key_of(known[key])
        yield (
            (key,),
            f"{own} = {value}: has no effect with {name} = {reason}. Remove one of them, or give the one that a file sets its default.",
        )
    for broken, keys, message in (
        *task_checks(config),
        *_training_checks(config),
        *adapter_checks(config, GENERATING),
    ):
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
        # "auto" selects recipes with their own choice of what a Linear saves.
        (is_auto and config.save not in FUSED_SAVES, "save", auto),
        (config.states == "fp32", "embedding_states", "states"),
        (not config.step_in_backward, "clip_by", "held_gradients"),
        (config.clip == 0, "clip_by", "clip"),
        (config.rate_schedule == "constant", "min_learning_rate", "rate_schedule"),
        (config.rate_schedule != WARMUP_STABLE_DECAY, "decay_steps", "rate_schedule"),
    ]
    # dict.fromkeys removes duplicates and keeps the order.
    yield from dict.fromkeys(
        (key, because) for applies, key, because in pairs if applies and is_set(config, key)
    )


def _excluded_by_held_gradients(c: TrainConfig) -> Iterator[Check]:
    """Combinations that steps in backward, or held gradients in FP8, do not support."""
    why_of_compile = "whose backward pass computes all gradients before it gives any"
    why_of_graphs = {
        "none": "which captures the step apart from the backward pass",
        "fp8": "which captures the step with gradients at fixed places",
    }.get(c.held_gradients, "")
    # GradScaler must see every gradient to decide if a step overflowed.
    why_of_scaling = "whose loss scaling looks at all gradients before the step"
    own, is_held = f"optimizer.held_gradients = {shown(c.held_gradients)}", bool(why_of_graphs)
    for other, is_broken, why in (
        ("compile", c.compile and c.step_in_backward, why_of_compile),
        ("cuda_graph", c.cuda_graph and is_held, why_of_graphs),
        ("precision", c.precision == "amp-fp16" and is_held, why_of_scaling),
    ):
        its = f"{key_of(c.__dataclass_fields__[other])} = {shown(getattr(c, other))}"
        message = f"{own}: does not work with {its}, {why}. Remove one of them."
        yield is_broken, f"held_gradients {other}", message


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
         f"guard = {shown(c.guard)}: device.cuda_graph = true replays the products of the recipe, and graphs of a stretch in BF16 want "
         "memory of "
         "their own. Remove one of them."),
        (c.on_spike and c.cuda_graph, "on_spike cuda_graph",
         f"guard.on_spike = {shown(c.on_spike)}: device.cuda_graph = true replays the products of the recipe, and BF16, which judges "
         "spikes, is another "
         "graph. Remove one of them."),
        *((True, "switch steps", f"recipe.switch = {shown(c.switch)}: {message}") for message in problems),
        (not c.token_budget and c.batch_size % c.micro_batches, "micro_batches batch_size",
         f"batch.micro_batches = {c.micro_batches}: must divide batch.size = {c.batch_size}."),
        (c.save in FUSED_SAVES and not c.fuse, "save fuse",
         f"recipe.save = {c.save!r}: says what fused norms and activations keep, and fuse is off. Add recipe.fuse = true, or remove save."),
        (c.save in FUSED_SAVES and c.compile, "save compile",
         f"recipe.save = {c.save!r}: in a compiled model the compiler decides what is kept for backward. Remove one of save and compile."),
        (c.save in FUSED_SAVES[1:] and c.compress_activations, "save compress_activations",
         f"recipe.save = {c.save!r}: memory.compress_activations = true encodes once more what is in 8 bits already. Remove one of them."),
        (c.compress_activations and c.compile, "compress_activations compile",
         "memory.compress_activations = true: a compiled model cannot use it, because the compiler decides what is kept for backward. "
         "Remove one of compress_activations and compile."),
        (c.loss == "slices" and parallel_syntax.names(c.parallel, "tp"), "loss parallel",
         f"training.loss = 'slices': parallel = {shown(c.parallel)} cuts the words of the head among ranks, and each has its part of the "
         "gradient already. Remove loss."),
        (c.checkpointing == "auto" and "auto" in (c.recipe, *c.layers_recipe.values()), "checkpointing recipe",
         "memory.checkpointing = 'auto': counts a step before the run, and recipe = 'auto' is chosen by measurements in it. Name one of "
         "the two."),
        (c.cuda_graph and c.checkpointing != "none", "cuda_graph checkpointing",
         f"device.cuda_graph = true: does not work with memory.checkpointing = {c.checkpointing!r}, which keeps the generator's "
         "state on the host. Remove one of them."),
        (c.master and not c.precision.startswith("bf16-o"), "master precision",
         f"optimizer.master = {c.master!r}: has no effect with recipe.precision = {c.precision!r}, whose weights are float32. "
         "Remove it, or take precision bf16-o2."),
        (c.step_in_backward and c.clip and not c.clip_by, "held_gradients clip",
         f"optimizer.held_gradients = 'none': optimizer.clip = {c.clip} wants the norm of the whole gradient, which is known only after "
         "the last layer has "
         "stepped. Choose optimizer.clip_by = 'previous' (the norm of the step before), 'two-pass' (a forward and backward pass more), "
         "'parameter' "
         "(each by its own norm), or optimizer.clip = 0."),
        *_excluded_by_held_gradients(c),
        ("/" in c.states and len(RULES[c.optimizer].moments) < 2, "states optimizer",
         f"optimizer.states = {c.states!r}: names two moments, and {c.optimizer} keeps one. Give one, as optimizer.states = "
         f"{c.states.partition('/')[0]!r}."),
        (c.keep_float32 and not c.precision.startswith("bf16-o"), "keep_float32 precision",
         f"recipe.keep_float32 = {c.keep_float32!r}: has no effect with recipe.precision = {c.precision!r}, whose weights are float32. "
         "Remove it, or take precision bf16-o2."),
        (c.min_learning_rate > c.learning_rate, "min_learning_rate learning_rate",
         f"optimizer.min_learning_rate = {c.min_learning_rate}: must not exceed optimizer.learning_rate = {c.learning_rate}."),
        (c.decay_steps and not c.epochs and c.warmup_steps + c.decay_steps > c.steps, "decay_steps warmup_steps steps",
         f"optimizer.decay_steps = {c.decay_steps}: with optimizer.warmup_steps = {c.warmup_steps} it is longer than "
         f"training.steps = {c.steps}. Lower one of them, or train longer."),
    ]  # fmt: skip
