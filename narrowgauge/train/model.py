"""The model of a run: a Llama of the configured sizes, or one of transformers from a folder or the Hub, converted; and its switches.

Remote code is never run. On a CPU without bfloat16 instructions, Linears that the recipe leaves alone get the recipe `bf16`,
which rounds the operands and multiplies in float32, and attention computes in float32: the same step, many times faster.
"""

import warnings
from collections.abc import Callable, Mapping
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
from narrowgauge.diagnose.generators import seed_all
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.fuse import fuse
from narrowgauge.nn import step_end
from narrowgauge.nn.dropout import use_counted_dropout
from narrowgauge.nn.float32_modules import SOFTMAX
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import device_facts
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
    config: TrainConfig, make: Callable[[], Any], device: torch.device, tokens: int, choices: Mapping[str, str] | None
) -> Any:
    """The converted model on `device`, in the dtype of its precision, in training mode. Random weights come from config.seed.

    make     gives the float32 model: `language_model`, or `pretrained` for another task
    tokens   rows of a forward pass, by which recipe "auto" chooses
    choices  what recipe "auto" chose when the run began, for a run that is resumed
    """
    precision = precisions.get(config.precision)
    seed_all(config.seed)
    model = make().train()
    precision.prepare(model, config.keep_float32)
    if SOFTMAX in precision.keep_list(config.keep_float32):
        use_float32_softmax(model)
    if device.type != "cpu":
        model.to(device)  # now: a GPU that holds the weights in 16 bits may not hold them in 32
    names = {"*": config.recipe, **config.layers_recipe}
    patterns = {pattern: _pattern_recipe(config, name) for pattern, name in names.items()}
    if config.embedding_codes and (words := embeddings.problem(model)):
        raise ConfigError(f"embedding_codes = {config.embedding_codes!r}: {words} Or leave embedding_codes out.")
    # else there is nothing to convert, and a model needs no Linear
    if config.layers_recipe or patterns["*"] is not None:
        with warnings.catch_warnings():  # said before the first step (`run_metadata.emulated_on_gpu`)
            warnings.filterwarnings("ignore", message="convert: products of recipe .* are emulated")
            convert(model, patterns, tokens=tokens, compiled=config.compile, choices=choices)
    if config.embedding_codes:
        embeddings.quantize_embeddings(model, config.embedding_codes)  # type: ignore[arg-type]
        step_end.follow_model(model)
    if precision.computes_in == torch.bfloat16 and not device_facts(device.type, device.index).bf16_gemm:
        use_float32_attention(model)
        untouched = {row.name for row in describe(model) if row.recipe == "none"}
        kept = {name: "bf16" for name, module in model.named_modules() if name in untouched and _is_wide(module)}
        if kept:
            convert(model, kept)
    if config.fuse:
        fuse(model, config.save if config.save in FUSED_SAVES else None)  # type: ignore[arg-type]
    if device.type == "cpu":
        use_counted_dropout(model)
    return model


def _is_wide(layer: nn.Module) -> bool:
    """Whether a Linear is one that recipes are for; the head of a classifier is narrow, and fast in any case."""
    return type(layer) in (nn.Linear, QLinear) and min(layer.weight.shape) >= SMALLEST  # type: ignore[arg-type]


def _pattern_recipe(config: TrainConfig, name: str) -> str | Recipe | products.Some | None:
    if name == NO_RECIPE:
        return None
    return name if name == recipes.AUTO else products.parse(name, partial(chosen_recipe, config))


def chosen_recipe(config: TrainConfig, name: str) -> Recipe:
    """The recipe called `name` with the run's `save` option."""
    recipe = recipes.get(name)
    if config.save in ("", *FUSED_SAVES) or recipe.grad_weight.rhs is None:
        return recipe
    return replace(recipe, save=config.save)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModelClass:
    """A class of models of transformers."""

    auto: Any  # its Auto class
    words: str  # for messages
    options: Mapping[str, Any] = field(default_factory=dict)  # that override the model's own configuration
    new: bool = False  # whether a head that the folder has no weights for may start at random


CAUSAL_LM = ModelClass(transformers.AutoModelForCausalLM, "causal language model")
SEQ2SEQ = ModelClass(transformers.AutoModelForSeq2SeqLM, "sequence-to-sequence model")


def language_model(config: TrainConfig, tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    """A Llama of the configured sizes, or a causal language model from a folder or the Hub, which knows the tokenizer's ids."""
    if config.model:
        model = pretrained(config, CAUSAL_LM)
    else:
        sizes = transformers.LlamaConfig(
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
    check_sizes(model, tokenizer, "sequence_length", config.sequence_length)
    return model


def own_configuration(config: TrainConfig, model_class: ModelClass) -> Any:
    """The configuration in the model's folder, with the options of its kind. Raises ConfigError if there is none."""
    where = config.model
    if where.startswith((".", "/", "~")) and not Path(where).expanduser().is_dir():
        raise ConfigError(
            f"model = {where!r}: no such folder. Pass a folder with config.json, or a model's name on the Hub."
        )
    if Path(where).is_dir():
        reading.refuse_special_files(Path(where), OF_MODELS)
    try:
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **model_class.options)
    except Exception as error:  # of a damaged folder transformers raises whatever it stumbles over
        raise _cannot_load(where, model_class, error) from error


def pretrained(config: TrainConfig, model_class: ModelClass) -> Any:
    """The model that the configuration names, in float32. Raises ConfigError if it is none of this kind, or not whole."""
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
    }  # of another size: a head of other classes
    fresh = sorted(name for name in absent if model_class.new and _is_of_the_head(model, name))
    if fresh:
        tell(f"Note: not in {where}, so at random to begin with: {', '.join(fresh)}.")
    missing = sorted(absent - set(fresh))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model = {where!r}: holds no weights for {missing[0]!r}{more} of {type(model).__name__}, which would start at random. "
            "Pass a whole model, or --from-scratch."
        )
    for name, weight in model.state_dict().items():
        if count := nonfinite(weight):
            raise ConfigError(
                f"model = {where!r}: weight {name!r} holds {count} values that are not finite, of {weight.numel()}. "
                "Pass a model whose weights are whole."
            )
    return model


def _is_of_the_head(model: Any, name: str) -> bool:
    """Whether a weight lies above what was pretrained. Encoders keep their pooler below, and not all were saved with one."""
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def _cannot_load(where: str, model_class: ModelClass, error: Exception) -> ConfigError:
    said = str(error).split("Model type should be one of", 1)[0].rstrip(". ")  # a list of two hundred classes follows
    return ConfigError(
        f"model = {where!r}: transformers cannot load it as a {model_class.words}: {said}. "
        "Pass a folder or hub name of one with safetensors whose code is part of transformers."
    )


def check_sizes(model: Any, tokenizer: transformers.PreTrainedTokenizerFast, key: str, length: int) -> None:
    """Raises if the model has too few positions for the setting `key`, or does not embed every id of the tokenizer."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(
            f"{key} = {length}: {type(model).__name__} knows positions up to {longest}. Set {key} to {longest} or less."
        )
    rows = model.get_input_embeddings().weight.shape[0]
    ids = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))  # they may have gaps
    if ids > rows:
        raise DataError(
            f"tokenizer with ids up to {ids - 1}, but the model embeds {rows}. "
            "Use the model's own tokenizer (leave `tokenizer` empty), or train from scratch."
        )


# Switches: recipes over the steps


@dataclass(frozen=True)
class Stage:
    """One switch."""

    step: int  # the first that computes with it
    switch: str  # as it was written
    changes: dict[str, tuple[Recipe, Recipe]]  # layer -> its recipe before and after

    def apply(self, model: nn.Module) -> None:
        """Of a model in stages, on the layers that this rank has."""
        layers = dict(model.named_modules())
        for name, (_, recipe) in self.changes.items():
            if name in layers:
                layers[name].recipe = recipe

    @property
    def event(self) -> dict[str, Any]:
        """What metrics.jsonl says of it."""
        before, after = (sorted({pair[side].name for pair in self.changes.values()}) for side in (0, 1))
        return {"switch": self.switch, "layers": len(self.changes), "before": before, "after": after}

    def __str__(self) -> str:
        before, after = (", ".join(self.event[side]) for side in ("before", "after"))
        return f"step {self.step}: switch {self.switch}: {len(self.changes)} layers from {before} to {after}"


def stages(config: TrainConfig, model: nn.Module) -> list[Stage]:
    """The configured switches in order, resolved for the model. ConfigError for one that names no layer, or would change nothing.

    The recipes of step n depend on n alone, so a resumed run computes as if it had never stopped: applying the stages up to step k
    brings a new model to the state after step k, windows of delayed scaling included.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    now = {name: layer.recipe for name, layer in layers.items() if layer.recipe is not None}
    found = []
    for entry in sorted(switch_syntax.parse(config.switch), key=lambda each: each.after_step(config.steps)):
        try:
            changes = widened(model, now, chosen_recipe(config, entry.recipe), entry.layers, entry.products)
        except ConfigError as error:
            raise ConfigError(f"switch = {config.switch!r}: {entry.text!r}: {error}") from None
        first = entry.after_step(config.steps) + 1
        found.append(Stage(first, entry.text, {name: (now[name], new) for name, new in changes.items()}))
        now |= changes
    return found


def with_stage(stages: list[Stage], model: nn.Module, recipe: Recipe, after: int, words: str) -> list[Stage]:
    """The stages with one more, whose layers all get `recipe` where it is wider, from step `after` + 1 on.

    Later ones widen what it leaves, and may change nothing then. words: name it in the log. ConfigError if it would change nothing itself.
    """
    now = {name: each.recipe for name, each in model.named_modules() if isinstance(each, QLinear) and each.recipe}
    for stage in reversed(stages):  # those that have begun are in the model
        now |= {name: before for name, (before, _) in stage.changes.items() if name in now}
    found = [stage for stage in stages if stage.step <= after]
    for stage in found:
        now |= {name: new for name, (_, new) in stage.changes.items()}
    changes = widened(model, now, recipe)
    found.append(Stage(after + 1, words, {name: (now[name], new) for name, new in changes.items()}))
    now |= changes
    for stage in stages[len(found) - 1 :]:
        later = {name: _still_wider(now[name], new) for name, (_, new) in stage.changes.items()}
        changes = {name: new for name, new in later.items() if new is not now[name]}
        found.append(Stage(stage.step, stage.switch, {name: (now[name], new) for name, new in changes.items()}))
        now |= changes
    return found


def _still_wider(now: Recipe, planned: Recipe) -> Recipe:
    """What a switch was to give a layer, where no product of it is narrower than now."""
    return planned if all(bits(planned.gemms()[name]) >= bits(now.gemms()[name]) for name in GEMMS) else now
