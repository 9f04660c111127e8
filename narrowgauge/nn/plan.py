"""LinearPlan: a recipe resolved for a device.

A plan is computed once. Choosing kernels at every call would cost more than a small GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling
from narrowgauge.errors import Reason
from narrowgauge.ops.mm import MmPlan, plan
from narrowgauge.ops.quantize import cpp, plan_amax, quantize, tile_amax
from narrowgauge.ops.quantize import plan as plan_quantize
from narrowgauge.ops.registry import device_facts
from narrowgauge.recipe import Cast, DelayedScaling, Hadamard, LearnedStep, Recipe
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.hadamard import Functions
    from narrowgauge.ops.quantize.spec import Turn
    from narrowgauge.qtensor import QTensor

# Role -> (the GEMM that reads the tensor, the GEMM that reads its transpose).
PRODUCTS = {
    "x": ("output", "grad_weight"),
    "w": ("output", "grad_input"),
    "gy": ("grad_input", "grad_weight"),
}
# GEMM -> the roles of its lhs and its rhs.
OPERANDS = {"output": ("x", "w"), "grad_input": ("gy", "w"), "grad_weight": ("gy", "x")}


@dataclass(frozen=True, eq=False)
class OperandPlan:
    """Casts and kernels that turn a tensor t [outer, inner] into the operands of its two GEMMs.

    role          "x", "w" or "gy"
    kind          class of its Operand
    rows, cols    casts of t and of t.T; None: 16 bits
    *_expand      dtype of dequantized values if the GEMM's kernel reads those instead of codes
    *_rotate      rotation of the GEMM
    transposes    t.T needs no cast of its own: it is the transposed cast of t
    turns_freely  the GEMMs read t.T as a view of the codes of t, which have one orientation alone
    pairs         both GEMMs read codes of the same cast, so one read of t may give both
                  (`ops.quantize.pair`)
    casts_once    t.T needs no read of its own: as `transposes`, or a kernel of the CPU casts both
                  from one read
    pairs_turned  as `pairs`, where t.T is rotated by fixed signs and t is not, and the device's kernels
                  cast both from one read (`ops.hadamard.casting`)
    fuses_turns   kernels of this device may rotate and cast in one
    shares_rows   layers that cast the same t get the same rows: no random numbers, and no scale
                  from the layer's state other than an amax history, if the histories are equal
    shares_cols   likewise for cols
    is_delayed    an amax history of earlier steps sets the scale
    reads_codes   backward reads the codes of t, and decodes them
    kernels       kernels chosen so far
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
    turns_freely: bool
    pairs: bool
    casts_once: bool
    pairs_turned: bool
    fuses_turns: bool
    shares_rows: bool
    shares_cols: bool
    is_delayed: bool
    reads_codes: bool
    kernels: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def quantize(
        self, x: Tensor, cast: Cast, amax: Tensor | None, noise: Any, expand: torch.dtype | None
    ) -> QTensor:
        """`ops.quantize`, with a kernel that is chosen once per form of the arguments."""
        if is_compiling():
            return quantize(x, cast, amax=amax, noise=noise, expand=expand)
        # The facts that a kernel's refusal may depend on. A new refusal must add its fact here.
        key = (cast is self.rows, x.dtype, expand, x.shape[1] & 1, 0 in x.shape, type(noise))
        run = self.kernels.get(key)
        if run is None:
            run = plan_quantize(x, cast, amax, noise, expand)
            # Values times their scales would be divided by them again.
            if self.reads_codes and run is cpp.run:
                run = partial(cpp.run, may_fold=False)
            self.kernels[key] = run
        found: QTensor = run(x, cast, amax, noise, expand)
        return found

    def amax(self, x: Tensor) -> Tensor:
        """Largest magnitude of x, [1, 1] float32, with a kernel that is chosen once."""
        if is_compiling():
            return tile_amax(x, (WHOLE, WHOLE))
        key = ("amax of x", x.dtype, x.shape[1] & 1, 0 in x.shape)
        if (run := self.kernels.get(key)) is None:
            run = self.kernels[key] = plan_amax(x)
        found: Tensor = run(x)
        return found

    def with_amax(self, x: Tensor) -> tuple[QTensor | None, Tensor | None]:
        """Quantize x and return its amax; see `ops.quantize.pair.plan_with_amax`."""
        assert self.rows is not None
        if is_compiling():
            is_whole = self.rows.is_per_tensor
            return None, tile_amax(x.detach(), (WHOLE, WHOLE)) if is_whole else None
        key = ("amax", x.dtype, x.shape[1] & 1, x.shape[0] & 1)
        if (run := self.kernels.get(key)) is None:
            from narrowgauge.ops.quantize import pair  # only for weights that backward recasts

            run = self.kernels[key] = pair.plan_with_amax(x, self.rows)
        found: tuple[QTensor | None, Tensor | None] = run(x)
        return found

    def by_amax(self, x: Tensor, cast: Cast, amax: Tensor) -> QTensor:
        """Quantize x under a two-level rule by an amax of `with_amax`."""
        key = ("by amax", x.dtype, x.shape[1] & 1)
        if (run := self.kernels.get(key)) is None:
            from narrowgauge.ops.quantize import pair

            run = self.kernels[key] = pair.plan_by_amax(cast)
        found: QTensor = run(x, amax)
        return found

    def one_read(
        self, x: Tensor, delayed: bool, both: bool, records: bool
    ) -> Callable[..., Any] | None:
        """Return a kernel that reads x [outer, inner] once, or None if there is none.

        delayed  scale by the amax history
        both     also cast x.T
        records  update the history
        ->       run(x, amax_state, noise) -> (rows, cols, amax)
        """
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
            from narrowgauge.ops.quantize import pair  # only for kernels that read codes

            reads_once = pair.reads_once(x, self.rows, delayed, both)
            self.kernels[key] = (
                pair.plan(x, self.rows, records, both, delayed) if reads_once else None
            )
        found: Callable[..., Any] | None = self.kernels[key]
        return found

    def rotates_in_cast(self, x: Tensor, cast: Cast) -> bool:
        """True if one kernel rotates and encodes x, see `ops.hadamard.encoding`."""
        if is_compiling():
            return False  # a compiler fuses the two
        assert self.rows_rotate is not None
        key = ("rotation", x.dtype, 0 in x.shape)
        if (fused := self.kernels.get(key)) is None:
            from narrowgauge.ops.hadamard import encoding

            fused = encoding.rotation_is_fused(x, self.rows_rotate, cast.format)
            self.kernels[key] = fused
        return bool(fused)

    def casts_in_rotation(
        self,
        x: Tensor,
        cast: Cast,
        expand: torch.dtype | None,
        turn: Turn,
        beside: bool = False,
    ) -> Callable[..., tuple[QTensor, QTensor | None]] | None:
        """Return a kernel that rotates and casts x in one, chosen once, or None if there is none.

        beside  also cast x.T, without a rotation
        ->      run(x, cast, turn, noise of both, expand, beside) -> (rotated, beside or None)
        """
        if is_compiling() or 0 in x.shape:
            return None
        is_across = x.stride(0) == 1
        key = ("turn", cast is self.rows, x.dtype, expand, x.shape[1] & 1, is_across, beside)
        if key not in self.kernels:
            from narrowgauge.ops.hadamard.casting import plan_rotated  # only for rotations

            self.kernels[key] = plan_rotated(x, cast, expand, turn, beside)
        found: Callable[..., tuple[QTensor, QTensor | None]] | None = self.kernels[key]
        return found

    @cached_property
    def serves_a_step(self) -> tuple[bool, bool]:
        """(rows, cols): True if the cast is the same at every call between two optimizer steps."""
        return (
            self.rows is not None and not _draws(self.rows, self.rows_rotate),
            self.cols is not None and not _draws(self.cols, self.cols_rotate),
        )


def _draws(cast: Cast | None, rotate: Hadamard | None) -> bool:
    """True if random numbers enter the operand."""
    return (cast is not None and cast.rounding != "nearest") or (
        rotate is not None and rotate.signs == "random"
    )


def _is_shareable(cast: Cast | None, rotate: Hadamard | None) -> bool:
    has_own_scale = cast is not None and isinstance(cast.calibrate, LearnedStep)
    return not has_own_scale and not _draws(cast, rotate)


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """The kernels and casts of one recipe on one device.

    output, grad_input, grad_weight   kernel of each GEMM
    x, w, gy                          how the operands are made
    hadamard                          kernel of rotations and 4-bit codes; None: the recipe has none
    """

    recipe: Recipe
    output: MmPlan
    grad_input: MmPlan
    grad_weight: MmPlan
    x: OperandPlan
    w: OperandPlan
    gy: OperandPlan
    hadamard: Functions | None = None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        device: torch.device,
        kinds: dict[str, type[Any]],
        hidden_by: str = "",
        wide: bool = False,
    ) -> LinearPlan:
        """Resolve a recipe for a device.

        kinds      role (x, w, gy) -> class of its Operand
        hidden_by  name of the wrapper class that hides the memory of the tensors, see
                   `addresses.wrapper`
        wide       dequantize to float32, for float32 GEMMs on a CPU. They would convert bfloat16
                   values at every call
        """
        of = partial(plan, hidden_by=hidden_by) if hidden_by else plan
        plans = {name: of(gemm, device) for name, gemm in recipe.gemms().items()}
        for name, each in plans.items():
            if wide and each.expand is not None:
                plans[name] = replace(each, expand=torch.float32)
        x, w, gy = (
            _operand_plan(role, kind, recipe, plans, device) for role, kind in kinds.items()
        )
        rotates = any(gemm.rotate is not None for gemm in recipe.gemms().values())
        hadamard = None
        if rotates or recipe.backward == "straight-through":
            from narrowgauge.ops import hadamard as rotations  # only for recipes that need it

            hadamard = rotations.plan(device, hidden_by)
        products = plans["output"], plans["grad_input"], plans["grad_weight"]
        return cls(recipe, *products, x, w, gy, hadamard)

    def step_cast(self) -> tuple[Cast | None, str]:
        """Return (cast, '') for the weight cast that an optimizer step can leave beside the weight.

        Returns (None, reason) if it cannot. The reason is a clause.
        """
        w, recipe = self.w, self.recipe
        if recipe.backward == "straight-through":
            return None, Reason(
                "straight-through",
                f"{recipe.name} multiplies straight-through, with casts of its own",
            )
        if w.rows is None:
            return None, Reason("high-precision", "its output takes the weight in 16 bits")
        if w.rows_rotate is not None or w.cols_rotate is not None:
            return None, Reason("rotation", "a rotation mixes elements before they are cast")
        if w.rows != w.cols:
            other = "takes it in 16 bits" if w.cols is None else f"as {w.cols}"
            return None, Reason("other-cast", f"output casts it as {w.rows}, grad_input {other}")
        for product, expand in ((self.output, w.rows_expand), (self.grad_input, w.cols_expand)):
            if expand is not None:
                return None, Reason(
                    "decoded", f"kernel {product.choice.kernel.name} multiplies decoded values"
                )
        from narrowgauge.ops.quantize import precast_weight

        refusal = precast_weight.refuse(w.rows)
        return (w.rows, "") if refusal is None else (None, Reason(refusal.code, refusal.text))


def _operand_plan(
    role: str, kind: type[Any], recipe: Recipe, plans: dict[str, MmPlan], device: torch.device
) -> OperandPlan:
    rows, cols = recipe.roles()[role]
    first, second = PRODUCTS[role]
    rotations = getattr(recipe, first).rotate, getattr(recipe, second).rotate
    expands = plans[first].expand, plans[second].expand
    # x may differ in *_expand: its codes are saved, and dequantized when grad_weight reads them.
    same = rows == cols and (expands[0] == expands[1] or role == "x")
    unrotated = rotations[0] is rotations[1] is None
    pairs = unrotated and rows is not None and rows == cols and expands[0] is expands[1] is None
    transposes = (
        same
        and unrotated
        and (rows is None or (rows.is_symmetric and rows.format.codes_per_byte == 1))
    )
    # gy: one cast with one draw of noise serves both GEMMs, unless grad_input samples rows.
    if recipe.backward == "straight-through":
        unpacked = rows is not None and (expands[0] is not None or rows.format.codes_per_byte == 1)
        whole = (
            rows is not None and rows.tile == (WHOLE, WHOLE) and recipe.grad_input.sample is None
        )
        pairs, transposes = False, same and unpacked and whole
    shares = _is_shareable(rows, rotations[0]), _is_shareable(cols, rotations[1])
    is_delayed = any(
        cast is not None and isinstance(cast.calibrate, DelayedScaling) for cast in (rows, cols)
    )
    turns_freely = pairs and transposes and _turns_freely((plans[first], plans[second]), device)
    is_paired = pairs and not is_delayed and _is_paired_on_cpu(rows, device)
    turns = [each for each in rotations if each is not None]
    is_cuda = device_facts(device.type, device.index).type == "cuda"
    fuses = bool(turns) and (is_cuda or any(c is not None and c.rounding == "eden" for c in (rows, cols)))  # fmt: skip
    # Random signs are drawn by the GEMM that needs them, and decoded operands exist in backward.
    pairs_turned = (
        is_cuda
        and rotations[0] is None
        and all(each.signs != "random" and each.rounds == 1 for each in turns)
        and len(turns) == 1
        and rows is not None
        and rows == cols
        and expands[0] is expands[1] is None
        and recipe.backward == "recast"
    )
    return OperandPlan(
        role, kind, rows, cols, *expands, *rotations, transposes, turns_freely, pairs, transposes or is_paired, pairs_turned, fuses,
        *shares, is_delayed, recipe.backward == "recast-codes",
    )  # fmt: skip


def _turns_freely(products: tuple[MmPlan, MmPlan], device: torch.device) -> bool:
    """True if both GEMMs take codes in either memory order. Compiled code stores both orders."""
    if is_compiling() or any(each.choice.kernel.name != "native" for each in products):
        return False
    from narrowgauge.ops.mm import cublas  # only for its GEMMs

    return cublas.takes_every_layout(device)


def _is_paired_on_cpu(cast: Cast | None, device: torch.device) -> bool:
    if cast is None or device_facts(device.type, device.index).type != "cpu":
        return False
    from narrowgauge.ops.quantize import pair  # only for kernels that read codes

    return pair.reads_once(torch.empty(2, 4, device="cpu"), cast, False)
