"""torch.nn.functional.scaled_mm on CUDA, written down: its own check of the arguments, then its sum from raw memory.

Where a scale lies is taken from cuBLAS' documentation, element by element, and has nothing in common with ops/mm/cublas.py.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType
from torch.nn.functional import scaled_mm as torch_scaled_mm

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scaled_mm(lhs, rhs, bias, output_dtype):
    """As `cublas.scaled_mm`, which hands a [M, K] and b [K, N], column-major, to torch -> [M, N]."""
    (a, scale_a, how_a, swizzle_a), (b, scale_b, how_b, swizzle_b) = lhs, rhs
    how_a, how_b = ([ScalingType(value) for value in how] for how in (how_a, how_b))
    swizzle_a, swizzle_b = (
        [SwizzleType(value) for value in swizzle] for swizzle in (swizzle_a, swizzle_b)
    )
    b = b.T
    if (
        a.dtype != torch.float4_e2m1fn_x2 or len(how_a) == 2
    ):  # of MXFP4 the shape function is wrong, see test_mm_blocks
        with FakeTensorMode():
            torch_scaled_mm(
                fake(a), fake(b), fakes(scale_a), how_a, fakes(scale_b), how_b,
                swizzle_a=swizzle_a, swizzle_b=swizzle_b, output_dtype=output_dtype,
            )  # fmt: skip
    left, right = (
        _decoded(x, shape) * _scales(shape, scale, how, swizzle)
        for x, shape, scale, how, swizzle in (
            (a, _shape(a), scale_a, how_a, swizzle_a),
            (b.T, _shape(b.T), scale_b, how_b, swizzle_b),
        )
    )
    return (left @ right.T).to(output_dtype)


def fake(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def fakes(scales):
    return [fake(scale) for scale in scales] if isinstance(scales, list) else fake(scales)


def _shape(x):
    """[outer, K] in elements; two of E2M1 share a byte."""
    return x.shape[0], x.shape[1] * (2 if x.dtype == torch.float4_e2m1fn_x2 else 1)


def _decoded(x, shape):
    """[outer, K] float64 of a row-major operand."""
    if x.dtype != torch.float4_e2m1fn_x2:
        return x.to(torch.float64)
    data = x.view(torch.uint8)
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).reshape(shape).long()
    return torch.tensor(E2M1_LEVELS, dtype=torch.float64)[codes & 7] * (1 - 2 * (codes >> 3))


def _scales(shape, scales, how, swizzle):
    """[outer, K] float64: the scale of each element, found by its address."""
    scales, how = (x if isinstance(x, list) else [x] for x in (scales, how))
    outer, inner = shape
    row, k = torch.arange(outer)[:, None], torch.arange(inner)[None, :]
    memory = scales[0].as_strided((scales[0].numel(),), (1,))
    if how[0] == ScalingType.BlockWise1x128:
        address = (k // 128) * outer + row
    elif how[0] == ScalingType.BlockWise128x128:
        address = (row // 128) * (-(-inner // 512) * 4) + k // 128
    else:
        assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4
        column = k // (16 if how[0] == ScalingType.BlockWise1x16 else 32)
        panels = -(-inner // (16 if how[0] == ScalingType.BlockWise1x16 else 32) // 4)
        block = (row // 128) * panels + column // 4
        address = block * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    numbers = memory.to(torch.float64)[address]
    return numbers * scales[1].to(torch.float64) if len(scales) == 2 else numbers
