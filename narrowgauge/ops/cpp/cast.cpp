// Cast a matrix to a low-precision format, tile by tile:
//
//     amax[a, b]  = max |x| over the tile
//     scale[a, b] = rule(amax[a, b])
//     out[i, j]   = round(x[i, j] * (1 / scale[i / tile_rows, j / tile_columns]))
//
// Round to nearest with ties to even, or stochastically with the noise of a key (noise.h); saturate.
// The operations and their order are those of formats.py, scaling.py and quantize/definition.py, so
// results are bit-identical.
//
// `narrowgauge_cast` does all three steps in one pass, or takes the scales. Under a two-level rule
// the scale of a tile depends on the largest magnitude of the whole tensor, so three passes follow
// each other: `narrowgauge_amax`, `narrowgauge_two_level` and `narrowgauge_cast`.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "noise.h"

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
    Rule rule;
    float smallest_scale, smallest_whole, headroom;  // smallest_whole: of the tensor's own scale
    float largest_tile;  // scale of the largest tile, relative to the tensor's own
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
inline float relative_scale(float amax, float whole, const Cast& cast, float factor = 1.f) {
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

// ---- a matrix ---------------------------------------------------------------------------------

struct Matrix {
    int64_t stride, rows, columns, tile_rows, tile_columns;  // rows of x lie `stride` elements apart
    int64_t tiles_per_row() const { return (columns + tile_columns - 1) / tile_columns; }
};

// Element (i, j) has number i * of_row + j * of_column of the key (low, high).
struct Noise {
    uint32_t low, high, of_row, of_column;
};

template <typename In> void amax_of(const In* x, const Matrix& matrix, int64_t first, int64_t last, float* amax) {
    std::vector<uint32_t> maxima(matrix.tiles_per_row());
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t row = tile * matrix.tile_rows;
        tile_maxima(x, row, std::min(row + matrix.tile_rows, matrix.rows), matrix.stride, matrix.columns, matrix.tile_columns, maxima);
        for (const uint32_t largest : maxima) *amax++ = float_of(largest);
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

// Replace each amax of the tiles `first` to `last` of rows of tiles by the scale of amax or of 1.5
// amax, whichever has the smaller squared error (`least_error` in quantize/definition.py).
//
// transposed  the elements of a tile are added up column by column
template <bool integers, typename In>
void choose_scales(const In* x, const Matrix& matrix, int64_t first, int64_t last, float whole, bool transposed, float* amax,
                   const Cast& cast) {
    const Format format = cast.format;
    const int64_t height = matrix.tile_rows, width = matrix.tile_columns;
    std::vector<float> values(height * width);
    std::vector<double> squares(height * width);
    for (int64_t row = first; row < last; ++row) {
        for (int64_t tile = 0; tile < matrix.tiles_per_row(); ++tile, ++amax) {
            const int64_t rows = std::min(height, matrix.rows - row * height);
            const int64_t columns = std::min(width, matrix.columns - tile * width);
            std::fill(values.begin(), values.end(), 0.f);  // a short tile is padded with zeros
            for (int64_t i = 0; i < rows; ++i) {
                const In* from = x + (row * height + i) * matrix.stride + tile * width;
                for (int64_t j = 0; j < columns; ++j) values[transposed ? j * height + i : i * width + j] = load(from + j);
            }
            const auto error = [&](float scale) {
                const float reciprocal = reciprocal_of(scale, whole, true), full = scale * whole;
                for (int64_t i = 0; i < height * width; ++i) {
                    const float off = values[i] - rounded<integers, false>(values[i] * reciprocal, 0.f, format) * full;
                    squares[i] = std::fabs(off) < float_of(SMALLEST_NORMAL) ? 0. : double(off) * double(off);
                }
                return halved_sum(squares.data(), height * width);
            };
            const float six = relative_scale(*amax, whole, cast), four = relative_scale(*amax, whole, cast, 1.5f);
            *amax = error(four) < error(six) ? four : six;
        }
    }
}

template <bool whole, bool stochastic, typename In, typename Out>
void round_rows(const In* x, Out* out, const Matrix& matrix, int64_t first, int64_t last, float* scales, const float* given,
                const Noise& of, const Cast& cast) {
    // Local copies, which no store to `out` can alias, stay in registers.
    const Format format = cast.format;
    const Noise noise = of;
    const float shared = given ? *given : 1.f;
    const bool two_level = cast.two_level;
    const int64_t columns = matrix.columns, width = matrix.tile_columns;
    const int64_t count = matrix.tiles_per_row();
    std::vector<uint32_t> maxima(count);
    std::vector<float> reciprocals(count);
    for (int64_t i = first; i < last; ++i) {
        if (i == first || i % matrix.tile_rows == 0) {
            float* scale = scales + i / matrix.tile_rows * count;
            if (cast.makes_scales) {
                tile_maxima(x, i, std::min(i + matrix.tile_rows, last), matrix.stride, columns, width, maxima);
                for (int64_t tile = 0; tile < count; ++tile) scale[tile] = scale_of(maxima[tile], cast);
            }
            for (int64_t tile = 0; tile < count; ++tile) reciprocals[tile] = reciprocal_of(scale[tile], shared, two_level);
        }
        const In* from = x + i * matrix.stride;
        Out* to = out + i * columns;
        const uint32_t at = uint32_t(i) * noise.of_row;
        const auto round = [=](int64_t j, float reciprocal) {
            const float number = stochastic ? uniform(noise.low, noise.high, at + uint32_t(j) * noise.of_column) : 0.f;
            store(to + j, rounded<whole, stochastic>(load(from + j) * reciprocal, number, format));
        };
        const float* reciprocal = reciprocals.data();
        if (width == 1) {
            for (int64_t j = 0; j < columns; ++j) round(j, reciprocal[j]);
            continue;
        }
        for (int64_t begin = 0; begin < columns; begin += width, ++reciprocal) {
            const int64_t end = std::min(begin + width, columns);
            for (int64_t j = begin; j < end; ++j) round(j, *reciprocal);
        }
    }
}

// Call `run` with x as a pointer to its dtype.
template <typename Run> void with_dtype(const void* x, const Cast& cast, const Run& run) {
    if (cast.x_narrow) run(static_cast<const uint16_t*>(x));
    else run(static_cast<const float*>(x));
}

}  // namespace

extern "C" {

// Write the largest magnitude of each tile to amax, row-major. `first` and `last` count rows of
// tiles.
void narrowgauge_amax(int64_t first, int64_t last, const Cast* cast, const void* x, int64_t stride, int64_t rows, int64_t columns,
                      int64_t tile_rows, int64_t tile_columns, float* amax) {
    const Matrix matrix{stride, rows, columns, tile_rows, tile_columns};
    with_dtype(x, *cast, [&](const auto* from) { amax_of(from, matrix, first, last, amax + first * matrix.tiles_per_row()); });
}

// Replace each amax by its scale under a two-level rule. `first` and `last` count tiles.
//
// largest  the largest of all amax, NaN if one of them is NaN
// shared   receives the float32 of the tensor times the headroom
void narrowgauge_two_level(int64_t first, int64_t last, const Cast* given, const float* largest, float* amax, float* shared) {
    const Cast cast = *given;
    const float whole = whole_scale(bits_of(*largest), cast);
    for (int64_t i = first; i < last; ++i) amax[i] = relative_scale(amax[i], whole, cast);
    if (first == 0) *shared = whole * cast.headroom;
}

// The same for the rule that chooses between two scales of a tile. `first` and `last` count rows of
// tiles.
void narrowgauge_four_over_six(int64_t first, int64_t last, const Cast* given, const void* x, int64_t stride, int64_t rows,
                               int64_t columns, int64_t tile_rows, int64_t tile_columns, const float* largest, int32_t transposed,
                               float* amax, float* shared) {
    const Cast cast = *given;
    const Matrix matrix{stride, rows, columns, tile_rows, tile_columns};
    const float whole = whole_scale(bits_of(*largest), cast);
    with_dtype(x, cast, [&](const auto* from) {
        float* scales = amax + first * matrix.tiles_per_row();
        if (cast.format.whole) choose_scales<true>(from, matrix, first, last, whole, transposed, scales, cast);
        else choose_scales<false>(from, matrix, first, last, whole, transposed, scales, cast);
    });
    if (first == 0) *shared = whole * cast.headroom;
}

// Round x to `out`, whose rows are `columns` elements. `first` and `last` count rows, or rows of
// tiles if this function computes the scales: a tile must not be split between threads.
//
// scales  read, or written if the cast makes them
// shared  factor of all scales, or null
// transposed  x is the transpose of the tensor that is cast
void narrowgauge_cast(int64_t first, int64_t last, const Cast* cast, const void* x, int64_t stride, int64_t rows, int64_t columns,
                      int64_t tile_rows, int64_t tile_columns, float* scales, const float* shared, uint32_t low, uint32_t high,
                      int32_t transposed, void* out) {
    const Matrix matrix{stride, rows, columns, tile_rows, tile_columns};
    // Noise is numbered in the row-major order of the tensor, whatever its memory order.
    const Noise noise{low, high, transposed ? 1 : uint32_t(columns), transposed ? uint32_t(rows) : 1};
    if (cast->makes_scales) {
        first *= tile_rows;
        last = std::min(last * tile_rows, rows);
    }
    const auto run = [&](auto whole, auto stochastic, const auto* from, auto* to) {
        round_rows<whole.value, stochastic.value>(from, to, matrix, first, last, scales, shared, noise, *cast);
    };
    const auto with_rounding = [&](const auto* from, auto* to) {
        const std::true_type yes;
        const std::false_type no;
        if (cast->format.whole) cast->stochastic ? run(yes, yes, from, to) : run(yes, no, from, to);
        else cast->stochastic ? run(no, yes, from, to) : run(no, no, from, to);
    };
    with_dtype(x, *cast, [&](const auto* from) {
        if (cast->out_kind == 0) with_rounding(from, static_cast<float*>(out));
        if (cast->out_kind == 1) with_rounding(from, static_cast<uint16_t*>(out));
        if (cast->out_kind == 2) with_rounding(from, static_cast<int8_t*>(out));
    });
}

}  // extern "C"
