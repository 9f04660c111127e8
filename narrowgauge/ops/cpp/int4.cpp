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
  const float norm = float(1.0 / std::sqrt(double(block)));
  const int64_t columns = inverse ? whole : inner, kept = inverse ? inner : whole;
  const int64_t bytes = (whole + 7) / 8;
  for (int64_t r = first; r < last; r++) {
    const float* source = widened(x, dtype, r * stride, columns, wide.data());
    if (!inverse && signs) {
      for (int64_t i = 0; i < columns; i++) row[i] = source[i] * signs[i];
    } else if (bits) {
      const uint8_t* set = bits + r * bytes;
      for (int64_t i = 0; i < columns; i++) row[i] = (set[i / 8] >> (i % 8)) & 1 ? source[i] : 0.f;
    } else {
      std::memcpy(row.data(), source, columns * sizeof(float));
    }
    std::fill(row.begin() + columns, row.end(), 0.f);
    float* target = out + r * kept;
    if (block > 1) {
      butterflies(row.data(), whole, block);
      for (int64_t i = 0; i < whole; i++) row[i] *= norm;
    }
    if (inverse && signs) {
      for (int64_t i = 0; i < kept; i++) target[i] = row[i] * signs[i];
    } else {
      std::memcpy(target, row.data(), kept * sizeof(float));
    }
  }
}

// codes = round(y * (1 / scale)) to nearest even, clipped to +-max. packed (two codes to a byte)
// and bits (set where |ratio| is at most max) are written unless they are null.
void narrowgauge_encode(int64_t first, int64_t last, const float* y, int64_t columns, const float* scale, float max, int8_t* codes,
                        uint8_t* packed, uint8_t* bits) {
  const float magic = 0x1.8p23f;  // adding it makes float32 round to an integer, to nearest even
  const float reciprocal = 1.f / *scale;
  const int64_t bytes = (columns + 7) / 8, pairs = (columns + 1) / 2;
  for (int64_t r = first; r < last; r++) {
    const float* source = y + r * columns;
    int8_t* row = codes + r * columns;
    for (int64_t i = 0; i < columns; i++) {
      float ratio = source[i] * reciprocal;
      // NaN becomes code 0; the scale carries the NaN.
      float near = (std::min(std::max(ratio == ratio ? ratio : 0.f, -max), max) + magic) - magic;
      row[i] = int8_t(int32_t(near));
    }
    if (bits) {
      uint8_t* out = bits + r * bytes;
      int64_t i = 0;
#ifdef __AVX2__
      const __m256 size = _mm256_set1_ps(-0.f), step = _mm256_set1_ps(reciprocal), most = _mm256_set1_ps(max);
      for (; i + 8 <= columns; i += 8) {
        __m256 ratio = _mm256_andnot_ps(size, _mm256_mul_ps(_mm256_loadu_ps(source + i), step));
        out[i / 8] = uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(ratio, most, _CMP_LE_OQ)));
      }
#endif
      for (; i < columns; i += 8) {
        int set = 0;
        for (int64_t k = i; k < std::min(i + 8, columns); k++) set |= (std::fabs(source[k] * reciprocal) <= max) << (k - i);
        out[i / 8] = uint8_t(set);
      }
    }
    if (packed) {
      uint8_t* out = packed + r * pairs;
      for (int64_t i = 0; i < columns / 2; i++) out[i] = uint8_t((row[2 * i] & 15) | uint8_t(row[2 * i + 1]) << 4);
      if (columns % 2) out[pairs - 1] = uint8_t(row[columns - 1] & 15);
    }
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
