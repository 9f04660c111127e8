"""The definition of rotate and unrotate in plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.addresses import wrapper
from narrowgauge.ops.hadamard.codes import unpack_bits

# The signs of TransformerEngine's NVFP4 recipe (arXiv 2509.25149), so that a block of 16 agrees with it.
_SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

# Built once; constants of mathematics, not a state. On a GPU a number that comes from the host is waited for, and ends a capture.
_matrices: dict[tuple[int, torch.device], Tensor] = {}
_signs: dict[tuple[int, torch.device], Tensor] = {}


def hadamard_matrix(block: int, device: torch.device) -> Tensor:
    """H [block, block] float32, orthonormal: (-1) ** popcount(i & j) / sqrt(block)."""
    return _constant(_build, _matrices, block, device)


def _constant(
    build: Callable[[int, torch.device], Tensor],
    built: dict[tuple[int, torch.device], Tensor],
    block: int,
    device: torch.device,
) -> Tensor:
    if torch.compiler.is_compiling() or device.type == "meta" or wrapper():
        return build(block, device)
    key = (block, device)
    if key not in built:
        with torch.inference_mode(False):
            built[key] = build(block, device)
    return built[key]


def _build(block: int, device: torch.device) -> Tensor:
    index = torch.arange(block, device=device, dtype=torch.int32)
    parity = index[:, None] & index[None, :]
    for shift in (8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return (1 - 2 * (parity & 1)).to(torch.float32) * block**-0.5


def fixed_signs(block: int, device: torch.device) -> Tensor:
    """[block] of +1 and -1: TransformerEngine's for 16, else drawn from Python's generator seeded with the block."""
    return _constant(_draw_fixed, _signs, block, device)


def _draw_fixed(block: int, device: torch.device) -> Tensor:
    source = random.Random(block)
    signs = _SIGNS_16 if block == 16 else tuple(source.choice((1, -1)) for _ in range(block))
    return torch.tensor(signs, dtype=torch.float32, device=device)


def rotate(x: Tensor, block: int, signs: Tensor | None) -> Tensor:
    """See `ops.hadamard`; arguments are checked there."""
    full = torch.nn.functional.pad(x.to(torch.float32), (0, -x.shape[1] % block))
    return _times_hadamard(full if signs is None else full * signs, block)


def unrotate(y: Tensor, block: int, inner: int, signs: Tensor | None, bits: Tensor | None) -> Tensor:
    """The inverse, of the elements of y whose bit is set."""
    y = y.to(torch.float32)
    full = _times_hadamard(y if bits is None else torch.where(unpack_bits(bits, y.shape[1]), y, 0.0), block)
    return (full if signs is None else full * signs)[:, :inner]


def _times_hadamard(x: Tensor, block: int) -> Tensor:
    """x [outer, whole blocks] times BlockDiag(H); float32 under autocast too."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _times_hadamard(x, block)
    turned = torch.mm(x.reshape(-1, block), hadamard_matrix(block, x.device))
    return turned.reshape(x.shape)
