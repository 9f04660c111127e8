"""Attention variants for transformers models: in float32, without a mask, with a float32 softmax.

float32 attention is for CPUs without bfloat16 instructions, attention without a mask for GPUs.

PyTorch's scaled dot-product attention (sdpa) and flash attention compute their softmax in float32
internally. Eager attention code computes it in the dtype of the scores unless it asks for float32.
A TorchFunctionMode then casts the scores to float32 and rounds the result once.

On such a CPU, PyTorch's bfloat16 attention is slower than float32: its backward took three times as
long in a single measurement. float32 attention gets the inputs of the 16-bit computation, and its
result is rounded to the 16-bit dtype. Only the values in between are more exact.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from narrowgauge.conversion import attention_precision
from narrowgauge.conversion.attention_precision import fp8_attention_forward

EAGER = "narrowgauge_eager"
FLOAT32_ATTENTION = "narrowgauge_float32"
WHOLE_ROWS = "narrowgauge_whole_rows"
FLOAT32_WHOLE_ROWS = "narrowgauge_float32_whole_rows"
FP8_WHOLE_ROWS = "narrowgauge_fp8_whole_rows"


def float32_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in float32, for transformers' attention interface.

    query  [batch, heads, tokens, head_dim], as are key and value
    ->     ([batch, tokens, heads, head_dim] in the dtype of query, None)
    """
    # Autocast would cast the float32 inputs back to 16 bits.
    with torch.autocast(query.device.type, enabled=False):
        # T5 passes its position_bias here
        options = {name: _wide(value) for name, value in options.items()}
        mask = _wide(attention_mask)
        out, _ = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), mask, **options
        )
    return out.to(query.dtype), None


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


# Attention name -> (name of the variant without a mask, its function).
WITHOUT_MASK = {
    "sdpa": (WHOLE_ROWS, sdpa_attention_forward),
    FLOAT32_ATTENTION: (FLOAT32_WHOLE_ROWS, float32_attention),
    attention_precision.NAME: (FP8_WHOLE_ROWS, fp8_attention_forward),
}


def use_float32_attention(model: Any) -> None:
    """Switches a transformers model to float32 attention, with sdpa's mask."""
    AttentionInterface.register(FLOAT32_ATTENTION, float32_attention)
    AttentionMaskInterface.register(FLOAT32_ATTENTION, sdpa_mask)
    model.set_attn_implementation(FLOAT32_ATTENTION)


class _WideSoftmax(TorchFunctionMode):
    """Computes every 16-bit softmax in float32 and rounds it once.

    Calls with an explicit dtype are unchanged.
    """

    FUNCTIONS = (nn.functional.softmax, torch.softmax, Tensor.softmax)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in self.FUNCTIONS or kwargs.get("dtype") is not None:
            return function(*args, **kwargs)
        scores, *more = args
        return function(scores.float(), *more, **kwargs).to(scores.dtype)


def eager_attention(module: nn.Module, *given: Any, **options: Any) -> Any:
    """The eager attention of the layer's own modeling file, with its softmax in float32."""
    # transformers has one eager_attention_forward per modeling file.
    own = sys.modules[type(module).__module__].eager_attention_forward
    with _WideSoftmax():
        return own(module, *given, **options)


def use_float32_softmax(model: Any) -> None:
    """Switches a transformers model with eager attention to a float32 softmax.

    Other attentions use one already.
    """
    if model.config._attn_implementation != "eager" or not _has_interface(model):
        return
    AttentionInterface.register(EAGER, eager_attention)
    AttentionMaskInterface.register(EAGER, eager_mask)
    model.set_attn_implementation(EAGER)


def softmax_words(model: Any) -> str:
    """A sentence on the dtype of the attention softmax."""
    kind = model.config._attn_implementation
    if kind == "eager":
        return (
            "Softmax of attention: as the model's own code has it, which takes no other attention."
        )
    return f"Softmax of attention: in float32{'' if kind == EAGER else f' inside of {kind}'}."


def _has_interface(model: Any) -> bool:
    """True if the model's attention function can be replaced by name.

    All attention layers must look it up by name and have an eager function beside their class.
    """
    found = [
        each
        for each in model.modules()
        if hasattr(sys.modules[type(each).__module__], "eager_attention_forward")
    ]
    return bool(found) and bool(getattr(model, "_supports_attention_backend", False))


def use_attention_of_whole_rows(model: Any, batch: Mapping[str, Tensor]) -> bool:
    """Switches a causal model to attention without a mask, if all batches have whole rows.

    batch  an example of all batches

    Applies to sdpa and to `float32_attention`. Returns False and changes nothing for padded or
    packed batches, and for models with local attention.

    By default transformers (5.17 to 5.23, masking_utils) checks in each forward pass for positions
    that restart within a row, which waits for the GPU. During CUDA graph capture and under
    torch.compile it cannot check, and builds a mask of tokens x tokens instead. Flash attention
    does not accept this mask. An attention without a registered mask function gets no mask at all.
    """
    config = model.config
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = set(getattr(config, "layer_types", None) or ())
    sees_all = limits == [None, None] and kinds <= {"full_attention"}
    masked = "attention_mask" in batch or "position_ids" in batch or "input_ids" not in batch
    if (
        masked
        or not sees_all
        or config.is_encoder_decoder
        or config.get_text_config() is not config
    ):
        return False
    if config._attn_implementation not in WITHOUT_MASK:
        return False
    name, attention = WITHOUT_MASK[config._attn_implementation]
    # No AttentionMaskInterface.register: without it transformers passes no mask, and sdpa uses
    # is_causal.
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    return True
