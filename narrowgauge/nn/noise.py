"""The random numbers of an operand's casts, and the order in which backward draws them.

Numbers are drawn in the order of the products, gradient of the input first: what a generator gave in it is what a run is repeated by. The
products themselves may be computed in the other order: a key of 16 bytes stands for the noise of a whole tensor (`ops.random`), so the
keys of the first product are drawn, kept, and read when it comes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgauge.ops.random import Key, draw, draws_keys
from narrowgauge.qtensor import QTensor


def noise_of(operand: Any, x: Tensor, which: str) -> Tensor | Key:
    """Of x, the rows or cols of an Operand (operands.py): that which waits for it, or a new draw."""
    noise = _noise_of(operand, x, which)
    if operand.context.observer is not None:
        operand.drawn = {**(operand.drawn or {}), which: noise}
    return noise


def _noise_of(operand: Any, x: Tensor, which: str) -> Tensor | Key:
    if which in operand.waiting:
        waited: Tensor | Key = operand.waiting.pop(which)
        return waited
    plan, context = operand.plan, operand.context
    keys: dict[str, Key] = operand.casts.keys
    rotate = plan.rows_rotate if which == "rows" else plan.cols_rotate
    if plan.role != "w" or context.cache is None or (rotate is not None and rotate.signs == "random"):
        return draw(tuple(x.shape), x.device, context.stream, plan.role, which)
    if which == "cols" and which in keys:  # cast once a step, or again with the same numbers
        return keys[which]
    noise = draw(tuple(x.shape), x.device, context.stream, plan.role, which)
    return noise if isinstance(noise, Tensor) else keys.setdefault(which, noise)


def show(operand: Any, made: QTensor, product: str, which: str) -> None:
    """Shows the observer the noise of the rows or cols of an Operand that the product reads, where it is known."""
    drew = getattr(operand.context.observer, "drew", None)
    drawn = operand.casts.keys | (operand.drawn or {})
    noise, is_turned = drawn.get(which), False
    if noise is None and which == "cols" and operand.plan.transposes:
        noise, is_turned = drawn.get("rows"), True
    if drew is None or noise is None:
        return
    if not isinstance(noise, Tensor):
        outer, inner = made.shape
        noise = noise.uniform((inner, outer) if is_turned else (outer, inner))
    drew(product, operand.plan.role, noise.T if is_turned else noise)


def drawn_ahead(gy: Any, w: Any) -> bool:
    """Draws the keys of both operands of the input's gradient, which is made behind that of the weight then, to the same bits.

    So x, its cast and that of gy.T are gone when it is made, and it is not there while they are. False where noise has no keys, and
    straight-through, where the products share more than noise.
    """
    if gy.context.plan.recipe.backward == "straight-through" or not draws_keys(gy.tensor.device):
        return False
    rows, cols, serves = gy.plan.rows, w.plan.cols, w.plan.transposes and w.casts.rows is not None
    if gy.casts.rows is None and rows is not None and rows.rounding == "stochastic":
        gy.waiting["rows"] = noise_of(gy, gy.tensor, "rows")
    if w.casts.cols is None and not serves and cols is not None and cols.rounding == "stochastic":
        w.waiting["cols"] = noise_of(w, w.tensor.t(), "cols")
    return True
