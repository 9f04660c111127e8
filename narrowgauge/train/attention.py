"""Attention in float32, for a CPU without bfloat16 instructions; without a mask, for a GPU that reads whole rows; a softmax in float32.

PyTorch's attention (sdpa) and flash attention compute their softmax in float32 inside. Eager code rounds it to the type of its scores
where it does not say float32: there a mode of torch's widens what is given to a softmax, and rounds what it gives.

On such a CPU PyTorch's bfloat16 attention is the slower one: its backward took three times as long as float32's in a single reading. The
inputs are those of the 16-bit computation, the result is rounded to its dtype; what lies between is more exact, not less.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

EAGER = "narrowgauge_eager"
FLOAT32_ATTENTION = "narrowgauge_float32"
WHOLE_ROWS = "narrowgauge_whole_rows"
FLOAT32_WHOLE_ROWS = "narrowgauge_float32_whole_rows"


def float32_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [batch, heads, tokens, width] -> [batch, tokens, heads, width]."""
    with torch.autocast(query.device.type, enabled=False):
        options = {name: _wide(value) for name, value in options.items()}  # T5's position_bias among them
        mask = _wide(attention_mask)
        out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **options)
    return out.to(query.dtype), None


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


# Attention -> the name of the same one for whole rows, and what computes it.
WITHOUT_MASK = {
    "sdpa": (WHOLE_ROWS, sdpa_attention_forward),
    FLOAT32_ATTENTION: (FLOAT32_WHOLE_ROWS, float32_attention),
}


def use_float32_attention(model: Any) -> None:
    """Switches a transformers model to it."""
    AttentionInterface.register(FLOAT32_ATTENTION, float32_attention)
    AttentionMaskInterface.register(FLOAT32_ATTENTION, sdpa_mask)
    model.set_attn_implementation(FLOAT32_ATTENTION)


class _WideSoftmax(TorchFunctionMode):
    """A softmax of 16 bits is computed in float32 and rounded once; one that is told its type is left alone."""

    FUNCTIONS = (nn.functional.softmax, torch.softmax, Tensor.softmax)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.FUNCTIONS or kwargs.get("dtype") is not None:
            return function(*args, **kwargs)
        scores, *more = args
        return function(scores.float(), *more, **kwargs).to(scores.dtype)


def eager_attention(module: nn.Module, *given: Any, **options: Any) -> Any:
    """The eager attention beside the module's class, with its softmax in float32."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    with _WideSoftmax():
        return own(module, *given, **options)


def use_float32_softmax(model: Any) -> None:
    """Switches a transformers model of eager attention to that one; others compute it in float32 anyway."""
    if model.config._attn_implementation != "eager" or not _has_interface(model):
        return
    AttentionInterface.register(EAGER, eager_attention)
    AttentionMaskInterface.register(EAGER, eager_mask)
    model.set_attn_implementation(EAGER)


def softmax_words(model: Any) -> str:
    """In which type attention computes its softmax, a sentence."""
    kind = model.config._attn_implementation
    if kind == "eager":
        return "Softmax of attention: as the model's own code has it, which takes no other attention."
    return f"Softmax of attention: in float32{'' if kind == EAGER else f' inside of {kind}'}."


def _has_interface(model: Any) -> bool:
    """Whether all attentions of the model look their function up, and have an eager one beside their class."""
    found = [each for each in model.modules() if hasattr(sys.modules[type(each).__module__], "eager_attention_forward")]
    return bool(found) and bool(getattr(model, "_supports_attention_backend", False))


def use_attention_of_whole_rows(model: Any, batch: Mapping[str, Tensor]) -> bool:
    """Switches a causal transformers model to its attention without a mask, where all batches are like this one: whole rows.

    PyTorch's, or the one in float32.

    Else transformers (5.17 to 5.23, masking_utils) looks in each forward pass whether positions begin anew within a row, for which a
    GPU is waited for. Where it cannot look, while a CUDA graph is captured or torch.compile traces, it makes a mask of all tokens by
    all tokens, which flash attention does not take. An attention that has no mask function registered is given none.

    False, and nothing changed, for padded and packed batches, and for models that do not look at all tokens before.
    """
    config = model.config
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = set(getattr(config, "layer_types", None) or ())
    sees_all = limits == [None, None] and kinds <= {"full_attention"}
    masked = "attention_mask" in batch or "position_ids" in batch or "input_ids" not in batch
    if masked or not sees_all or config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    if config._attn_implementation not in WITHOUT_MASK:
        return False
    name, attention = WITHOUT_MASK[config._attn_implementation]
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    return True
