// Rounds a matrix to the values of a narrow format, tile by tile, in one pass:
//
//     out[i, j] = round(x[i, j] / scale[i / tile_rows, j / tile_columns])
//
// to nearest, ties to even, saturating: the operations of formats.py in its order, so the same bits.

#include <cstdint>
#include <cstring>

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

constexpr uint32_t EXPONENT = 0x7F800000, SIGN = 0x80000000;

struct Format {
    float max, smallest_normal, gaps;  // gaps: 1.5 * 2**(23 - mantissa); of whole numbers smallest_normal is 0
    bool has_nan;
};

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
void round_rows(const In* x, Out* out, int64_t first, int64_t last, int64_t stride, int64_t columns, const float* scales,
                int64_t tile_rows, int64_t tile_columns, const Format format) {
    const int64_t scales_per_row = (columns + tile_columns - 1) / tile_columns;
    for (int64_t i = first; i < last; ++i) {
        const In* from = x + i * stride;
        Out* to = out + i * columns;
        const float* scale = scales + i / tile_rows * scales_per_row;
        if (tile_columns == 1) {
            for (int64_t j = 0; j < columns; ++j) store(to + j, rounded<whole>(load(from + j) / scale[j], format));
            continue;
        }
        for (int64_t begin = 0; begin < columns; begin += tile_columns, ++scale) {
            const int64_t end = begin + tile_columns < columns ? begin + tile_columns : columns;
            const float divisor = *scale;
            for (int64_t j = begin; j < end; ++j) store(to + j, rounded<whole>(load(from + j) / divisor, format));
        }
    }
}

}  // namespace

// x_narrow: bfloat16, else float32. out_kind: 0 float32, 1 bfloat16, 2 int8 (of whole numbers).
// Rows of x lie `stride` elements apart, those of out `columns`.
extern "C" void narrowgauge_round_nearest(int64_t first, int64_t last, const void* x, int32_t x_narrow, void* out,
                                          int32_t out_kind, int64_t stride, int64_t columns, const float* scales,
                                          int64_t tile_rows, int64_t tile_columns, int32_t whole, int32_t has_nan, float max,
                                          float smallest_normal, float gaps) {
    const Format format{max, smallest_normal, gaps, has_nan != 0};
    const auto to = [&](const auto* from, auto* into) {
        if (whole) round_rows<true>(from, into, first, last, stride, columns, scales, tile_rows, tile_columns, format);
        else round_rows<false>(from, into, first, last, stride, columns, scales, tile_rows, tile_columns, format);
    };
    const auto from = [&](const auto* given) {
        if (out_kind == 0) to(given, static_cast<float*>(out));
        if (out_kind == 1) to(given, static_cast<uint16_t*>(out));
        if (out_kind == 2) to(given, static_cast<int8_t*>(out));
    };
    x_narrow ? from(static_cast<const uint16_t*>(x)) : from(static_cast<const float*>(x));
}
