"""A kernel must prove itself on a device before it may compute there: one small random product against the definition.

A kernel that was never run on a device, a layout that a library changed, a driver that miscompiles: none of them raises an error,
all of them give plausible numbers. So before a kernel is first taken for two casts on a device, it multiplies

    136 x 272 by 264 x 272      no multiple of 16, 32 or 128 in any axis but K of 16; scales from tile to tile up to 2**12 apart

and the same with a NaN in the left operand. The truth is computed on the CPU from the decoded operands in float64. The kernel passes if

    |out - truth| <= allowed * (|x_lhs| @ |x_rhs|.T)   everywhere, and NaN spoils the rows and columns that it must, no others

    allowed   of integers 2**-20: their sums are exact, and scaled in float32
              of floats   2**-8 + 2**-13 * ceil(K / 32): one rounding to bfloat16 on the way out, and tensor cores that keep 13 bits
                          behind the point when they add (Hopper with fast_accumulate; arXiv 2412.19437, 3.3.2), 32 products at a time

A kernel that reads its scales in another order, leaves a block out or repeats one is wrong by the size of the product itself, a
hundred times more. Otherwise it is refused, with the reason in words, like any kernel that cannot serve a call, and the next takes
its place: `describe` and `narrowgauge info` say so, and a caller who forces it by name gets the error.

Once per process, device, kernel and pair of casts: 5 to 11 ms of a processor (docs/gpu.md), four launches that are waited
for; then a dictionary. Compiling a Triton kernel, where there is one, comes on top; a call would need it anyway. Random numbers come from a
generator of their own, and nothing is recorded for autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from narrowgauge.formats import ALL, IntFormat
from narrowgauge.ops import selfcheck
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.quantize import definition as quantization
from narrowgauge.ops.quantize import dequantize
from narrowgauge.ops.registry import Kernel, constant_while_compiling
from narrowgauge.ops.selfcheck import Verdict
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import CURRENT, Cast
from narrowgauge.scaling import RULES

Run = Callable[..., Tensor]
Words = tuple[str, tuple[int, int], str, float]

# Whether torch.compile hands frozen dataclasses to functions whose results it takes as constants (`constant_while_compiling`).
TAKES_DATACLASSES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

ROWS, COLUMNS, CONTRACTED = 136, 264, 272
SPREAD = 6  # tiles of the operands differ by up to 2**(2 * SPREAD)
SEED = 20260529


VERDICTS: dict[tuple[str, Cast, Cast, int], Verdict] = {}
_RUNS: dict[str, Run] = {}


def proven(kernel: Kernel[MmSpec]) -> Kernel[MmSpec]:
    """The kernel, refused as well where it fails its proof on the device at hand (see `Device.index`)."""
    _RUNS[kernel.name] = kernel.run

    def refuse(spec: MmSpec) -> str | None:
        reason = kernel.refuse(spec)
        if reason is not None or spec.device.index is None:
            return reason
        assert spec.lhs is not None and spec.rhs is not None
        where = (spec.device.type, spec.device.index)
        if torch.compiler.is_compiling() and not TAKES_DATACLASSES:
            return _failure_of_traced(kernel.name, _words(spec.lhs), _words(spec.rhs), *where)
        return _failure(kernel.name, spec.lhs, spec.rhs, *where)

    return replace(kernel, refuse=refuse)


@constant_while_compiling
def _failure(name: str, lhs: Cast, rhs: Cast, device_type: str, index: int) -> str | None:
    """Why the kernel failed its proof, or None. Proves it if that is still to do, also in the middle of a compilation."""
    key = (name, _plain(lhs), _plain(rhs), index)
    if key not in VERDICTS:
        selfcheck.refuse_capture("mm", name, device_type, index)
        VERDICTS[key] = examine(_RUNS[name], key[1], key[2], torch.device(device_type, index))
    return VERDICTS[key].reason


@constant_while_compiling
def _failure_of_traced(name: str, lhs: Words, rhs: Words, device_type: str, index: int) -> str | None:
    """As _failure, of casts by their words."""
    casts = [_of_words(*each) for each in (lhs, rhs)]
    if casts[0] is None or casts[1] is None:
        return (
            f"it cannot prove itself while torch {torch.__version__} traces, for formats and scale rules that are not narrowgauge's "
            "own; torch 2.13 or eager mode can"
        )
    return _failure(name, casts[0], casts[1], device_type, index)


def _words(cast: Cast) -> Words:
    """What of a cast a GEMM can see, without objects."""
    return cast.format.name, cast.tile, cast.scale.name, cast.headroom


def _of_words(format: str, tile: tuple[int, int], rule: str, headroom: float) -> Cast | None:
    """The cast behind the words, as `_plain` has it; None where they name nothing of ours."""
    known, rules = {each.name: each for each in ALL}, {each.name: each for each in RULES}
    if format not in known or rule not in rules:
        return None
    return Cast(format=known[format], tile=tile, scale=rules[rule], headroom=headroom)


def _plain(cast: Cast) -> Cast:
    """What of a cast a GEMM can see: not where its amax came from, nor how it rounds."""
    return replace(cast, calibrate=CURRENT, rounding="nearest")


def examine(run: Run, lhs: Cast, rhs: Cast, device: torch.device) -> Verdict:
    """The proof itself, see `verdicts.examine`."""
    return selfcheck.examine("mm", lambda device: _compare(run, lhs, rhs, device), device)


def _compare(run: Run, lhs: Cast, rhs: Cast, device: torch.device) -> tuple[float, str | None]:
    """(largest error as a share of what is allowed, why the kernel fails or None)."""
    worst, allowed = 0.0, _allowed(lhs, rhs)
    for poisoned in (False, True):
        left, right, truth, size = _sample(lhs, rhs, poisoned)
        for fast_accumulate in (False, True):
            out = run(_on(left, device), _on(right, device), None, torch.float32, fast_accumulate).to("cpu")
            if tuple(out.shape) != tuple(truth.shape):
                return float("inf"), f"its result has the shape {list(out.shape)} on {device}, not {list(truth.shape)}"
            if size is not None:
                error = ((out.to(torch.float64) - truth).abs() / size).nan_to_num(nan=0.0, posinf=float("inf"))
                worst = max(worst, float(error.max()))
            if worst > allowed:
                return worst / allowed, (
                    f"its result is wrong on {device}: off by {worst:.2g} of the product's size where {allowed:.2g} is allowed"
                )
            if not torch.equal(out.isnan(), truth.isnan()):
                what = "hides NaN" if int(out.isnan().sum()) < int(truth.isnan().sum()) else "makes NaN of numbers"
                return float("inf"), f"it {what} on {device}"
    return worst / allowed, None


def _allowed(lhs: Cast, rhs: Cast) -> float:
    if isinstance(lhs.format, IntFormat) and isinstance(rhs.format, IntFormat):
        return 2.0**-20
    return 2.0**-8 + 2.0**-13 * -(-CONTRACTED // 32)


@cache
def _sample(lhs: Cast, rhs: Cast, poisoned: bool) -> tuple[QTensor, QTensor, Tensor, Tensor | None]:
    """Two operands on the CPU, their product [ROWS, COLUMNS] float64, and the product of their magnitudes.

    Poisoned: the product says where NaN is and is zero elsewhere, and None instead of the magnitudes; the numbers are the other's.
    """
    left, x = _operand(ROWS, lhs, poisoned)
    right, w = _operand(COLUMNS, rhs, False)
    if poisoned:
        spoilt = x.isnan().any(dim=1)[:, None] | w.isnan().any(dim=1)
        return left, right, torch.where(spoilt, float("nan"), 0.0), None
    size = (x.abs() @ w.abs().T).clamp_min(torch.finfo(torch.float32).tiny)
    return left, right, x.to(torch.float64) @ w.to(torch.float64).T, size


@cache
def _operand(rows: int, cast: Cast, poisoned: bool) -> tuple[QTensor, Tensor]:
    """Normal numbers, each 16 x 16 of them scaled by a power of two of their own, one NaN if poisoned; and decoded, float32."""
    generator = torch.Generator().manual_seed(SEED + rows)
    spread = torch.randint(-SPREAD, SPREAD + 1, (-(-rows // 16), -(-CONTRACTED // 16)), generator=generator)
    x = torch.randn(rows, CONTRACTED, generator=generator)
    x = torch.ldexp(x, spread.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :CONTRACTED])
    if poisoned:
        x[rows // 2, CONTRACTED // 3] = float("nan")
    q = quantization.quantize(x, cast, None, None, None)
    return q, dequantize(q)


def _on(operand: QTensor, device: torch.device) -> QTensor:
    shared = operand.global_scale
    return replace(
        operand,
        data=operand.data.to(device),
        scale=operand.scale.to(device),
        global_scale=None if shared is None else shared.to(device),
    )
