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

void butterflies(float* y, int64_t n, int block) {
  int h = 1;
#ifdef __AVX2__
  if (block >= 8) {
    three_stages(y, n);
    h = 8;
  }
#endif
  for (; h < block; h *= 2) stage(y, n, h);
}

}  // namespace
