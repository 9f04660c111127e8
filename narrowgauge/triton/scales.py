"""Scale rules inside a kernel, to the bit as `scaling` has them. C: see `settings.Settings`."""

import triton
import triton.language as tl


@triton.jit
def scale_of(amax_bits, C: tl.constexpr):
    """The bits of amax as int32, any shape -> scales float32: 1 where amax is zero or subnormal, NaN where it is not finite."""
    if C.power:
        bits = tl.minimum(amax_bits, 0x7F7FFFFF) + C.carry
        exponent = (bits & 0x7F800000) - (C.log2 << 23)
        # At most 2^126, since no format here has a largest magnitude below 4: its reciprocal is normal too.
        scale = tl.maximum(exponent, (C.lowest_exponent + 127) << 23).to(tl.float32, bitcast=True)
    else:
        amax = amax_bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + C.largest), 2.0**C.lowest_exponent)
    scale = tl.where(amax_bits < 0x00800000, 1.0, scale)
    return tl.where((amax_bits & 0x7FFFFFFF) < 0x7F800000, scale, float("nan"))


@triton.jit
def divisor(scale, C: tl.constexpr):
    """What `divided` takes: the reciprocal of a power of two, which is exact, or the scale; NaN stays NaN."""
    if C.multiplies:
        reciprocal = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        by = tl.where(scale == scale, reciprocal, float("nan"))
    else:
        by = scale * C.headroom
    return by


@triton.jit
def divided(x, by, C: tl.constexpr):
    """x over its scale, correctly rounded. x float32; `by` from `divisor`, broadcastable to it."""
    if C.multiplies:
        y = x * by
    else:
        y = tl.div_rn(x, tl.broadcast_to(by, x.shape))
    return y
