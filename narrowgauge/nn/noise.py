"""The random numbers of an operand's casts, and the order in which backward draws them.

Numbers are drawn in the order of the products, gradient of the input first: what a generator gave in it is what a run is repeated by. The
products themselves may be computed in the other order: a key of 16 bytes stands for the noise of a whole tensor (`ops.random`), so the
keys of the first product are drawn, kept, and read when it comes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.random import Key, draw, draws_keys
from narrowgauge.recipe import Hadamard


def noise_of(operand: Any, x: Tensor, which: str) -> Tensor | Key:
    """Of x, the rows or cols of an Operand (operands.py): that which waits for it, or a new draw."""
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


def comes_last(gy: Any) -> bool:
    """Whether the gradient of the input may be made behind that of the weight, with the same bits and no more work.

    So x, its cast and that of gy.T are gone when it is made, and it is not there while they are. Not where one cast of gy serves both
    products, and not in the eyes of an observer, which is shown products in their order.
    """
    plan, context = gy.plan, gy.context
    if plan.pairs or plan.transposes or plan.cols is None or context.plan.recipe.backward == "straight-through":
        return False
    return context.observer is None and draws_keys(gy.tensor.device)


def drawn_ahead(gy: Any, w: Any, hadamard: Hadamard | None) -> Rotation:
    """The rotation of the input's gradient; the keys of both operands of that product wait for it."""
    rotation = Rotation.draw(hadamard, gy.tensor, gy.context.stream, "grad_input")
    rows, cols, serves = gy.plan.rows, w.plan.cols, w.plan.transposes and w.casts.rows is not None
    if gy.casts.rows is None and rows is not None and rows.rounding == "stochastic":
        gy.waiting["rows"] = noise_of(gy, gy.tensor, "rows")
    if w.casts.cols is None and not serves and cols is not None and cols.rounding == "stochastic":
        w.waiting["cols"] = noise_of(w, w.tensor.t(), "cols")
    return rotation
