"""The random numbers of `ops.random` inside a kernel: a function of the key and of the element's number."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(key, row, length, column):
    """float32 in [0, 1), multiples of 2^-24, of element row * length + column modulo 2^32.

    key  pointer to (low, high) as int64; row and column broadcast against each other
    """
    low, high = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    index = (row.to(tl.uint32) * tl.cast(length, tl.uint32) + low) + column.to(tl.uint32)
    bits = mix(mix(index) ^ high)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
