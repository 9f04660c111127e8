"""What a recipe means on a device (LinearPlan), and what one call of a layer adds to that (LinearContext).

A plan is worked out once: choosing kernels at every call would cost more than a small product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling
from narrowgauge.ops.mm import Plan, plan
from narrowgauge.ops.quantize import plan as plan_quantize
from narrowgauge.ops.quantize import quantize, tile_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Hadamard, LearnedStep, Recipe, Window
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.random import Stream

# Called with (gemm, role, original tensor, operand as it enters the GEMM) for each operand of each product. Eager mode only.
Observer = Callable[[str, str, Tensor, "QTensor | Tensor"], None]

# Role -> the product that reads the tensor as it is, and the one that reads it transposed.
PRODUCTS = {"x": ("output", "grad_weight"), "w": ("output", "grad_input"), "gy": ("grad_input", "grad_weight")}


@dataclass(frozen=True, eq=False)
class OperandPlan:
    """How a tensor t [outer, inner] becomes the operands of its two products.

    role          "x", "w" or "gy"
    kind          the class of its Operand
    rows, cols    the casts of t and of t.T; None: 16 bits
    *_expand      the dtype of decoded values if the product's kernel wants those instead of codes
    *_rotate      the rotation of the product
    transposes    t.T needs no cast of its own: it is the cast of t, transposed
    pairs         both products read codes of the same cast, so that one read of t may give both (`ops.quantize.pair`)
    shares_rows   whether layers that cast the same t get the same rows: no random numbers, and no scale from a layer's own state but
                  a window, if theirs are the same
    shares_cols   and the same cols
    is_delayed    whether a window of earlier steps gives their scale
    kernels       the kernels chosen so far
    """

    role: str
    kind: type[Any]
    rows: Cast | None
    cols: Cast | None
    rows_expand: torch.dtype | None
    cols_expand: torch.dtype | None
    rows_rotate: Hadamard | None
    cols_rotate: Hadamard | None
    transposes: bool
    pairs: bool
    shares_rows: bool
    shares_cols: bool
    is_delayed: bool
    kernels: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def quantize(self, x: Tensor, cast: Cast, amax: Tensor | None, noise: Any, expand: torch.dtype | None) -> QTensor:
        """As `ops.quantize`, by a kernel that is chosen once; no refusal looks at more of the arguments than the key does."""
        if is_compiling():
            return quantize(x, cast, amax=amax, noise=noise, expand=expand)
        key = (cast is self.rows, x.dtype, expand, x.shape[1] & 1, 0 in x.shape, type(noise))
        run = self.kernels.get(key)
        if run is None:
            run = self.kernels[key] = plan_quantize(x, cast, amax, noise, expand)
        found: QTensor = run(x, cast, amax, noise, expand)
        return found

    def with_amax(self, x: Tensor) -> tuple[QTensor | None, Tensor]:
        """See `ops.quantize.pair.plan_with_amax`."""
        assert self.rows is not None
        if is_compiling():
            return None, tile_amax(x.detach(), (WHOLE, WHOLE))
        key = ("amax", x.dtype, x.shape[1] & 1, x.shape[0] & 1)
        if (run := self.kernels.get(key)) is None:
            from narrowgauge.ops.quantize import pair  # where weights are cast again

            run = self.kernels[key] = pair.plan_with_amax(x, self.rows)
        found: tuple[QTensor | None, Tensor] = run(x)
        return found

    def one_read(self, x: Tensor, delayed: bool, both: bool, records: bool) -> Callable[..., Any] | None:
        """What casts x, [outer, inner], both ways, or by a window, in one read: run(x, amax_state, noise); None: no kernel does."""
        if self.rows is None:
            return None
        if is_compiling():
            from narrowgauge.ops.quantize import pair

            cast = self.rows
            if not pair.reads_once(x, cast, delayed, both):
                return None
            return lambda x, state, noise: pair.quantize_pair(
                x, cast, amax_state=state, records=records, cols=both, noise=noise
            )
        key = (delayed, both, records, x.dtype, x.shape[1] & 1)
        if key not in self.kernels:
            from narrowgauge.ops.quantize import pair  # where kernels read codes

            reads_once = pair.reads_once(x, self.rows, delayed, both)
            self.kernels[key] = pair.plan(x, self.rows, records, both, delayed) if reads_once else None
        found: Callable[..., Any] | None = self.kernels[key]
        return found

    @cached_property
    def serves_a_step(self) -> tuple[bool, bool]:
        """Whether rows, and cols, are the same at every call between two optimizer steps."""
        return (
            self.rows is not None and not _draws(self.rows, self.rows_rotate),
            self.cols is not None and not _draws(self.cols, self.cols_rotate),
        )


def _draws(cast: Cast | None, rotate: Hadamard | None) -> bool:
    """Whether random numbers enter the operand."""
    return (cast is not None and cast.rounding != "nearest") or (rotate is not None and rotate.signs == "random")


def _is_shareable(cast: Cast | None, rotate: Hadamard | None) -> bool:
    has_own_scale = cast is not None and isinstance(cast.calibrate, LearnedStep)
    return not has_own_scale and not _draws(cast, rotate)


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """output, grad_input, grad_weight: the kernel of each product. x, w, gy: how their operands are made."""

    recipe: Recipe
    output: Plan
    grad_input: Plan
    grad_weight: Plan
    x: OperandPlan
    w: OperandPlan
    gy: OperandPlan

    @classmethod
    def of(
        cls, recipe: Recipe, device: torch.device, kinds: dict[str, type[Any]], hidden_by: str = "", wide: bool = False
    ) -> LinearPlan:
        """kinds: role (x, w, gy) -> the class of its Operand. hidden_by: what hides their memory, see `addresses.wrapper`.

        wide: keep decoded values in float32, for float32 products on a CPU, which would convert them at each call.
        """
        of = partial(plan, hidden_by=hidden_by) if hidden_by else plan
        plans = {name: of(gemm, device) for name, gemm in recipe.gemms().items()}
        for name, each in plans.items():
            if wide and each.expand is not None:
                plans[name] = replace(each, expand=torch.float32)
        operands = [_operand_plan(role, kind, recipe, plans) for role, kind in kinds.items()]
        return cls(recipe, plans["output"], plans["grad_input"], plans["grad_weight"], *operands)

    def step_cast(self) -> tuple[Cast | None, str]:
        """(the cast of a weight that its optimizer's step can leave beside it, '') or (None, why it cannot, a clause)."""
        w, recipe = self.w, self.recipe
        if recipe.backward == "straight-through":
            return None, f"{recipe.name} multiplies straight-through, with casts of its own"
        if w.rows is None:
            return None, "its output takes the weight in 16 bits"
        if w.rows_rotate is not None or w.cols_rotate is not None:
            return None, "a rotation mixes elements before they are cast"
        if w.rows != w.cols:
            other = "takes it in 16 bits" if w.cols is None else f"as {w.cols}"
            return None, f"output casts it as {w.rows}, grad_input {other}"
        for product, expand in ((self.output, w.rows_expand), (self.grad_input, w.cols_expand)):
            if expand is not None:
                return None, f"kernel {product.choice.kernel.name} multiplies decoded values"
        from narrowgauge.ops.quantize import precast_weight

        refusal = precast_weight.refuse(w.rows)
        return (w.rows, "") if refusal is None else (None, refusal.text)


def _operand_plan(role: str, kind: type[Any], recipe: Recipe, plans: dict[str, Plan]) -> OperandPlan:
    rows, cols = recipe.roles()[role]
    first, second = PRODUCTS[role]
    rotations = getattr(recipe, first).rotate, getattr(recipe, second).rotate
    expands = plans[first].expand, plans[second].expand
    # Codes of x are kept, and decoded when they are read.
    same = rows == cols and (expands[0] == expands[1] or role == "x")
    unrotated = rotations[0] is rotations[1] is None
    pairs = unrotated and rows is not None and rows == cols and expands[0] is expands[1] is None
    transposes = same and unrotated and (rows is None or (rows.is_symmetric and rows.format.codes_per_byte == 1))
    if recipe.backward == "straight-through":  # gy: its rows may be sampled; one draw of the noise serves both products
        unpacked = rows is not None and (expands[0] is not None or rows.format.codes_per_byte == 1)
        whole = rows is not None and rows.tile == (WHOLE, WHOLE) and recipe.grad_input.sample is None
        pairs, transposes = False, same and unpacked and whole
    shares = _is_shareable(rows, rotations[0]), _is_shareable(cols, rotations[1])
    is_delayed = any(cast is not None and isinstance(cast.calibrate, Window) for cast in (rows, cols))
    return OperandPlan(role, kind, rows, cols, *expands, *rotations, transposes, pairs, *shares, is_delayed)


@dataclass(eq=False)
class LinearContext:
    """What one call of the products needs besides tensors.

    out_dtype      of the result
    records        whether delayed scaling notes what it sees: in training, not in evaluation
    grads          whether autograd records, so that a backward pass may come
    sources        role -> who may have the operand's casts already (caches.py), in the order in which they are asked
    cache          what keeps the weight's casts, for backward too
    is_cold        whether learned steps are in their cold start
    sampled        the products whose rows are sampled in this step
    steps_version  changes whenever the learned steps do
    stream         where random numbers come from; None: torch's generator, in turn
    by_rows        whether the spread of a weight is summed row by row, which ranks that have some of the rows can do alike
    x_window       what layers have in common whose windows of x hold the same numbers; None: nobody else's is known to
    keeps_x        whether x is kept for backward, and cast again, although the recipe keeps codes; see `kept_inputs`
    watches        whether the observer needs x itself in backward (`observer.ProductObserver`), also where codes alone would be saved
    shows_results  whether the observer sees results (`observer.ProductObserver`)
    keeps_w        (compiled code) whether forward casts the weight both ways and keeps its cols for backward
    w_casts        (eager code) the casts of the weight that forward leaves to backward; None: backward casts it
    """

    plan: LinearPlan
    out_dtype: torch.dtype
    records: bool = True
    grads: bool = True
    sources: dict[str, list[Any]] = field(default_factory=dict)
    cache: Any = None
    observer: Observer | None = None
    is_cold: bool = False
    sampled: tuple[str, ...] = ()
    steps_version: tuple[int, ...] = ()
    stream: Stream | None = None
    by_rows: bool = False
    x_window: Hashable | None = None
    keeps_x: bool = False
    keeps_w: bool = False
    watches: bool = False
    shows_results: bool = False
    w_casts: Any = None
