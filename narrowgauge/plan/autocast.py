"""Emulate the device's autocast for fake tensors, which are on the CPU.

On a GPU, autocast converts the inputs of the functions below to float32. Attention runs in 16 bits
on every device, but the kernel that replaces it here is not known to autocast.

Source: ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE of torch 2.11 to 2.13,
as far as models use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

_NARROW = (torch.bfloat16, torch.float16)
IN_FLOAT32: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm, F.group_norm, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div, F.softplus,
        F.binary_cross_entropy_with_logits, F.cosine_similarity, torch.layer_norm, torch.native_layer_norm, torch.pow, Tensor.pow,
        Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp, torch.log, Tensor.log, torch.reciprocal, Tensor.reciprocal,
        torch.logsumexp, Tensor.logsumexp,
    }
)  # fmt: skip
WITH_DTYPE: frozenset[Callable[..., Any]] = frozenset(
    {
        F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.cumsum, Tensor.cumsum,
        torch.prod, Tensor.prod, torch.sum, Tensor.sum, torch.norm, Tensor.norm,
    }
)  # fmt: skip


def widened(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as a GPU's autocast converts them.

    They are unchanged if autocast is off.
    """
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    # A dtype argument overrides autocast for the functions of the second list.
    if func in IN_FLOAT32 or (func in WITH_DTYPE and kwargs.get("dtype") is None):
        with torch.autocast("cpu", enabled=False):
            args, kwargs = tree_map(_wide, (args, kwargs))
    return args, kwargs


def narrowed(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention as autocast converts them."""
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    dtype = torch.get_autocast_dtype("cpu")

    def narrow(value: Any) -> Any:
        return (
            value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
        )

    changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(narrow, (args, kwargs))
    return changed


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value
