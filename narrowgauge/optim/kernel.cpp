// One optimizer step on the CPU: decode, update and encode a tile at a time, in buffers that stay in the first-level cache.
//
// The definition is reference.py; this file computes the same bits. Hence no contraction into fused multiply-adds (the flag
// -ffp-contract=off), no reassociation, and the order of every operation as written there. Each stage is a loop without branches
// over at most TILE elements, which the compiler vectorizes; the switches between kinds stand outside of these loops.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernel_floats.h"
#ifdef __AVX2__
#include "kernel_avx2.h"
#endif

namespace {

constexpr int TILE = 256;

enum Kind { NONE, FP32, SQUARED8, UE5M3, E4M3, FP16, SQUARED4, LINEAR4 };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };
enum Master { DIRECT, MASTER_FP32, MASTER_FP16, REMAINDER, STOCHASTIC };
enum Rule { ADAMW, LION, SGD };

struct Moment {
  void* codes;
  uint16_t* scale;    // bfloat16, one per tile
  int8_t* expansion;  // log2 of the exponent, one per tile
  int32_t kind, is_signed, lowest, highest;  // lowest, highest: the expansions to choose from
};

struct Job {
  int64_t rows, columns, tile;
  int32_t rule, nesterov, weight_dtype, gradient_dtype, master_kind;
  uint32_t noise, weight_noise;
  float decay, beta1, rest1, beta2, rest2, eps, step_size, correction;
  void* weight;
  const void* gradient;
  void* master;
  uint16_t* master_scale;
  Moment first, second;
};

// t <- t ^ (2^log_k) by repeated squares or roots, each of them correctly rounded everywhere.
void expand(float* t, int n, int log_k) {
  for (int k = 0; k < log_k; k++) for (int i = 0; i < n; i++) t[i] = t[i] * t[i];
  for (int k = log_k; k < 0; k++) for (int i = 0; i < n; i++) t[i] = std::sqrt(t[i]);
}

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

// ---- moments ------------------------------------------------------------------------------------------------------------

template <int MANTISSA, int BIAS, typename CODE>
void decode_float(const Moment& q, int64_t at, int64_t tile, int n, float* out) {
  const CODE* codes = static_cast<const CODE*>(q.codes) + at;
  constexpr int SIGN = 8 * sizeof(CODE) - 1;
  const float top = sizeof(CODE) == 1 ? 0x1p-8f : 0x1p-15f, scale = from_bfloat16(q.scale[tile]);
  const int log_k = q.expansion ? q.expansion[tile] : 0;
  for (int i = 0; i < n; i++) out[i] = small_value<MANTISSA, BIAS>(codes[i] & ((1U << SIGN) - 1)) * top;
  expand(out, n, -log_k);
  for (int i = 0; i < n; i++) {
    float x = out[i] * scale;
    out[i] = as_float(as_bits(x) | uint32_t(codes[i] >> SIGN) << 31);
  }
}

void decode(const Moment& q, int64_t at, int64_t row, int64_t columns, int64_t column, int64_t tile, int n, float* out) {
  const float scale = q.scale ? from_bfloat16(q.scale[tile]) : 1.f;
  const uint8_t* bytes = static_cast<const uint8_t*>(q.codes);
  switch (q.kind) {
    case NONE: std::fill(out, out + n, 0.f); break;
    case FP32: break;  // worked on in place
    case SQUARED8: {
      const int8_t* codes = static_cast<const int8_t*>(q.codes) + at;
      const float unit = scale * (1.f / 16129.f);
      for (int i = 0; i < n; i++) { float c = codes[i]; out[i] = c * std::fabs(c) * unit; }
      break;
    }
    case UE5M3: {
      const uint8_t* codes = bytes + at;
      for (int i = 0; i < n; i++) {
        float t = as_float((uint32_t(codes[i]) + 761U) << 20);
        out[i] = (codes[i] ? t : 0.f) * scale;
      }
      break;
    }
    case E4M3: decode_float<3, 7, uint8_t>(q, at, tile, n, out); break;
    case FP16: decode_float<10, 15, uint16_t>(q, at, tile, n, out); break;
    default: {
      const uint8_t* packed = bytes + row * ((columns + 1) / 2) + column / 2;
      float nibble[TILE + 1];
      for (int i = 0; i < (n + 1) / 2; i++) {
        nibble[2 * i] = float(packed[i] & 0xF);
        nibble[2 * i + 1] = float(packed[i] >> 4);
      }
      const float unit = scale * (q.kind == SQUARED4 ? 1.f / 49.f : 1.f / 16.f);
      if (q.kind == SQUARED4) for (int i = 0; i < n; i++) { float c = nibble[i] - 8.f; out[i] = c * std::fabs(c) * unit; }
      else for (int i = 0; i < n; i++) out[i] = scale == 0x1p-94f ? 0.f : (nibble[i] + 1.f) * unit;
    }
  }
}

// The expansion that spreads the tile's magnitudes over the format's 14 octaves of normal numbers below 2^8.
int chosen_expansion(const Moment& q, const float* x, int n, uint32_t amax) {
  int32_t least = 0x7F800000;
  for (int i = 0; i < n; i++) {
    int32_t bits = int32_t(as_bits(x[i]) & 0x7FFFFFFF);
    least = std::min(least, bits ? bits : 0x7F800000);
  }
  if (amax == 0 || amax >= 0x7F800000U) return 0;
  float octaves = float((int32_t(amax) - least) >> 23) + 2.f;
  int log_k = q.highest;
  while (log_k > q.lowest && std::ldexp(octaves, log_k) > 14.f) log_k--;
  return log_k;
}

template <int MANTISSA, int BIAS, typename CODE>
void encode_float(const Moment& q, const float* x, int64_t at, int64_t tile, int n, float inverse, uint32_t amax, uint32_t noise) {
  CODE* codes = static_cast<CODE*>(q.codes) + at;
  constexpr int SIGN = 8 * sizeof(CODE) - 1;
  const float top = sizeof(CODE) == 1 ? 0x1p8f : 0x1p15f;
  const int log_k = q.expansion ? chosen_expansion(q, x, n, amax) : 0;
  if (q.expansion) q.expansion[tile] = int8_t(log_k);
  float y[TILE], below[TILE], above[TILE];
  for (int i = 0; i < n; i++) y[i] = std::min(std::fabs(x[i]) * inverse, 1.f);
  expand(y, n, log_k);
  if (q.is_signed) {
    for (int i = 0; i < n; i++) {
      uint32_t magnitude = small_bits<MANTISSA, BIAS>(round_nearest<MANTISSA, BIAS>(y[i] * top));
      codes[i] = CODE(magnitude | (as_bits(x[i]) >> 31) << SIGN);
    }
    return;
  }
  for (int i = 0; i < n; i++) {
    float gap = power_below<BIAS>(y[i] * top) * (1.f / (1 << MANTISSA)), low = std::floor(y[i] * top / gap) * gap;
    below[i] = low / top;
    above[i] = (low + gap) / top;
    y[i] = low;
  }
  expand(below, n, -log_k);
  expand(above, n, -log_k);
  for (int i = 0; i < n; i++) {
    float t = std::min(std::fabs(x[i]) * inverse, 1.f);
    float threshold = below[i] + uniform(noise, uint32_t(at + i)) * (above[i] - below[i]);
    float gap = power_below<BIAS>(y[i]) * (1.f / (1 << MANTISSA));
    uint32_t magnitude = small_bits<MANTISSA, BIAS>(threshold < t ? y[i] + gap : y[i]);
    codes[i] = CODE(std::max(magnitude, uint32_t(t > 0.f)));
  }
}

void encode_nibbles(const Moment& q, const float* x, uint8_t* packed, int64_t at, int n, float inverse, uint32_t noise) {
  uint8_t nibble[TILE + 1];
  nibble[n] = 0;
  if (q.kind == SQUARED4) {
    const float unit = 49.f * inverse;
    for (int i = 0; i < n; i++) {
      float c = std::rint(std::sqrt(std::fabs(x[i]) * unit));
      nibble[i] = uint8_t(int32_t(std::copysign(c, x[i]) + 8.f));
    }
  } else {
    const float unit = 16.f * inverse;
    for (int i = 0; i < n; i++) {
      float c = float(int32_t(x[i] * unit + uniform(noise, uint32_t(at + i))));
      nibble[i] = uint8_t(int32_t(std::min(std::max(c, 1.f), 16.f) - 1.f));
    }
  }
  for (int i = 0; i < (n + 1) / 2; i++) packed[i] = uint8_t(nibble[2 * i] | nibble[2 * i + 1] << 4);
}

void encode(const Moment& q, const float* x, int64_t at, int64_t row, int64_t columns, int64_t column, int64_t tile, int n,
            uint32_t noise) {
  if (q.kind == NONE || q.kind == FP32) return;
  const uint32_t amax = amax_bits(x, n);
  const float scale = scale_from(amax, q.kind == SQUARED4 || q.kind == LINEAR4 ? 0xFFFFU : 0x7FFFFFU);
  q.scale[tile] = uint16_t(as_bits(scale) >> 16);
  const float inverse = scale == scale ? 1.f / scale : 0.f;
  uint8_t* bytes = static_cast<uint8_t*>(q.codes);
  switch (q.kind) {
    case SQUARED8: {
      int8_t* codes = static_cast<int8_t*>(q.codes) + at;
      const float unit = 16129.f * inverse;
      for (int i = 0; i < n; i++) {
        float c = std::rint(std::sqrt(std::fabs(x[i]) * unit));
        codes[i] = int8_t(int32_t(std::copysign(c, x[i])));
      }
      break;
    }
    case UE5M3:
      for (int i = 0; i < n; i++) {
        float t = x[i] * inverse;
        int32_t code = int32_t((as_bits(t) + (mix(noise + uint32_t(at + i)) >> 12)) >> 20) - 761;
        bytes[at + i] = uint8_t(std::max(code, int32_t(x[i] > 0.f)));
      }
      break;
    case E4M3: encode_float<3, 7, uint8_t>(q, x, at, tile, n, inverse, amax, noise); break;
    case FP16: encode_float<10, 15, uint16_t>(q, x, at, tile, n, inverse, amax, noise); break;
    default: encode_nibbles(q, x, bytes + row * ((columns + 1) / 2) + column / 2, at, n, inverse, noise);
  }
}

// ---- weights ------------------------------------------------------------------------------------------------------------

void load_weight(const Job& job, int64_t at, int64_t tile, int n, float* w) {
  widen(job.weight, job.weight_dtype, at, n, w);
  float wide[TILE], seen[TILE];
  uint16_t half[TILE];
  if (job.master_kind == REMAINDER) {
    const int16_t* rest = static_cast<const int16_t*>(job.master) + at;
    for (int i = 0; i < n; i++) w[i] = as_float(as_bits(w[i]) + uint32_t(int32_t(rest[i])));
  }
  if (job.master_kind != MASTER_FP32 && job.master_kind != MASTER_FP16) return;
  if (job.master_kind == MASTER_FP32) {
    std::memcpy(wide, static_cast<const float*>(job.master) + at, n * sizeof(float));
  } else {
    const uint16_t* codes = static_cast<const uint16_t*>(job.master) + at;
    const float scale = from_bfloat16(job.master_scale[tile]);
    for (int i = 0; i < n; i++) wide[i] = from_float16(codes[i]) * 0x1p-15f * scale;
  }
  narrow(wide, half, job.weight_dtype, 0, n, true);
  widen(half, job.weight_dtype, 0, n, seen);
  for (int i = 0; i < n; i++) w[i] = seen[i] == w[i] ? wide[i] : w[i];  // a weight written since is taken over
}

void store_weight(const Job& job, float* w, int64_t at, int64_t tile, int n) {
  uint16_t* half = static_cast<uint16_t*>(job.weight) + at;
  switch (job.master_kind) {
    case MASTER_FP32: std::memcpy(static_cast<float*>(job.master) + at, w, n * sizeof(float)); break;
    case MASTER_FP16: {
      uint16_t* codes = static_cast<uint16_t*>(job.master) + at;
      const float scale = scale_from(amax_bits(w, n), 0x7FFFFFU), inverse = scale == scale ? 1.f / scale : 0.f;
      job.master_scale[tile] = uint16_t(as_bits(scale) >> 16);
      for (int i = 0; i < n; i++) {
        float y = std::min(std::fabs(w[i]) * inverse, 1.f) * 0x1p15f;
        float gap = power_below<15>(y) * 0x1p-10f, part = y / gap, whole = std::floor(part);
        y = (uniform(job.weight_noise, uint32_t(at + i)) < part - whole ? whole + 1.f : whole) * gap;
        codes[i] = uint16_t(small_bits<10, 15>(y) | (as_bits(w[i]) >> 16 & 0x8000));
        w[i] = from_float16(codes[i]) * 0x1p-15f * scale;
      }
      break;
    }
    case REMAINDER: {
      int16_t* rest = static_cast<int16_t*>(job.master) + at;
      for (int i = 0; i < n; i++) {
        uint16_t kept = to_bfloat16_away(w[i]);
        rest[i] = int16_t(as_bits(w[i]) - (uint32_t(kept) << 16));
        half[i] = kept;
      }
      return;
    }
    case STOCHASTIC:
      for (int i = 0; i < n; i++) half[i] = to_bfloat16_stochastic(w[i], mix(job.weight_noise + uint32_t(at + i)));
      return;
  }
  narrow(w, job.weight, job.weight_dtype, at, n, job.master_kind != DIRECT);
}

// ---- rules: reference.py has the equations ------------------------------------------------------------------------------

void update(const Job& job, float* __restrict w, const float* __restrict g, float* __restrict m, float* __restrict v, int n) {
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
    const int64_t bits = q->kind == FP32 ? 32 : q->kind == FP16 ? 16 : q->kind == SQUARED4 || q->kind == LINEAR4 ? 4 : 8;
    if (q->kind != NONE) prefetch(q->codes, at * bits / 8, n * bits / 8);
  }
  if (job.master) {
    const int64_t bytes = job.master_kind == MASTER_FP32 ? 4 : 2;
    prefetch(job.master, at * bytes, n * bytes);
  }
}

#ifdef __AVX2__
bool suits_avx2(const Job& job) {
  return job.rule == ADAMW && job.weight_dtype == FLOAT32 && job.gradient_dtype == FLOAT32 &&
         job.first.kind == SQUARED8 && job.second.kind == UE5M3;
}
inline int32_t shift_of(float scale) { return int32_t(as_bits(scale) & 0x7F800000U) - (127 << 23); }

// A tile of n elements, a multiple of 16, whose scales are numbers; false, with nothing changed, if they are not.
bool step_tile_avx2(const Job& job, int64_t at, int64_t tile, int n) {
  const float constants[] = {job.rest1, job.beta2, job.rest2, job.eps, job.step_size, job.correction, job.decay};
  const float first_scale = from_bfloat16(job.first.scale[tile]), second_scale = from_bfloat16(job.second.scale[tile]);
  if (!(first_scale == first_scale && second_scale == second_scale)) return false;
  int8_t* first = static_cast<int8_t*>(job.first.codes) + at;
  uint8_t* second = static_cast<uint8_t*>(job.second.codes) + at;
  alignas(32) float m[TILE], v[TILE];
  uint32_t most[2];
  avx2::update(first, second, first_scale * (1.f / 16129.f), shift_of(second_scale), static_cast<const float*>(job.gradient) + at,
               static_cast<float*>(job.weight) + at, m, v, n, constants, most);
  const float new_first = scale_from(most[0], 0x7FFFFFU), new_second = scale_from(most[1], 0x7FFFFFU);
  job.first.scale[tile] = uint16_t(as_bits(new_first) >> 16);
  job.second.scale[tile] = uint16_t(as_bits(new_second) >> 16);
  avx2::encode(m, v, 16129.f * (1.f / new_first), shift_of(new_second), job.noise, uint32_t(at), first, second, n);
  return true;
}
#endif

void step_tile(const Job& job, int64_t row, int64_t tile_in_row, int64_t tiles) {
  float buffers[4][TILE];
  const int64_t column = tile_in_row * job.tile, at = row * job.columns + column, tile = row * tiles + tile_in_row;
  const int n = int(std::min(job.tile, job.columns - column));
  prefetch_tile(job, at + n, job.tile);  // behind the last tile this asks for what nobody reads, which does no harm
#ifdef __AVX2__
  if (n % 16 == 0 && suits_avx2(job) && step_tile_avx2(job, at, tile, n)) return;
#endif
  const bool direct = job.weight_dtype == FLOAT32, wide_gradient = job.gradient_dtype == FLOAT32;
  float* w = direct ? static_cast<float*>(job.weight) + at : buffers[0];
  const float* g = wide_gradient ? static_cast<const float*>(job.gradient) + at : buffers[1];
  float* m = job.first.kind == FP32 ? static_cast<float*>(job.first.codes) + at : buffers[2];
  float* v = job.second.kind == FP32 ? static_cast<float*>(job.second.codes) + at : buffers[3];
  if (!direct) load_weight(job, at, tile, n, w);
  if (!wide_gradient) widen(job.gradient, job.gradient_dtype, at, n, buffers[1]);
  decode(job.first, at, row, job.columns, column, tile, n, m);
  decode(job.second, at, row, job.columns, column, tile, n, v);
  update(job, w, g, m, v, n);
  encode(job.first, m, at, row, job.columns, column, tile, n, job.noise);
  encode(job.second, v, at, row, job.columns, column, tile, n, job.noise);
  if (!direct) store_weight(job, w, at, tile, n);
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
