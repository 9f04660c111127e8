"""Scale rules inside a kernel, bit-identical to `scaling`. C: see `CastConstants`."""

import triton
import triton.language as tl


@triton.jit
def _over(x, divisor: tl.constexpr, C: tl.constexpr):
    """Return x / divisor, correctly rounded, for a constant divisor and x >= 0.

    Infinity may become NaN.

    Markstein's method: a quotient within one unit, and its remainder, which fma computes exactly.
    tl.div_rn would add a hundred instructions for operands that do not occur here.
    """
    if C.interpreted:  # the interpreter's fma rounds the product
        y = tl.div_rn(x, tl.zeros_like(x) + divisor)
    else:
        first = x * (1.0 / divisor)
        y = tl.fma(
            tl.fma(first, tl.zeros_like(x) - divisor, x), tl.zeros_like(x) + 1.0 / divisor, first
        )
    return y


@triton.jit
def _inverse(x, C: tl.constexpr):
    """Return 1 / x, correctly rounded, for normal x with normal reciprocal. NaN stays NaN.

    This is the fast path of rcp.rn.f32, without its slow path for other operands.
    """
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
    """Return the scale float32 for the bits of amax, int32 of any shape.

    The scale is 1 if amax is zero or subnormal, and NaN if it is not finite. Under two-level rules
    it is the scale of the tensor before headroom, which multiplies the e4m3 scales of the tiles.
    """
    if C.power:
        bits = tl.minimum(amax_bits, 0x7F7FFFFF) + C.carry
        exponent = (bits & 0x7F800000) - (C.log2 << 23)
        # At most 2^126, because `cast_constants.refuse` rejects formats with a largest value below
        # 4.
        scale = tl.maximum(exponent, (C.lowest_exponent + 127) << 23).to(tl.float32, bitcast=True)
    else:
        amax = amax_bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(_over(amax, C.largest_scaled, C), 2.0**C.lowest_exponent)
    scale = tl.where(amax_bits < 0x00800000, 1.0, scale)
    return tl.where((amax_bits & 0x7FFFFFFF) < 0x7F800000, scale, float("nan"))


@triton.jit
def e4m3_scale_of(amax_bits, shared, C: tl.constexpr, factor: tl.constexpr = 1.0):
    """Return e4m3 scales, as float32, for the bits of amax, int32 of any shape.

    shared  `scale_of` the tensor
    factor  multiplies amax (`ScaleRule.tries`)
    """
    amax = amax_bits.to(tl.float32, bitcast=True)
    wanted = _over(amax, C.largest, C)
    # Otherwise rounding up would turn the rest into 2^-9.
    wanted = tl.where(wanted < 2.0**-126, 0.0, wanted)
    if factor != 1.0:
        wanted = wanted * factor
    wanted = tl.div_rn(wanted, tl.zeros_like(wanted) + shared)
    y = tl.where(wanted > 448.0, 448.0, wanted)
    bits = y.to(tl.int32, bitcast=True)
    if C.ceils:
        normal = (bits + 0xFFFFF) & -0x100000
        subnormal = tl.ceil(y * 512.0) * 0.001953125
    else:
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        # Rounds to a multiple of 2^-9, the unit of e4m3's subnormals.
        subnormal = (y + 16384.0) - 16384.0
    scale = tl.where(y < 0.015625, subnormal, normal.to(tl.float32, bitcast=True))
    scale = tl.where(wanted < 2.0**-126, 0.0, scale)
    return tl.where(tl.abs(wanted) < float("inf"), scale, float("nan"))


@triton.jit
def reciprocal_of(scale, shared, C: tl.constexpr):
    """Return the factor of x: 1 / scale, rounded once; under two-level rules (1 / shared) / scale.

    Any shape; NaN stays NaN. Under two-level rules the order of operations is NVFP4's, and a zero
    scale gives zero. Scales and their reciprocals are normal numbers, see `scaling`. shared is
    unused otherwise.
    """
    if C.two_level:
        whole = shared * C.headroom
        inverse = _inverse(whole, C)
        reciprocal = tl.where(scale == 0.0, 0.0, tl.div_rn(tl.zeros_like(scale) + inverse, scale))
    elif C.power and C.headroom == 1:
        # The reciprocal of a power of two: negate the exponent on the bits.
        exact = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        reciprocal = tl.where(scale == scale, exact, float("nan"))
    else:
        reciprocal = _inverse(scale * C.headroom, C)
    return reciprocal
