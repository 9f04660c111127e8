"""Random numbers of `ops.random` inside a kernel, a function of key and element index."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(key, row, length, column):
    """Return float32 in [0, 1), multiples of 2^-24, of element row * length + column modulo 2^32.

    key          pointer to (low, high) as int64
    row, column  broadcast against each other
    """
    low, high = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    # 32 bits, as the noise is defined. With 64-bit indices and four warps, casts of both
    # orientations spilled 464 bytes.
    index = (row.to(tl.uint32) * tl.cast(length, tl.uint32) + low) + column.to(tl.uint32)
    bits = mix(mix(index) ^ high)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
