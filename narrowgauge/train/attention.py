"""Attention in float32, for a CPU that has no bfloat16 instructions.

There PyTorch's bfloat16 attention is the slower one: its backward took three times as long as float32's in a single reading. The
inputs are those of the 16-bit computation, the result is rounded to its dtype; what lies between is more exact, not less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FLOAT32_ATTENTION = "narrowgauge_float32"


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
