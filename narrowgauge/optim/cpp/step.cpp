// One optimizer step on the CPU: decode, update and encode a tile at a time, in buffers that stay in the first-level cache.
//
// The definition is update.py with rules.py, moments.py and masters.py; this file computes the same bits. Hence no contraction into fused multiply-adds (the flag
// -ffp-contract=off), no reassociation, and the order of every operation as written there. Each stage is a loop without branches
// over at most TILE elements, which the compiler vectorizes; the switches between kinds stand outside of these loops.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"
#if defined(__AVX2__) && defined(__F16C__)
#define NARROWGAUGE_AVX2
#include "avx2.h"
#endif

namespace {

constexpr int TILE = 256;

enum Kind { NONE, FP32, SQUARED8, UE5M3, E4M3, FP16, DYNAMIC4, LINEAR4 };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };
enum Master { DIRECT, MASTER_FP32, MASTER_FP16, REMAINDER, STOCHASTIC };
enum Rule { ADAMW, LION, SGD };

struct Moment {
  void* codes;
  uint16_t* scale;    // bfloat16, one per tile
  int8_t* expansion;  // log2 of the exponent, one per tile
  int32_t kind, is_signed, lowest, highest;  // lowest, highest: the expansions to choose from
};

struct Constants {
  float decay, beta1, rest1, beta2, rest2, eps, step_size, correction;
  int32_t rule, nesterov;
};

struct Job {
  int64_t rows, columns, tile;
  int32_t weight_dtype, gradient_dtype, master_kind;
  uint32_t noise, weight_noise;
  const Constants* constants;
  void* weight;
  const void* gradient;
  void* master;
  uint16_t* master_scale;
  Moment first, second;
};

// Where a tile lies: its number, its first element, its first byte of 4-bit codes, and its first index counted by whole tiles.
struct Place {
  int64_t tile, element, packed, index;
};

void widen(const void* source, int dtype, int64_t at, int n, float* out) {
  if (dtype == FLOAT32) std::memcpy(out, static_cast<const float*>(source) + at, n * sizeof(float));
  const uint16_t* half = static_cast<const uint16_t*>(source) + at;
  if (dtype == BFLOAT16) for (int i = 0; i < n; i++) out[i] = from_bfloat16(half[i]);
  if (dtype == FLOAT16) for (int i = 0; i < n; i++) out[i] = from_float16(half[i]);
}

void narrow(const float* x, void* target, int dtype, int64_t at, int n, bool away) {
  if (dtype == FLOAT32) std::memcpy(static_cast<float*>(target) + at, x, n * sizeof(float));
  uint16_t* half = static_cast<uint16_t*>(target) + at;
  if (dtype == FLOAT16) for (int i = 0; i < n; i++) half[i] = to_float16(x[i]);
  if (dtype == BFLOAT16 && away) for (int i = 0; i < n; i++) half[i] = to_bfloat16_away(x[i]);
  if (dtype == BFLOAT16 && !away) for (int i = 0; i < n; i++) half[i] = to_bfloat16(x[i]);
}

// ---- scales -------------------------------------------------------------------------------------------------------------

uint32_t amax_bits(const float* x, int n) {  // integer order of the bits is the order of magnitudes, and NaN comes last
  int32_t most = 0;
  for (int i = 0; i < n; i++) most = std::max(most, int32_t(as_bits(x[i]) & 0x7FFFFFFF));
  return uint32_t(most);
}
float scale_from(uint32_t amax, uint32_t dropped) {  // rounded up to the kept bits, at least 2^-94; NaN above 2^126
  if (amax > 253U << 23) return as_float(0x7FC00000U);
  uint32_t bits = (amax + dropped) & ~dropped;
  return as_float(std::max(bits, 33U << 23));
}

uint32_t dropped_bits(int kind) { return kind == DYNAMIC4 || kind == LINEAR4 ? 0xFFFFU : 0x7FFFFFU; }

// ---- moments ------------------------------------------------------------------------------------------------------------

template <int MANTISSA, int BIAS, typename CODE>
void decode_float(const Moment& q, int64_t at, int64_t tile, int n, float* out) {
  const CODE* codes = static_cast<const CODE*>(q.codes) + at;
  constexpr int SIGN = 8 * sizeof(CODE) - 1;
  const float top = sizeof(CODE) == 1 ? 0x1p-8f : 0x1p-15f, scale = from_bfloat16(q.scale[tile]);
  if (q.expansion) {
    const int log_k = q.expansion[tile];
    for (int i = 0; i < n; i++) out[i] = expansion_tables.value(codes[i] & ((1U << SIGN) - 1), log_k);
  } else {
    for (int i = 0; i < n; i++) out[i] = small_value<MANTISSA, BIAS>(codes[i] & ((1U << SIGN) - 1)) * top;
  }
  for (int i = 0; i < n; i++) {
    float x = out[i] * scale;
    out[i] = as_float(as_bits(x) | uint32_t(codes[i] >> SIGN) << 31);
  }
}

void decode(const Moment& q, const Place& at, int n, float* out) {
  const float scale = q.scale ? from_bfloat16(q.scale[at.tile]) : 1.f;
  switch (q.kind) {
    case NONE: std::fill(out, out + n, 0.f); break;
    case FP32: break;  // worked on in place
    case SQUARED8: {
      const int8_t* codes = static_cast<const int8_t*>(q.codes) + at.element;
      const float unit = scale * (1.f / 16129.f);
      for (int i = 0; i < n; i++) { float c = codes[i]; out[i] = c * std::fabs(c) * unit; }
      break;
    }
    case UE5M3: {
      const uint8_t* codes = static_cast<const uint8_t*>(q.codes) + at.element;
      for (int i = 0; i < n; i++) {
        float t = as_float((uint32_t(codes[i]) + 761U) << 20);
        out[i] = (codes[i] ? t : 0.f) * scale;
      }
      break;
    }
    case E4M3: decode_float<3, 7, uint8_t>(q, at.element, at.tile, n, out); break;
    case FP16: decode_float<10, 15, uint16_t>(q, at.element, at.tile, n, out); break;
    default: {
      const uint8_t* packed = static_cast<const uint8_t*>(q.codes) + at.packed;
      float nibble[TILE + 1];
      for (int i = 0; i < (n + 1) / 2; i++) {
        nibble[2 * i] = float(packed[i] & 0xF);
        nibble[2 * i + 1] = float(packed[i] >> 4);
      }
      if (q.kind == DYNAMIC4) {
        for (int i = 0; i < n; i++) {
          const int32_t code = int32_t(nibble[i]) - 8;
          const float level = DYNAMIC_LEVELS[std::abs(code) & 7];
          out[i] = (code < 0 ? -level : level) * scale;
        }
      } else {
        for (int i = 0; i < n; i++) out[i] = scale == 0x1p-94f ? 0.f : (nibble[i] + 1.f) * (scale * (1.f / 16.f));
      }
    }
  }
}

// The expansion that spreads the tile's magnitudes, `least` the smallest but 0, over the format's 14 octaves of normal
// numbers below 2^8.
int chosen_expansion(const Moment& q, uint32_t least, uint32_t amax) {
  if (amax == 0 || amax >= 0x7F800000U) return 0;
  float octaves = float(int32_t(amax - least) >> 23) + 2.f;
  int log_k = q.highest;
  while (log_k > q.lowest && std::ldexp(octaves, log_k) > 14.f) log_k--;
  return log_k;
}
uint32_t least_bits(const float* x, int n) {
  uint32_t least = 0x7F800000;
  for (int i = 0; i < n; i++) {
    uint32_t bits = as_bits(x[i]) & 0x7FFFFFFF;
    least = std::min(least, bits ? bits : 0x7F800000);
  }
  return least;
}

// t <- t ^ (2^log_k) by repeated squares or roots, each of them correctly rounded everywhere.
void expand(float* t, int n, int log_k) {
  for (int k = 0; k < log_k; k++) for (int i = 0; i < n; i++) t[i] = t[i] * t[i];
  for (int k = log_k; k < 0; k++) for (int i = 0; i < n; i++) t[i] = std::sqrt(t[i]);
}

template <int MANTISSA, int BIAS, typename CODE>
void encode_float(const Moment& q, const float* x, const Place& at, int n, float inverse, uint32_t noise, int log_k) {
  CODE* codes = static_cast<CODE*>(q.codes) + at.element;
  constexpr int SIGN = 8 * sizeof(CODE) - 1, SPARE = MANTISSA == 10 ? 3 : 0;  // random bits that float16 does not drop
  const float top = sizeof(CODE) == 1 ? 0x1p8f : 0x1p15f;
  float y[TILE];
  for (int i = 0; i < n; i++) y[i] = std::fabs(x[i]) * inverse;
  expand(y, n, log_k);
  for (int i = 0; i < n; i++) {
    const float t = std::fabs(x[i]) * inverse, z = y[i] * top;
    if (q.is_signed) {
      uint32_t magnitude = small_bits<MANTISSA, BIAS>(round_nearest<MANTISSA, BIAS>(z));
      codes[i] = CODE(magnitude | (as_bits(x[i]) >> 31) << SIGN);
      continue;
    }
    const uint32_t bits = noise16(noise, uint32_t(at.index + i));
    uint32_t magnitude;
    if (q.expansion) {
      magnitude = small_bits<MANTISSA, BIAS>(z);
      const float below = expansion_tables.value(magnitude, log_k), above = expansion_tables.value(magnitude + 1, log_k);
      magnitude += below + uniform(bits) * (above - below) < t;
    } else {
      uint32_t of_normal = ((as_bits(z) + (bits >> SPARE)) >> (23 - MANTISSA)) - (uint32_t(127 - BIAS) << MANTISSA);
      uint32_t of_subnormal = uint32_t(int32_t(z * as_float(uint32_t(126 + BIAS + MANTISSA) << 23) + uniform(bits)));
      magnitude = z < as_float(uint32_t(128 - BIAS) << 23) ? of_subnormal : of_normal;
    }
    codes[i] = CODE(std::max(magnitude, uint32_t(t > 0.f)));
  }
}

void encode_nibbles(const Moment& q, const float* x, const Place& at, int n, float inverse, uint32_t noise) {
  uint8_t nibble[TILE + 1], *packed = static_cast<uint8_t*>(q.codes) + at.packed;
  nibble[n] = 0;
  if (q.kind == DYNAMIC4) {
    for (int i = 0; i < n; i++) {
      const float share = std::fabs(x[i]) * inverse;
      int32_t code = 0;
      for (float boundary : DYNAMIC_BOUNDARIES) code += share > boundary;
      nibble[i] = uint8_t(x[i] < 0.f ? 8 - code : 8 + code);
    }
  } else {
    const float unit = 16.f * inverse;
    for (int i = 0; i < n; i++) {
      float c = float(int32_t(x[i] * unit + uniform(noise16(noise, uint32_t(at.index + i)))));
      nibble[i] = uint8_t(int32_t(std::min(std::max(c, 1.f), 16.f) - 1.f));
    }
  }
  for (int i = 0; i < (n + 1) / 2; i++) packed[i] = uint8_t(nibble[2 * i] | nibble[2 * i + 1] << 4);
}

// x itself is overwritten with zeros if the tile is poisoned: its scale is NaN then.
void encode(const Moment& q, float* x, const Place& at, int n, uint32_t noise) {
  if (q.kind == NONE || q.kind == FP32) return;
  const uint32_t amax = amax_bits(x, n);
  const float scale = scale_from(amax, dropped_bits(q.kind));
  q.scale[at.tile] = uint16_t(as_bits(scale) >> 16);
  int log_k = 0;
  if (q.expansion) q.expansion[at.tile] = int8_t(log_k = chosen_expansion(q, least_bits(x, n), amax));
  if (scale != scale) std::fill(x, x + n, 0.f);
  const float inverse = scale == scale ? 1.f / scale : 0.f;
  switch (q.kind) {
    case SQUARED8: {
      int8_t* codes = static_cast<int8_t*>(q.codes) + at.element;
      const float unit = 16129.f * inverse;
      for (int i = 0; i < n; i++) codes[i] = int8_t(int32_t(std::copysign(std::rint(std::sqrt(std::fabs(x[i]) * unit)), x[i])));
      break;
    }
    case UE5M3: {
      uint8_t* codes = static_cast<uint8_t*>(q.codes) + at.element;
      for (int i = 0; i < n; i++) {
        float t = x[i] * inverse;
        int32_t code = int32_t((as_bits(t) + noise16(noise, uint32_t(at.index + i)) * 16 + 8) >> 20) - 761;
        codes[i] = uint8_t(std::max(code, int32_t(x[i] > 0.f)));
      }
      break;
    }
    case E4M3: encode_float<3, 7, uint8_t>(q, x, at, n, inverse, noise, log_k); break;
    case FP16: encode_float<10, 15, uint16_t>(q, x, at, n, inverse, noise, log_k); break;
    default: encode_nibbles(q, x, at, n, inverse, noise);
  }
}

// ---- weights ------------------------------------------------------------------------------------------------------------

void load_weight(const Job& job, const Place& at, int n, float* w) {
  widen(job.weight, job.weight_dtype, at.element, n, w);
  float wide[TILE], seen[TILE];
  uint16_t half[TILE];
  if (job.master_kind == REMAINDER) {
    const int16_t* rest = static_cast<const int16_t*>(job.master) + at.element;
    for (int i = 0; i < n; i++) w[i] = as_float(as_bits(w[i]) + uint32_t(int32_t(rest[i])));
  }
  if (job.master_kind != MASTER_FP32 && job.master_kind != MASTER_FP16) return;
  if (job.master_kind == MASTER_FP32) {
    std::memcpy(wide, static_cast<const float*>(job.master) + at.element, n * sizeof(float));
  } else {
    const uint16_t* codes = static_cast<const uint16_t*>(job.master) + at.element;
    const float scale = from_bfloat16(job.master_scale[at.tile]);
    for (int i = 0; i < n; i++) wide[i] = from_float16(codes[i]) * 0x1p-15f * scale;
  }
  narrow(wide, half, job.weight_dtype, 0, n, true);
  widen(half, job.weight_dtype, 0, n, seen);
  for (int i = 0; i < n; i++) w[i] = seen[i] == w[i] ? wide[i] : w[i];  // a weight written since is taken over
}

void store_weight(const Job& job, float* w, const Place& at, int n) {
  uint16_t* half = static_cast<uint16_t*>(job.weight) + at.element;
  switch (job.master_kind) {
    case MASTER_FP32: std::memcpy(static_cast<float*>(job.master) + at.element, w, n * sizeof(float)); break;
    case MASTER_FP16: {
      uint16_t* codes = static_cast<uint16_t*>(job.master) + at.element;
      const float scale = scale_from(amax_bits(w, n), 0x7FFFFFU), inverse = scale == scale ? 1.f / scale : 0.f;
      job.master_scale[at.tile] = uint16_t(as_bits(scale) >> 16);
      for (int i = 0; i < n; i++) {
        float y = std::min(std::fabs(w[i]) * inverse, 1.f) * 0x1p15f;
        float gap = power_below<15>(y) * 0x1p-10f, part = y / gap, whole = std::floor(part);
        y = (uniform(noise16(job.weight_noise, uint32_t(at.index + i))) < part - whole ? whole + 1.f : whole) * gap;
        codes[i] = uint16_t(small_bits<10, 15>(y) | (as_bits(w[i]) >> 16 & 0x8000));
        w[i] = from_float16(codes[i]) * 0x1p-15f * scale;
      }
      break;
    }
    case REMAINDER: {
      int16_t* rest = static_cast<int16_t*>(job.master) + at.element;
      for (int i = 0; i < n; i++) {
        uint16_t kept = to_bfloat16_away(w[i]);
        rest[i] = int16_t(as_bits(w[i]) - (uint32_t(kept) << 16));
        half[i] = kept;
      }
      return;
    }
    case STOCHASTIC:
      for (int i = 0; i < n; i++) half[i] = to_bfloat16_stochastic(w[i], noise16(job.weight_noise, uint32_t(at.index + i)));
      return;
  }
  narrow(w, job.weight, job.weight_dtype, at.element, n, job.master_kind != DIRECT);
}

// ---- rules: rules.py has the equations ------------------------------------------------------------------------------

void update(const Constants& job, float* __restrict w, const float* __restrict g, float* __restrict m, float* __restrict v, int n) {
  const float decay = job.decay, beta1 = job.beta1, rest1 = job.rest1, beta2 = job.beta2, rest2 = job.rest2;
  const float eps = job.eps, step_size = job.step_size, correction = job.correction;
  switch (job.rule) {
    case ADAMW:
      for (int i = 0; i < n; i++) {
        m[i] = m[i] + rest1 * (g[i] - m[i]);
        v[i] = v[i] * beta2 + rest2 * g[i] * g[i];
        float denominator = std::sqrt(v[i]) * correction + eps;
        w[i] = w[i] * decay + step_size * m[i] / denominator;
      }
      break;
    case LION:
      for (int i = 0; i < n; i++) {
        float c = m[i] + rest1 * (g[i] - m[i]);
        float sign = c > 0.f ? 1.f : (c < 0.f ? -1.f : c);
        w[i] = w[i] * decay + step_size * sign;
        m[i] = m[i] + rest2 * (g[i] - m[i]);
      }
      break;
    default: {
      const bool nesterov = job.nesterov;
      for (int i = 0; i < n; i++) {
        float d = g[i] + decay * w[i];
        m[i] = m[i] * beta1 + d;
        float direction = nesterov ? d + beta1 * m[i] : m[i];
        w[i] = w[i] + step_size * direction;
      }
    }
  }
}

// Asks for the lines of `bytes` bytes while the tile before them is computed: the gaps between the loops over a tile's
// streams are too long for the processor's own prefetching.
inline void prefetch(const void* start, int64_t offset, int64_t bytes) {
  const char* from = static_cast<const char*>(start) + offset;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}
void prefetch_tile(const Job& job, int64_t at, int64_t n) {
  const int64_t weight_bytes = job.weight_dtype == FLOAT32 ? 4 : 2, gradient_bytes = job.gradient_dtype == FLOAT32 ? 4 : 2;
  prefetch(job.weight, at * weight_bytes, n * weight_bytes);
  prefetch(job.gradient, at * gradient_bytes, n * gradient_bytes);
  for (const Moment* q : {&job.first, &job.second}) {
    const int64_t bits = q->kind == FP32 ? 32 : q->kind == FP16 ? 16 : q->kind == DYNAMIC4 || q->kind == LINEAR4 ? 4 : 8;
    if (q->kind != NONE) prefetch(q->codes, at * bits / 8, n * bits / 8);
  }
  if (job.master) {
    const int64_t bytes = job.master_kind == MASTER_FP32 ? 4 : 2;
    prefetch(job.master, at * bytes, n * bytes);
  }
}

#ifdef NARROWGAUGE_AVX2
void* codes_at(const Moment& q, const Place& at) {
  uint8_t* codes = static_cast<uint8_t*>(q.codes);
  return codes + (q.kind == FP16 ? 2 * at.element : q.kind == DYNAMIC4 || q.kind == LINEAR4 ? at.packed : at.element);
}

template <class FORMAT> FORMAT format_at(const Moment& q, const Place& at) {
  return FORMAT(codes_at(q, at), q.scale ? from_bfloat16(q.scale[at.tile]) : 1.f, q.expansion ? q.expansion[at.tile] : 0);
}

template <class FORMAT>
void encode_avx2(const Moment& q, float* x, const Place& at, int n, uint32_t noise, const avx2::Extent<FORMAT::EXPANDS>& extent) {
  const uint32_t amax = extent.most();
  const float scale = scale_from(amax, dropped_bits(q.kind));
  if (scale != scale) return encode(q, x, at, n, noise);
  q.scale[at.tile] = uint16_t(as_bits(scale) >> 16);
  if (FORMAT::EXPANDS) q.expansion[at.tile] = int8_t(chosen_expansion(q, extent.least(), amax));
  avx2::encode(format_at<FORMAT>(q, at), x, n, avx2::Noise(noise, uint32_t(at.index)));
}

template <class FIRST, class SECOND, class RULE>
void step_tile_avx2(const Job& job, const Place& at, int n, float* w, const float* g) {
  alignas(32) float m[TILE], v[TILE];
  avx2::Extent<FIRST::EXPANDS> of_first;
  avx2::Extent<SECOND::EXPANDS> of_second;
  avx2::update(RULE(*job.constants), format_at<FIRST>(job.first, at), format_at<SECOND>(job.second, at), g, w, m, v, n, of_first,
               of_second);
  encode_avx2<FIRST>(job.first, m, at, n, job.noise, of_first);
  if constexpr (SECOND::IS_KEPT) encode_avx2<SECOND>(job.second, v, at, n, job.noise, of_second);
}

template <class FIRST, class SECOND> bool step_formats_avx2(const Job& job, const Place& at, int n, float* w, const float* g) {
  switch (job.constants->rule) {
    case ADAMW: step_tile_avx2<FIRST, SECOND, avx2::AdamW<Constants>>(job, at, n, w, g); break;
    case LION: step_tile_avx2<FIRST, avx2::None, avx2::Lion<Constants>>(job, at, n, w, g); break;
    default: step_tile_avx2<FIRST, avx2::None, avx2::Sgd<Constants>>(job, at, n, w, g);
  }
  return true;
}

// A tile of n elements; false, with nothing changed, if it is left to the plain stages: float32 states, a length that is no
// multiple of 16, a scale that is no number.
bool step_states_avx2(const Job& job, const Place& at, int n, float* w, const float* g) {
  for (const Moment* q : {&job.first, &job.second})
    if (q->scale && (q->scale[at.tile] & 0x7FFF) > 0x7F80) return false;
  if (n % 16 != 0) return false;
  switch (job.first.kind) {
    case SQUARED8: return step_formats_avx2<avx2::Squared8, avx2::UE5M3>(job, at, n, w, g);
    case DYNAMIC4: return step_formats_avx2<avx2::Dynamic4, avx2::Linear4>(job, at, n, w, g);
    case E4M3:
      if (job.first.expansion) return step_formats_avx2<avx2::E4M3<true, true>, avx2::E4M3<false, true>>(job, at, n, w, g);
      return step_formats_avx2<avx2::E4M3<true, false>, avx2::Float16>(job, at, n, w, g);
    default: return false;
  }
}
#else
bool step_states_avx2(const Job&, const Place&, int, float*, const float*) { return false; }
#endif

void step_tile(const Job& job, int64_t row, int64_t tile_in_row, int64_t tiles) {
  float buffers[4][TILE];
  const int64_t column = tile_in_row * job.tile, tile = row * tiles + tile_in_row;
  const Place at{tile, row * job.columns + column, row * ((job.columns + 1) / 2) + column / 2, tile * job.tile};
  const int n = int(std::min(job.tile, job.columns - column));
  prefetch_tile(job, at.element + n, job.tile);  // behind the last tile this asks for what nobody reads, which does no harm
  const bool direct = job.weight_dtype == FLOAT32, wide_gradient = job.gradient_dtype == FLOAT32;
  float* w = direct ? static_cast<float*>(job.weight) + at.element : buffers[0];
  const float* g = wide_gradient ? static_cast<const float*>(job.gradient) + at.element : buffers[1];
  float* m = job.first.kind == FP32 ? static_cast<float*>(job.first.codes) + at.element : buffers[2];
  float* v = job.second.kind == FP32 ? static_cast<float*>(job.second.codes) + at.element : buffers[3];
  if (!direct) load_weight(job, at, n, w);
  if (!wide_gradient) widen(job.gradient, job.gradient_dtype, at.element, n, buffers[1]);
  if (!step_states_avx2(job, at, n, w, g)) {
    decode(job.first, at, n, m);
    decode(job.second, at, n, v);
    update(*job.constants, w, g, m, v, n);
    encode(job.first, m, at, n, job.noise);
    encode(job.second, v, at, n, job.noise);
  }
  if (!direct) store_weight(job, w, at, n);
}

}  // namespace

extern "C" int64_t narrowgauge_job_bytes() { return sizeof(Job); }

// Part `part` of `parts` of every job: a run of whole tiles, so that threads share nothing.
extern "C" void narrowgauge_step(const Job* jobs, int64_t count, int64_t part, int64_t parts) {
  for (int64_t j = 0; j < count; j++) {
    const Job& job = jobs[j];
    const int64_t tiles = (job.columns + job.tile - 1) / job.tile, all = job.rows * tiles;
    for (int64_t t = all * part / parts; t < all * (part + 1) / parts; t++) step_tile(job, t / tiles, t % tiles, tiles);
  }
}
