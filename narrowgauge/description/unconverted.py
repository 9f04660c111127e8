"""Weights that are no Linear's but are multiplied as one: what `convert` cannot give a recipe, and `describe` says so.

    Conv1D of transformers            y = x @ weight + bias, weight [in, out]: GPT-2 and its kin
    nn.MultiheadAttention             q, k and v of one weight [3 E, E], or of three where kdim or vdim differ
    experts in one parameter          [experts, ...]: the mixtures of experts of transformers 5

Left out: convolutions, recurrent layers and embeddings, which are other operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

_CONV1D = "transformers' Conv1D is no nn.Linear: replace it by one with the transposed weight"
_ATTENTION = "nn.MultiheadAttention multiplies it in a function of its own: replace it by an attention with nn.Linear"
_EXPERTS = "the experts share one parameter: give each an nn.Linear"
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class Weight(NamedTuple):
    """A weight outside the Linears: its dotted name (of Conv1D that of the module), its shape and why it stays, in words."""

    name: str
    shape: str
    reason: str


def other_weights(name: str, module: nn.Module) -> Iterator[Weight]:
    """The weights that `module`, called `name` in its model, multiplies itself as a Linear would; not those of its children."""
    if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            yield Weight(name, f"{weight.shape[0]} -> {weight.shape[1]}", _CONV1D)
    elif isinstance(module, nn.MultiheadAttention):
        for own in _PROJECTIONS:
            weight = getattr(module, own)
            if weight is not None:
                yield Weight(_joined(name, own), f"{weight.shape[1]} -> {weight.shape[0]}", _ATTENTION)
    elif _holds_experts(name, module):
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3:
                count, *matrix = weight.shape
                yield Weight(_joined(name, own), f"{count} experts of {matrix[0]} x {matrix[1]}", _EXPERTS)


def _holds_experts(name: str, module: nn.Module) -> bool:
    """By its name, its class, or a number of experts; not the convolutions in it, whose weights have three axes as well."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    named = "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return named or any(hasattr(module, count) for count in ("num_experts", "num_local_experts", "n_experts"))


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
