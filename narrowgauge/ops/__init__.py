"""The three functions that carry the library: quantize, dequantize, mm. A folder per op: contract, definition, kernels."""

from narrowgauge.ops.mm import mm
from narrowgauge.ops.quantize import dequantize, quantize

__all__ = ["dequantize", "mm", "quantize"]
