"""Scale rules inside a kernel, to the bit as `scaling` has them. C: see `CastConstants`."""

import triton
import triton.language as tl


@triton.jit
def _over(x, divisor: tl.constexpr, C: tl.constexpr):
    """x / divisor, a constant, correctly rounded: a quotient within a unit and its remainder, which fma leaves exact (Markstein).

    tl.div_rn has a hundred instructions beside it for operands that are none here. x >= 0; infinity may become NaN.
    """
    if C.interpreted:  # where fma rounds the product
        y = tl.div_rn(x, tl.zeros_like(x) + divisor)
    else:
        first = x * (1.0 / divisor)
        y = tl.fma(tl.fma(first, tl.zeros_like(x) - divisor, x), tl.zeros_like(x) + 1.0 / divisor, first)
    return y


@triton.jit
def _inverse(x, C: tl.constexpr):
    """1 / x correctly rounded, x and it normal numbers: the way of rcp.rn.f32 for such, without its other one. NaN stays NaN."""
    if C.interpreted:
        y = tl.div_rn(tl.zeros_like(x) + 1.0, x)
    else:
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        y = tl.fma(tl.fma(x * -1.0, near, tl.zeros_like(x) + 1.0), near, near)
    return y


@triton.jit
def scale_of(amax_bits, C: tl.constexpr):
    """The bits of amax as int32, any shape -> scales float32: 1 where amax is zero or subnormal, NaN where it is not finite.

    Of two levels that of the tensor, which the e4m3 scales of its tiles multiply, before headroom.
    """
    if C.power:
        bits = tl.minimum(amax_bits, 0x7F7FFFFF) + C.carry
        exponent = (bits & 0x7F800000) - (C.log2 << 23)
        # At most 2^126, since no format here has a largest magnitude below 4.
        scale = tl.maximum(exponent, (C.lowest_exponent + 127) << 23).to(tl.float32, bitcast=True)
    else:
        amax = amax_bits.to(tl.float32, bitcast=True)
        largest = 448.0 * C.largest if C.two_level else C.largest
        scale = tl.maximum(_over(amax, largest, C), 2.0**C.lowest_exponent)
    scale = tl.where(amax_bits < 0x00800000, 1.0, scale)
    return tl.where((amax_bits & 0x7FFFFFFF) < 0x7F800000, scale, float("nan"))


@triton.jit
def e4m3_scale_of(amax_bits, shared, C: tl.constexpr):
    """The bits of amax as int32, any shape, and `scale_of` the tensor -> scales float32 that e4m3 holds."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    wanted = _over(amax, C.largest, C)
    wanted = tl.where(wanted < 2.0**-126, 0.0, wanted)  # or rounding up would make 2^-9 of what is left
    wanted = tl.div_rn(wanted, tl.zeros_like(wanted) + shared)
    y = tl.where(wanted > 448.0, 448.0, wanted)
    bits = y.to(tl.int32, bitcast=True)
    if C.ceils:
        normal = (bits + 0xFFFFF) & -0x100000
        subnormal = tl.ceil(y * 512.0) * 0.001953125
    else:
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        subnormal = (y + 16384.0) - 16384.0  # whose unit is 2^-9
    scale = tl.where(y < 0.015625, subnormal, normal.to(tl.float32, bitcast=True))
    scale = tl.where(wanted < 2.0**-126, 0.0, scale)
    return tl.where(tl.abs(wanted) < float("inf"), scale, float("nan"))


@triton.jit
def reciprocal_of(scale, shared, C: tl.constexpr):
    """What x is multiplied by: 1 / scale, rounded once; of two levels (1 / shared) / scale, in this order, zero where the scale is.

    Any shape, NaN stays NaN. Scales and their reciprocals are normal numbers, see `scaling`. shared: of two levels, else unused
    """
    if C.two_level:
        whole = shared * C.headroom
        inverse = _inverse(whole, C)
        reciprocal = tl.where(scale == 0.0, 0.0, tl.div_rn(tl.zeros_like(scale) + inverse, scale))
    elif C.power and C.headroom == 1:
        exact = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        reciprocal = tl.where(scale == scale, exact, float("nan"))
    else:
        reciprocal = _inverse(scale * C.headroom, C)
    return reciprocal
