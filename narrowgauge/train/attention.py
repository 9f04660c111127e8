"""Attention in float32, for a CPU that has no bfloat16 instructions; and without a mask, for a GPU that reads whole rows.

On such a CPU PyTorch's bfloat16 attention is the slower one: its backward took three times as long as float32's in a single reading. The
inputs are those of the 16-bit computation, the result is rounded to its dtype; what lies between is more exact, not less.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FLOAT32_ATTENTION = "narrowgauge_float32"
WHOLE_ROWS = "narrowgauge_whole_rows"


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


def use_float32_attention(model: Any) -> None:
    """Switches a transformers model to it."""
    AttentionInterface.register(FLOAT32_ATTENTION, float32_attention)
    AttentionMaskInterface.register(FLOAT32_ATTENTION, sdpa_mask)
    model.set_attn_implementation(FLOAT32_ATTENTION)


def use_attention_of_whole_rows(model: Any, batch: Mapping[str, Tensor]) -> bool:
    """Switches a causal transformers model to PyTorch's attention without a mask, where all batches are like this one: whole rows.

    Else transformers (5.17 to 5.23, masking_utils) looks in each forward pass whether positions begin anew within a row, for which a
    GPU is waited for. Where it cannot look, while a CUDA graph is captured or torch.compile traces, it makes a mask of all tokens by
    all tokens, which flash attention does not take. An attention that has no mask function registered is given none.

    False, and nothing changed, for padded and packed batches, and for models that do not look at all tokens before.
    """
    config = model.config
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = set(getattr(config, "layer_types", None) or ())
    sees_all = limits == [None, None] and kinds <= {"full_attention"}
    masked = "attention_mask" in batch or "position_ids" in batch
    if masked or not sees_all or config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    if config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(WHOLE_ROWS, sdpa_attention_forward)
    model.set_attn_implementation(WHOLE_ROWS)
    return True
