// Tiles of attention in bfloat16 on AVX512-BF16: products, exp2, and the layouts that they read.
//
// vdpbf16ps multiplies 16 pairs of bfloat16 numbers and adds each pair to a float32 lane. A pair
// lies along the contracted axis. So the left operand is a matrix of rows, of which 4 bytes (a pair)
// are broadcast, and the right operand is a panel [pairs][columns][2]:
//
//     sums[r][c] += left[r][2 p] * panel[p][c][0] + left[r][2 p + 1] * panel[p][c][1]
//
// A tile has 4 rows and 16 to 64 columns: 16 sums, 4 registers of the panel and a broadcast. GCC 12
// keeps these 21 of 32 registers; it spills a tile of 6 x 64, at half the speed. The instruction
// reads denormal bfloat16 numbers as zeros.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

namespace {

constexpr int64_t BLOCK = 64, LANES = 16, ROWS = 4;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
using bf16 = uint16_t;

inline int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Memory of one call, aligned to cache lines and not initialized.
template <class T>
struct Scratch {
  T* data;
  explicit Scratch(int64_t count) : data(static_cast<T*>(std::aligned_alloc(64, up(std::max<int64_t>(count, 1) * sizeof(T), 64)))) {
    if (data == nullptr) std::abort();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() const { return data; }
};

}  // namespace

#if defined(__x86_64__)
#include <immintrin.h>

// Compiled for the instructions on any processor; narrowgauge_attention_supported says whether they
// may run.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16")
#endif
#define INLINE inline __attribute__((always_inline))

// Runs `...` with the constant NV equal to `count`, which is 1 to 4.
#define WITH_VECTORS(count, ...)                       \
  switch (count) {                                     \
    case 1: { constexpr int NV = 1; __VA_ARGS__; break; } \
    case 2: { constexpr int NV = 2; __VA_ARGS__; break; } \
    case 3: { constexpr int NV = 3; __VA_ARGS__; break; } \
    default: { constexpr int NV = 4; __VA_ARGS__; }       \
  }

namespace {

// 2 ** x for x <= 0, and slightly above. exp2(0) is exactly 1, exp2(-inf) is 0, NaN stays NaN.
// Relative error at most 2.5e-7 where the result is a normal number: 0.9e-7 of the polynomial of the
// fractional part (minimax with a fixed constant term), and the rounding of five multiply-adds.
INLINE __m512 exp2_of(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x); 0 for infinities
  __m512 p = _mm512_set1_ps(0.0018671316793188453f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009017026983201504f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05579991638660431f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24016444385051727f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931512951850891f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // p * 2 ** floor(x)
}

// exp of a score, for softmax: 2 ** (score * factor - shift * factor).
//
// added   of scores with a mask that is added, in units of e: subtracts first, since its largest
//         numbers times log2(e) overflow. shift is one of the scores
// else    of bare products, which `factor` scales: one multiply-add. shift has the factor already
template <bool ADDED>
INLINE __m512 weight_of(__m512 score, __m512 shift, __m512 factor) {
  return exp2_of(ADDED ? _mm512_mul_ps(_mm512_sub_ps(score, shift), factor) : _mm512_fmsub_ps(score, factor, shift));
}

template <int NV>
INLINE void multiply(const bf16* left, int64_t left_stride, const bf16* panel, int64_t panel_stride, int64_t pairs,
                     __m512 (&sums)[ROWS][NV]) {
  for (int64_t p = 0; p < pairs; p++) {
    __m512bh columns[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) columns[v] = (__m512bh)_mm512_loadu_si512(panel + p * panel_stride + 2 * LANES * v);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, left + r * left_stride + 2 * p, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], both);
    }
  }
}

template <int NV>
INLINE void clear(__m512 (&sums)[ROWS][NV]) {
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[r][v] = _mm512_setzero_ps();
}

// out[r][c] = out[r][c] * factor[c] + the product, for `rows` rows (a multiple of 4) and 16 NV columns.
template <int NV, bool SCALES>
inline void accumulate_columns(const bf16* left, int64_t left_stride, const bf16* panel, int64_t panel_stride, int64_t pairs,
                               int64_t rows, float* out, int64_t out_stride, const float* factor) {
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
    __m512 sums[ROWS][NV];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        sums[r][v] = _mm512_loadu_ps(out + (r0 + r) * out_stride + LANES * v);
        if (SCALES) sums[r][v] = _mm512_mul_ps(sums[r][v], _mm512_loadu_ps(factor + LANES * v));
      }
    multiply<NV>(left + r0 * left_stride, left_stride, panel, panel_stride, pairs, sums);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) _mm512_storeu_ps(out + (r0 + r) * out_stride + LANES * v, sums[r][v]);
  }
}

// out [rows][columns] += left [rows][2 pairs] @ panel [pairs][columns][2]; columns a multiple of 16.
inline void accumulate(const bf16* left, int64_t left_stride, const bf16* panel, int64_t columns, int64_t pairs, int64_t rows,
                       float* out) {
  for (int64_t c = 0; c < columns; c += BLOCK)
    WITH_VECTORS(std::min<int64_t>(4, (columns - c) / LANES),
                 accumulate_columns<NV, false>(left, left_stride, panel + 2 * c, 2 * columns, pairs, rows, out + c, columns, nullptr));
}

// out [rows][64] = out * factor + left [rows][2 pairs] @ panel [pairs][64][2], for vectors of lanes
// v0 to nv - 1. factor [64], or nullptr for 1.
//
// is_diagonal  contracted index c meets only lanes from c on: it goes in steps of 16, and each step
//              skips the vectors of lanes below it
inline void accumulate_lanes(const bf16* left, const bf16* panel, int64_t pairs, int64_t rows, int64_t nv, bool is_diagonal, float* out,
                             const float* factor) {
  if (!is_diagonal) {
    if (factor != nullptr) {
      WITH_VECTORS(nv, accumulate_columns<NV, true>(left, BLOCK, panel, 2 * BLOCK, pairs, rows, out, BLOCK, factor));
    } else {
      WITH_VECTORS(nv, accumulate_columns<NV, false>(left, BLOCK, panel, 2 * BLOCK, pairs, rows, out, BLOCK, nullptr));
    }
    return;
  }
  for (int64_t v0 = 0; v0 < nv && v0 * LANES / 2 < pairs; v0++) {
    const int64_t p0 = v0 * LANES / 2, some = std::min<int64_t>(LANES / 2, pairs - p0);
    const bf16 *from = left + 2 * p0, *part = panel + 2 * (p0 * BLOCK + v0 * LANES);
    if (v0 == 0 && factor != nullptr) {
      WITH_VECTORS(nv, accumulate_columns<NV, true>(from, BLOCK, part, 2 * BLOCK, some, rows, out, BLOCK, factor));
    } else {
      WITH_VECTORS(nv - v0, accumulate_columns<NV, false>(from, BLOCK, part, 2 * BLOCK, some, rows, out + v0 * LANES, BLOCK, nullptr));
    }
  }
}

// --- Layouts ---

// Transpose 16 x 16 elements of 4 bytes.
INLINE void transpose(__m512i (&x)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    x[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    x[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// Rows a and b [16] as 16 pairs.
INLINE __m512i pairs_of(const bf16* a, const bf16* b) {
  const __m512i low = a == nullptr ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
  const __m512i high = b == nullptr ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// x [count <= 64][width], rows `stride` apart -> to [64][width], zeros beyond.
inline void copy_rows(const bf16* x, int64_t stride, int64_t count, int64_t width, bf16* to) {
  for (int64_t r = 0; r < count; r++) std::memcpy(to + r * width, x + r * stride, width * sizeof(bf16));
  if (count < BLOCK) std::memset(to + count * width, 0, (BLOCK - count) * width * sizeof(bf16));
}

// x [count <= 64][width] -> panel [width / 2][64][2]: pairs along the width, a row in a lane.
inline void pack_lanes(const bf16* x, int64_t stride, int64_t count, int64_t width, bf16* panel) {
  for (int64_t c = 0; c < width; c += 2 * LANES) {
    const int64_t pairs = std::min<int64_t>(LANES, (width - c) / 2);
    for (int64_t r0 = 0; r0 < BLOCK; r0 += LANES) {
      __m512i rows[16];
      for (int64_t r = 0; r < LANES; r++)
        rows[r] = r0 + r < count ? _mm512_maskz_loadu_epi32(__mmask16((1u << pairs) - 1), x + (r0 + r) * stride + c) : _mm512_setzero_si512();
      transpose(rows);
      for (int64_t p = 0; p < pairs; p++) _mm512_storeu_si512(panel + 2 * ((c / 2 + p) * BLOCK + r0), rows[p]);
    }
  }
}

// x [count <= 64][width] -> panel [32][width][2]: pairs along the rows, a column in a lane.
inline void pack_pairs(const bf16* x, int64_t stride, int64_t count, int64_t width, bf16* panel) {
  for (int64_t r = 0; r < BLOCK; r += 2) {
    const bf16* a = r < count ? x + r * stride : nullptr;
    const bf16* b = r + 1 < count ? a + stride : nullptr;
    for (int64_t c = 0; c < width; c += LANES)
      _mm512_storeu_si512(panel + r * width + 2 * c, pairs_of(a == nullptr ? a : a + c, b == nullptr ? b : b + c));
  }
}

// x [count <= 64][width] -> to [width][64].
inline void pack_transposed(const bf16* x, int64_t stride, int64_t count, int64_t width, bf16* to) {
  for (int64_t r0 = 0; r0 < BLOCK; r0 += 2 * LANES)
    for (int64_t c = 0; c < width; c += LANES) {
      __m512i rows[16];
      for (int64_t r = 0; r < LANES; r++) {
        const int64_t row = r0 + 2 * r;
        const bf16* a = row < count ? x + row * stride + c : nullptr;
        rows[r] = pairs_of(a, row + 1 < count ? a + stride : nullptr);
      }
      transpose(rows);
      for (int64_t i = 0; i < LANES; i++) _mm512_storeu_si512(to + (c + i) * BLOCK + r0, rows[i]);
    }
}

// x [width][64] float32 times factor [64] -> to [count <= 64][width] bfloat16, rows `stride` apart.
inline void unpack_lanes(const float* x, const float* factor, int64_t count, int64_t width, bf16* to, int64_t stride) {
  for (int64_t r0 = 0; r0 < count; r0 += LANES)
    for (int64_t c = 0; c < width; c += LANES) {
      const __m512 f = _mm512_loadu_ps(factor + r0);
      __m512i rows[16];
      for (int64_t i = 0; i < LANES; i++)
        rows[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x + (c + i) * BLOCK + r0), f));
      transpose(rows);
      for (int64_t r = 0; r < std::min(LANES, count - r0); r++)
        _mm256_storeu_si256((__m256i*)(to + (r0 + r) * stride + c), (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(rows[r])));
    }
}

// Rows a and b of float32 -> 16 pairs of bfloat16.
INLINE __m512i rounded_pairs(__m512 a, __m512 b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                         17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

}  // namespace
#endif
