"""quantize_rotated: cast a matrix under a rotation, and its transpose as it is beside it, from one read.

    rotated = quantize(rotate(x, block, signs), cast, noise[0], expand)     [outer, inner in whole blocks]
    beside  = quantize(x.T, cast, noise[1])                                 [inner, outer], if requested

x is t.T of an operand t (nn/operands.py): `rotated` is the operand of grad_weight and `beside` the one
of the GEMM that reads t. The definition computes them in sequence, with the butterflies of
`hadamard.definition`. Kernels have the same order of additions and are bit-identical:

    triton       blocks of 16 or 32, scales of 1 x 16 and 1 x 32. Two launches under two-level rules, for
                 the largest magnitudes of both and for the codes of both; else one
    native-eden  (CPU) casts that correct their scales, nothing beside them (eden_cpp.py)

Left out: two rounds, in triton; x.T under a rotation of its own; per-tensor and per-row scales.

Self-check: as those of `quantize` (selfcheck.py), bit for bit, with signs where a recipe has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.hadamard.definition import rotate
from narrowgauge.ops.quantize import EDEN, LAUNCHES, definition, triton
from narrowgauge.ops.quantize.spec import Spec, Turn, Two
from narrowgauge.ops.registry import Kernel, Refusal, Registry, imported
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison
from narrowgauge.ops.triton import cast_constants
from narrowgauge.qtensor import QTensor

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

ORDERS, WIDTHS = (16, 32), (16, 32)  # of a block of the Triton kernel, and of its tiles

Pair = tuple[QTensor, QTensor | None]


@dataclass(frozen=True)
class RotatedSpec(Spec):
    """Properties of a call that decide which kernel is chosen.

    block   of the rotation
    rounds  of the rotation
    signs   True if it has signs
    beside  True if x.T is cast too
    across  True if the rows of x lie across memory, i.e. x.T is row-major
    """

    block: int = 1
    rounds: int = 1
    signs: bool = False
    beside: bool = False
    across: bool = True


def refuse(spec: RotatedSpec) -> Refusal | None:
    """Return the reason why the Triton kernel does not compute this, or None."""
    if (refusal := triton.refuse(spec)) is not None:
        return refusal
    if not spec.across:
        return Refusal("shape", "rotates across the rows of memory, and these lie along them")
    if spec.rounds > 1:
        return Refusal("operands", f"rotates once, not in {spec.rounds} rounds")
    if (refusal := refuse_cast(spec.cast, spec.block)) is not None:
        return refusal
    if spec.beside and spec.expand is not None:
        return Refusal("expanded", "writes codes where it casts both, not decoded values")
    return None


def refuse_cast(cast: Cast, block: int) -> Refusal | None:
    """Return the reason why the Triton kernel has no form of this cast under such a rotation, or None."""
    if (refusal := cast_constants.refuse(cast)) is not None:
        return refusal
    if block not in ORDERS:
        return Refusal("shape", f"rotates blocks of {_listed(ORDERS)}, not {block}")
    if cast.tile[0] != 1 or cast.tile[1] not in WIDTHS:
        wanted = f"scales {_listed(WIDTHS)} elements of a row"
        return Refusal("tile", f"{wanted} under a rotation, not tiles of {cast.tile}")
    return None


def refuse_eden(spec: RotatedSpec) -> Refusal | None:
    """Return the reason why the C++ kernel that corrects scales does not compute this, or None."""
    if spec.beside:
        return Refusal("operands", "casts a matrix and not its transpose beside it")
    refusal: Refusal | None = imported(EDEN, "refuse")(spec)
    return refusal


def _listed(sizes: tuple[int, ...]) -> str:
    return " or ".join(map(str, sizes))


def run_eden(
    x: Tensor, cast: Cast, turn: Turn, noise: Two, expand: torch.dtype | None, beside: bool
) -> Pair:
    """See `ops.quantize.eden_cpp`."""
    return imported(EDEN, "run_rotated")(x, cast, None, noise[0], expand, *turn), None


def reference(
    x: Tensor, cast: Cast, turn: Turn, noise: Two, expand: torch.dtype | None, beside: bool
) -> Pair:
    """Definition; see the module."""
    turned, (block, signs, second) = x, turn
    for each in (signs,) if second is None else (signs, second):
        turned = rotate(turned, block, each)
    found = definition.quantize(turned, cast, None, noise[0], expand)
    return found, definition.quantize(x.T, cast, None, noise[1], None) if beside else None


def plan_rotated(
    x: Tensor, cast: Cast, expand: torch.dtype | None, turn: Turn, beside: bool = False
) -> Callable[..., Pair] | None:
    """Return the kernel that rotates and casts such an x, or None if none does both.

    turn  a rotation of the same form; numbers of its signs are not read
    ->    run(x, cast, turn, noise, expand, beside) -> (rotated, beside or None), valid as the result
          of `ops.quantize.plan`
    """
    block, signs, second = turn
    spec = RotatedSpec.of(
        x, cast, None, None, expand,
        block=block, rounds=1 if second is None else 2, signs=signs is not None, beside=beside,
        across=x.stride(0) == 1,
    )  # fmt: skip
    spec = spec.with_keys() if cast.draws else spec
    kernel = KERNELS.choose(spec).kernel
    if kernel.by_torch:
        return None
    if cast.draws or not kernel.replays:
        return kernel.run
    from narrowgauge.ops.triton.replay import Replays  # imported only where kernels are launched

    replays = Replays(
        lambda x, signs: kernel.run(x, cast, Turn(block, signs), (None, None), expand, beside)
    )
    return lambda x, cast, turn, noise, expand, beside: replays(x, turn[1])


# --- self-check

_ROW_SHIFT = 3  # rows that a sample lacks of whole blocks


def _kind(spec: RotatedSpec) -> tuple[Any, ...]:
    return spec.cast, spec.dtype, spec.noise, spec.expand, spec.block, spec.signs, spec.beside


def _compare(
    run: Callable[..., Pair], kind: Any, device: torch.device, shape: tuple[int, int] | None = None
) -> Iterator[OutputComparison]:
    from narrowgauge.ops.quantize import selfcheck

    cast, dtype, noise, expand, block, signs, beside = kind
    size = shape or (selfcheck.ROWS, selfcheck.COLUMNS)
    keys = selfcheck.KEYS if noise == "key" else (None, None)
    for poisoned in (False, True) if shape is None else (False,):
        x = selfcheck.sample(dtype, poisoned, size)[_ROW_SHIFT:]
        length = -(-x.shape[0] // block) * block
        drawn = None
        if signs:
            generator = torch.Generator().manual_seed(block)
            drawn = torch.randint(0, 2, (length,), generator=generator).to(torch.float32) * 2 - 1
        for words, t in (("", x), (", in memory order", x.T.contiguous().T)):
            there = t.to(device)
            turn = Turn(block, None if drawn is None else drawn.to(device))
            got = run(there.T, cast, turn, keys, expand, beside)
            truth = reference(t.T, cast, Turn(block, drawn), keys, expand, beside)
            words += ", NaN within" if poisoned else ""
            for each in selfcheck.compared((*got, None), (*truth, None), None, False):
                yield each._replace(name=each.name + words)


def _examples() -> Iterator[RotatedSpec]:
    """Yield the rotated casts of all recipes, as both GEMMs ask for them."""
    from narrowgauge import recipes  # imported here because a cast does not need it
    from narrowgauge.ops.registry import Device

    gemms = [gemm for recipe in recipes.ALL for gemm in recipe.gemms().values()]
    found = dict.fromkeys(
        (cast, gemm.rotate)
        for gemm in gemms
        for cast in (gemm.lhs, gemm.rhs)
        if cast is not None and gemm.rotate is not None
    )
    for cast, hadamard in found:
        is_corrected = cast.rounding == "eden"
        if not is_corrected and refuse_cast(cast, hadamard.block) is not None:
            continue
        for beside in (False, True):
            yield RotatedSpec(
                Device("cpu"), torch.bfloat16, (2, 4), cast, "key" if cast.draws else None,
                expand=torch.float32 if is_corrected else None,
                block=hadamard.block, signs=hadamard.signs != "none", beside=beside,
            )  # fmt: skip


CHECK: KernelCheck[RotatedSpec] = KernelCheck(
    _kind, _compare, _examples, large=partial(_compare, shape=(2048, 4096))
)
KERNELS: Registry[RotatedSpec] = Registry("quantize_rotated")
KERNELS.register(
    Kernel(
        "triton", refuse, imported(LAUNCHES, "rotated"), "cuda", check=lambda: CHECK, replays=True
    ),
    Kernel("native-eden", refuse_eden, run_eden, "cpu", check=lambda: CHECK),
    Kernel("reference", lambda spec: None, reference, by_torch=True),
)
