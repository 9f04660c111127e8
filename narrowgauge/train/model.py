"""The model of a run: a Llama or a transformers model with its recipes and recipe switches.

Remote code is never executed.

On a CPU without bfloat16 instructions, Linears without a recipe get the recipe `bf16`. It rounds
the operands to bfloat16 and multiplies in float32. Attention is computed in float32 there. The step
is the same and many times faster.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion import SMALLEST, convert, embeddings, products
from narrowgauge.conversion.description import describe
from narrowgauge.conversion.switching import bits, widened
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.fuse import fuse
from narrowgauge.nn import step_end
from narrowgauge.nn.dropout import use_counted_dropout
from narrowgauge.nn.float32_modules import SOFTMAX
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.rng import seed_all
from narrowgauge.optim import precision as precisions
from narrowgauge.recipe import GEMMS, Recipe
from narrowgauge.storage import reading
from narrowgauge.train.attention import use_float32_attention, use_float32_softmax
from narrowgauge.train.checkpoint.store import nonfinite
from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.settings import FUSED_SAVES, NO_RECIPE, TrainConfig
from narrowgauge.train.console import tell
from narrowgauge.train.model_files import OF_MODELS, quiet, refuse_foreign_code


def build(
    config: TrainConfig,
    make: Callable[[], Any],
    device: torch.device,
    tokens: int,
    choices: Mapping[str, str] | None,
) -> Any:
    """The converted model on `device`, in training mode and in the dtype of its precision.

    make     returns the float32 model: `language_model`, or `pretrained` for another task
    tokens   rows of the matmuls in a forward pass, for the choices of recipe "auto"
    choices  recorded choices of recipe "auto", for a resumed run; else None

    config.seed determines random weights.
    """
    precision = precisions.get(config.precision)
    seed_all(config.seed)
    model = make().train()
    precision.prepare(model, config.keep_float32)
    if SOFTMAX in precision.keep_list(config.keep_float32):
        use_float32_softmax(model)
    if device.type != "cpu":
        model.to(device)  # cast before the move: the float32 weights may not fit in GPU memory
    names = {"*": config.recipe, **config.layers_recipe}
    patterns = {pattern: _pattern_recipe(config, name) for pattern, name in names.items()}
    if config.embedding_codes and (words := embeddings.problem(model)):
        raise ConfigError(
            f"recipe.embedding_codes = {config.embedding_codes!r}: {words} Or leave embedding_codes out.",
            code="convert.embedding-codes",
        )
    # Without any recipe, skip convert: it requires at least one Linear.
    if config.layers_recipe or patterns["*"] is not None:
        # `run_metadata.emulated_on_gpu` prints this before the first step
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="convert: products of recipe .* are emulated")
            convert(model, patterns, tokens=tokens, compiled=config.compile, choices=choices)
    if config.embedding_codes:
        embeddings.quantize_embeddings(model, config.embedding_codes)  # type: ignore[arg-type]
        step_end.follow_model(model)
    if (
        precision.computes_in == torch.bfloat16
        and not device_facts(device.type, device.index).bf16_gemm
    ):
        use_float32_attention(model)
        untouched = {row.name for row in describe(model) if row.recipe == "none"}
        kept = {
            name: "bf16"
            for name, module in model.named_modules()
            if name in untouched and _is_wide(module)
        }
        if kept:
            convert(model, kept)
    if config.fuse:
        fuse(model, config.save if config.save in FUSED_SAVES else None)  # type: ignore[arg-type]
    if device.type == "cpu":
        use_counted_dropout(model)
    return model


def _is_wide(layer: nn.Module) -> bool:
    """True if both dimensions of a Linear reach SMALLEST.

    A classifier's head is smaller, and fast anyway.
    """
    return type(layer) in (nn.Linear, QLinear) and min(layer.weight.shape) >= SMALLEST  # type: ignore[arg-type]


def _pattern_recipe(config: TrainConfig, name: str) -> str | Recipe | products.Some | None:
    if name == NO_RECIPE:
        return None
    return name if name == recipes.AUTO else products.parse(name, partial(chosen_recipe, config))


def chosen_recipe(config: TrainConfig, name: str) -> Recipe:
    """The recipe called `name`, with the run's option `save`."""
    recipe = recipes.get(name)
    if config.save in ("", *FUSED_SAVES) or recipe.grad_weight.rhs is None:
        return recipe
    return replace(recipe, save=config.save)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers models."""

    auto: Any  # Auto class of transformers
    words: str  # description, for messages
    # Overrides of the model's own configuration
    options: Mapping[str, Any] = field(default_factory=dict)
    new: bool = False  # a head without stored weights may start at random


CAUSAL_LM = ModelClass(transformers.AutoModelForCausalLM, "causal language model")
SEQ2SEQ = ModelClass(transformers.AutoModelForSeq2SeqLM, "sequence-to-sequence model")


def language_model(config: TrainConfig, tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    """A new Llama of the configured sizes, or a causal language model from a folder or the Hub.

    Raises an error if it has too few positions, or embeds fewer ids than the tokenizer has.
    """
    if config.model:
        model = pretrained(config, CAUSAL_LM)
    else:
        sizes = transformers.LlamaConfig(
            # A multiple of 16, as torch._scaled_mm requires of its dimensions.
            vocab_size=-(-len(tokenizer) // 16) * 16,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads or config.heads,
            max_position_embeddings=config.sequence_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
        model = transformers.LlamaForCausalLM(sizes)
    check_sizes(model, tokenizer, "model.sequence_length", config.sequence_length)
    return model


def own_configuration(config: TrainConfig, model_class: ModelClass) -> Any:
    """Configuration in the model's folder, with the overrides of its class.

    Raises ConfigError if there is none.
    """
    where = config.model
    if where.startswith((".", "/", "~")) and not Path(where).expanduser().is_dir():
        raise ConfigError(
            f"model = {where!r}: no such folder. Pass a folder with config.json, or a model's name on the Hub.",
            code="model.no-folder",
        )
    if Path(where).is_dir():
        reading.refuse_special_files(Path(where), OF_MODELS)
    try:
        return transformers.AutoConfig.from_pretrained(
            where, trust_remote_code=False, **model_class.options
        )
    except Exception as error:  # transformers raises many exception types for a damaged folder
        raise _cannot_load(where, model_class, error) from error


def pretrained(config: TrainConfig, model_class: ModelClass) -> Any:
    """The float32 model that the configuration names.

    Raises ConfigError for another kind of model, or missing weights.
    """
    where, sizes = config.model, own_configuration(config, model_class)
    refuse_foreign_code(where, sizes)
    try:
        if config.from_scratch:
            return model_class.auto.from_config(sizes, trust_remote_code=False, dtype=torch.float32)
        with quiet():
            model, found = model_class.auto.from_pretrained(
                where, config=sizes, trust_remote_code=False, dtype=torch.float32, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=model_class.new,
            )  # fmt: skip
    except Exception as error:
        raise _cannot_load(where, model_class, error) from error
    absent = {
        *found["missing_keys"],
        *(name for name, *_ in found["mismatched_keys"]),
    }  # mismatched: a head for another number of classes
    fresh = sorted(name for name in absent if model_class.new and _is_of_the_head(model, name))
    if fresh:
        tell(f"Note: not in {where}, so at random to begin with: {', '.join(fresh)}.")
    missing = sorted(absent - set(fresh))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model = {where!r}: holds no weights for {missing[0]!r}{more} of {type(model).__name__}, which would start at random. "
            "Pass a whole model, or --model.from-scratch.",
            code="model.missing-weights",
        )
    for name, weight in model.state_dict().items():
        if count := nonfinite(weight):
            raise ConfigError(
                f"model = {where!r}: weight {name!r} holds {count} values that are not finite, of {weight.numel()}. "
                "Pass a model whose weights are whole.",
                code="weights.not-finite",
            )
    return model


def _is_of_the_head(model: Any, name: str) -> bool:
    """True if a weight belongs to the task head.

    A pooler counts as well: some encoders were saved without one.
    """
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def _cannot_load(where: str, model_class: ModelClass, error: Exception) -> ConfigError:
    # Cut off a list of two hundred classes
    said = str(error).split("Model type should be one of", 1)[0].rstrip(". ")
    return ConfigError(
        f"model = {where!r}: transformers cannot load it as a {model_class.words}: {said}. "
        "Pass a folder or hub name of one with safetensors whose code is part of transformers.",
        code="model.unloadable",
    )


def check_sizes(
    model: Any, tokenizer: transformers.PreTrainedTokenizerFast, key: str, length: int
) -> None:
    """Raises ConfigError if the model has too few positions, DataError if too few embeddings.

    key     name of the setting that `length` comes from
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(
            f"{key} = {length}: {type(model).__name__} knows positions up to {longest}. Set {key} to {longest} or less.",
            code="model.positions",
        )
    rows = model.get_input_embeddings().weight.shape[0]
    # Ids may have gaps, so len(tokenizer) is not enough
    ids = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    if ids > rows:
        raise DataError(
            f"tokenizer with ids up to {ids - 1}, but the model embeds {rows}. "
            "Use the model's own tokenizer (leave `tokenizer` empty), or train from scratch.",
            code="model.vocabulary",
        )


# Switches: recipes over the steps


@dataclass(frozen=True)
class RecipeSwitch:
    """One recipe switch."""

    step: int  # first step with the new recipes
    switch: str  # text of the setting
    changes: dict[str, tuple[Recipe, Recipe]]  # layer -> (recipe before, recipe after)

    def apply(self, model: nn.Module) -> None:
        """Sets the new recipes. With pipeline switches, on the layers of this rank."""
        layers = dict(model.named_modules())
        for name, (_, recipe) in self.changes.items():
            if name in layers:
                layers[name].recipe = recipe

    @property
    def event(self) -> dict[str, Any]:
        """Fields of the `switch` event."""
        before, after = (
            sorted({pair[side].name for pair in self.changes.values()}) for side in (0, 1)
        )
        return {
            "switch": self.switch,
            "layers": len(self.changes),
            "before": before,
            "after": after,
        }

    def __str__(self) -> str:
        before, after = (", ".join(self.event[side]) for side in ("before", "after"))
        return f"step {self.step}: switch {self.switch}: {len(self.changes)} layers from {before} to {after}"


def recipe_switches(config: TrainConfig, model: nn.Module) -> list[RecipeSwitch]:
    """The configured recipe switches in order of their steps, resolved to layers of the model.

    The recipes of step n depend on n alone, so a resumed run computes the same numbers. Applying
    the switches up to step k to a new model creates the modules and amax histories that the run has
    after step k.

    Raises ConfigError for a switch that matches no layer or changes nothing.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    now = {name: layer.recipe for name, layer in layers.items() if layer.recipe is not None}
    found = []
    for entry in sorted(
        switch_syntax.parse(config.switch), key=lambda each: each.after_step(config.steps)
    ):
        try:
            changes = widened(
                model, now, chosen_recipe(config, entry.recipe), entry.layers, entry.products
            )
        except ConfigError as error:
            raise ConfigError(
                f"recipe.switch = {config.switch!r}: {entry.text!r}: {error}", code="switch.refused"
            ) from None
        first = entry.after_step(config.steps) + 1
        found.append(
            RecipeSwitch(
                first, entry.text, {name: (now[name], new) for name, new in changes.items()}
            )
        )
        now |= changes
    return found


class RecipeSchedule:
    """The recipe switches of a run, in order of their steps."""

    def __init__(self, switches: list[RecipeSwitch]) -> None:
        self._switches = list(switches)

    def __iter__(self) -> Iterator[RecipeSwitch]:
        return iter(self._switches)

    def replace(self, switches: list[RecipeSwitch]) -> None:
        """Continues with other switches, as a plugin asked. Applies none."""
        self._switches = list(switches)

    def apply_until(self, step: int, model: nn.Module) -> None:
        """Applies the switches whose first step is at most `step`."""
        for switch in self._switches:
            if switch.step <= step:
                switch.apply(model)

    def names_until(self, step: int) -> list[str]:
        """Texts of the switches whose first step is at most `step`."""
        return [switch.switch for switch in self._switches if switch.step <= step]

    def starts_at(self, step: int) -> bool:
        """True if a switch starts with this step."""
        return any(switch.step == step for switch in self._switches)


def with_switch(
    switches: list[RecipeSwitch], model: nn.Module, recipe: Recipe, after: int, words: str
) -> list[RecipeSwitch]:
    """The recipe switches plus one more, to `recipe` after step `after`.

    words  name of the switch in the log

    The switch changes all layers for which `recipe` has more bits. Later switches then start from
    the new recipes, and may change nothing. Raises ConfigError if the new switch changes nothing
    itself.
    """
    now = {
        name: each.recipe
        for name, each in model.named_modules()
        if isinstance(each, QLinear) and each.recipe
    }
    # Undo the switches already applied to the model: start from the first recipes
    for switch in reversed(switches):
        now |= {name: before for name, (before, _) in switch.changes.items() if name in now}
    found = [switch for switch in switches if switch.step <= after]
    for switch in found:
        now |= {name: new for name, (_, new) in switch.changes.items()}
    changes = widened(model, now, recipe)
    found.append(
        RecipeSwitch(after + 1, words, {name: (now[name], new) for name, new in changes.items()})
    )
    now |= changes
    for switch in switches[len(found) - 1 :]:
        later = {name: _still_wider(now[name], new) for name, (_, new) in switch.changes.items()}
        changes = {name: new for name, new in later.items() if new is not now[name]}
        found.append(
            RecipeSwitch(
                switch.step,
                switch.switch,
                {name: (now[name], new) for name, new in changes.items()},
            )
        )
        now |= changes
    return found


def _still_wider(now: Recipe, planned: Recipe) -> Recipe:
    """The planned recipe if each of its matmuls has at least as many bits as now, else `now`."""
    return (
        planned
        if all(bits(planned.gemms()[name]) >= bits(now.gemms()[name]) for name in GEMMS)
        else now
    )
