"""Predicts forward and backward of a Linear on a GPU from its data sheet.

    seconds = sum over 3 products of max(2 M N K / rate, bytes / bandwidth) + bytes of the casts / bandwidth + launches

The rates are the makers' dense ones times 78 % (matrix units) and 92 % (memory), and a launch is 2 microseconds: the constants of
torchao's roofline for the H100 (torchao/testing/training/roofline_utils.py). Bytes of the casts per element: a per-tensor scale reads 2
for the maximum, moves 2 + 1 for the codes and 1 for their transpose; per row twice that, since both orientations are cast from the
original; per block one read less, without a separate maximum. Block-scaled products run at 66 % of the FP8 rate (DeepGEMM's first
figures: 1304 to 1358 of 1979 TFLOP/s). The prediction is right to a few tens of percent: enough to say whether FP8 can pay.
"""

from __future__ import annotations

from dataclasses import dataclass

MATRIX_SHARE, BLOCK_SHARE, MEMORY_SHARE = 0.78, 0.66, 0.92
LAUNCH_S = 2e-6
RESULT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Card:
    """Dense FLOP/s and bytes/s of the data sheet."""

    bf16: float
    fp8: float
    bandwidth: float


CARDS: dict[str, Card] = {  # part of the device's name -> card; the first that fits
    "H200": Card(989e12, 1979e12, 4.8e12),
    "H100 PCIe": Card(756e12, 1513e12, 2.0e12),
    "H100": Card(989e12, 1979e12, 3.35e12),
    "H800": Card(989e12, 1979e12, 3.35e12),
    "GH200": Card(989e12, 1979e12, 4.0e12),
    "B200": Card(2250e12, 4500e12, 8.0e12),
    "L40S": Card(362e12, 733e12, 0.864e12),
    "L4": Card(121e12, 242e12, 0.3e12),
    "RTX 4090": Card(165.2e12, 330.3e12, 1.008e12),
}

# recipe -> (cast bytes per element of x and gy, cast bytes per element of w, cast kernels, share of the rate)
CASTS: dict[str, tuple[int, int, int, float]] = {
    "bf16": (0, 0, 0, MATRIX_SHARE),
    "fp8-current": (2 + 4, 2 + 4 + 2, 9, MATRIX_SHARE),
    "fp8-row": (2 * 5, 2 * 5, 12, MATRIX_SHARE),
    "fp8-block": (2 * 3, 3 + 2, 5, BLOCK_SHARE),
}


def card(device_name: str) -> Card | None:
    """The rates of a GPU by its name; None if it is not in the table."""
    return next((found for part, found in CARDS.items() if part in device_name), None)


def seconds(recipe: str, m: int, n: int, k: int, rates: Card) -> float:
    """Forward and backward of a Linear from k to n features on m tokens, gradients of x and w included."""
    activation, weight, launches, share = CASTS[recipe]
    rate, operand_bytes = (rates.bf16, 2) if recipe == "bf16" else (rates.fp8, 1)
    bandwidth = rates.bandwidth * MEMORY_SHARE
    sizes = ((m, n, k), (m, k, n), (n, k, m))  # (rows, columns, contracted) of output, grad_input, grad_weight
    products = sum(
        max(2 * m * n * k / (rate * share), (operand_bytes * (a * c + b * c) + RESULT_BYTES * a * b) / bandwidth)
        for a, b, c in sizes
    )
    casts = (activation * (m * k + m * n) + weight * n * k) / bandwidth
    return products + casts + (3 + launches) * LAUNCH_S
