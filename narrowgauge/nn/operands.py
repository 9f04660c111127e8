"""The three matrix products of a Linear as one autograd function.

    T tokens, K in_features, N out_features; x [T, K], w [N, K], gy [T, N]

    output       = mm(x,    w)    + bias     [T, N]
    grad_input   = mm(gy,   w.T)             [T, K]
    grad_weight  = mm(gy.T, x.T)             [N, K]

Each operand is rotated along its contracted axis, if the product says so, and then cast. Everything inside works on plain
tensors, so `torch.compile(fullgraph=True)` traces through.

What is left out: second derivatives (asking for them raises; `suspended` has them); backward="straight-through", which is another
function (straight_through.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.autograd_rules import first_order_only
from narrowgauge.nn.caches import Handed
from narrowgauge.nn.plan import Plans, Settings
from narrowgauge.ops.hadamard import draw_signs, rotate
from narrowgauge.ops.mm import Plan, high_precision
from narrowgauge.ops.quantize import dequantize, quantize, tile_amax
from narrowgauge.ops.quantize.amax_state import observe
from narrowgauge.ops.quantize.pair import OneRead, in_one_read
from narrowgauge.ops.quantize.precast_weight import quantize_stepped
from narrowgauge.ops.quantize.precast_weight import refuse as refuse_stepped
from narrowgauge.ops.random import draw
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Gemm, Hadamard, LearnedStep, Recipe, Window
from narrowgauge.tiles import WHOLE
from narrowgauge.traced import handed_out


def cast_ahead(x: Tensor, live: Tensor | None, settings: Settings, keeps: bool) -> Handed:
    """x [T, K] cast as a layer with these settings would: what it finds under `handed_key`.

    keeps  whether the layer computes grad_weight
    """
    lhs, kept, kept_cast, amax = _cast_input(x, live, Turn(), settings, keeps)
    return Handed(lhs, kept if kept_cast is not None else None, kept_cast, amax)


def handed_key(settings: Settings, keeps: bool) -> Hashable:
    """What layers that may take the same `Handed` have in common."""
    recipe = settings.recipe
    again = recipe.grad_weight.rhs if keeps and recipe.save == "quantized" else None
    return recipe.output.lhs, settings.plans.output.expand, again, again is not None and settings.plans.turn_x


def _given(settings: Settings, keeps: bool) -> Handed | None:
    """The cast that a producer handed over with x, if it is this layer's."""
    if settings.share is None or not settings.share.handed:
        return None
    found = settings.share.handed.get(handed_key(settings, keeps))
    if found is not None:
        found.reads.taken += 1
    return found


@dataclass(frozen=True)
class Turn:
    """The rotation of one product: both operands are called with it before they are cast. Without one, they pass."""

    hadamard: Hadamard | None = None
    signs: Tensor | None = None

    @classmethod
    def of(cls, hadamard: Hadamard | None, operand: Tensor) -> Turn:
        """The rotation along the last axis of `operand`, with new signs where they are random."""
        if hadamard is None:
            return cls()
        return cls(hadamard, draw_signs(hadamard, operand.shape[1], operand.device))

    @property
    def is_random(self) -> bool:
        return self.is_random_in(self.hadamard)

    @staticmethod
    def is_random_in(hadamard: Hadamard | None) -> bool:
        return hadamard is not None and hadamard.signs == "random"

    def __call__(self, operand: Tensor) -> Tensor:
        return operand if self.hadamard is None else rotate(operand, self.hadamard, self.signs)


class Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        x_live: Tensor | None,
        w_live: Tensor | None,
        gy_live: Tensor | None,
    ) -> Tensor:
        recipe, how = settings.recipe, settings.plans.output
        turn, keeps = Turn.of(recipe.output.rotate, x), ctx.needs_input_grad[1]
        given = _given(settings, keeps)
        if given is None:
            lhs, kept, ctx.kept_cast, x_amax = _cast_input(x, x_live, turn, settings, keeps)
        else:
            own = (x if keeps else None, None, None)
            lhs, kept = given.lhs, own if given.kept is None else given.kept
            ctx.kept_cast, x_amax = given.kept_cast, given.amax
        w_amax = _weight_in_both(weight, w_live, settings, ctx.needs_input_grad[0])
        if w_amax is None:
            w_amax = _amax(weight, w_live, settings)
        rhs = _weight_operand("output", weight, settings, how, w_amax, turn)
        show(settings, "output", ("x", seen(settings, turn, x), lhs), ("w", seen(settings, turn, weight), rhs))
        y = how.choice.kernel.run(lhs, rhs, bias, settings.out_dtype, recipe.output.fast_accumulate)

        ctx.settings, ctx.x_dtype = settings, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gy_live = gy_live  # an attribute: saved tensors may not change before backward, and this one does
        ctx.save_for_backward(weight, x_amax, w_amax, *kept)
        return handed_out(y)

    @staticmethod
    @first_order_only("a Linear with a recipe", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x_amax, w_amax, *kept = ctx.saved_tensors
        settings: Settings = ctx.settings
        recipe = settings.recipe
        grad_input = grad_weight = grad_bias = lhs = None
        cast, how = recipe.grad_input.lhs, settings.plans.grad_input
        both = None if settings.gradients is None else settings.gradients.take(gy)
        if both is None and settings.plans.both_gy and ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
            assert cast is not None
            both = in_one_read(gy, cast, ctx.gy_live, records=settings.records)
        gy_amax = _amax(gy, ctx.gy_live, settings) if both is None else both.amax
        if ctx.needs_input_grad[0]:
            turn = Turn.of(recipe.grad_input.rotate, gy)
            lhs = operand(turn(gy), cast, how.expand, gy_amax, settings) if both is None else both.plain
            rhs = _weight_operand("grad_input", weight, settings, how, w_amax, turn)
            show(
                settings,
                "grad_input",
                ("gy", seen(settings, turn, gy), lhs),
                ("w", seen(settings, turn, weight.T).T, rhs),
            )
            grad_input = _gradient(how, lhs, rhs, recipe.grad_input, ctx.x_dtype, settings)
        if ctx.needs_input_grad[1]:
            how, turn = settings.plans.grad_weight, Turn.of(recipe.grad_weight.rotate, gy.T)
            if both is not None:
                assert both.turned is not None
                lhs = both.turned
            elif lhs is not None and settings.plans.turn_gy:
                lhs = turned(lhs)
            else:
                lhs = operand(turn(gy.T), recipe.grad_weight.lhs, how.expand, gy_amax, settings)
            rhs = _kept_operand(kept, ctx.kept_cast, lhs.shape[1], settings, how.expand, x_amax, turn)
            if settings.observer is not None:
                x = (
                    dequantize(rhs)
                    if isinstance(rhs, QTensor) and ctx.kept_cast is not None
                    else seen(settings, turn, kept[0].T)
                )
                show(settings, "grad_weight", ("gy", seen(settings, turn, gy.T).T, lhs), ("x", x.T, rhs))
            grad_weight = _gradient(how, lhs, rhs, recipe.grad_weight, weight.dtype, settings)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = gy.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _gradient(
    how: Plan, lhs: QTensor | Tensor, rhs: QTensor | Tensor, gemm: Gemm, dtype: torch.dtype, settings: Settings
) -> Tensor:
    """lhs @ rhs.T in `dtype`, the type of what it is the gradient of.

    Under bfloat16 autocast, on a CPU that multiplies bfloat16, it is rounded to bfloat16 on its way, once: by 2**-8 of each
    element at most, as in torch's own Linear there, whose x and weight autocast has cast. Float32 would take twice the time.
    """
    on_narrow_units = how.expand == torch.bfloat16 and lhs.device.type == "cpu"
    made = torch.bfloat16 if on_narrow_units and settings.out_dtype == torch.bfloat16 else dtype
    return how.choice.kernel.run(lhs, rhs, None, made, gemm.fast_accumulate).to(dtype)


Kept = tuple[Tensor | None, ...]


def _cast_input(
    x: Tensor, live: Tensor | None, turn: Turn, settings: Settings, keeps: bool
) -> tuple[QTensor | Tensor, Kept, Cast | None, Tensor | None]:
    """x as the operand of `output`, what `_keep` leaves of it for backward, by which cast, and the amax of its window.

    Shared with layers that read the same x.
    """
    recipe, plans = settings.recipe, settings.plans
    cast, again = recipe.output.lhs, recipe.grad_weight.rhs if recipe.save == "quantized" else None
    keeps_codes = keeps and again is not None

    def build() -> tuple[QTensor | Tensor, Kept, Cast | None, Tensor | None]:
        one = None
        if cast is not None and plans.output.expand is None and turn.hadamard is None:
            # Whether or not there is a backward pass, noise is drawn alike: checkpointing repeats a forward pass that had none.
            both = keeps_codes and plans.both_x and (settings.grads or cast.rounding == "stochastic")
            one = in_one_read(x, cast, live, records=settings.records, both=both)
        if one is not None and one.turned is not None:
            kept = (one.turned.data, one.turned.scale, one.turned.global_scale)
            return one.plain, kept, one.turned.cast, one.amax
        amax = _amax(x, live, settings) if one is None else one.amax
        lhs = operand(turn(x), cast, plans.output.expand, amax, settings) if one is None else one.plain
        return (lhs, *(_keep(x, lhs, settings, amax) if keeps_codes else ((None, None, None), None)), amax)

    alone = cast is None or turn.is_random or not all(is_shareable(each) for each in (cast, again))
    if settings.share is None or alone or (keeps_codes and Turn.is_random_in(recipe.grad_weight.rotate)):
        lhs, kept, kept_cast, amax = build()
    else:
        kept_by = (again, recipe.grad_weight.rotate, plans.turn_x) if keeps_codes else None
        key = (cast, turn.hadamard, plans.output.expand, settings.out_dtype, kept_by)
        lhs, kept, kept_cast, amax = settings.share.get(key, build)
    # x itself is not shared: this layer's autograd node keeps the one that it was given.
    return lhs, ((x, None, None) if keeps and not keeps_codes else kept), kept_cast, amax


def _weight_in_both(weight: Tensor, live: Tensor | None, settings: Settings, keeps: bool) -> Tensor | None:
    """Puts both orientations of the weight into the cache, from one read of it; the amax [1, 1] of its window, or None.

    None as well where that is not to be had; `_weight_operand` then makes each when it is wanted. Rounded to nearest only: what
    draws random numbers must draw them at every forward pass.
    """
    cast, cache = settings.recipe.output.rhs, settings.cache
    stepped = settings.stepped if settings.records else None  # evaluation leaves it to training
    if cache is None or not (keeps or stepped) or not settings.plans.both_w or cast is None:
        return None
    if weight.is_inference() or cast.rounding == "stochastic":
        return None
    if cache.has("output", weight, settings):
        return cache.amax(weight, settings)
    one = None
    if stepped is not None and stepped.serves(weight, cast, live):
        one = OneRead(*quantize_stepped(weight, stepped, live, records=settings.records))
    elif keeps:
        one = in_one_read(weight, cast, live, records=settings.records)
    if one is None:
        return None
    for gemm, made in (("output", one.plain), ("grad_input", one.turned), ("amax", one.amax)):
        if made is not None:
            cache.get(gemm, weight, settings, lambda made=made: made)  # type: ignore[misc]
    return one.amax


def cast_weight(weight: Tensor, live: Tensor | None, settings: Settings) -> None:
    """Puts the casts of the weight that serve a whole step into the cache of the settings, and its amax into its window.

    Left out: what is rotated by new signs or rounded by new numbers at every call, and 16-bit operands, which follow autocast.
    """
    recipe, plans = settings.recipe, settings.plans
    amax = _weight_in_both(weight, live, settings, True)
    if amax is None:
        amax = _amax(weight, live, settings)
    for gemm, product, how in (
        ("output", recipe.output, plans.output),
        ("grad_input", recipe.grad_input, plans.grad_input),
    ):
        if serves_a_step(product.rhs, product.rotate):
            turn = Turn.of(product.rotate, weight if gemm == "output" else weight.T)
            _weight_operand(gemm, weight, settings, how, amax, turn)


def step_cast(recipe: Recipe, plans: Plans) -> tuple[Cast | None, str]:
    """(the cast of a weight that its optimizer's step can leave beside it, '') or (None, why it cannot, a clause)."""
    forward, backward = recipe.output, recipe.grad_input
    if recipe.backward == "straight-through":
        return None, f"{recipe.name} multiplies straight-through, with casts of its own"
    if forward.rhs is None:
        return None, "its output takes the weight in 16 bits"
    if forward.rotate is not None or backward.rotate is not None:
        return None, "a rotation mixes elements before they are cast"
    if forward.rhs != backward.rhs:
        other = "takes it in 16 bits" if backward.rhs is None else f"as {backward.rhs}"
        return None, f"output casts it as {forward.rhs}, grad_input {other}"
    if (reason := refuse_stepped(forward.rhs)) is not None:
        return None, reason
    for how in (plans.output, plans.grad_input):
        if how.expand is not None:
            return None, f"kernel {how.choice.kernel.name} multiplies decoded values"
    return forward.rhs, ""


def serves_a_step(cast: Cast | None, rotation: Hadamard | None) -> bool:
    """Whether the cast of a weight is the same at every call between two optimizer steps."""
    return cast is not None and cast.rounding == "nearest" and not Turn.is_random_in(rotation)


def is_shareable(cast: Cast | None) -> bool:
    """Whether layers that cast the same tensor get the same numbers: no random ones, and no scale from a layer's own state."""
    return cast is None or (cast.rounding == "nearest" and not isinstance(cast.calibrate, Window | LearnedStep))


def _amax(x: Tensor, live: Tensor | None, settings: Settings) -> Tensor | None:
    """The amax [1, 1] that delayed scaling gives this tensor, noted in its window; None for a tensor without a window."""
    if live is None or x.numel() == 0:
        return None
    return observe(live, tile_amax(x.detach(), (WHOLE, WHOLE)), records=settings.records)


def operand(
    x: Tensor, cast: Cast | None, expand: torch.dtype | None, amax: Tensor | None, settings: Settings
) -> QTensor | Tensor:
    """x [outer, inner] as it enters a GEMM: 16 bits, or quantized with its own or its window's amax."""
    if cast is None:
        return high_precision(x, settings.out_dtype)
    return _quantized(x, cast, expand, amax)


def _quantized(x: Tensor, cast: Cast, expand: torch.dtype | None, amax: Tensor | None) -> QTensor:
    noise = draw(tuple(x.shape), x.device) if cast.rounding == "stochastic" else None
    return quantize(x, cast, amax=amax if isinstance(cast.calibrate, Window) else None, noise=noise, expand=expand)


def _weight_operand(
    gemm: str, weight: Tensor, settings: Settings, how: Plan, amax: Tensor | None, turn: Turn
) -> QTensor | Tensor:
    """The weight for `gemm`, from the cache where there is one. For grad_input it is w.T, from w's codes if they serve."""
    recipe, cache = settings.recipe, settings.cache

    def build() -> QTensor | Tensor:
        if gemm == "output":
            return operand(turn(weight), recipe.output.rhs, how.expand, amax, settings)
        if cache is not None and settings.plans.turn_w:
            codes = turned(_weight_operand("output", weight, settings, how, amax, turn))
            return codes if how.expand is not None else _row_major(codes)
        return operand(turn(weight.T), recipe.grad_input.rhs, how.expand, amax, settings)

    if cache is None or turn.is_random:
        return build()
    was_built = False

    def noted() -> QTensor | Tensor:
        nonlocal was_built
        was_built = True
        return build()

    kept = cache.get(gemm, weight, settings, noted)
    cast = recipe.output.rhs
    if gemm == "output" and not was_built and cast is not None and cast.rounding == "stochastic":
        # Draws what casting drew: activation checkpointing repeats a forward that cast with one that finds the cast here.
        draw(tuple(turn(weight).shape), weight.device)
    return kept


def turned(operand: QTensor | Tensor) -> QTensor | Tensor:
    return operand.transposed() if isinstance(operand, QTensor) else operand.T


def _row_major(operand: QTensor | Tensor) -> QTensor | Tensor:
    """Contiguous codes: native GEMMs would otherwise turn the weight at every micro-batch."""
    return replace(operand, data=operand.data.contiguous()) if isinstance(operand, QTensor) else operand.contiguous()


def _keep(
    x: Tensor, lhs: QTensor | Tensor, settings: Settings, amax: Tensor | None
) -> tuple[tuple[Tensor | None, ...], Cast]:
    """What backward needs of x with save="quantized": (codes, scale, global scale) of x.T and the cast that made them."""
    recipe = settings.recipe
    cast = recipe.grad_weight.rhs
    assert cast is not None
    if not isinstance(lhs, QTensor) or not settings.plans.turn_x:
        turned = _quantized(Turn.of(recipe.grad_weight.rotate, x.T)(x.T), cast, None, amax)
    elif lhs.is_expanded and x.device.type == "cpu":
        turned = lhs.transposed()  # encoding and decoding on a CPU takes longer than the GEMM
    else:
        turned = lhs.compact().transposed()
    return (turned.data, turned.scale, turned.global_scale), cast


def _kept_operand(
    kept: list[Tensor | None],
    kept_cast: Cast | None,
    tokens: int,
    settings: Settings,
    expand: torch.dtype | None,
    amax: Tensor | None,
    turn: Turn,
) -> QTensor | Tensor:
    """x.T [K, T] for grad_weight, from what `_keep` left. tokens: T, in whole blocks where the product is rotated."""
    data, scale, global_scale = kept
    assert data is not None
    if kept_cast is None:
        return operand(turn(data.T), settings.recipe.grad_weight.rhs, expand, amax, settings)
    assert scale is not None
    q = QTensor(data=data, scale=scale, cast=kept_cast, inner=tokens, global_scale=global_scale)
    return q if expand is None or q.is_expanded else q.expanded(expand)


def seen(settings: Settings, turn: Turn, original: Tensor) -> Tensor:
    """What an observer is shown beside an operand: the tensor in the basis in which it was cast."""
    return original if settings.observer is None else turn(original)


def show(settings: Settings, gemm: str, *operands: tuple[str, Tensor, QTensor | Tensor]) -> None:
    if settings.observer is not None:
        for role, original, operand in operands:
            settings.observer(gemm, role, original, operand)
