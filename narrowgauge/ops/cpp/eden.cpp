// Rotation, cast and correction of an EDEN operand (ops/quantize/eden.py) in one pass over x:
//
//     y       = x diag(signs) H diag(second) H          block by block; optional, as int4.cpp rotates
//     scale   = rule(amax), or the better of two        of each tile of y, 1 x n
//     q       = round(y * (1 / scale))                  to nearest
//     S       = sum y^2 / sum y q scale                 of each block of a row
//     scale'  = scale * S                               rounded stochastically under two levels
//
// Under a two-level rule the scales depend on the largest magnitude of all rows. So a first pass,
// `narrowgauge_rotated`, writes y and the largest magnitude of each tile, and the second reads y.
// Results are bit-identical to the definition on the y that int4.cpp computes.
//
// Rows are read in groups, since x may be the transpose of a row-major matrix: 16 neighbours of a
// column lie beside each other there, and a group uses the whole cache line.

#include <type_traits>

#include "butterflies.h"
#include "noise.h"
#include "rounding.h"

namespace {

constexpr int64_t GROUP = 16;          // rows read at once
constexpr int64_t LARGEST_BLOCK = 1024;  // of recipe.py

// x [rows, inner], of any strides, before its rotation.
struct Source {
    const void* x;
    int32_t is_narrow;  // 1 bfloat16, 0 float32
    int64_t row_stride, column_stride, inner, whole;  // whole: inner in whole blocks and tiles
    const float *signs, *second;
    int32_t block;  // of the rotation; 1: none
};

// Read `count` rows from row `first` on as float32 [count, whole], zeros behind `inner`.
template <typename In> void read(const In* x, const Source& from, int64_t first, int64_t count, float* out) {
    const In* start = x + first * from.row_stride;
    if (from.column_stride == 1) {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t j = 0; j < from.inner; ++j) out[r * from.whole + j] = load(start + r * from.row_stride + j);
    } else {
        // 16 columns of the group at a time: rows of `out` that lie a power of two apart share a
        // set of the cache.
        float square[GROUP][16];
        for (int64_t begin = 0; begin < from.inner; begin += 16) {
            const int64_t width = std::min<int64_t>(16, from.inner - begin);
            for (int64_t j = 0; j < width; ++j)
                for (int64_t r = 0; r < count; ++r)
                    square[r][j] = load(start + r * from.row_stride + (begin + j) * from.column_stride);
            for (int64_t r = 0; r < count; ++r) std::memcpy(out + r * from.whole + begin, square[r], width * sizeof(float));
        }
    }
    for (int64_t r = 0; r < count; ++r) std::fill(out + r * from.whole + from.inner, out + (r + 1) * from.whole, 0.f);
}

// One round of a rotation, as `narrowgauge_turn`. n: elements that a sign multiplies.
void turn(float* row, const float* signs, int64_t n, const Source& from) {
    if (signs)
        for (int64_t i = 0; i < n; ++i) row[i] *= signs[i];
    butterflies(row, from.whole, from.block);
    const float norm = float(1.0 / std::sqrt(double(from.block)));
    for (int64_t i = 0; i < from.whole; ++i) row[i] *= norm;
}

void read_rotated(const Source& from, int64_t first, int64_t count, float* out) {
    if (from.is_narrow) read(static_cast<const uint16_t*>(from.x), from, first, count, out);
    else read(static_cast<const float*>(from.x), from, first, count, out);
    if (from.block == 1) return;
    for (int64_t r = 0; r < count; ++r) {
        turn(out + r * from.whole, from.signs, from.inner, from);
        if (from.second) turn(out + r * from.whole, from.second, from.whole, from);
    }
}

inline uint32_t largest_of(const float* y, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(y + i));
    return largest;
}

// A tile under one scale: its codes, their values, and the squared error of the rule that compares.
template <int64_t width> struct Candidate {
    float scale, codes[width], values[width];

    template <bool integers> void round(const float* y, float of, float shared, const Cast& cast) {
        scale = of;
        const float reciprocal = reciprocal_of(scale, shared, cast.two_level), full = scale * shared;
        const Format format = cast.format;
        for (int64_t i = 0; i < width; ++i) {
            codes[i] = rounded<integers, false>(y[i] * reciprocal, 0.f, format);
            values[i] = codes[i] * full;
        }
    }

    double error(const float* y) const {
        double squares[width];
#pragma GCC unroll 1
        for (int64_t i = 0; i < width; ++i) squares[i] = square_of(y[i] - values[i]);
        return halved<width>(squares);
    }
};

struct Correction {
    int64_t block;     // elements that share it
    int32_t is_given;  // scales are given, else made: of `amax` under a two-level rule
    float shared;      // float32 of the tensor under a two-level rule, else 1
    uint32_t low, high;
};

// Cast a row y of whole tiles. scale: its tiles' amax or given scales, replaced by corrected scales.
template <int64_t width, bool integers>
void cast_row(const float* y, int64_t tiles, int64_t number, float* scale, const Cast& cast, const Correction& of, float* codes) {
    const int64_t per_block = of.block / width;
    double squares[LARGEST_BLOCK], along[LARGEST_BLOCK], products[width];
    Candidate<width> candidates[2];
    for (int64_t first = 0; first < tiles; first += per_block) {
        const int64_t last = std::min(first + per_block, tiles);
        for (int64_t tile = first; tile < last; ++tile) {
            const float* from = y + tile * width;
            float made = scale[tile];
            if (!of.is_given && cast.two_level) made = relative_scale(scale[tile], of.shared, cast, cast.factors[0]);
            else if (!of.is_given) made = scale_of(largest_of(from, width), cast);
            candidates[0].template round<integers>(from, made, of.shared, cast);
            int best = 0;
            if (!of.is_given && cast.tries == 2) {
                made = relative_scale(scale[tile], of.shared, cast, cast.factors[1]);
                candidates[1].template round<integers>(from, made, of.shared, cast);
                best = candidates[1].error(from) < candidates[0].error(from);
            }
            const Candidate<width>& found = candidates[best];
            scale[tile] = found.scale;
#pragma GCC unroll 1
            for (int64_t i = 0; i < width; ++i) products[i] = double(from[i]) * double(found.values[i]);
            along[tile - first] = halved<width>(products);
#pragma GCC unroll 1
            for (int64_t i = 0; i < width; ++i) products[i] = double(from[i]) * double(from[i]);
            squares[tile - first] = halved<width>(products);
            std::memcpy(codes + tile * width, found.codes, sizeof found.codes);
        }
        for (int64_t tile = last - first; tile < per_block; ++tile) along[tile] = squares[tile] = 0.;
        const double size = halved_sum(squares, per_block), inner = halved_sum(along, per_block);
        const float correction = inner > 0. ? float(size / inner) : 1.f;
        for (int64_t tile = first; tile < last; ++tile) {
            float wanted = scale[tile] * correction;
            if (cast.two_level) {
                const uint32_t at = uint32_t(number * tiles + tile);
                wanted = rounded<false, true>(wanted, uniform(of.low, of.high, at), cast.of_scales);
            } else {
                const float largest = float_of(uint32_t(LARGEST_SCALE));
                wanted = wanted < cast.smallest_scale ? cast.smallest_scale : wanted;
                wanted = largest < wanted ? largest : wanted;
            }
            scale[tile] = wanted;
        }
    }
}

template <typename Out> void store_row(const float* codes, int64_t columns, Out* out) {
    for (int64_t j = 0; j < columns; ++j) store(out + j, codes[j]);
}

template <int64_t width, bool integers>
void cast_rows(const Source& from, int64_t first, int64_t last, int64_t columns, float* scales, const Cast& cast,
               const Correction& of, void* out) {
    const int64_t tiles = (columns + width - 1) / width;
    // Rows of whole tiles in float32 are read where they lie.
    const bool is_direct = from.block == 1 && !from.is_narrow && from.column_stride == 1 && tiles * width == from.inner;
    std::vector<float> rows(is_direct ? 0 : GROUP * from.whole), codes(tiles * width);
    for (int64_t begin = first; begin < last; begin += GROUP) {
        const int64_t count = std::min(GROUP, last - begin);
        if (!is_direct) read_rotated(from, begin, count, rows.data());
        for (int64_t r = begin; r < begin + count; ++r) {
            const float* y = is_direct ? static_cast<const float*>(from.x) + r * from.row_stride : rows.data() + (r - begin) * from.whole;
            cast_row<width, integers>(y, tiles, r, scales + r * tiles, cast, of, codes.data());
            if (cast.out_kind == 0) store_row(codes.data(), columns, static_cast<float*>(out) + r * columns);
            if (cast.out_kind == 1) store_row(codes.data(), columns, static_cast<uint16_t*>(out) + r * columns);
            if (cast.out_kind == 2) store_row(codes.data(), columns, static_cast<int8_t*>(out) + r * columns);
        }
    }
}

// Call `run` with the width of a tile as a constant: 16, 32, 64 or 128.
template <int64_t width = 16, typename Run> void with_width(int64_t wanted, const Run& run) {
    if (wanted == width) run(std::integral_constant<int64_t, width>());
    else if constexpr (width < 128) with_width<2 * width>(wanted, run);
}

}  // namespace

extern "C" {

// Write y [rows, whole], and the largest magnitude of each of its tiles to amax.
//
// out   float32, or null: y is not needed
// tile  elements of a row that share a scale; the last tile of a row may be short
void narrowgauge_rotated(int64_t first, int64_t last, const void* x, int32_t is_narrow, int64_t row_stride, int64_t column_stride,
                         int64_t inner, int64_t whole, const float* signs, const float* second, int32_t block, int64_t tile,
                         float* amax, float* out) {
    const Source from{x, is_narrow, row_stride, column_stride, inner, whole, signs, second, block};
    const int64_t tiles = (whole + tile - 1) / tile;
    std::vector<float> rows(out ? 0 : GROUP * whole);
    for (int64_t begin = first; begin < last; begin += GROUP) {
        const int64_t count = std::min(GROUP, last - begin);
        float* y = out ? out + begin * whole : rows.data();
        read_rotated(from, begin, count, y);
        for (int64_t r = 0; r < count; ++r)
            for (int64_t t = 0; t < tiles; ++t)
                amax[(begin + r) * tiles + t] = float_of(largest_of(y + r * whole + t * tile, std::min(tile, whole - t * tile)));
    }
}

// Cast rows to `out` [rows, columns] and correct their scales [rows, tiles].
//
// whole     `columns` in whole tiles, and under a rotation in whole blocks
// columns   of the rotated x: a rotation completes its blocks
// tile      elements that share a scale, see `with_width`
// scales    the amax of each tile under a two-level rule, or given scales; unread under float32 rules.
//           Corrected scales are written to it
// largest   the largest of all amax, NaN if one of them is NaN; null unless scales are made of amax
// shared    float32 of the tensor under a two-level rule: read if scales are given, else written
void narrowgauge_eden(int64_t first, int64_t last, const Cast* given, const void* x, int32_t is_narrow, int64_t row_stride,
                      int64_t column_stride, int64_t inner, int64_t whole, const float* signs, const float* second, int32_t block,
                      int64_t columns, int64_t tile, int64_t correction_block, int32_t is_given, float* scales,
                      const float* largest, float* shared, uint32_t low, uint32_t high, void* out) {
    const Cast cast = *given;
    const Source from{x, is_narrow, row_stride, column_stride, inner, whole, signs, second, block};
    float factor = 1.f;
    if (cast.two_level) factor = is_given ? *shared : whole_scale(bits_of(*largest), cast);
    const Correction of{correction_block, is_given, factor, low, high};
    with_width(tile, [&](auto width) {
        if (cast.format.whole) cast_rows<width.value, true>(from, first, last, columns, scales, cast, of, out);
        else cast_rows<width.value, false>(from, first, last, columns, scales, cast, of, out);
    });
    if (cast.two_level && !is_given && first == 0) *shared = factor;
}

}  // extern "C"
