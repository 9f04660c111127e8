"""Measure one GEMM of a Linear against the same GEMM in high precision.

    lhs [M, K], rhs [N, K]    original operands, rotated and sampled if the recipe does so
    codes                     their quantized form: codes times scales, or 16 bits
    result [M, N]             the kernel's result from the codes

In Frobenius norms, k a contracted column:

    error        |result - lhs @ rhs.T| / |lhs @ rhs.T|                          format and kernel
    noise        |result - lhs @ rhs.T| / sqrt(sum over k |lhs_k|^2 |rhs_k|^2)   no cancellation
    kernel       |result - codes product| / |codes product|                      the kernel alone
    kernel_most  upper bound on `kernel` from rounding of the sum and of the result, see `roundings`

High precision is float64 on a CPU. On a GPU it is float32 without TF32, because float64 is slow
there and 2^-24 is far below the errors of interest. One operand pair at a time is converted, lhs in
blocks of rows: 8 bytes (4 on a GPU) per element of rhs, and STRETCH elements. Sums of squares are
stored, so that micro-batches add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.diagnose.statistics import ROUNDING
from narrowgauge.formats import FloatFormat, IntFormat
from narrowgauge.lab.blame.recast import Recast
from narrowgauge.ops.quantize import dequantize
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import CurrentScaling, DelayedScaling
from narrowgauge.scaling import times_scale

STRETCH = 2**22  # elements of lhs and of the result that are in high precision at once
# Half a unit in the last place of bfloat16 is 2^-8 of the value, not 2^-9. A bound of 2^-9 held in
# 3,000 GEMMs, since roundings average out to 0.0017, and failed at the first small GEMM with
# unlucky mantissas.
UNIT = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
# Hopper accumulates FP8 products with 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
TENSOR_CORE = 2.0**-13
PROMOTED = 128  # FP8 products between two float32 sums if accumulation is not fast


@dataclass
class OperandSums:
    """Sums over one operand of a GEMM, finite elements only.

    format       its cast, or its 16-bit dtype
    is_narrow    True if it is quantized
    is_integer   True if it is quantized to integers
    is_delayed   True if its scale comes from an amax history
    is_by_amax   True if its scale comes from its own amax
    error, size  sums of squares of codes - original, and of the original
    saturated    elements beyond the format's largest number
    underflown   non-zero elements with code zero
    nonzero      non-zero elements
    used         largest amax that a scale was made for
    present      largest amax of the original
    recast       codes compared with a fresh cast of the original
    """

    format: str = ""
    is_narrow: bool = False
    is_integer: bool = False
    is_delayed: bool = False
    is_by_amax: bool = False
    error: float = 0.0
    size: float = 0.0
    saturated: int = 0
    underflown: int = 0
    nonzero: int = 0
    used: float = 0.0
    present: float = 0.0
    recast: Recast = field(default_factory=Recast)

    @property
    def off(self) -> float:
        """|codes - original| / |original|."""
        return _ratio(self.error, self.size)

    def take(self, other: OperandSums) -> None:
        for each in ("error", "size", "saturated", "underflown", "nonzero"):
            setattr(self, each, getattr(self, each) + getattr(other, each))
        for each in ("used", "present"):
            setattr(self, each, max(getattr(self, each), getattr(other, each)))
        for each in ("format", "is_narrow", "is_integer", "is_delayed", "is_by_amax"):
            setattr(self, each, getattr(other, each))
        self.recast.take(other.recast)

    def add(
        self,
        original: Tensor,
        codes: QTensor | Tensor,
        wide: torch.dtype,
        noise: Tensor | None = None,
    ) -> None:
        """Add one operand; original [outer, inner] and noise are oriented as the codes are."""
        decoded = decode(codes)
        for own, made, scale in _stretches(original, decoded, _scales(codes)):
            wide_own = own.to(wide)
            self.error += _squares(made.to(wide) - wide_own)
            self.size += _squares(wide_own)
            here = own != 0
            self.nonzero += int(here.sum())
            self.underflown += int((here & (made == 0)).sum())
            if scale is not None and isinstance(codes, QTensor):
                # ROUNDING: amax * (1 / scale) may exceed the maximum by rounding alone
                # (diagnose/statistics.py).
                limit = scale * (codes.cast.format.max * (1 + ROUNDING))
                self.saturated += int((own.abs().to(torch.float32) > limit).sum())
        if not isinstance(codes, QTensor):
            self.format = str(codes.dtype).removeprefix("torch.")
            return
        self.recast.add(original, codes, noise)
        cast = codes.cast
        self.format, self.is_narrow, self.is_integer = (
            str(cast),
            True,
            isinstance(cast.format, IntFormat),
        )
        self.is_delayed, self.is_by_amax = (
            isinstance(cast.calibrate, DelayedScaling),
            isinstance(cast.calibrate, CurrentScaling),
        )
        if original.numel():
            self.present = max(self.present, float(original.abs().amax()))
            self.used = max(self.used, float(codes.full_scale().max()) * cast.format.max)


@dataclass
class Product:
    """Sums over the calls of one GEMM of one layer. All floats are sums of squares.

    far         result - lhs @ rhs.T
    size        lhs @ rhs.T
    incoherent  |lhs_k|^2 |rhs_k|^2 over k: size without cancellation
    off         result - product of the codes
    coded       product of the codes
    explained   bound on `off` from rounding
    shape       [M, N, K] of the last call
    calls       number of calls
    """

    lhs: OperandSums = field(default_factory=OperandSums)
    rhs: OperandSums = field(default_factory=OperandSums)
    far: float = 0.0
    size: float = 0.0
    incoherent: float = 0.0
    off: float = 0.0
    coded: float = 0.0
    explained: float = 0.0
    shape: tuple[int, int, int] = (0, 0, 0)
    calls: int = 0

    def take(self, other: Product) -> None:
        """Add the sums of another rank."""
        for each in ("far", "size", "incoherent", "off", "coded", "explained", "calls"):
            setattr(self, each, getattr(self, each) + getattr(other, each))
        self.lhs.take(other.lhs)
        self.rhs.take(other.rhs)
        self.shape = other.shape

    @property
    def error(self) -> float:
        return _ratio(self.far, self.size)

    @property
    def noise(self) -> float:
        return _ratio(self.far, self.incoherent)

    @property
    def kernel(self) -> float:
        return _ratio(self.off, self.coded)

    @property
    def kernel_most(self) -> float:
        return _ratio(self.explained, self.coded)

    @torch.no_grad()
    def add(
        self,
        originals: tuple[Tensor, Tensor],
        codes: tuple[QTensor | Tensor, QTensor | Tensor],
        bias: Tensor | None,
        result: Tensor,
        fast: bool,
        noises: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Add one call. originals, codes, noises: of lhs and rhs, [outer, contracted].

        fast    True if the kernel may accumulate FP8 products with few bits
        noises  noise of stochastic rounding, where it is known
        """
        wide = torch.float32 if result.is_cuda else torch.float64
        self.calls += 1
        self.shape = result.shape[0], result.shape[1], originals[0].shape[1]
        with exact_float32(result.device):
            for operand, original, made, noise in zip(
                (self.lhs, self.rhs), originals, codes, noises, strict=True
            ):
                operand.add(original, made, wide, noise)
            far, size, _ = _distance(result, originals, bias, wide)
            columns = [each.to(wide).square().sum(dim=0, dtype=torch.float64) for each in originals]
            off, coded, explained = kernel_distance(codes, bias, result, fast)
        self.far, self.size, self.off, self.coded = (
            self.far + far,
            self.size + size,
            self.off + off,
            self.coded + coded,
        )
        # Sums of squares per contracted column: the size of the result if its terms were
        # independent.
        self.incoherent += float((columns[0] * columns[1]).sum())
        self.explained += explained**2


def kernel_distance(
    codes: tuple[QTensor | Tensor, QTensor | Tensor],
    bias: Tensor | None,
    result: Tensor,
    fast: bool,
) -> tuple[float, float, float]:
    """Distance of a kernel's result from the product of its codes.

    Returns (sum of squares of result - codes product, sum of squares of the codes product, bound on
    the norm of the difference from rounding).

    codes  of lhs and rhs

    Call it inside `exact_float32`.
    """
    wide = torch.float32 if result.is_cuda else torch.float64
    decoded = decode(codes[0]), decode(codes[1])
    off, coded, whole = _distance(result, decoded, bias, wide)
    lengths = [math.sqrt(_squares(each.to(wide))) for each in decoded]
    explained = roundings(
        result, codes, math.sqrt(coded), math.sqrt(whole), math.prod(lengths), fast
    )
    return off, coded, explained


def roundings(
    result: Tensor, codes: tuple[QTensor | Tensor, QTensor | Tensor], coded: float, whole: float, lengths: float, fast: bool
) -> float:  # fmt: skip
    """Bound on the Frobenius distance of a correct kernel's result from its own codes' product.

    Rounding of the result: a unit roundoff of its values including the bias (`whole`). The float32
    sum: 4 sqrt(K) 2^-24 |lhs| |rhs|, which a sum of K rounded terms exceeds with a probability
    below 1e-3 per element (Higham and Mary 2019, theorem 2.4). FP8 and smaller floats on a GPU:
    2^-13 of the sum for each of sqrt(K) independent roundings, with K at most 128 if partial sums
    are promoted. The measured error is a fifth of that (docs/convergence.md, fast accumulation).
    """
    contracted = codes[0].shape[1]
    most = UNIT[result.dtype] * whole + 4 * math.sqrt(contracted) * UNIT[torch.float32] * lengths
    floats = all(
        isinstance(each, QTensor) and isinstance(each.cast.format, FloatFormat) for each in codes
    )
    if result.is_cuda and floats:
        most += TENSOR_CORE * math.sqrt(contracted if fast else min(contracted, PROMOTED)) * coded
    return most


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Disable TF32 for float32 GEMMs of a GPU inside the block; restores the setting after it."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def decode(codes: QTensor | Tensor) -> Tensor:
    return dequantize(codes) if isinstance(codes, QTensor) else codes


def _distance(
    result: Tensor, operands: tuple[Tensor, Tensor], bias: Tensor | None, wide: torch.dtype
) -> tuple[float, float, float]:
    """Sums of squares: result - product - bias, product = lhs @ rhs.T, and product + bias."""
    lhs, rhs = operands
    right, far, size, whole = rhs.to(wide).T, 0.0, 0.0, 0.0
    rows = max(1, STRETCH // max(lhs.shape[1] + rhs.shape[0], 1))
    # Autocast would cast the high-precision operands back to 16 bits.
    with torch.autocast(result.device.type, enabled=False):
        for left, own in zip(lhs.split(rows), result.split(rows), strict=True):
            product = left.to(wide) @ right
            size += _squares(product)
            if bias is not None:
                product += bias.to(wide)
            whole += _squares(product)
            far += _squares(own.to(wide) - product)
    return far, size, whole


def _scales(codes: QTensor | Tensor) -> Tensor | None:
    """Scale of each element, [outer, inner], or one scale for all."""
    if not isinstance(codes, QTensor):
        return None
    scale = codes.full_scale()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    return times_scale(torch.ones(codes.shape, device=codes.device), scale, codes.cast.tile)


def _stretches(
    own: Tensor, made: Tensor, scale: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    rows = max(1, STRETCH // max(own.shape[1], 1))
    for first in range(0, len(own), rows):
        part = slice(first, first + rows)
        yield own[part], made[part], scale if scale is None or scale.numel() == 1 else scale[part]


def _squares(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _ratio(far: float, size: float) -> float:
    """Ratio of two norms from their sums of squares; 0 for 0 / 0, infinite for x / 0."""
    if math.isnan(far) or math.isnan(size):
        return math.nan
    return math.sqrt(far / size) if size > 0 else 0.0 if far == 0 else math.inf
