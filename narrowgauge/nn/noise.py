"""Random numbers for the casts of an operand, and the order in which backward draws them.

Random numbers are drawn in a fixed order of GEMMs, grad_input first, so that a run with the same
generator state is repeated bit for bit. The GEMMs themselves may run in the other order: the noise
of a whole tensor is a key of 16 bytes (`ops.random`). The keys of grad_input are drawn first, held
in `Operand.waiting`, and used later.

Repetition, in eager code on devices that draw keys:

    x                     a new draw at each forward pass
    gy                    a new draw at each backward pass
    w.rows                the first key serves the optimizer step; later passes draw and discard
    w.cols                drawn by the first backward pass; its key serves the others of the step
    random signs          nothing is kept: each cast has signs and noise of its own
    no cache of w         a new draw at each cast: compiled code, no gradients, before `advance`
    devices without keys  the cache keeps codes instead of a key

Activation checkpointing restores the generator before it repeats a forward pass
(`preserve_rng_state=True`, torch's default), so the repetition draws the same numbers. On several
ranks keys depend on micro-batch, layer and purpose instead (`distributed.state`), so a repetition
has the same key too. It records no other amax, since an amax state takes maxima.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.random import Key, draw, draws_keys

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor


def noise_of(operand: Any, x: Tensor, which: str) -> Tensor | Key:
    """Noise for x, the `rows` or `cols` input of an Operand: drawn earlier, or drawn now.

    operand  the Operand (operands.py)
    which    "rows" or "cols"
    """
    noise = _noise_of(operand, x, which)
    if operand.context.observation is not None:
        operand.drawn = {**(operand.drawn or {}), which: noise}
    return noise


def _noise_of(operand: Any, x: Tensor, which: str) -> Tensor | Key:
    if which in operand.waiting:
        waited: Tensor | Key = operand.waiting.pop(which)
        return waited
    plan, context = operand.plan, operand.context
    keys: dict[str, Key] = operand.casts.noise_keys
    cast, rotate = (
        (plan.rows, plan.rows_rotate) if which == "rows" else (plan.cols, plan.cols_rotate)
    )
    shape = tuple(x.shape)
    if cast.draws == "scales":
        shape = cast.noise_shape(shape)
    # Only the noise of a cached weight is needed again. Random signs change its cast at every call.
    if (
        plan.role != "w"
        or context.sources.weight_cache is None
        or (rotate is not None and rotate.signs == "random")
    ):
        return draw(shape, x.device, context.ranks.stream, plan.role, which)
    # One cast of w serves an optimizer step, so a recast in a later pass must repeat its noise:
    # of cols the key is read, of rows `setdefault` returns the first key.
    if which == "cols" and which in keys:
        return keys[which]
    noise = draw(shape, x.device, context.ranks.stream, plan.role, which)
    return noise if isinstance(noise, Tensor) else keys.setdefault(which, noise)


def show(operand: Any, made: QTensor, product: str, which: str) -> None:
    """Report to the observer the noise of an operand's cast, if it is known.

    made     the cast operand
    product  the GEMM that reads it
    which    "rows" or "cols"
    """
    observation = operand.context.observation
    drawn = operand.casts.noise_keys | (operand.drawn or {})
    # A transposed cast has the noise of the cast that it was made from.
    noise, is_turned = drawn.get(which), False
    if noise is None and which == "cols" and operand.plan.transposes:
        noise, is_turned = drawn.get("rows"), True
    if not observation.receives_noise or noise is None:
        return
    if not isinstance(noise, Tensor):
        outer, inner = made.shape
        shape = (inner, outer) if is_turned else (outer, inner)
        noise = noise.uniform(made.cast.noise_shape(shape))
    observation.noise(product, operand.plan.role, noise.T if is_turned else noise)


def drawn_ahead(gy: Any, w: Any) -> bool:
    """Draw the noise keys of both operands of grad_input now; return True if it may run last.

    grad_weight can then run first, and x, its cast and the cast of gy.T are freed before grad_input
    exists. Results are bit-identical. Returns False if noise is not drawn as keys, and for
    straight-through recipes, whose GEMMs share more than noise.
    """
    if gy.context.plan.recipe.backward == "straight-through" or not draws_keys(gy.tensor.device):
        return False
    rows, cols, serves = gy.plan.rows, w.plan.cols, w.plan.transposes and w.casts.rows is not None
    if gy.casts.rows is None and rows is not None and rows.draws:
        gy.waiting["rows"] = noise_of(gy, gy.tensor, "rows")
    if w.casts.cols is None and not serves and cols is not None and cols.draws:
        w.waiting["cols"] = noise_of(w, w.tensor.t(), "cols")
    return True


def tied(x: Tensor, to: Tensor) -> Tensor:
    """Return x; under torch.compile, x plus a zero that is computed from `to`.

    A workaround: compiled code may draw a random number a second time in backward.

    For a draw of forward, x is a tensor that forward's result needs and `to` is the draw. For a
    draw of backward, x is the draw and `to` is the gradient.
    """
    if not torch.compiler.is_compiling():
        return x
    # The min-cut partitioner (torch 2.13) protects a random op from recomputation only if forward's
    # result needs it. A draw that backward alone reads was computed partly in forward and partly in
    # backward, from two draws: sampled rows with the numbers of other rows, and two operands of one
    # GEMM with different signs (SQNR of mxfp4's weight gradients: -9 to -5 dB instead of 9 to 12).
    return x + to.reshape(-1)[:1].isnan().sum() * 0.0
