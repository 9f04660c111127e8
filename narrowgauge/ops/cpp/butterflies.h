// The product of rows with BlockDiag(H), H Sylvester's matrix without its factor 1 / sqrt(block), in
// log2 block stages of additions. Sums are in the order of the stages: int4.cpp and eden.cpp rotate
// by this code, so that their results are bit-identical.
#pragma once

#include <cstdint>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// ---- butterflies: y[i], y[i + h] <- y[i] + y[i + h], y[i] - y[i + h] for h = 1, 2, 4 ... block / 2 -----------------------

void stage(float* y, int64_t n, int h) {
  for (int64_t base = 0; base < n; base += 2 * h) {
    float *low = y + base, *high = y + base + h;
    for (int i = 0; i < h; i++) {
      float a = low[i], b = high[i];
      low[i] = a + b;
      high[i] = a - b;
    }
  }
}

#ifdef __AVX2__
// The first three stages within registers of 8: add the neighbour, after negating the element where
// it is the subtrahend.
void three_stages(float* y, int64_t n) {
  const __m256 one = _mm256_castsi256_ps(_mm256_set_epi32(1 << 31, 0, 1 << 31, 0, 1 << 31, 0, 1 << 31, 0));
  const __m256 two = _mm256_castsi256_ps(_mm256_set_epi32(1 << 31, 1 << 31, 0, 0, 1 << 31, 1 << 31, 0, 0));
  const __m256 four = _mm256_castsi256_ps(_mm256_set_epi32(1 << 31, 1 << 31, 1 << 31, 1 << 31, 0, 0, 0, 0));
  for (int64_t i = 0; i < n; i += 8) {
    __m256 v = _mm256_loadu_ps(y + i);
    v = _mm256_add_ps(_mm256_permute_ps(v, 0xB1), _mm256_xor_ps(v, one));
    v = _mm256_add_ps(_mm256_permute_ps(v, 0x4E), _mm256_xor_ps(v, two));
    v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, four));
    _mm256_storeu_ps(y + i, v);
  }
}
#endif

#ifdef __AVX512F__
// The stages of `registers` times 16 elements, without a store between two stages. A product with
// +-1 is exact, so each fused multiply-add rounds once, as an addition does.
template <int registers> void stages_in_registers(float* y, int64_t n) {
  constexpr __mmask16 ONE = 0xAAAA, TWO = 0xCCCC, FOUR = 0xF0F0, EIGHT = 0xFF00;
  const __m512 plus = _mm512_set1_ps(1.f), minus = _mm512_set1_ps(-1.f);
  const __m512 one = _mm512_mask_mov_ps(plus, ONE, minus), two = _mm512_mask_mov_ps(plus, TWO, minus);
  const __m512 four = _mm512_mask_mov_ps(plus, FOUR, minus), eight = _mm512_mask_mov_ps(plus, EIGHT, minus);
  for (int64_t i = 0; i < n; i += 16 * registers) {
    __m512 v[registers];
#pragma GCC unroll 8
    for (int k = 0; k < registers; k++) {
      __m512 x = _mm512_loadu_ps(y + i + 16 * k);
      x = _mm512_fmadd_ps(x, one, _mm512_permute_ps(x, 0xB1));
      x = _mm512_fmadd_ps(x, two, _mm512_permute_ps(x, 0x4E));
      x = _mm512_fmadd_ps(x, four, _mm512_shuffle_f32x4(x, x, 0xB1));
      v[k] = _mm512_fmadd_ps(x, eight, _mm512_shuffle_f32x4(x, x, 0x4E));
    }
#pragma GCC unroll 3
    for (int h = 1; h < registers; h *= 2) {
#pragma GCC unroll 8
      for (int k = 0; k < registers; k++) {
        if (k & h) continue;
        const __m512 low = v[k], high = v[k + h];
        v[k] = _mm512_add_ps(low, high);
        v[k + h] = _mm512_sub_ps(low, high);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < registers; k++) _mm512_storeu_ps(y + i + 16 * k, v[k]);
  }
}
#endif

void butterflies(float* y, int64_t n, int block) {
  int h = 1;
#ifdef __AVX512F__
  if (block >= 128) stages_in_registers<8>(y, n);
  else if (block == 64) stages_in_registers<4>(y, n);
  else if (block == 32) stages_in_registers<2>(y, n);
  else if (block == 16) stages_in_registers<1>(y, n);
  if (block >= 16) h = block < 128 ? block : 128;
#endif
#ifdef __AVX2__
  if (block >= 8 && h == 1) {
    three_stages(y, n);
    h = 8;
  }
#endif
  for (; h < block; h *= 2) stage(y, n, h);
}

}  // namespace
