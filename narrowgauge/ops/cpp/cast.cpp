// Cast a matrix to a low-precision format, tile by tile:
//
//     scale[a, b] = rule(max |x| over the tile)                            unless scales are given
//     out[i, j] = round(x[i, j] * (1 / scale[i / tile_rows, j / tile_columns]))
//
// Round to nearest, ties to even, and saturate. The operations and their order are those of
// formats.py and scaling.py, so results are bit-identical.

#include <algorithm>
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
// Exact: values of these formats fit into bfloat16.
inline void store(uint16_t* out, float value) { *out = uint16_t(bits_of(value) >> 16); }
inline void store(int8_t* out, float value) { *out = int8_t(value); }

// Bits of |x|. As integers they have the order of the magnitudes, with infinity and then NaN above
// all numbers.
inline uint32_t magnitude(const float* x) { return bits_of(*x) & 0x7FFFFFFF; }
inline uint32_t magnitude(const uint16_t* x) { return uint32_t(*x & 0x7FFF) << 16; }

constexpr uint32_t EXPONENT = 0x7F800000, MANTISSA = 0x007FFFFF, SIGN = 0x80000000, ONE = 0x3F800000;
constexpr uint32_t SMALLEST_NORMAL = 0x00800000, NOT_A_NUMBER = 0x7FC00000;
constexpr int32_t LARGEST_SCALE = 0x7E800000;  // 2**126

enum Rule : int32_t { GIVEN, FP32, POWER_OF_TWO_CEIL, POWER_OF_TWO_FLOOR };  // source of the scales

// Must match `Constants` in ops/quantize/cpp.py.
struct Format {
    int32_t x_narrow;  // 1 bfloat16, 0 float32
    int32_t out_kind;  // 0 float32, 1 bfloat16, 2 int8 (integer formats)
    int32_t whole, has_nan;
    // The constant 1.5 * 2**(23 - mantissa) is in `gaps`; smallest_normal is 0 for integers.
    float max, smallest_normal, gaps;
    Rule rule;
    float smallest_scale;
};

inline float scale_of(uint32_t amax, const Format& format) {
    // A non-finite amax makes the scale NaN, which makes the whole tile NaN. Zero and subnormal
    // amax have scale 1.
    if (amax >= EXPONENT) return float_of(NOT_A_NUMBER);
    if (amax < SMALLEST_NORMAL) return float_of(ONE);
    if (format.rule == FP32) {
        // The quotient is rounded correctly: float64 has more than twice the bits of float32, so
        // rounding twice is harmless.
        const float scale = std::max(float(double(float_of(amax)) / double(format.max)), format.smallest_scale);
        return std::min(scale, float_of(LARGEST_SCALE));
    }
    // 2 ** (floor(log2 amax) - floor(log2 max)) on the bits, because exp2 and log2 are inexact next
    // to powers of two. `carry` rounds the exponent up where the mantissa of amax exceeds the
    // mantissa of max.
    const uint32_t max = bits_of(format.max), carry = format.rule == POWER_OF_TWO_CEIL ? MANTISSA - (max & MANTISSA) : 0;
    const int32_t exponent = int32_t((amax + carry) & EXPONENT) - int32_t(max & EXPONENT) + int32_t(ONE);
    return float_of(uint32_t(std::min(std::max(exponent, int32_t(bits_of(format.smallest_scale))), LARGEST_SCALE)));
}

// Compute the scales of one row of tiles, the rows `first` to `last` of x.
template <typename In>
void scale_tiles(const In* x, int64_t first, int64_t last, int64_t stride, int64_t columns, float* scales, int64_t tile_columns,
                 const Format& format) {
    const int64_t count = (columns + tile_columns - 1) / tile_columns;
    std::vector<uint32_t> amax(count, 0);
    for (int64_t i = first; i < last; ++i) {
        const In* from = x + i * stride;
        if (tile_columns == 1) {
            for (int64_t j = 0; j < columns; ++j) amax[j] = std::max(amax[j], magnitude(from + j));
            continue;
        }
        for (int64_t tile = 0; tile < count; ++tile) {
            const int64_t end = std::min((tile + 1) * tile_columns, columns);
            uint32_t largest = amax[tile];
            for (int64_t j = tile * tile_columns; j < end; ++j) largest = std::max(largest, magnitude(from + j));
            amax[tile] = largest;
        }
    }
    for (int64_t tile = 0; tile < count; ++tile) scales[tile] = scale_of(amax[tile], format);
}

// Round to nearest even by adding and subtracting 1.5 * 2**23 units: float32's own rounding does
// the work. The unit of a float format depends on the exponent of y; subnormals have one unit,
// which is the reason for the maximum below. Integer formats have one unit and no -0: the addition
// turns -0 into +0.
template <bool whole> inline float rounded(float y, const Format& format) {
    y = -format.max > y ? -format.max : y;  // comparisons with NaN are false, so NaN survives
    y = format.max < y ? format.max : y;
    float power = float_of(bits_of(y) & EXPONENT);
    power = format.smallest_normal > power ? format.smallest_normal : power;
    const float shift = whole ? format.gaps : power * format.gaps;
    float r = (y + shift) - shift;
    // The addition loses the sign of values that round to zero.
    if (!whole) r = float_of((bits_of(r) & ~SIGN) | (bits_of(y) & SIGN));
    return !format.has_nan && y != y ? 0.0f : r;
}

template <bool whole, typename In, typename Out>
void round_rows(const In* x, Out* out, int64_t first, int64_t last, int64_t stride, int64_t columns, float* scales,
                int64_t tile_rows, int64_t tile_columns, const Format& given) {
    // A local copy, which no store to `out` can alias, stays in registers.
    const Format format = given;
    const int64_t scales_per_row = (columns + tile_columns - 1) / tile_columns;
    for (int64_t i = first; i < last; ++i) {
        const In* from = x + i * stride;
        Out* to = out + i * columns;
        float* scale = scales + i / tile_rows * scales_per_row;
        if (format.rule != GIVEN && i % tile_rows == 0)
            scale_tiles(x, i, std::min(i + tile_rows, last), stride, columns, scale, tile_columns, format);
        if (tile_columns == 1) {
            for (int64_t j = 0; j < columns; ++j) store(to + j, rounded<whole>(load(from + j) * (1.f / scale[j]), format));
            continue;
        }
        for (int64_t begin = 0; begin < columns; begin += tile_columns, ++scale) {
            const int64_t end = std::min(begin + tile_columns, columns);
            const float reciprocal = 1.f / *scale;
            for (int64_t j = begin; j < end; ++j) store(to + j, rounded<whole>(load(from + j) * reciprocal, format));
        }
    }
}

}  // namespace

// Rows of x lie `stride` elements apart, rows of out `columns` elements. `first` and `last` count
// rows, or rows of tiles if this function computes the scales: a tile must not be split between
// threads.
extern "C" void narrowgauge_cast(int64_t first, int64_t last, const Format* format, const void* x, void* out, float* scales,
                                 int64_t stride, int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns) {
    if (format->rule != GIVEN) {
        first *= tile_rows;
        last = std::min(last * tile_rows, rows);
    }
    const auto to = [&](const auto* from, auto* into) {
        if (format->whole) round_rows<true>(from, into, first, last, stride, columns, scales, tile_rows, tile_columns, *format);
        else round_rows<false>(from, into, first, last, stride, columns, scales, tile_rows, tile_columns, *format);
    };
    const auto from = [&](const auto* given) {
        if (format->out_kind == 0) to(given, static_cast<float*>(out));
        if (format->out_kind == 1) to(given, static_cast<uint16_t*>(out));
        if (format->out_kind == 2) to(given, static_cast<int8_t*>(out));
    };
    format->x_narrow ? from(static_cast<const uint16_t*>(x)) : from(static_cast<const float*>(x));
}
