"""The functions that carry the library: quantize, dequantize, mm, rotate. A folder per op: contract, definition, kernels."""

from narrowgauge.ops.mm import mm
from narrowgauge.ops.quantize import dequantize, quantize

__all__ = ["dequantize", "mm", "quantize"]
