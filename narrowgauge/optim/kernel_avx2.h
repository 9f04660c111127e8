// AdamW with 8-bit states on float32 weights and gradients, for processors with AVX2: the same bits as the stages in
// kernel.cpp, in two passes over a tile instead of six. A compiler's own vectors convert 8-bit codes too slowly for it.
//
// A power-of-two scale is added to the exponent bits instead of multiplied: SHIFT is its exponent, in units of the bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace avx2 {

inline __m256i all(int32_t x) { return _mm256_set1_epi32(x); }
inline __m256 all(float x) { return _mm256_set1_ps(x); }
inline __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
inline __m256 value(__m256i x) { return _mm256_castsi256_ps(x); }
inline __m128i eight_bytes(const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); }

inline __m256i mixed(__m256i x) {
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), all(0x7feb352d));
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), all(int32_t(0x846ca68bU)));
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

inline uint32_t largest(__m256i x) {
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
  uint32_t most = 0;
  for (uint32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}

// First pass: decodes, updates, writes the weight; the new moments go to m and v, the bits of their largest to most.
// first_unit is the scale of the first moment / 127^2; n a multiple of 8.
inline void update(const int8_t* first, const uint8_t* second, float first_unit, int32_t second_shift, const float* gradient,
                   float* weight, float* m, float* v, int n, const float* constants, uint32_t most[2]) {
  const __m256 rest1 = all(constants[0]), beta2 = all(constants[1]), rest2 = all(constants[2]), eps = all(constants[3]);
  const __m256 step_size = all(constants[4]), correction = all(constants[5]), decay = all(constants[6]);
  const __m256i magnitude = all(0x7FFFFFFF), zero = _mm256_setzero_si256(), origin = all((761 << 20) + second_shift);
  __m256i most_m = zero, most_v = zero;
  for (int i = 0; i < n; i += 8) {
    const __m256 g = _mm256_loadu_ps(gradient + i);
    __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(first + i)));
    x = _mm256_mul_ps(_mm256_mul_ps(x, _mm256_and_ps(x, value(magnitude))), all(first_unit));
    x = _mm256_add_ps(x, _mm256_mul_ps(rest1, _mm256_sub_ps(g, x)));
    _mm256_storeu_ps(m + i, x);
    most_m = _mm256_max_epi32(most_m, _mm256_and_si256(bits(x), magnitude));
    const __m256i code = _mm256_cvtepu8_epi32(eight_bytes(second + i));
    const __m256i shifted = _mm256_add_epi32(_mm256_slli_epi32(code, 20), origin);
    __m256 y = value(_mm256_andnot_si256(_mm256_cmpeq_epi32(code, zero), shifted));
    y = _mm256_add_ps(_mm256_mul_ps(y, beta2), _mm256_mul_ps(_mm256_mul_ps(rest2, g), g));
    _mm256_storeu_ps(v + i, y);
    most_v = _mm256_max_epi32(most_v, _mm256_and_si256(bits(y), magnitude));
    const __m256 denominator = _mm256_add_ps(_mm256_mul_ps(_mm256_sqrt_ps(y), correction), eps);
    const __m256 change = _mm256_div_ps(_mm256_mul_ps(step_size, x), denominator);
    _mm256_storeu_ps(weight + i, _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(weight + i), decay), change));
  }
  most[0] = largest(most_m);
  most[1] = largest(most_v);
}

// 32-bit numbers to bytes, saturating; two vectors give sixteen bytes in their order.
inline __m256i sixteen_bits(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
}

// Second pass: encodes. first_inverse is 127^2 / scale; index the number of the tile's first element; n a multiple of 16.
inline void encode(const float* m, const float* v, float first_inverse, int32_t second_shift, uint32_t noise, uint32_t index,
                   int8_t* first, uint8_t* second, int n) {
  const __m256i magnitude = all(0x7FFFFFFF), one = all(1), origin = all((761 << 20) + second_shift);
  __m256i count = _mm256_add_epi32(all(int32_t(noise + index)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  for (int i = 0; i < n; i += 16) {
    __m256i signed_codes[2], codes[2];
    for (int half = 0; half < 2; half++) {
      const __m256 x = _mm256_loadu_ps(m + i + 8 * half);
      const __m256 root = _mm256_sqrt_ps(_mm256_mul_ps(_mm256_and_ps(x, value(magnitude)), all(first_inverse)));
      signed_codes[half] = _mm256_sign_epi32(_mm256_cvtps_epi32(root), _mm256_or_si256(bits(x), one));
      const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i + 8 * half));
      const __m256i carried = _mm256_add_epi32(_mm256_sub_epi32(y, origin), _mm256_srli_epi32(mixed(count), 12));
      codes[half] = _mm256_max_epi32(_mm256_srai_epi32(carried, 20), _mm256_min_epi32(y, one));
      count = _mm256_add_epi32(count, all(8));
    }
    const __m256i a = sixteen_bits(signed_codes[0], signed_codes[1]), b = sixteen_bits(codes[0], codes[1]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first + i),
                     _mm_packs_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(second + i),
                     _mm_packus_epi16(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
  }
}

}  // namespace avx2
