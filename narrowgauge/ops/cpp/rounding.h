// Elements and scales of a cast: the operations of formats.py and scaling.py, in their order, so that
// results are bit-identical. cast.cpp and eden.cpp include it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float load(const float* x) { return *x; }
inline float load(const uint16_t* x) { return float_of(uint32_t(*x) << 16); }  // bfloat16
inline void store(float* out, float value) { *out = value; }
// Exact: values of these formats fit into bfloat16, times scales that `cpp.exponents` allows too.
inline void store(uint16_t* out, float value) { *out = uint16_t(bits_of(value) >> 16); }
inline void store(int8_t* out, float value) { *out = int8_t(value); }

// Bits of |x|. As integers they have the order of the magnitudes, with infinity and then NaN above
// all numbers.
inline uint32_t magnitude(const float* x) { return bits_of(*x) & 0x7FFFFFFF; }
inline uint32_t magnitude(const uint16_t* x) { return uint32_t(*x & 0x7FFF) << 16; }

constexpr uint32_t EXPONENT = 0x7F800000, MANTISSA = 0x007FFFFF, SIGN = 0x80000000, ONE = 0x3F800000;
constexpr uint32_t SMALLEST_NORMAL = 0x00800000, NOT_A_NUMBER = 0x7FC00000;
constexpr int32_t LARGEST_SCALE = 0x7E800000;  // 2**126

// `Cast.rule`. OTHER is a rule that the kernel does not know: its scales are passed in.
enum Rule : int32_t { OTHER, FP32, POWER_OF_TWO_CEIL, POWER_OF_TWO_FLOOR, TWO_LEVEL, TWO_LEVEL_CEIL, FOUR_OVER_SIX };

// Must match `FormatConstants` in ops/quantize/cpp_constants.py.
struct Format {
    int32_t whole, has_nan;  // whole: an integer format
    // smallest_normal is 0 for integers. gap is 2**-mantissa: the distance of neighbours in [1, 2).
    // shift is 1.5 * 2**23 * gap.
    float max, smallest_normal, gap, shift;
};

// Must match `CppCast` in ops/quantize/cpp_constants.py.
struct Cast {
    Format format, of_scales;  // of_scales: of the scales of a two-level rule
    int32_t x_narrow;          // 1 bfloat16, 0 float32
    int32_t out_kind;          // 0 float32, 1 bfloat16, 2 int8 (integer formats)
    int32_t stochastic;
    int32_t makes_scales;  // `narrowgauge_cast` computes the scales
    int32_t two_level;     // true of a rule that is OTHER too
    int32_t folds;         // `narrowgauge_cast` multiplies values by the scales of their tiles
    Rule rule;
    float smallest_scale, smallest_whole, headroom;  // smallest_whole: of the tensor's own scale
    float largest_tile;  // scale of the largest tile, relative to the tensor's own
    int32_t tries;       // candidates for the scale of a tile, 1 or 2: factors of its amax
    float factors[2];
};

// Saturate y and round it. noise is read by stochastic rounding alone: the upper neighbour is taken
// if noise is below y's distance from the lower one, in units of their gap.
//
// To nearest even by adding and subtracting 1.5 * 2**23 gaps: float32's own rounding does the work.
// The gap of a float format depends on the exponent of y; subnormals have one gap, which is the
// reason for the maximum below. Integer formats have one gap and no -0: both additions turn -0 into
// +0.
template <bool whole, bool stochastic> inline float rounded(float y, float noise, const Format& format) {
    y = -format.max > y ? -format.max : y;  // comparisons with NaN are false, so NaN survives
    y = format.max < y ? format.max : y;
    float power = whole ? 1.f : float_of(bits_of(y) & EXPONENT);
    power = format.smallest_normal > power ? format.smallest_normal : power;
    float r;
    if (stochastic) {
        const float gap = power * format.gap, ratio = y / gap, below = std::floor(ratio);
        r = (below + (noise < ratio - below ? 1.f : 0.f)) * gap;
    } else {
        const float shift = power * format.shift;
        r = (y + shift) - shift;
    }
    // The additions lose the sign of values that round to zero.
    if (!whole) r = float_of((bits_of(r) & ~SIGN) | (bits_of(y) & SIGN));
    return !format.has_nan && y != y ? 0.0f : r;
}

// ---- scales -----------------------------------------------------------------------------------

// amax / divisor, rounded correctly: float64 has more than twice the bits of float32, so rounding
// twice is harmless.
inline float quotient(float amax, double divisor) { return float(double(amax) / divisor); }

// The scale of a tile by a rule of one level.
inline float scale_of(uint32_t amax, const Cast& cast) {
    // A non-finite amax makes the scale NaN, which makes the whole tile NaN. Zero and subnormal
    // amax have scale 1.
    if (amax >= EXPONENT) return float_of(NOT_A_NUMBER);
    if (amax < SMALLEST_NORMAL) return float_of(ONE);
    if (cast.rule == FP32) {
        const float scale = std::max(quotient(float_of(amax), cast.format.max), cast.smallest_scale);
        return std::min(scale, float_of(LARGEST_SCALE));
    }
    // 2 ** (floor(log2 amax) - floor(log2 max)) on the bits, because exp2 and log2 are inexact next
    // to powers of two. `carry` rounds the exponent up where the mantissa of amax exceeds the
    // mantissa of max.
    const uint32_t max = bits_of(cast.format.max), carry = cast.rule == POWER_OF_TWO_CEIL ? MANTISSA - (max & MANTISSA) : 0;
    const int32_t exponent = int32_t((amax + carry) & EXPONENT) - int32_t(max & EXPONENT) + int32_t(ONE);
    return float_of(uint32_t(std::min(std::max(exponent, int32_t(bits_of(cast.smallest_scale))), LARGEST_SCALE)));
}

// The float32 of a tensor under a two-level rule.
inline float whole_scale(uint32_t largest, const Cast& cast) {
    if (largest >= EXPONENT) return float_of(NOT_A_NUMBER);
    if (largest < SMALLEST_NORMAL) return float_of(ONE);
    return std::max(quotient(float_of(largest), double(cast.largest_tile) * cast.format.max), cast.smallest_whole);
}

// The scale of a tile relative to the float32 of its tensor, for `factor` times its amax.
inline float relative_scale(float amax, float whole, const Cast& cast, float factor) {
    const float smallest = float_of(SMALLEST_NORMAL), wanted = quotient(amax, cast.format.max);
    // Subnormals count as zero, whether or not the division flushes them.
    const float relative = (wanted < smallest ? 0.f : wanted) * factor / whole;
    const float scale = cast.rule == TWO_LEVEL_CEIL ? rounded<false, true>(relative, 0.f, cast.of_scales)
                                                    : rounded<false, false>(relative, 0.f, cast.of_scales);
    return relative < smallest ? 0.f : relative < float_of(EXPONENT) ? scale : float_of(NOT_A_NUMBER);
}

// Bits of the largest magnitude of each tile in one row of tiles, the rows `first` to `last` of x.
template <typename In>
void tile_maxima(const In* x, int64_t first, int64_t last, int64_t stride, int64_t columns, int64_t tile_columns,
                 std::vector<uint32_t>& amax) {
    std::fill(amax.begin(), amax.end(), 0);
    for (int64_t i = first; i < last; ++i) {
        const In* from = x + i * stride;
        if (tile_columns == 1) {
            for (int64_t j = 0; j < columns; ++j) amax[j] = std::max(amax[j], magnitude(from + j));
            continue;
        }
        for (int64_t tile = 0; tile < int64_t(amax.size()); ++tile) {
            const int64_t end = std::min((tile + 1) * tile_columns, columns);
            uint32_t largest = amax[tile];
            for (int64_t j = tile * tile_columns; j < end; ++j) largest = std::max(largest, magnitude(from + j));
            amax[tile] = largest;
        }
    }
}

// 1 / (scale * shared). Two levels: in the order of NVFP4 hardware, and a scale that underflowed
// makes zeros.
inline float reciprocal_of(float scale, float shared, bool two_level) {
    if (!two_level) return 1.f / (scale * shared);
    return scale == 0.f ? 0.f : (1.f / shared) / scale;
}

// Sum of so many numbers, which are overwritten: the later half is added to the earlier one until
// one is left (`halved_sum` in scaling.py).
inline double halved_sum(double* left, int64_t count) {
    while (count > 1) {
        const int64_t half = (count + 1) / 2;
        for (int64_t i = half; i < count; ++i) left[i - half] += left[i];
        count = half;
    }
    return left[0];
}

// The same of a power of two that the compiler knows. Loops of few steps that GCC unrolls first, it
// no longer makes vectors of, hence `unroll 1` here and in eden.cpp.
template <int64_t count> inline double halved(double* left) {
    if constexpr (count == 1) return left[0];
    else {
#pragma GCC unroll 1
        for (int64_t i = 0; i < count / 2; ++i) left[i] += left[i + count / 2];
        return halved<count / 2>(left);
    }
}

// The square of a difference. Subnormals count as zero, whether or not the subtraction flushes them.
inline double square_of(float off) {
    // Chosen on the bits: a comparison of floats keeps GCC from making vectors of the loop around it.
    const float kept = float_of(magnitude(&off) < SMALLEST_NORMAL ? 0u : bits_of(off));
    return double(kept) * double(kept);
}

}  // namespace
