// Exact u @ s.T on AVX2, for INT4 u, and for s in INT4 or consisting of two INT4 digits (magnitudes
// up to 98).
//
// vpmaddubsw multiplies 32 unsigned by 32 signed bytes and adds pairs to 16 bits: twice the
// multiplications per instruction of vpmaddwd, and four times those of a float32 FMA. u is
// therefore stored as u + 7 in 0 ... 14, and 7 * (sum of the row of s) is subtracted at the end.
// Saturation: a pair adds at most 2 * 14 * |s|, so `steps` pairs stay within 16 bits before they
// are widened to 32 bits.
//
// INT8 x INT8 would overflow 16 bits in one pair, and vpmaddwd gains 1.5 times at best
// (decisions/cpu.md), so INT8 stays in float32.
//
// Operands are packed into panels of 6 rows (left) and 16 rows (right) with the layout
// [K/4][rows][4]: a broadcast of 4 bytes of a left row meets two registers of 8 right rows. 12
// accumulators, 2 right registers, 1 broadcast and 1 result use all 16 registers of AVX2. A right
// panel with 2048 columns is 32 KiB, the size of the L1 cache; left panels stream past it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int LEFT = 6, RIGHT = 16, DEPTH = 4, OFFSET = 7;

// Pack rows [base, base + ROWS) of a matrix with strides (row_stride, stride) into one panel.
// Elements beyond the edges are zero.
template <int ROWS>
void pack_panel(const int8_t* x, int64_t base, int64_t rows, int64_t inner, int64_t row_stride, int64_t stride, int offset,
                int8_t* panel) {
  const int64_t depth = (inner + DEPTH - 1) / DEPTH;
  const int present = int(std::min<int64_t>(ROWS, rows - base));
  if (present < ROWS || inner % DEPTH) std::memset(panel, 0, depth * ROWS * DEPTH);
  const int8_t* from = x + base * row_stride;
  if (stride == 1) {
    for (int r = 0; r < present; r++) {
      const int8_t* row = from + r * row_stride;
      for (int64_t k = 0; k < inner / DEPTH; k++) std::memcpy(panel + (k * ROWS + r) * DEPTH, row + k * DEPTH, DEPTH);
      for (int64_t k = inner / DEPTH * DEPTH; k < inner; k++) panel[((k / DEPTH) * ROWS + r) * DEPTH + k % DEPTH] = row[k];
    }
  } else if (present == ROWS && row_stride == 1) {
    for (int64_t k = 0; k < inner; k++) {
      int8_t* to = panel + (k / DEPTH) * ROWS * DEPTH + k % DEPTH;
      const int8_t* column = from + k * stride;
      for (int r = 0; r < ROWS; r++) to[r * DEPTH] = column[r];
    }
  } else {
    for (int64_t k = 0; k < inner; k++)
      for (int r = 0; r < present; r++)
        panel[((k / DEPTH) * ROWS + r) * DEPTH + k % DEPTH] = from[r * row_stride + k * stride];
  }
  if (offset) for (int64_t i = 0; i < depth * ROWS * DEPTH; i++) panel[i] = int8_t(panel[i] + offset);
}

#ifdef __AVX2__
// Compute sums[LEFT][RIGHT] for one pair of panels. UNSIGNED_LEFT: u is the left operand, else the
// right one.
template <bool UNSIGNED_LEFT>
void multiply_panels(const int8_t* left, const int8_t* right, int64_t depth, int steps, __m256i* sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 2 * LEFT; i++) sums[i] = _mm256_setzero_si256();
  for (int64_t k = 0; k < depth;) {
    const int64_t end = std::min(k + steps, depth);
    __m256i part[2 * LEFT];
    for (int i = 0; i < 2 * LEFT; i++) part[i] = _mm256_setzero_si256();
    for (; k < end; k++) {
      const __m256i r0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right));
      const __m256i r1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right + 32));
#pragma GCC unroll 6
      for (int i = 0; i < LEFT; i++) {
        int32_t four;
        std::memcpy(&four, left + i * DEPTH, DEPTH);
        const __m256i l = _mm256_set1_epi32(four);
        // The first operand of maddubs is the unsigned one.
        const __m256i p0 = UNSIGNED_LEFT ? _mm256_maddubs_epi16(l, r0) : _mm256_maddubs_epi16(r0, l);
        part[2 * i] = _mm256_add_epi16(part[2 * i], p0);
        const __m256i p1 = UNSIGNED_LEFT ? _mm256_maddubs_epi16(l, r1) : _mm256_maddubs_epi16(r1, l);
        part[2 * i + 1] = _mm256_add_epi16(part[2 * i + 1], p1);
      }
      left += LEFT * DEPTH;
      right += RIGHT * DEPTH;
    }
    for (int i = 0; i < 2 * LEFT; i++) sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(part[i], ones));
  }
}
#endif

}  // namespace

extern "C" {

int32_t narrowgauge_has_gemm() {
#ifdef __AVX2__
  return 1;
#else
  return 0;
#endif
}

// Pack panels first ... last of x [rows, inner] with strides (row_stride, stride), `width` rows
// each (6 or 16).
void narrowgauge_pack(int64_t first, int64_t last, const int8_t* x, int64_t rows, int64_t inner, int64_t row_stride,
                      int64_t stride, int32_t width, int32_t offset, int8_t* panels) {
  const int64_t size = (inner + DEPTH - 1) / DEPTH * DEPTH * width;
  for (int64_t p = first; p < last; p++) {
    int8_t* panel = panels + p * size;
    if (width == LEFT) pack_panel<LEFT>(x, p * width, rows, inner, row_stride, stride, offset, panel);
    else pack_panel<RIGHT>(x, p * width, rows, inner, row_stride, stride, offset, panel);
  }
}

// Compute out [m, n] float32 for the left panels first ... last. An operand has one scale, or one
// per row. Panels of the unsigned operand hold u + 7 beyond its edges too, which is harmless:
// results beyond its last row are not stored, and beyond the end of K the panel of s is zero.
void narrowgauge_gemm(int64_t first, int64_t last, const int8_t* left, const int8_t* right, int64_t m, int64_t n, int64_t inner,
                      int32_t unsigned_left, int32_t steps, const float* left_scale, int32_t left_rows,
                      const float* right_scale, int32_t right_rows, float* out) {
#ifdef __AVX2__
  const int64_t depth = (inner + DEPTH - 1) / DEPTH;
  const int64_t left_size = depth * DEPTH * LEFT, right_size = depth * DEPTH * RIGHT;
  const bool scalars = !left_rows && !right_rows;
  const float both = scalars ? left_scale[0] * right_scale[0] : 1.f;
  // Correction for the offset of u: 7 * (sum of the row of s).
  auto row_sum = [&](const int8_t* panel, int rows, int row) {
    int32_t sum = 0;
    for (int64_t k = 0; k < depth; k++)
      for (int b = 0; b < DEPTH; b++) sum += panel[(k * rows + row) * DEPTH + b];
    return OFFSET * sum;
  };
  std::vector<int32_t> left_sums((last - first) * LEFT, 0);
  if (!unsigned_left)
    for (int64_t r = 0; r < (last - first) * LEFT; r++)
      left_sums[r] = row_sum(left + (first + r / LEFT) * left_size, LEFT, int(r % LEFT));
  for (int64_t j = 0; j < (n + RIGHT - 1) / RIGHT; j++) {
    const int8_t* b = right + j * right_size;
    const int columns = int(std::min<int64_t>(RIGHT, n - j * RIGHT));
    int32_t right_sums[RIGHT] = {};
    if (unsigned_left) for (int c = 0; c < RIGHT; c++) right_sums[c] = row_sum(b, RIGHT, c);
    for (int64_t i = first; i < last; i++) {
      __m256i sums[2 * LEFT];
      if (unsigned_left) multiply_panels<true>(left + i * left_size, b, depth, steps, sums);
      else multiply_panels<false>(left + i * left_size, b, depth, steps, sums);
      const int rows = int(std::min<int64_t>(LEFT, m - i * LEFT));
      for (int r = 0; r < rows; r++) {
        int32_t whole[RIGHT];
        float values[RIGHT];
        std::memcpy(whole, sums + 2 * r, sizeof whole);
        const int32_t off = left_sums[(i - first) * LEFT + r];
        const int64_t row = i * LEFT + r;
        // The order of these multiplications is the one of times_scales in ops/mm/definition.py.
        if (scalars) {
          for (int c = 0; c < RIGHT; c++) values[c] = float(whole[c] - off - right_sums[c]) * both;
        } else {
          const float scale = left_scale[left_rows ? row : 0];
          for (int c = 0; c < columns; c++)
            values[c] = float(whole[c] - off - right_sums[c]) * scale * right_scale[right_rows ? j * RIGHT + c : 0];
        }
        std::memcpy(out + row * n + j * RIGHT, values, columns * sizeof(float));
      }
    }
  }
#endif
}

}  // extern "C"
