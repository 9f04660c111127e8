"""Weights that are no Linear's but are multiplied as one: what `convert` cannot give a recipe, and `describe` says so.

    Conv1D of transformers            y = x @ weight + bias, weight [in, out]: GPT-2 and its kin
    nn.MultiheadAttention             q, k and v of one weight [3 E, E], or of three where kdim or vdim differ
    experts in one parameter          [experts, ...]: the mixtures of experts of transformers 5

Left out: convolutions, recurrent layers and embeddings, which are other operations.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

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


_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "einsum"}


def read_weights(owner: nn.Module) -> frozenset[str]:
    """Children of `owner` by whose weight its class's `forward` multiplies itself, as F.linear(x, self.child.weight) does.

    By structure: it may also call the child, in another branch. Empty where there is no source.
    """
    return _read_weights(type(owner).forward)


@cache
def _read_weights(forward: Callable[..., Any]) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    operands: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            operands += [*node.args, *(each.value for each in node.keywords)] if name in _PRODUCTS else []
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            operands += [node.left, node.right]
    found = (_READ.match(ast.unparse(operand)) for operand in operands)
    return frozenset(match[1] for match in found if match)


_READ = re.compile(r"self\.(\w+)\.weight\b")


def refuse_fast_path(model: nn.Module, refuses: Callable[[nn.Module], bool]) -> None:
    """nn.TransformerEncoderLayer in eval() without gradients reads its Linears' weights in one fused kernel, which knows no recipe.

    Layers with a Linear that `refuses` compute by their modules, as in training; the others as torch decides. torch has no switch of
    one layer for it but the number that says which activation the kernel would compute: 0, none that it knows.
    """
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            known = {"relu": 1, "gelu": 2, "ReLU": 1, "GELU": 2}
            name = getattr(layer.activation, "__name__", type(layer.activation).__name__)
            by_kernel = known.get(name, 0)
            layer.activation_relu_or_gelu = 0 if any(map(refuses, (layer.linear1, layer.linear2))) else by_kernel
