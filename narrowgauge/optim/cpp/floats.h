// Scalar elements: random bits, 16-bit floats of weights and gradients, and small floats by their
// bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float from_bfloat16(uint16_t code) { return as_float(uint32_t(code) << 16); }

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16; x *= 0x7feb352dU;
  x ^= x >> 15; x *= 0x846ca68bU;
  return x ^ (x >> 16);
}
// 16 bits for element `index`: one mixing serves two elements, eight apart.
inline uint32_t noise16(uint32_t key, uint32_t index) {
  return mix(key + (index >> 4) * 8 + (index & 7)) >> ((index & 8) * 2) & 0xFFFF;
}
inline float uniform(uint32_t bits16) { return (float(int32_t(bits16)) + 0.5f) * 0x1p-16f; }

// 16-bit floats of weights and gradients: round to nearest, ties to even; `away`: ties away from
// zero.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits = as_bits(x);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}
inline uint16_t to_bfloat16_away(float x) {
  uint32_t bits = as_bits(x);
  return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (bits + 0x8000) >> 16);
}
inline uint16_t to_bfloat16_stochastic(float x, uint32_t noise16) {
  uint32_t bits = as_bits(x), magnitude = bits & 0x7FFFFFFF;
  uint32_t carried = (bits + (magnitude < 0x7F800000 ? noise16 : 0)) >> 16;
  return uint16_t(magnitude > 0x7F800000 ? 0x7FC0 : carried);
}

// Magnitudes of small floats with MANTISSA bits and exponent bias BIAS. small_bits rounds down.
template <int MANTISSA, int BIAS> inline uint32_t small_bits(float y) {
  const float normal = as_float(uint32_t(128 - BIAS) << 23);  // 2^(1 - BIAS)
  uint32_t of_normal = (as_bits(y) >> (23 - MANTISSA)) - (uint32_t(127 - BIAS) << MANTISSA);
  uint32_t of_subnormal = uint32_t(int32_t(y * as_float(uint32_t(126 + BIAS + MANTISSA) << 23)));
  return y < normal ? of_subnormal : of_normal;
}
template <int MANTISSA, int BIAS> inline float small_value(uint32_t magnitude) {
  float of_normal = as_float((magnitude << (23 - MANTISSA)) + (uint32_t(127 - BIAS) << 23));
  float of_subnormal = float(int32_t(magnitude)) * as_float(uint32_t(128 - BIAS - MANTISSA) << 23);
  return magnitude < (1U << MANTISSA) ? of_subnormal : of_normal;
}
// 2^floor(log2 y), at least the smallest normal number.
template <int BIAS> inline float power_below(float y) {
  return as_float(std::max(as_bits(y) & 0x7F800000U, uint32_t(128 - BIAS) << 23));
}
template <int MANTISSA, int BIAS> inline float round_nearest(float y) {
  // Adding and subtracting 1.5 * 2^23 units of the last kept bit rounds to nearest, ties to even.
  float shift = power_below<BIAS>(y) * (1.5f * float(1 << (23 - MANTISSA)));
  return (y + shift) - shift;
}

// Levels of dynamic4 and their midpoints, as in moments.py.
const float DYNAMIC_LEVELS[8] = {0.0f, 0.003f, 0.012f, 0.04f, 0.11f, 0.27f, 0.55f, 1.0f};
const float DYNAMIC_BOUNDARIES[7] = {0.001500000013038516f, 0.007499999832361937f, 0.026000000536441803f, 0.07500000298023224f,
                                     0.1899999976158142f, 0.4099999964237213f, 0.7749999761581421f};

// Lookup tables of dynamic4. of_code: signed level of each code. No octave contains two midpoints,
// so one comparison finds a level: below[i] is the number of midpoints under octave i (as bits),
// from 2^-11 on, and boundary[i] the midpoint inside it, or infinity. Octave 0 also serves all
// smaller numbers.
struct LevelTables {
  // Biased exponent of the first octave.
  static constexpr int BELOW = 127 - 11;
  float of_code[16], below[16], boundary[16];
  LevelTables() {
    for (int i = 0; i < 16; i++) {
      of_code[i] = i > 8 ? DYNAMIC_LEVELS[i - 8] : i > 0 ? -DYNAMIC_LEVELS[8 - i] : 0.f;
      uint32_t found = 0;
      const float start = as_float(uint32_t(BELOW + i) << 23);
      while (found < 7 && DYNAMIC_BOUNDARIES[found] < start) found++;
      below[i] = as_float(found);
      boundary[i] = found < 7 && DYNAMIC_BOUNDARIES[found] < 2.f * start ? DYNAMIC_BOUNDARIES[found] : INFINITY;
    }
    of_code[8] = 0.f;
  }
};
const LevelTables level_tables;

// y^(1/k) for E4M3 numbers of 2^8 y, one row per log2 k of -2 ... 2, as in moments.py.
struct ExpansionTables {
  float fractions[5][8], subnormals[5][8], quarters[8];
  ExpansionTables() {
    for (int f = 0; f < 8; f++) {
      const double share = f / 8.0;
      fill(1.0 + share, f, fractions);
      fill(share * 0x1p-14, f, subnormals);
      quarters[f] = float(std::sqrt(std::sqrt(double(1 << (f & 3)))));
    }
  }
  static void fill(double y, int f, float (*rows)[8]) {
    const double values[] = {(y * y) * (y * y), y * y, y, std::sqrt(y), std::sqrt(std::sqrt(y))};
    for (int k = 0; k < 5; k++) rows[k][f] = float(values[k]);
  }
};
const ExpansionTables expansion_tables;

inline float from_float16(uint16_t code) {
  uint32_t magnitude = code & 0x7FFF, sign = uint32_t(code & 0x8000) << 16;
  uint32_t finite = as_bits(small_value<10, 15>(magnitude)), special = 0x7F800000U | (magnitude & 0x3FF) << 13;
  return as_float((magnitude < 0x7C00 ? finite : special) | sign);
}
inline uint16_t to_float16(float x) {
  uint32_t sign = (as_bits(x) >> 16) & 0x8000;
  float y = std::fabs(x);
  // 65520 is the midpoint between 65504 and 65536: from there on float16 is infinite.
  uint32_t finite = small_bits<10, 15>(round_nearest<10, 15>(y < 65520.f ? y : 0.f));
  return uint16_t((y < 65520.f ? finite : (y == y ? 0x7C00U : 0x7E00U)) | sign);
}
inline uint16_t to_float16_stochastic(float x, uint32_t noise16) {
  const float size = std::fabs(x), part = size * 0x1p24f, whole = std::floor(part);
  const float normal = as_float((as_bits(size) + (noise16 >> 3)) & ~0x1FFFU);
  // Subnormal numbers have equal gaps of 2^-24, so a carry into the mantissa would have the wrong
  // odds.
  const float subnormal = (uniform(noise16) < part - whole ? whole + 1.f : whole) * 0x1p-24f;
  const float y = size < 0x1p-14f ? subnormal : normal;
  return to_float16(size < INFINITY ? std::copysign(y, x) : x);
}

}  // namespace
