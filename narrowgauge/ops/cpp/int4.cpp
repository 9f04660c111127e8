// Kernels around a 4-bit GEMM, each one pass over memory, and the GEMM itself (gemm.h).
//
// The definitions are in plain torch: ops/hadamard/definition.py, ops/random.py and ops/mm. encode,
// decode, uniform and gemm are bit-identical to them. turn adds in the order
// of the butterflies, not of a matrix product, so its sums differ by rounding. Rows are
// independent: a call processes rows `first` to `last`, and threads share the rows. Loops without
// branches are left to the compiler's vectorizer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "butterflies.h"
#include "gemm.h"
#include "noise.h"

namespace {

enum Dtype { FLOAT32, BFLOAT16 };

float from_bfloat16(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Return n elements of a row as float32, without a copy if they are float32.
const float* widened(const void* x, int dtype, int64_t at, int64_t n, float* buffer) {
  if (dtype == FLOAT32) return static_cast<const float*>(x) + at;
  const uint16_t* half = static_cast<const uint16_t*>(x) + at;
  for (int64_t i = 0; i < n; i++) buffer[i] = from_bfloat16(half[i]);
  return buffer;
}

// row = source where the bit is set, else 0.
void masked(const float* source, const uint8_t* bits, int64_t n, float* row) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __mmask16 set = __mmask16(bits[i / 8] | bits[i / 8 + 1] << 8);
    _mm512_storeu_ps(row + i, _mm512_maskz_loadu_ps(set, source + i));
  }
#elif defined(__AVX2__)
  const __m256i places = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  for (; i + 8 <= n; i += 8) {
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), places), places);
    _mm256_storeu_ps(row + i, _mm256_and_ps(_mm256_loadu_ps(source + i), _mm256_castsi256_ps(set)));
  }
#endif
  for (; i < n; i++) row[i] = (bits[i / 8] >> (i % 8)) & 1 ? source[i] : 0.f;
}

const void* at_row(const void* x, int dtype, int64_t at) {
  return static_cast<const char*>(x) + at * (dtype == FLOAT32 ? 4 : 2);
}

float norm_of(int block) { return float(1.0 / std::sqrt(double(block))); }

// What `encode` writes of a row; null: not written.
struct Encoded {
  int8_t* codes;
  uint8_t *packed, *bits;
  float* residual;
};

// See `narrowgauge_encode`.
void encode_row(const float* y, int64_t columns, float reciprocal, float max, const Encoded& out) {
  int64_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m512 step = _mm512_set1_ps(reciprocal), most = _mm512_set1_ps(max), least = _mm512_set1_ps(-max);
  const __m128i nibble = _mm_set1_epi8(15), places = _mm_set1_epi16(0x1001);
  for (; i + 16 <= columns; i += 16) {
    const __m512 ratio = _mm512_mul_ps(_mm512_loadu_ps(y + i), step);
    const __mmask16 is_number = _mm512_cmp_ps_mask(ratio, ratio, _CMP_ORD_Q);
    const __m512 held = _mm512_maskz_min_ps(is_number, _mm512_max_ps(ratio, least), most);
    const __m512i code = _mm512_cvtps_epi32(held);  // to nearest even
    const __m128i bytes = _mm512_cvtepi32_epi8(code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes + i), bytes);
    const __mmask16 inside = _mm512_cmp_ps_mask(_mm512_abs_ps(ratio), most, _CMP_LE_OQ);
    if (out.bits) {
      out.bits[i / 8] = uint8_t(inside);
      out.bits[i / 8 + 1] = uint8_t(inside >> 8);
    }
    if (out.residual) _mm512_storeu_ps(out.residual + i, _mm512_maskz_sub_ps(inside, _mm512_cvtepi32_ps(code), ratio));
    if (out.packed) {
      const __m128i pairs = _mm_maddubs_epi16(_mm_and_si128(bytes, nibble), places);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out.packed + i / 2), _mm_cvtepi16_epi8(pairs));
    }
  }
#endif
  const float magic = 0x1.8p23f;  // adding it makes float32 round to an integer, to nearest even
  const int64_t start = i;
  for (; i < columns; i++) {
    const float ratio = y[i] * reciprocal;
    // NaN becomes code 0; the scale carries the NaN.
    const float near = (std::min(std::max(ratio == ratio ? ratio : 0.f, -max), max) + magic) - magic;
    out.codes[i] = int8_t(int32_t(near));
  }
  if (out.bits) {
    i = start;
#ifdef __AVX2__
    const __m256 size = _mm256_set1_ps(-0.f), steps = _mm256_set1_ps(reciprocal), bound = _mm256_set1_ps(max);
    for (; i + 8 <= columns; i += 8) {
      __m256 ratio = _mm256_andnot_ps(size, _mm256_mul_ps(_mm256_loadu_ps(y + i), steps));
      out.bits[i / 8] = uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(ratio, bound, _CMP_LE_OQ)));
    }
#endif
    for (; i < columns; i += 8) {
      int set = 0;
      for (int64_t k = i; k < std::min(i + 8, columns); k++) set |= (std::fabs(y[k] * reciprocal) <= max) << (k - i);
      out.bits[i / 8] = uint8_t(set);
    }
  }
  if (out.residual)
    for (i = start; i < columns; i++) {
      const float ratio = y[i] * reciprocal;
      out.residual[i] = std::fabs(ratio) <= max ? float(out.codes[i]) - ratio : 0.f;
    }
  if (out.packed) {
    const int64_t pairs = (columns + 1) / 2;
    for (i = start / 2; i < columns / 2; i++)
      out.packed[i] = uint8_t((out.codes[2 * i] & 15) | uint8_t(out.codes[2 * i + 1]) << 4);
    if (columns % 2) out.packed[pairs - 1] = uint8_t(out.codes[columns - 1] & 15);
  }
}

Encoded row_of(int64_t r, int64_t columns, int8_t* codes, uint8_t* packed, uint8_t* bits, float* residual) {
  return {codes + r * columns, packed ? packed + r * ((columns + 1) / 2) : nullptr, bits ? bits + r * ((columns + 7) / 8) : nullptr,
          residual ? residual + r * columns : nullptr};
}

}  // namespace

extern "C" {

// Rotate the rows of x; rows of x lie `stride` elements apart.
//
// forward  x [rows, inner] is padded with zeros -> out [rows, whole]
// inverse  x [rows, whole] -> out [rows, inner]; elements whose bit is zero count as 0 (bits may be
//          null)
void narrowgauge_turn(int64_t first, int64_t last, const void* x, int32_t dtype, int64_t stride, int64_t inner, int64_t whole,
                      const float* signs, const uint8_t* bits, int32_t block, int32_t inverse, float* out) {
  std::vector<float> row(whole), wide(whole);
  const float norm = norm_of(block);
  const int64_t columns = inverse ? whole : inner, kept = inverse ? inner : whole;
  const int64_t bytes = (whole + 7) / 8;
  for (int64_t r = first; r < last; r++) {
    const float* source = widened(x, dtype, r * stride, columns, wide.data());
    if (!inverse && signs) {
      for (int64_t i = 0; i < columns; i++) row[i] = source[i] * signs[i];
    } else if (bits) {
      masked(source, bits + r * bytes, columns, row.data());
    } else {
      std::memcpy(row.data(), source, columns * sizeof(float));
    }
    std::fill(row.begin() + columns, row.end(), 0.f);
    float* target = out + r * kept;
    if (block > 1) butterflies(row.data(), whole, block);
    // A factor of 1 changes no number.
    const float factor = block > 1 ? norm : 1.f;
    if (inverse && signs) {
      for (int64_t i = 0; i < kept; i++) target[i] = row[i] * factor * signs[i];
    } else {
      for (int64_t i = 0; i < kept; i++) target[i] = row[i] * factor;
    }
  }
}

// codes = round(y * (1 / scale)) to nearest even, clipped to +-max. packed (two codes to a byte)
// and bits (set where |ratio| is at most max) are written unless they are null.
void narrowgauge_encode(int64_t first, int64_t last, const float* y, int64_t columns, const float* scale, float max, int8_t* codes,
                        uint8_t* packed, uint8_t* bits) {
  const float reciprocal = 1.f / *scale;
  for (int64_t r = first; r < last; r++)
    encode_row(y + r * columns, columns, reciprocal, max, row_of(r, columns, codes, packed, bits, nullptr));
}

// Both in one pass over x: turn, forward, and then encode. residual is codes - ratio, zero where
// |ratio| is above max; null: not written.
void narrowgauge_turn_encode(int64_t first, int64_t last, const void* x, int32_t dtype, int64_t stride, int64_t inner, int64_t whole,
                             const float* signs, int32_t block, const float* scale, float max, int8_t* codes, uint8_t* packed,
                             uint8_t* bits, float* residual) {
  std::vector<float> row(whole);
  const float reciprocal = 1.f / *scale;
  for (int64_t r = first; r < last; r++) {
    narrowgauge_turn(0, 1, at_row(x, dtype, r * stride), dtype, stride, inner, whole, signs, nullptr, block, 0, row.data());
    encode_row(row.data(), whole, reciprocal, max, row_of(r, whole, codes, packed, bits, residual));
  }
}

// Sums of each row of d, for the gradient of a learned step: sums [rows, 2] float64.
//
// sums[0]  d * codes over the elements whose bit is zero
// sums[1]  d * residual over all elements; residual null: 0
//
// Lane k of 16 adds the elements k, k + 16, ... in float32, so sums depend on neither level nor threads.
void narrowgauge_step_sums(int64_t first, int64_t last, const float* d, const int8_t* codes, const uint8_t* bits, const float* residual,
                           int64_t columns, double* sums) {
  const int64_t bytes = (columns + 7) / 8;
  for (int64_t r = first; r < last; r++) {
    const float *row = d + r * columns, *errors = residual ? residual + r * columns : nullptr;
    const int8_t* code = codes + r * columns;
    const uint8_t* set = bits + r * bytes;
    float clipped[16] = {}, rounded[16] = {};
    int64_t i = 0;
#ifdef __AVX512F__
    __m512 outside = _mm512_setzero_ps(), inside = _mm512_setzero_ps();
    for (; i + 16 <= columns; i += 16) {
      const __m512 x = _mm512_loadu_ps(row + i);
      const __mmask16 is_clipped = __mmask16(~(set[i / 8] | set[i / 8 + 1] << 8));
      if (is_clipped) {
        const __m128i bytes_of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(code + i));
        const __m512 term = _mm512_mul_ps(x, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_of)));
        outside = _mm512_mask_add_ps(outside, is_clipped, outside, term);
      }
      if (errors) inside = _mm512_add_ps(inside, _mm512_mul_ps(x, _mm512_loadu_ps(errors + i)));
    }
    _mm512_storeu_ps(clipped, outside);
    _mm512_storeu_ps(rounded, inside);
#endif
    for (; i < columns; i++) {
      if (!((set[i / 8] >> (i % 8)) & 1)) clipped[i % 16] += row[i] * float(code[i]);
      if (errors) rounded[i % 16] += row[i] * errors[i];
    }
    double total[2] = {};
    for (int k = 0; k < 16; k++) {
      total[0] += double(clipped[k]);
      total[1] += double(rounded[k]);
    }
    sums[2 * r] = total[0];
    sums[2 * r + 1] = total[1];
  }
}

// Unpack codes: [rows, ceil(columns / 2)] -> [rows, columns].
void narrowgauge_decode(int64_t first, int64_t last, const uint8_t* packed, int64_t columns, int8_t* codes) {
  const int64_t pairs = (columns + 1) / 2;
  for (int64_t r = first; r < last; r++) {
    const uint8_t* source = packed + r * pairs;
    int8_t* row = codes + r * columns;
    for (int64_t i = 0; i < columns / 2; i++) {
      row[2 * i] = int8_t(((source[i] & 15) ^ 8) - 8);
      row[2 * i + 1] = int8_t(((source[i] >> 4) ^ 8) - 8);
    }
    if (columns % 2) row[columns - 1] = int8_t(((source[pairs - 1] & 15) ^ 8) - 8);
  }
}

void narrowgauge_uniform(int64_t first, int64_t last, uint32_t low, uint32_t high, float* out) {
  for (int64_t i = first; i < last; i++) out[i] = uniform(low, high, uint32_t(i));
}

}  // extern "C"
