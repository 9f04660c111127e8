"""Models of transformers: a new Llama, or the configuration and weights of a folder or the Hub.

Remote code is never executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from narrowgauge.data import hub, load
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.storage import reading
from narrowgauge.train import coded_base
from narrowgauge.train.checkpoint.store import nonfinite
from narrowgauge.train.console import tell
from narrowgauge.train.first_look import of_setting, refuse_place
from narrowgauge.train.model_files import OF_MODELS, quiet, refuse_foreign_code

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig


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
    refuse_place("model", where)
    if Path(where).is_dir():
        reading.refuse_special_files(Path(where), OF_MODELS)
    try:
        return transformers.AutoConfig.from_pretrained(
            where, trust_remote_code=False, **model_class.options, **hub.options(where, "model")
        )
    except DataError:
        raise
    except Exception as error:  # transformers raises many exception types for a damaged folder
        raise _cannot_load(where, model_class, error) from error


def pretrained(
    config: TrainConfig, model_class: ModelClass, dtype: torch.dtype | str = torch.float32
) -> Any:
    """The model that the configuration names, in `dtype`; "auto": in that of its weights.

    With config.base the matrices have no memory yet: `coded_base.fill` reads them. Raises ConfigError
    for another kind of model, or missing weights.
    """
    where, sizes = config.model, own_configuration(config, model_class)
    refuse_foreign_code(where, sizes)
    if config.base and not config.from_scratch:
        refuse_quantized(where, getattr(sizes, "quantization_config", None), known=("fp8",))
        return coded_base.empty(model_class.auto, sizes)  # `model.build` reads the weights
    try:
        if config.from_scratch:
            return model_class.auto.from_config(sizes, trust_remote_code=False, dtype=torch.float32)
        with quiet():
            model, found = model_class.auto.from_pretrained(
                where, config=sizes, trust_remote_code=False, dtype=dtype, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=model_class.new, **hub.options(where, "model"),
            )  # fmt: skip
    except Exception as error:
        raise _cannot_load(where, model_class, error) from error
    # "auto" asks for the model as it is stored, to write texts with; codes do not train.
    if dtype != "auto" and getattr(model, "hf_quantizer", None) is not None:
        refuse_quantized(where, model.config.quantization_config)
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


def tokenizer_of(config: TrainConfig) -> Any:
    """The tokenizer that the settings name, or that of the model. Errors name the setting."""
    key, name = (
        ("data.tokenizer", config.tokenizer) if config.tokenizer else ("model", config.model)
    )
    try:
        return load(name)
    except DataError as error:
        raise of_setting(key, name, error) from None


def refuse_quantized(where: str, given: Any, known: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for weights that are codes already, by another cast than a recipe's.

    given  quantization_config of a model; None: its weights are not quantized
    known  methods that the caller reads
    """
    if not given:
        return
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    method = str(getattr(method, "value", method))
    if method not in known:
        raise ConfigError(
            f"model = {where!r}: its weights are quantized already ({method}), by another cast than a recipe's. Name the folder of the "
            "weights in 16 bits.",
            code="model.quantized",
        )


def _is_of_the_head(model: Any, name: str) -> bool:
    """True if a weight belongs to the task head.

    A pooler counts as well: some encoders were saved without one. It is all that counts of a model
    without a head, whose names have no prefix.
    """
    has_head = model.base_model is not model
    of_head = has_head and not name.startswith(f"{model.base_model_prefix}.")
    return of_head or ".pooler." in f".{name}"


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
