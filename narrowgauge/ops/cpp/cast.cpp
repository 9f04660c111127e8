// Cast a matrix to a low-precision format, tile by tile:
//
//     amax[a, b]  = max |x| over the tile
//     scale[a, b] = rule(amax[a, b])
//     out[i, j]   = round(x[i, j] * (1 / scale[i / tile_rows, j / tile_columns]))
//
// A cast that folds writes out[i, j] * scale[i / tile_rows, j / tile_columns].
//
// Round to nearest with ties to even, or stochastically with the noise of a key (noise.h); saturate.
// The operations and their order are those of formats.py, scaling.py and quantize/definition.py, so
// results are bit-identical.
//
// `narrowgauge_cast` does all three steps in one pass, or takes the scales. Under a two-level rule
// the scale of a tile depends on the largest magnitude of the whole tensor, so three passes follow
// each other: `narrowgauge_amax`, `narrowgauge_two_level` and `narrowgauge_cast`.

#include <type_traits>

#include "int8_codes.h"
#include "noise.h"
#include "rounding.h"

namespace {

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

// Replace each amax of the tiles `first` to `last` of rows of tiles by the scale of one of two factors
// of amax, whichever has the smaller squared error (`least_error` in quantize/definition.py).
//
// known       elements of a tile, a power of two that the compiler then knows; 0: any other number
// transposed  the elements of a tile are added up column by column
template <int64_t known, bool integers, typename In>
void choose_scales(const In* x, const Matrix& matrix, int64_t first, int64_t last, float whole, bool transposed, float* amax,
                   const Cast& cast) {
    const Format format = cast.format;
    const int64_t height = matrix.tile_rows, width = matrix.tile_columns, count = known ? known : height * width;
    std::vector<float> values(count);
    std::vector<double> squares(count);
    float* const value = values.data();
    double* const square = squares.data();
    const auto error = [=](float scale) {
        const float reciprocal = reciprocal_of(scale, whole, true), full = scale * whole;
        for (int64_t i = 0; i < count; ++i) square[i] = square_of(value[i] - rounded<integers, false>(value[i] * reciprocal, 0.f, format) * full);
        if constexpr (known > 0) return halved<known>(square);
        else return halved_sum(square, count);
    };
    for (int64_t row = first; row < last; ++row) {
        for (int64_t tile = 0; tile < matrix.tiles_per_row(); ++tile, ++amax) {
            const int64_t rows = std::min(height, matrix.rows - row * height);
            const int64_t columns = std::min(width, matrix.columns - tile * width);
            if (rows * columns < count) std::fill(value, value + count, 0.f);  // a short tile is padded with zeros
            for (int64_t i = 0; i < rows; ++i) {
                const In* from = x + (row * height + i) * matrix.stride + tile * width;
                if (transposed) for (int64_t j = 0; j < columns; ++j) value[j * height + i] = load(from + j);
                else for (int64_t j = 0; j < columns; ++j) value[i * width + j] = load(from + j);
            }
            const float six = relative_scale(*amax, whole, cast, cast.factors[0]), four = relative_scale(*amax, whole, cast, cast.factors[1]);
            *amax = error(four) < error(six) ? four : six;
        }
    }
}

inline int32_t exponent_of(uint32_t bits) { return int32_t((bits & EXPONENT) >> 23) - 127; }

// Include the numbers from `lowest` to `highest` in span, which threads share.
inline void widen(int32_t* span, int32_t lowest, int32_t highest) {
    int32_t seen = __atomic_load_n(&span[0], __ATOMIC_RELAXED);
    while (lowest < seen && !__atomic_compare_exchange_n(&span[0], &seen, lowest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    seen = __atomic_load_n(&span[1], __ATOMIC_RELAXED);
    while (highest > seen && !__atomic_compare_exchange_n(&span[1], &seen, highest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// Whether no element of a tile exceeds the largest code by the scale of its own maximum.
inline bool is_bounded(const Cast& cast) { return cast.rule == FP32 || cast.rule == POWER_OF_TWO_CEIL; }

template <bool whole, bool stochastic, typename In, typename Out>
void round_rows(const In* x, Out* out, const Matrix& matrix, int64_t first, int64_t last, float* scales, const float* given,
                const Noise& of, const Cast& cast, int32_t* span) {
    // Local copies, which no store to `out` can alias, stay in registers.
    const Format format = cast.format;
    const Noise noise = of;
    const float shared = given ? *given : 1.f;
    const bool two_level = cast.two_level;
    const int64_t columns = matrix.columns, width = matrix.tile_columns;
    const int64_t count = matrix.tiles_per_row();
    std::vector<uint32_t> maxima(count);
    std::vector<float> reciprocals(count), factors(count, 1.f);
    uint32_t lowest = bits_of(1.f), highest = lowest;
    for (int64_t i = first; i < last; ++i) {
        if (i == first || i % matrix.tile_rows == 0) {
            float* scale = scales + i / matrix.tile_rows * count;
            if (cast.makes_scales) {
                tile_maxima(x, i, std::min(i + matrix.tile_rows, last), matrix.stride, columns, width, maxima);
                for (int64_t tile = 0; tile < count; ++tile) scale[tile] = scale_of(maxima[tile], cast);
            }
            for (int64_t tile = 0; tile < count; ++tile) reciprocals[tile] = reciprocal_of(scale[tile], shared, two_level);
            if (cast.folds) {
                for (int64_t tile = 0; tile < count; ++tile) {
                    factors[tile] = scale[tile];
                    lowest = std::min(lowest, bits_of(scale[tile]));
                    highest = std::max(highest, bits_of(scale[tile]));
                }
            }
        }
        const In* from = x + i * matrix.stride;
        Out* to = out + i * columns;
        const uint32_t at = uint32_t(i) * noise.of_row;
        const auto round = [=](int64_t j, float reciprocal, float factor) {
            const float number = stochastic ? uniform(noise.low, noise.high, at + uint32_t(j) * noise.of_column) : 0.f;
            const float code = rounded<whole, stochastic>(load(from + j) * reciprocal, number, format);
            if constexpr (std::is_same_v<Out, int8_t>) store(to + j, code);
            else store(to + j, code * factor);
        };
        const float *reciprocal = reciprocals.data(), *factor = factors.data();
        // Scales of x's own maxima show whether a row has nothing but numbers.
        if constexpr (whole && !stochastic && std::is_same_v<Out, int8_t>) {
            if (count == 1 && cast.makes_scales && std::isfinite(*reciprocal)) {
                const OfRow factor{*reciprocal};
                if (is_bounded(cast)) codes_of_numbers<true>(from, factor, columns, format, to);
                else codes_of_numbers<false>(from, factor, columns, format, to);
                continue;
            }
        }
        if (width == 1) {
            for (int64_t j = 0; j < columns; ++j) round(j, reciprocal[j], factor[j]);
            continue;
        }
        for (int64_t begin = 0; begin < columns; begin += width, ++reciprocal, ++factor) {
            const int64_t end = std::min(begin + width, columns);
            for (int64_t j = begin; j < end; ++j) round(j, *reciprocal, *factor);
        }
    }
    if (span) widen(span, exponent_of(lowest), exponent_of(highest));
}

constexpr int64_t PAIR_ROWS = 32;  // must match ops/quantize/cpp.py

// Largest magnitudes of x [rows, columns] by row and by column. bfloat16 is compared as 16 bits.
template <typename In>
void row_and_column_maxima(const In* x, int64_t rows, int64_t stride, int64_t columns, float* of_rows, float* of_columns) {
    using Bits = std::conditional_t<sizeof(In) == 2, uint16_t, uint32_t>;
    constexpr int SHIFT = 32 - 8 * sizeof(In);
    std::vector<Bits> largest(columns, 0);
    for (int64_t i = 0; i < rows; ++i) {
        const In* from = x + i * stride;
        Bits of_row = 0;
        for (int64_t j = 0; j < columns; ++j) {
            const Bits bits = Bits(magnitude(from + j) >> SHIFT);
            of_row = std::max(of_row, bits);
            largest[j] = std::max(largest[j], bits);
        }
        of_rows[i] = float_of(uint32_t(of_row) << SHIFT);
    }
    for (int64_t j = 0; j < columns; ++j) of_columns[j] = float_of(uint32_t(largest[j]) << SHIFT);
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
    for (int64_t i = first; i < last; ++i) amax[i] = relative_scale(amax[i], whole, cast, cast.factors[0]);
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
        const auto choose = [&](auto known) {
            if (cast.format.whole) choose_scales<known.value, true>(from, matrix, first, last, whole, transposed, scales, cast);
            else choose_scales<known.value, false>(from, matrix, first, last, whole, transposed, scales, cast);
        };
        if (tile_rows * tile_columns == 16) choose(std::integral_constant<int64_t, 16>());
        else if (tile_rows * tile_columns == 256) choose(std::integral_constant<int64_t, 256>());
        else choose(std::integral_constant<int64_t, 0>());
    });
    if (first == 0) *shared = whole * cast.headroom;
}

// Largest magnitudes of each row of x, and of each column within blocks of PAIR_ROWS rows, for
// `narrowgauge_pair`. `first` and `last` count blocks.
//
// of_rows    [rows]
// of_blocks  [blocks, columns]
void narrowgauge_pair_amax(int64_t first, int64_t last, const Cast* cast, const void* x, int64_t stride, int64_t rows, int64_t columns,
                           float* of_rows, float* of_blocks) {
    with_dtype(x, *cast, [&](const auto* from) {
        for (int64_t block = first; block < last; ++block) {
            const int64_t begin = block * PAIR_ROWS;
            row_and_column_maxima(from + begin * stride, std::min(PAIR_ROWS, rows - begin), stride, columns, of_rows + begin,
                                  of_blocks + block * columns);
        }
    });
}

// Codes of x by row and of x.T by row, from one read, both in the memory order of x. `first` and
// `last` count blocks of PAIR_ROWS rows. The threads share the scales of the columns: each computes
// them all, from a maximum per block.
//
// of_rows, of_blocks  as `narrowgauge_pair_amax` left them, which a thread that has all the blocks
//                     calls here; of_rows receives the scales of the rows
// scales              receives the scales of the columns
// out, turned         [rows, columns]: codes by the scales of rows, and by those of columns
void narrowgauge_pair(int64_t first, int64_t last, const Cast* given, const void* x, int64_t stride, int64_t rows, int64_t columns,
                      float* of_rows, float* of_blocks, float* scales, int8_t* out, int8_t* turned) {
    if (first == 0 && last * PAIR_ROWS >= rows) narrowgauge_pair_amax(first, last, given, x, stride, rows, columns, of_rows, of_blocks);
    const Cast cast = *given;
    const Format format = cast.format;
    std::vector<uint32_t> largest(columns, 0);
    std::vector<float> reciprocals(columns);
    for (int64_t block = 0; block * PAIR_ROWS < rows; ++block)
        for (int64_t j = 0; j < columns; ++j) largest[j] = std::max(largest[j], bits_of(of_blocks[block * columns + j]));
    for (int64_t j = 0; j < columns; ++j) {
        const float scale = scale_of(largest[j], cast);
        if (first == 0) scales[j] = scale;
        const float reciprocal = reciprocal_of(scale, 1.f, false);
        // Codes of a column with NaN or infinity are 0. Zero makes them so of the numbers in it.
        reciprocals[j] = std::isfinite(reciprocal) ? reciprocal : 0.f;
    }
    with_dtype(x, cast, [&](const auto* from) {
        for (int64_t i = first * PAIR_ROWS; i < std::min(last * PAIR_ROWS, rows); ++i) {
            of_rows[i] = scale_of(bits_of(of_rows[i]), cast);
            const auto* row = from + i * stride;
            int8_t *const to = out + i * columns, *const beside = turned + i * columns;
            const OfRow of_row{reciprocal_of(of_rows[i], 1.f, false)};
            const OfColumns of_columns{reciprocals.data()};
            if (!std::isfinite(of_row.reciprocal)) {  // the row has NaN or infinity
                std::fill(to, to + columns, 0);
                codes_of_any(row, of_columns, columns, format, beside);
            } else if (is_bounded(cast)) {
                codes_of_both<true>(row, of_row, of_columns, columns, format, to, beside);
            } else {
                codes_of_both<false>(row, of_row, of_columns, columns, format, to, beside);
            }
        }
    });
}

// Round x to `out`, whose rows are `columns` elements. `first` and `last` count rows, or rows of
// tiles if this function computes the scales: a tile must not be split between threads.
//
// scales  read, or written if the cast makes them
// shared  factor of all scales, or null
// transposed  x is the transpose of the tensor that is cast
// span    of a cast that folds: widened to the exponents of all scales; 128 stands for NaN
void narrowgauge_cast(int64_t first, int64_t last, const Cast* cast, const void* x, int64_t stride, int64_t rows, int64_t columns,
                      int64_t tile_rows, int64_t tile_columns, float* scales, const float* shared, uint32_t low, uint32_t high,
                      int32_t transposed, int32_t* span, void* out) {
    const Matrix matrix{stride, rows, columns, tile_rows, tile_columns};
    // Noise is numbered in the row-major order of the tensor, whatever its memory order.
    const Noise noise{low, high, transposed ? 1 : uint32_t(columns), transposed ? uint32_t(rows) : 1};
    if (cast->makes_scales) {
        first *= tile_rows;
        last = std::min(last * tile_rows, rows);
    }
    const auto run = [&](auto whole, auto stochastic, const auto* from, auto* to) {
        round_rows<whole.value, stochastic.value>(from, to, matrix, first, last, scales, shared, noise, *cast, span);
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
