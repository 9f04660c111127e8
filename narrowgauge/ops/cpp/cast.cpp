// Rounds a matrix to the values of a narrow format, tile by tile:
//
//     scale[a, b] = rule(max |x| over the tile)                            where no scale is given
//     out[i, j] = round(x[i, j] * (1 / scale[i / tile_rows, j / tile_columns]))
//
// to nearest, ties to even, saturating: the operations of formats.py and scaling.py in their order, so the same bits.

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
inline void store(uint16_t* out, float value) { *out = uint16_t(bits_of(value) >> 16); }  // exact: values of narrow formats
inline void store(int8_t* out, float value) { *out = int8_t(value); }

// The bits of |x|: they are ordered as the magnitudes are, infinity and then NaN above all numbers.
inline uint32_t magnitude(const float* x) { return bits_of(*x) & 0x7FFFFFFF; }
inline uint32_t magnitude(const uint16_t* x) { return uint32_t(*x & 0x7FFF) << 16; }

constexpr uint32_t EXPONENT = 0x7F800000, MANTISSA = 0x007FFFFF, SIGN = 0x80000000, ONE = 0x3F800000;
constexpr uint32_t SMALLEST_NORMAL = 0x00800000, NOT_A_NUMBER = 0x7FC00000;
constexpr int32_t LARGEST_SCALE = 0x7E800000;  // 2**126

enum Rule : int32_t { GIVEN, FP32, POWER_OF_TWO_CEIL, POWER_OF_TWO_FLOOR };  // where scales come from

// `Constants` in ops/quantize/cpp.py.
struct Format {
    int32_t x_narrow;  // bfloat16, else float32
    int32_t out_kind;  // 0 float32, 1 bfloat16, 2 int8 (of whole numbers)
    int32_t whole, has_nan;
    float max, smallest_normal, gaps;  // gaps: 1.5 * 2**(23 - mantissa); of whole numbers smallest_normal is 0
    Rule rule;
    float smallest_scale;
};

inline float scale_of(uint32_t amax, const Format& format) {
    if (amax >= EXPONENT) return float_of(NOT_A_NUMBER);
    if (amax < SMALLEST_NORMAL) return float_of(ONE);
    if (format.rule == FP32) {
        const float scale = std::max(float(double(float_of(amax)) / double(format.max)), format.smallest_scale);
        return std::min(scale, float_of(LARGEST_SCALE));
    }
    const uint32_t max = bits_of(format.max), carry = format.rule == POWER_OF_TWO_CEIL ? MANTISSA - (max & MANTISSA) : 0;
    const int32_t exponent = int32_t((amax + carry) & EXPONENT) - int32_t(max & EXPONENT) + int32_t(ONE);
    return float_of(uint32_t(std::min(std::max(exponent, int32_t(bits_of(format.smallest_scale))), LARGEST_SCALE)));
}

// The scales of one row of tiles, of the rows of x from `first` to `last`.
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

// Whole numbers have one gap, and no -0: adding 1.5 * 2**23 and taking it away rounds them, and turns -0 into +0.
template <bool whole> inline float rounded(float y, const Format& format) {
    y = -format.max > y ? -format.max : y;  // in this order NaN stays
    y = format.max < y ? format.max : y;
    float power = float_of(bits_of(y) & EXPONENT);
    power = format.smallest_normal > power ? format.smallest_normal : power;
    const float shift = whole ? format.gaps : power * format.gaps;
    float r = (y + shift) - shift;
    if (!whole) r = float_of((bits_of(r) & ~SIGN) | (bits_of(y) & SIGN));
    return !format.has_nan && y != y ? 0.0f : r;
}

template <bool whole, typename In, typename Out>
void round_rows(const In* x, Out* out, int64_t first, int64_t last, int64_t stride, int64_t columns, float* scales,
                int64_t tile_rows, int64_t tile_columns, const Format& given) {
    const Format format = given;  // a copy of its own, which no store to `out` can change
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

// Rows of x lie `stride` elements apart, those of out `columns`. first, last: of rows, or of rows of tiles where scales are made here.
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
