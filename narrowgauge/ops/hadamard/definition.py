"""Definition of rotations and 4-bit codes in plain torch; `ops.hadamard` checks the arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import cached, is_compiling, type_of
from narrowgauge.ops.chunking import row_chunks

if TYPE_CHECKING:
    from narrowgauge.formats import Format

# The signs of TransformerEngine's NVFP4 recipe (arXiv 2509.25149), so that blocks of 16 agree with
# it.
_SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class EncodedRows(NamedTuple):
    """Result of `encode`.

    codes   int8 [outer, n]
    packed  uint8 [outer, ceil(n / codes per byte)], or None
    bits    uint8 [outer, ceil(n / 8)], or None
    """

    codes: Tensor
    packed: Tensor | None
    bits: Tensor | None


def _constant(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache a constant tensor per block, device and further integers.

    On a GPU, copying a constant from the host at every call synchronizes, and aborts the capture of
    a CUDA graph.
    """
    built = cached(build)

    def get(block: int, device: torch.device, *sizes: int) -> Tensor:
        if is_compiling():
            return build(block, device, *sizes)
        # A tensor that is created in inference mode could not be saved for backward later.
        with torch.inference_mode(False):
            return built(block, device, *sizes)

    return get


@_constant
def hadamard_matrix(block: int, device: torch.device) -> Tensor:
    """Return H [block, block] float32, orthonormal: (-1) ** popcount(i & j) / sqrt(block)."""
    index = torch.arange(block, device=device, dtype=torch.int32)
    # Fold the bits of i & j together: the lowest bit becomes the parity of the popcount.
    parity = index[:, None] & index[None, :]
    for shift in (8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return (1 - 2 * (parity & 1)).to(torch.float32) * block**-0.5


@_constant
def fixed_signs(block: int, device: torch.device, blocks: int = 1) -> Tensor:
    """Return the same +1 and -1 for each block, [blocks * block].

    The signs are TransformerEngine's for 16; others come from Python's generator, seeded with the
    block.
    """
    source = random.Random(block)
    signs = _SIGNS_16 if block == 16 else tuple(source.choice((1, -1)) for _ in range(block))
    return torch.tensor(signs, dtype=torch.float32, device=device).repeat(blocks)


def rotate(x: Tensor, block: int, signs: Tensor | None) -> Tensor:
    """See `ops.hadamard`.

    On a GPU, process chunks of rows into one output; results are bit-identical.
    """
    slices, filled = row_chunks(x), -x.shape[1] % block
    if len(slices) == 1:
        return _rotated(x, block, signs, filled)
    out = x.new_empty(x.shape[0], x.shape[1] + filled, dtype=torch.float32)
    for each in slices:
        out[each] = _rotated(x[each], block, signs, filled)
    return out


def _rotated(x: Tensor, block: int, signs: Tensor | None, filled: int) -> Tensor:
    """Rotate one piece. filled: number of zero columns that complete the blocks."""
    full = x.to(torch.float32)
    # Padded after the signs: with a sign of its own a zero of the padding could become -0.
    full = full if signs is None else full * signs[: x.shape[1]]
    return _times_hadamard(torch.nn.functional.pad(full, (0, filled)), block)


def unrotate(
    y: Tensor, block: int, inner: int, signs: Tensor | None, bits: Tensor | None
) -> Tensor:
    """See `ops.hadamard`. On a GPU, process chunks of rows; results are bit-identical."""
    slices = row_chunks(y)
    if len(slices) == 1:
        return _unrotated(y, block, inner, signs, bits)
    out = y.new_empty(y.shape[0], inner, dtype=torch.float32)
    for each in slices:
        out[each] = _unrotated(y[each], block, inner, signs, None if bits is None else bits[each])
    return out


def _unrotated(
    y: Tensor, block: int, inner: int, signs: Tensor | None, bits: Tensor | None
) -> Tensor:
    """Unrotate one piece. block: 1 if only the signs are undone."""
    full = y.to(torch.float32)
    full = full if bits is None else torch.where(unpack_bits(bits, y.shape[1]), full, 0.0)
    full = full if block == 1 else _times_hadamard(full, block)
    return (full if signs is None else full * signs)[:, :inner]


def _times_hadamard(x: Tensor, block: int) -> Tensor:
    """Return x [outer, whole blocks] times BlockDiag(H)."""
    # One pass of a GEMM where log2 block passes are slow, or a compiler would fuse them badly.
    if is_compiling() or type_of(x.device) != "cpu":
        return _by_matrix(x, block)
    return butterflies(x, block)


def butterflies(x: Tensor, block: int) -> Tensor:
    """The same in the order of additions that kernels have, so that they can be compared bit for bit.

        y[i], y[i + h] <- y[i] + y[i + h], y[i] - y[i + h]        for h = 1, 2, 4 ... block / 2

    and the factor 1 / sqrt(block) last.
    """
    y, half = x, 1
    while half < block:
        low, high = y.reshape(-1, block // (2 * half), 2, half).unbind(2)
        y, half = torch.stack((low + high, low - high), dim=2), 2 * half
    return y.reshape(x.shape) * block**-0.5


def _by_matrix(x: Tensor, block: int) -> Tensor:
    # Autocast would round both operands to 16 bits.
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _by_matrix(x, block)
    turned = torch.mm(x.reshape(-1, block), hadamard_matrix(block, x.device))
    return turned.reshape(x.shape)


def encode(
    y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the fields of `EncodedRows`."""
    parts = [_encoded(y[each], scale, format, packed, bits) for each in row_chunks(y)]
    if len(parts) == 1:
        return parts[0]
    codes, packed_codes, inside = zip(*parts, strict=True)
    return (
        torch.cat(codes),
        torch.cat(packed_codes) if packed else None,
        torch.cat(inside) if bits else None,
    )


def _encoded(
    y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    ratio = y.to(torch.float32) * (1 / scale)
    codes = format.encode(ratio)
    inside = pack_bits(ratio.abs() <= format.max) if bits else None
    return codes, format.pack(codes) if packed else None, inside


def rotate_encode(
    x: Tensor,
    block: int,
    signs: Tensor | None,
    scale: Tensor,
    format: Format,
    packed: bool,
    bits: bool,
    residual: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """See `ops.hadamard.Functions`."""
    rotated = rotate(x, block, signs)
    codes, pairs, inside = encode(rotated, scale, format, packed, bits)
    errors = rounding_errors(codes, rotated, scale, format) if residual else None
    return codes, pairs, inside, errors


def rounding_errors(codes: Tensor, rotated: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Return codes - rotated / scale, zero where clipped."""
    # Multiply by the reciprocal as `encode` does: a division rounds differently, and elements at
    # the clipping limit would disagree with the mask.
    ratio = rotated.to(torch.float32) * (1 / scale)
    return torch.where(ratio.abs() <= format.max, codes - ratio, 0.0)


def step_sums(
    d: Tensor, codes: Tensor, bits: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `ops.hadamard.Functions`."""
    parts = []
    for each in row_chunks(d):
        inside = unpack_bits(bits[each], d.shape[1])
        parts.append(torch.where(inside, 0.0, d[each] * codes[each]).sum())
    clipped = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    if residual is None:
        return clipped, torch.zeros_like(clipped)
    return clipped, (d * residual.to(torch.float32)).sum()


def decode(packed: Tensor, format: Format, length: int) -> Tensor:
    """See `ops.hadamard`."""
    return format.unpack(packed, length)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool [outer, n] -> uint8 [outer, ceil(n / 8)], the first of eight in the lowest bit."""
    full = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8))
    return (full.reshape(len(bits), full.shape[1] // 8, 8) << _places(bits.device)).sum(
        dim=-1, dtype=torch.uint8
    )


def unpack_bits(packed: Tensor, length: int) -> Tensor:
    """Invert `pack_bits`: uint8 [outer, m] -> bool [outer, length]."""
    bits = (packed[:, :, None] >> _places(packed.device)) & 1
    return bits.reshape(len(packed), packed.shape[1] * 8)[:, :length] == 1


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
