// One optimizer step on the CPU: decodes, updates and encodes one tile at a time, in buffers that
// fit in the L1 cache.
//
// Reference definition: step.py, rules.py and moments.py; this file is bit-identical. So operations
// are neither contracted into fused multiply-adds (-ffp-contract=off) nor reassociated, and have
// the order of the definition. Moments and rules use vectors of LANES elements (vectors.h). A tile
// takes two passes: the first decodes and updates, the second encodes with the scales that the
// first has found.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "floats.h"
#include "vectors.h"

namespace {

constexpr int TILE = 256;

enum Kind { NONE, FP32, E5M2, TAPERED8, E4M3, FP16, DYNAMIC4, LINEAR4 };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };
enum Master { DIRECT, MASTER_FP32, MASTER_FP16, REMAINDER, STOCHASTIC };
enum Rule { ADAMW, LION, SGD };

struct Moment {
  void* codes;
  uint16_t* scale;    // bfloat16, one per tile
  int8_t* expansion;  // log2 of the exponent, one per tile
  // lowest, highest: range of the expansion.
  int32_t kind, lowest, highest;
};

struct Constants {
  float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, correction, bound, lag, lag_of_decay;
  int32_t rule, nesterov;
};

struct Job {
  int64_t rows, columns, tile;
  // Position of this shard in the whole parameter, by which random numbers count elements.
  int64_t row_length, first_index;
  int32_t weight_dtype, gradient_dtype, master_kind;
  uint32_t noise, weight_noise;
  const Constants* constants;
  void* weight;
  const void* gradient;
  void* master;
  uint16_t* master_scale;
  Moment first, second;
};

// Position of a tile: its number, its first element, its first byte of 4-bit codes, and its first
// index in the whole parameter, with rows rounded up to whole tiles. The index is a multiple of
// BLOCK if a moment is quantized.
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

// The bits of magnitudes have the order of the magnitudes, and NaN is the largest.
uint32_t amax_bits(const float* x, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; i++) most = std::max(most, int32_t(as_bits(x[i]) & 0x7FFFFFFF));
  return uint32_t(most);
}
// Rounded up to the kept bits, at least 2^-94; NaN above 2^126.
float scale_from(uint32_t amax, uint32_t dropped) {
  if (amax > 253U << 23) return as_float(0x7FC00000U);
  uint32_t bits = (amax + dropped) & ~dropped;
  return as_float(std::max(bits, 33U << 23));
}
// log2 k of a tile: the largest with which its magnitudes (`least`: smallest nonzero) fit the 14
// octaves of normal E4M3 numbers below 2^8.
int chosen_expansion(const Moment& q, uint32_t least, uint32_t amax) {
  if (amax == 0 || amax >= 0x7F800000U) return 0;
  float octaves = float(int32_t(amax - least) >> 23) + 2.f;
  int log_k = q.highest;
  while (log_k > q.lowest && std::ldexp(octaves, log_k) > 14.f) log_k--;
  return log_k;
}

// ---- moments: moments.py has the formats ----
//
// A format is a struct for one tile, built from its scale and expansion. It works on a BLOCK of
// elements, which is PARTS vectors:
//
//   decode(codes, x)   x from the first byte of the block's codes
//   encode<DRAWS>(codes, x, random, decays, kept)
//                      writes the codes of x, and for first moments their decoded values in `kept`.
//                      The scale is at least the amax of the tile. random: 16 bits per element.
//                      decays: masks packed by `saturated`.
//                      DRAWS: a first moment is rounded stochastically too
//
// Formats on single vectors have decode_vector and encode_vector; ByVector loops over a block.

struct Format {
  // IS_NARROW: quantized. DECAYS: encode reads where a first moment only decays.
  static constexpr bool IS_NARROW = true, EXPANDS = false, DECAYS = true;
  // inverse and finite_scale are 0 for a NaN scale.
  F scale, inverse, finite_scale;
  int log_k;
  Format(float scale, int log_k)
      : scale(all(scale)), inverse(all(scale == scale ? 1.f / scale : 0.f)), finite_scale(all(scale == scale ? scale : 0.f)), log_k(log_k) {}
};

template <class FORMAT, int WIDTH> struct ByVector : Format {
  static constexpr int BITS = WIDTH;
  using Format::Format;
  void decode(const uint8_t* codes, F* x) const {
    for (int p = 0; p < PARTS; p++) x[p] = static_cast<const FORMAT*>(this)->decode_vector(codes + p * LANES * BITS / 8);
  }
  template <bool DRAWS> void encode(uint8_t* codes, const F* x, const U* random, H decays, F* kept) const {
    I masks[PARTS];
    from_saturated(decays, masks);
    for (int p = 0; p < PARTS; p++)
      kept[p] = static_cast<const FORMAT*>(this)->template encode_vector<DRAWS>(codes + p * LANES * BITS / 8, x[p], random[p], masks[p]);
  }
};

struct None : Format {
  static constexpr bool IS_NARROW = false;
  static constexpr int BITS = 0;
  using Format::Format;
};

// float32, updated in place without decoding.
struct Wide : Format {
  static constexpr bool IS_NARROW = false;
  static constexpr int BITS = 32;
  using Format::Format;
  void decode(const uint8_t* codes, F* x) const {
    for (int p = 0; p < PARTS; p++) x[p] = load<F>(codes + p * sizeof(F));
  }
};

// A code is the upper half of the float32, shifted, minus the exponent of the scale (a power of
// two). Both directions therefore use 16-bit integers, two float32 vectors at once. Multiplication
// by the scale would give the same bits: codes above 0 never represent numbers below 2^-125.
struct SignedE5M2 : Format {
  static constexpr bool DECAYS = false;
  static constexpr int BITS = 8;
  static constexpr uint32_t DROPS = 0x7FFFFF;
  // Code of a magnitude: its upper half >> 5, minus `base`. poison: NaN for a NaN scale, else 0.
  H base, poison;
  SignedE5M2(float scale, int log_k)
      : Format(scale, log_k), base(shorts(int16_t(4 * int(as_bits(scale) >> 23) - 127))), poison(shorts(scale == scale ? 0 : 0x7FC0)) {}
  void decode(const uint8_t* codes, F* x) const {
    const H c = signed_bytes(codes), size = (c & 0x7F) << 5;
    from_upper(((size + (base << 5)) & (size > 0)) | (c & shorts(INT16_MIN)) | poison, x);
  }
  template <bool DRAWS> void encode(uint8_t* codes, const F* x, const U* random, H, F* kept) const {
    const H seen = upper(x);
    H size;
    if (DRAWS) {
      F drawn[PARTS];
      for (int p = 0; p < PARTS; p++) drawn[p] = value(bits(magnitude(x[p])) + I(random[p] * 32) + 16);
      size = upper(drawn);
    } else {
      // Random bits for the five bits that the upper halves drop.
      I few[PARTS];
      for (int p = 0; p < PARTS; p++) few[p] = I(random[p] & 31);
      size = (seen & INT16_MAX) + saturated(few);
    }
    const H code = larger((size >> 5) - base, H{});
    store_bytes(codes, code | ((seen >> 8) & 0x80));
    from_upper(((size & shorts(~31)) & (code > 0)) | (seen & shorts(INT16_MIN)), kept);
  }
};

// Logarithm of a distance in octaves, see moments.py.
struct Tapered : Format {
  static constexpr int BITS = 8;
  static constexpr uint32_t DROPS = 0x7FFFFF;
  static constexpr int DISTANCE = (127 + 5) << 23, SHIFT = 17, TOP = ((127 + 25) << (23 - SHIFT)) + 16 + 255;
  using Format::Format;
  void decode(const uint8_t* codes, F* x) const {
    for (int p = 0; p < PARTS; p++) {
      const I c = widened(load<Bytes>(codes + p * LANES));
      const I share = DISTANCE - to_integer(value((TOP - c) << SHIFT));
      x[p] = value((c > 0) & share) * scale;
    }
  }
  template <bool> void encode(uint8_t* codes, const F* x, const U* random, H, F*) const {
    I code[PARTS], size[PARTS];
    for (int p = 0; p < PARTS; p++) {
      const F distance = to_float(DISTANCE - bits(x[p] * inverse));
      // Equals TOP - ((bits(distance) + (0xFFFF - random) * 2 + 1) >> SHIFT), with fewer
      // operations.
      code[p] = (I(random[p] * 2) + (TOP << SHIFT) - bits(distance)) >> SHIFT;
      size[p] = bits(x[p]);
    }
    // At least 1 for x > 0: a zero under the square root would make a huge step.
    if constexpr (PARTS == 1) {
      // Two saturations would take four operations.
      store(codes, to_bytes(larger(code[0], smaller(size[0], integers(1)))));
      return;
    }
    store_bytes(codes, larger(saturated(code), smaller(saturated(size), shorts(1))));
  }
};

// E4M3 of 2^8 t^k. k is 1 unless EXPANDED. For k = 1 the tables would hold the E4M3 numbers
// themselves, so `share` computes them without a lookup.
template <bool SIGNED, bool EXPANDED> struct Small : ByVector<Small<SIGNED, EXPANDED>, 8> {
  static constexpr bool EXPANDS = EXPANDED;
  static constexpr uint32_t DROPS = 0x7FFFFF;
  using Base = ByVector<Small<SIGNED, EXPANDED>, 8>;
  using Base::Base, Base::log_k, Base::scale, Base::inverse, Base::finite_scale;
  // Decodes a magnitude to x / scale.
  F share(I code) const {
    if (!EXPANDS || log_k == 0) {
      const F subnormal = to_float(code) * 0x1p-17f;
      return code < 8 ? subnormal : value((code << 20) + (112 << 23));
    }
    const ExpansionTables& tables = expansion_tables;
    // In units of a quarter octave.
    const I octaves = ((code >> 3) - 15) << (2 - log_k);
    F normal = lookup8(tables.fractions[log_k + 2], code & 7);
    if (log_k > 0) normal = normal * lookup8(tables.quarters, octaves & 3);
    return code < 8 ? lookup8(tables.subnormals[log_k + 2], code & 7) : normal * value(((octaves >> 2) + 127) << 23);
  }
  F decode_vector(const uint8_t* codes) const {
    const I c = widened(load<Bytes>(codes));
    const F x = share(SIGNED ? c & 0x7F : c) * scale;
    return SIGNED ? value(bits(x) | (c & 0x80) << 24) : x;
  }
  static I below(F y) {
    return y < 0x1p-6f ? to_integer(y * 0x1p9f) : (bits(y) >> 20) - (120 << 3);
  }
  template <bool DRAWS> F encode_vector(uint8_t* codes, F x, U random, I decays) const {
    const F t = magnitude(x) * inverse;
    F y = t;
    if constexpr (EXPANDS) {
      for (int k = 0; k < log_k; k++) y = y * y;
      for (int k = log_k; k < 0; k++) y = square_root(y);
    }
    y = y * 0x1p8f;
    I code;
    if (SIGNED && !DRAWS) {
      const F shift = value(larger(bits(y) & 0x7F800000, integers(121 << 23))) * 0x1.8p20f;
      code = below(decays ? y : (y + shift) - shift);
    } else if (EXPANDS && !SIGNED && log_k < 0) {
      const I normal = ((bits(y) + I(random << 4)) >> 20) - (120 << 3);
      const I subnormal = to_integer(y * 0x1p9f + uniform(random));
      code = y < 0x1p-6f ? subnormal : normal;
    } else {
      const I low = below(y);
      const F from = share(low), to = share(low + 1);
      code = low - (from + uniform(random) * (to - from) < t);
    }
    store(codes, to_bytes(SIGNED ? code | (I(U(bits(x)) >> 31) << 7) : larger(code, at_least_one(t))));
    return SIGNED ? with_sign(share(code) * finite_scale, x) : x;
  }
};

template <bool SIGNED> struct Float16 : ByVector<Float16<SIGNED>, 16> {
  static constexpr uint32_t DROPS = 0x7FFFFF;
  using Base = ByVector<Float16<SIGNED>, 16>;
  using Base::Base, Base::scale, Base::inverse, Base::finite_scale;
  F decode_vector(const uint8_t* codes) const { return from_float16s(load<Words>(codes)) * 0x1p-15f * scale; }
  static I below(F y) {
    return y < 0x1p-14f ? to_integer(y * 0x1p24f) : (bits(y) >> 13) - (112 << 10);
  }
  template <bool DRAWS> F encode_vector(uint8_t* codes, F x, U random, I decays) const {
    const F t = magnitude(x) * inverse, y = t * 0x1p15f;
    I code;
    if (SIGNED && !DRAWS) {
      const F shift = value(larger(bits(y) & 0x7F800000, integers(113 << 23))) * 0x1.8p13f;
      code = below(decays ? y : (y + shift) - shift);
    } else {
      const I normal = ((bits(y) + I(random >> 3)) >> 13) - (112 << 10);
      const I subnormal = to_integer(y * 0x1p24f + uniform(random));
      code = y < 0x1p-14f ? subnormal : normal;
    }
    const Words words = to_words(SIGNED ? code | (I(U(bits(x)) >> 31) << 15) : larger(code, at_least_one(t)));
    store(codes, words);
    return SIGNED ? from_float16s(words) * 0x1p-15f * finite_scale : x;
  }
};

struct Dynamic4 : ByVector<Dynamic4, 4> {
  static constexpr uint32_t DROPS = 0xFFFF;
  using ByVector::ByVector;
  F decode_vector(const uint8_t* codes) const {
    return lookup16(level_tables.of_code, nibbles(codes)) * scale;
  }
  template <bool DRAWS> F encode_vector(uint8_t* codes, F x, U random, I decays) const {
    const F share = magnitude(x) * inverse;
    const I octave = larger((bits(share) >> 23) - LevelTables::BELOW, integers(0));
    I code = bits(lookup16(level_tables.below, octave)) - (share > lookup16(level_tables.boundary, octave));
    // Masks are -1: this steps down to the level below.
    code += (DRAWS ? integers(-1) : decays) & (share < lookup8(DYNAMIC_LEVELS, code));
    if (DRAWS) {
      const F from = lookup8(DYNAMIC_LEVELS, code), to = lookup8(DYNAMIC_LEVELS, smaller(code + 1, integers(7)));
      code -= from + uniform(random) * (to - from) < share;
    }
    store_nibbles(codes, x < 0.f ? 8 - code : 8 + code);
    return with_sign(lookup8(DYNAMIC_LEVELS, code) * finite_scale, x);
  }
};

struct Linear4 : ByVector<Linear4, 4> {
  static constexpr uint32_t DROPS = 0xFFFF;
  using ByVector::ByVector;
  F decode_vector(const uint8_t* codes) const {
    const F x = (to_float(nibbles(codes)) + 1.f) * (scale * (1.f / 16.f));
    return scale == 0x1p-94f ? all(0.f) : x;
  }
  template <bool> F encode_vector(uint8_t* codes, F x, U random, I) const {
    const I code = to_integer(x * (16.f * inverse) + uniform(random));
    store_nibbles(codes, smaller(larger(code, integers(1)), integers(16)) - 1);
    return x;
  }
};

// ---- rules: rules.py has the equations ----
//
// only_decays(c, g, m) is true where the first moment only decays. step(w, g, m, v, decays) updates
// w, m and v, and sets `decays` where m is clamped. HOLDS: m or v is quantized, so m is clamped.
// Returns the lag by which the second pass corrects w for the rounding of m, if the rule LAGS.
// DRAWS and LAGS are `draws_first` and `lags` of the rule: the binding compares them.

// `rules.only_decays` for a moment that is an average of gradients.
inline I average_decays(F g, F m) { return magnitude(g) * 4.f <= magnitude(m); }

// With a quantized first moment, AdamW is split between the passes: sqrt(v) in the first, the
// quotient in the second. Their latencies then overlap with other work. `moments` returns the root
// and sets `lag` to the factor of the rate.

template <bool HOLDS> struct AdamW {
  static constexpr bool LAGS = HOLDS, DRAWS = false, HALVES = true;
  static I only_decays(const Constants&, F g, F m) { return average_decays(g, m); }
  // Without this split the first pass waited for a root and then a quotient, half of its time.
  static F moments(const Constants& c, F g, F& m, F& v, I& decays, F& lag) {
    m = m + c.one_minus_beta1 * (g - m);
    v = v * c.beta2 + c.one_minus_beta2 * g * g;
    const F root = square_root(v), limit = root * c.bound;
    lag = decays ? all(c.lag_of_decay) : all(c.lag);
    decays |= magnitude(m) > limit;
    m = with_sign(smaller(limit, magnitude(m)), m);
    return root;
  }
  template <class X> static X rate(const Constants& c, X root) { return c.step_size / (root * c.correction + c.eps); }
  static F step(const Constants& c, F& w, F g, F& m, F& v, I& decays) {
    m = m + c.one_minus_beta1 * (g - m);
    v = v * c.beta2 + c.one_minus_beta2 * g * g;
    const F root = square_root(v);
    if (!HOLDS) {
      w = w * c.decay + c.step_size * m / (root * c.correction + c.eps);
      return w;
    }
    const F rate = c.step_size / (root * c.correction + c.eps);
    m = with_sign(smaller(root * c.bound, magnitude(m)), m);
    w = w * c.decay + m * rate;
    return w;
  }
};

struct Lion {
  static constexpr bool LAGS = false, DRAWS = true, HALVES = false;
  static I only_decays(const Constants&, F g, F m) { return average_decays(g, m); }
  static F step(const Constants& c, F& w, F g, F& m, F&, I&) {
    const F direction = m + c.one_minus_beta1 * (g - m);
    w = w * c.decay + c.step_size * (direction > 0.f ? all(1.f) : (direction < 0.f ? all(-1.f) : direction));
    m = m + c.one_minus_beta2 * (g - m);
    return w;
  }
};

struct Sgd {
  static constexpr bool LAGS = true, DRAWS = false, HALVES = false;
  // m is a sum of gradients, not an average.
  static I only_decays(const Constants& c, F g, F m) { return magnitude(g) * 4.f <= magnitude(m) * c.one_minus_beta1; }
  static F step(const Constants& c, F& w, F g, F& m, F&, I&) {
    const F d = g + c.decay * w;
    m = m * c.beta1 + d;
    w = w + c.step_size * (c.nesterov ? d + c.beta1 * m : m);
    return all(c.lag);
  }
};

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
  // A difference means that someone wrote the weight since the last step, so the weight wins.
  for (int i = 0; i < n; i++) w[i] = seen[i] == w[i] ? wide[i] : w[i];
}

void store_weight(const Job& job, float* w, const Place& at, int n) {
  uint16_t* half = static_cast<uint16_t*>(job.weight) + at.element;
  const uint32_t noise = job.weight_noise + uint32_t(at.index / BLOCK * 8), start = uint32_t(at.index % BLOCK);
  switch (job.master_kind) {
    case MASTER_FP32: std::memcpy(static_cast<float*>(job.master) + at.element, w, n * sizeof(float)); break;
    case MASTER_FP16: {
      uint16_t* codes = static_cast<uint16_t*>(job.master) + at.element;
      const float scale = scale_from(amax_bits(w, n), 0x7FFFFFU), inverse = scale == scale ? 1.f / scale : 0.f;
      job.master_scale[at.tile] = uint16_t(as_bits(scale) >> 16);
      if (scale != scale) std::fill(w, w + n, 0.f);  // a poisoned tile: its scale says so
      for (int i = 0; i < n; i++) {
        float y = std::min(std::fabs(w[i]) * inverse, 1.f) * 0x1p15f;
        // gap is a power of two, so the division is exact.
        float gap = power_below<15>(y) * 0x1p-10f, part = y / gap, whole = std::floor(part);
        y = (uniform(noise16(noise, start + i)) < part - whole ? whole + 1.f : whole) * gap;
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
      if (job.weight_dtype == FLOAT16)
        for (int i = 0; i < n; i++) half[i] = to_float16_stochastic(w[i], noise16(noise, start + i));
      else for (int i = 0; i < n; i++) half[i] = to_bfloat16_stochastic(w[i], noise16(noise, start + i));
      return;
  }
  narrow(w, job.weight, job.weight_dtype, at.element, n, job.master_kind != DIRECT);
}

// Prefetches the next tile during the computation of this one. The hardware prefetcher loses the
// streams in the gaps between the loops of a tile.
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

// ---- a tile -------------------------------------------------------------------------------------------------------------

// Bits of the largest magnitude, with NaN of either sign as the largest, and of the smallest
// nonzero magnitude.
template <class FORMAT> struct Extent {
  U largest = U{}, smallest = ~U{};
  void see(F size) {
    const U x = U(bits(size));
    largest = x > largest ? x : largest;
    if constexpr (FORMAT::EXPANDS) smallest = x - 1 < smallest ? x - 1 : smallest;
  }
  uint32_t most() const {
    uint32_t found = 0;
    for (int l = 0; l < LANES; l++) found = std::max(found, largest[l]);
    return found & 0x7FFFFFFF;
  }
  // 0x7F800000 if all are 0.
  uint32_t least() const {
    uint32_t found = 0x7F7FFFFF;
    for (int l = 0; l < LANES; l++) found = std::min(found, smallest[l]);
    return found + 1;
  }
};

// A tile between its two passes: float32 moments, their extents (for the scales), float32 weights,
// the lag of each weight, and masks of decaying first moments, packed by `saturated`.
template <class FIRST, class SECOND> struct Updated {
  Place at;
  int n;
  // Points into the parameter if it is float32, else to `weights`.
  float* w;
  alignas(64) float m[TILE], v[TILE], lag[TILE], root[TILE], weights[TILE];
  alignas(64) int16_t decays[TILE];
  Extent<FIRST> of_first;
  Extent<SECOND> of_second;
};

template <class FORMAT> FORMAT format_of(const Moment& q, int64_t tile) {
  return FORMAT(q.scale ? from_bfloat16(q.scale[tile]) : 1.f, q.expansion ? q.expansion[tile] : 0);
}
template <class FORMAT> uint8_t* codes_of(const Moment& q, const Place& at) {
  return static_cast<uint8_t*>(q.codes) + (FORMAT::BITS == 4 ? at.packed : at.element * (FORMAT::BITS / 8));
}

// A partial last vector works on zero-padded copies. Copies the bytes of `count` elements; the
// unused half byte of an odd count stays 0.
template <int BITS> void copy_codes(uint8_t* to, const uint8_t* from, int count) {
  std::memcpy(to, from, (count * BITS + 7) / 8);
  if (BITS == 4 && count % 2) to[count / 2] &= 0xF;
}

// Chooses the scale for tile x from its extent, stores it, and returns the format for encoding.
template <class FORMAT> FORMAT format_for(const Moment& q, const Place& at, float* x, const Extent<FORMAT>& extent) {
  if constexpr (FORMAT::IS_NARROW) {
    const uint32_t amax = extent.most();
    const float scale = scale_from(amax, FORMAT::DROPS);
    q.scale[at.tile] = uint16_t(as_bits(scale) >> 16);
    if (scale != scale) std::fill(x, x + TILE, 0.f);  // a poisoned tile: its scale says so
    const int log_k = q.expansion ? chosen_expansion(q, extent.least(), amax) : 0;
    if (q.expansion) q.expansion[at.tile] = int8_t(log_k);
    return FORMAT(scale, log_k);
  }
  return FORMAT(1.f, 0);
}

// Second pass of a tile: writes codes with the scales of the first pass, and corrects the weights
// for the rounding error of m. Padding of a partial last vector is zero. Both moments share a loop:
// the square roots of one overlap with the integer work of the other.
template <class RULE, class FIRST, class SECOND> void encode(const Job& job, const Constants& constants, Updated<FIRST, SECOND>& tile) {
  constexpr bool HALVES = RULE::HALVES && FIRST::IS_NARROW;
  const Constants c = constants;  // as in step_tiles
  bool poisoned = false;
  float stepped[HALVES ? TILE : 1];
  if constexpr (HALVES) {
    const float scale = scale_from(tile.of_first.most(), FIRST::DROPS);
    // A non-finite tile steps now with its old first moment, which is zeros from here on. The loop
    // steps it too, because a branch there would load constants anew for each block.
    poisoned = scale != scale;
    if (poisoned)
      for (int i = 0; i < tile.n; i++) stepped[i] = tile.w[i] * c.decay + tile.m[i] * RULE::rate(c, tile.root[i]);
  }
  constexpr bool LAGS = RULE::LAGS && FIRST::IS_NARROW;
  const FIRST first = format_for<FIRST>(job.first, tile.at, tile.m, tile.of_first);
  const SECOND second = format_for<SECOND>(job.second, tile.at, tile.v, tile.of_second);
  uint8_t *const firsts = codes_of<FIRST>(job.first, tile.at), *const seconds = codes_of<SECOND>(job.second, tile.at);
  const uint32_t key = job.noise, start = uint32_t(tile.at.index / BLOCK);
  const auto block = [&](uint8_t* to_first, uint8_t* to_second, float* w, int i, const U* random) __attribute__((always_inline)) {
    F m[PARTS], v[PARTS], kept[PARTS];
    if constexpr (FIRST::IS_NARROW) {
      for (int p = 0; p < PARTS; p++) m[p] = load<F>(tile.m + i + p * LANES);
      first.template encode<RULE::DRAWS>(to_first, m, random, FIRST::DECAYS ? load<H>(tile.decays + i) : H{}, kept);
      if constexpr (HALVES) {
        for (int p = 0; p < PARTS; p++) {
          const int at = i + p * LANES;
          const F rate = RULE::rate(c, load<F>(tile.root + at)), lag = rate * load<F>(tile.lag + at);
          store(w + p * LANES, (load<F>(w + p * LANES) * c.decay + m[p] * rate) + (m[p] - kept[p]) * lag);
        }
      } else if constexpr (LAGS)
        for (int p = 0; p < PARTS; p++)
          store(w + p * LANES, load<F>(w + p * LANES) + (m[p] - kept[p]) * load<F>(tile.lag + i + p * LANES));
    }
    if constexpr (SECOND::IS_NARROW) {
      for (int p = 0; p < PARTS; p++) v[p] = load<F>(tile.v + i + p * LANES);
      second.template encode<true>(to_second, v, random, H{}, kept);
    }
  };
  const int n = tile.n, whole = n / BLOCK * BLOCK, rest = n - whole;
  float* const weights = tile.w;
  const auto from = [&](int i, const U* random) __attribute__((always_inline)) {
    block(firsts + i * FIRST::BITS / 8, seconds + i * SECOND::BITS / 8, weights + i, i, random);
  };
  U random[SHARING][PARTS];
  const int shared = n / (BLOCK * SHARING) * (BLOCK * SHARING);
  for (int i = 0; i < shared; i += BLOCK * SHARING) {
    blocks_noise(key, start + uint32_t(i / BLOCK), random);
    for (int b = 0; b < SHARING; b++) from(i + b * BLOCK, random[b]);
  }
  if (shared < whole) {
    block_noise(key, start + uint32_t(shared / BLOCK), *random);
    from(shared, *random);
  }
  if (rest) {
    uint8_t a[4 * BLOCK], b[4 * BLOCK];
    float w[BLOCK] = {};
    block_noise(key, start + uint32_t(whole / BLOCK), *random);
    std::memcpy(w, tile.w + whole, rest * sizeof(float));
    block(a, b, w, whole, *random);
    std::memcpy(tile.w + whole, w, rest * sizeof(float));
    if (FIRST::IS_NARROW) copy_codes<FIRST::BITS>(firsts + whole * FIRST::BITS / 8, a, rest);
    if (SECOND::IS_NARROW) copy_codes<SECOND::BITS>(seconds + whole * SECOND::BITS / 8, b, rest);
  }
  if (poisoned) std::memcpy(weights, stepped, n * sizeof(float));
}

// First pass of a tile: decodes, updates, and measures the extents.
template <class RULE, class FIRST, class SECOND>
void update(const Job& job, const Constants& c, const Place& at, int n, float* weights, const float* gradients,
            Updated<FIRST, SECOND>& tile) {
  const FIRST first = format_of<FIRST>(job.first, at.tile);
  const SECOND second = format_of<SECOND>(job.second, at.tile);
  uint8_t *const firsts = codes_of<FIRST>(job.first, at), *const seconds = codes_of<SECOND>(job.second, at);
  Extent<FIRST> of_first;
  Extent<SECOND> of_second;
  I all_decay = integers(-1);
  const auto block = [&](float* w_at, const float* g_at, uint8_t* first_at, uint8_t* second_at, int i, int count)
      __attribute__((always_inline)) {
    F first_moments[PARTS], second_moments[PARTS] = {};
    I all_decays[PARTS];
    first.decode(first_at, first_moments);
    if constexpr (SECOND::BITS > 0) second.decode(second_at, second_moments);
    for (int p = 0; p < PARTS; p++) {
      const int part = p * LANES;
      F w = load<F>(w_at + part), x = first_moments[p], y = second_moments[p];
      const F g = load<F>(g_at + part);
      I decays = RULE::only_decays(c, g, x);
      F lag;
      if constexpr (RULE::HALVES && FIRST::IS_NARROW) {
        store(tile.root + i + part, RULE::moments(c, g, x, y, decays, lag));
      } else {
        lag = RULE::step(c, w, g, x, y, decays);
        store(w_at + part, w);
      }
      if (count < BLOCK) x = LANE + part < count ? x : all(0.f), y = LANE + part < count ? y : all(0.f);
      if constexpr (FIRST::IS_NARROW) {
        of_first.see(magnitude(x));
        store(tile.m + i + part, x);
        if constexpr (RULE::LAGS) store(tile.lag + i + part, lag);
        if constexpr (FIRST::BITS == 4) all_decay &= decays;
        all_decays[p] = decays;
      } else {
        store(first_at + part * 4, x);
      }
      if constexpr (SECOND::BITS == 32) store(second_at + part * 4, y);
      if constexpr (SECOND::IS_NARROW) {
        of_second.see(y);
        store(tile.v + i + part, y);
      }
    }
    if constexpr (FIRST::IS_NARROW && FIRST::DECAYS && !RULE::DRAWS) store(tile.decays + i, saturated(all_decays));
  };
  const int whole = n / BLOCK * BLOCK, rest = n - whole;
  for (int i = 0; i < whole; i += BLOCK)
    block(weights + i, gradients + i, firsts + i * FIRST::BITS / 8, seconds + i * SECOND::BITS / 8, i, BLOCK);
  if (rest) {
    float w[BLOCK] = {}, g[BLOCK] = {};
    uint8_t a[4 * BLOCK] = {}, b[4 * BLOCK] = {}, *a_at = firsts + whole * FIRST::BITS / 8, *b_at = seconds + whole * SECOND::BITS / 8;
    std::memcpy(w, weights + whole, rest * sizeof(float));
    std::memcpy(g, gradients + whole, rest * sizeof(float));
    copy_codes<FIRST::BITS>(a, a_at, rest);
    if (SECOND::BITS > 0) copy_codes<SECOND::BITS>(b, b_at, rest);
    block(w, g, a, b, whole, rest);
    std::memcpy(weights + whole, w, rest * sizeof(float));
    if (FIRST::BITS == 32) std::memcpy(a_at, a, rest * sizeof(float));
    if (SECOND::BITS == 32) std::memcpy(b_at, b, rest * sizeof(float));
  }
  // The scale of a tile that decays as a whole follows the decay, so its codes may stay.
  if constexpr (FIRST::BITS == 4) {
    bool all_of_tile = true;
    for (int l = 0; l < LANES; l++) all_of_tile &= all_decay[l] != 0;
    if (all_of_tile) std::fill(tile.decays, tile.decays + TILE, int16_t(0));
  }
  tile.at = at, tile.n = n, tile.of_first = of_first, tile.of_second = of_second;
}

// Steps tiles `from` to `to`. The second pass of a tile follows the first pass of the next tile:
// its scale is known by then, and the processor overlaps both.
// Tried without gain: prefetching two tiles ahead, prefetching for writing, -O2, unrolling.
template <class RULE, class FIRST, class SECOND> void step_tiles(const Job& job, int64_t from, int64_t to) {
  constexpr bool NARROW = FIRST::IS_NARROW || SECOND::IS_NARROW;
  Updated<FIRST, SECOND> updated[2];
  float g_buffer[TILE];
  // A local copy: the compiler would reload constants that written memory could alias.
  const Constants c = *job.constants;
  const bool direct = job.weight_dtype == FLOAT32, wide_gradient = job.gradient_dtype == FLOAT32;
  const int64_t tiles = (job.columns + job.tile - 1) / job.tile;
  const auto finish = [&](Updated<FIRST, SECOND>& tile) {
    if constexpr (NARROW) encode<RULE>(job, c, tile);
    if (!direct) store_weight(job, tile.w, tile.at, tile.n);
  };
  for (int64_t t = from; t < to; t++) {
    const int64_t row = t / tiles, column = t % tiles * job.tile;
    const int64_t index = job.first_index + row * job.row_length + column;
    const Place at{t, row * job.columns + column, row * ((job.columns + 1) / 2) + column / 2, index};
    const int n = int(std::min(job.tile, job.columns - column));
    // After the last tile this prefetches unused addresses, which is harmless.
    prefetch_tile(job, at.element + n, job.tile);
    Updated<FIRST, SECOND>& tile = updated[t % 2];
    float* w = tile.w = direct ? static_cast<float*>(job.weight) + at.element : tile.weights;
    const float* g = wide_gradient ? static_cast<const float*>(job.gradient) + at.element : g_buffer;
    if (!direct) load_weight(job, at, n, w);
    if (!wide_gradient) widen(job.gradient, job.gradient_dtype, at.element, n, g_buffer);
    update<RULE>(job, c, at, n, w, g, tile);
    if constexpr (NARROW) {
      if (t > from) finish(updated[(t - 1) % 2]);
    } else {
      finish(tile);
    }
  }
  if constexpr (NARROW) if (to > from) finish(updated[(to - 1) % 2]);
}

using Step = void (*)(const Job&, int64_t, int64_t);

template <class FIRST, class SECOND> Step step_of_rule(int rule) {
  switch (rule) {
    case ADAMW: return step_tiles<AdamW<FIRST::IS_NARROW || SECOND::IS_NARROW>, FIRST, SECOND>;
    case LION: return step_tiles<Lion, FIRST, None>;
    case SGD: return step_tiles<Sgd, FIRST, None>;
    default: return nullptr;
  }
}

template <class FIRST> Step step_of_second(const Job& job) {
  const int rule = job.constants->rule;
  switch (job.second.kind) {
    case TAPERED8: return step_of_rule<FIRST, Tapered>(rule);
    case LINEAR4: return step_of_rule<FIRST, Linear4>(rule);
    case E4M3: return job.second.expansion ? step_of_rule<FIRST, Small<false, true>>(rule) : step_of_rule<FIRST, Small<false, false>>(rule);
    case FP16: return step_of_rule<FIRST, Float16<false>>(rule);
    default: return step_of_rule<FIRST, Wide>(rule);
  }
}

Step step_of(const Job& job) {
  switch (job.first.kind) {
    case FP32: return step_of_second<Wide>(job);
    case E5M2: return step_of_second<SignedE5M2>(job);
    case DYNAMIC4: return step_of_second<Dynamic4>(job);
    case FP16: return step_of_second<Float16<true>>(job);
    default: return job.first.expansion ? step_of_second<Small<true, true>>(job) : step_of_second<Small<true, false>>(job);
  }
}

}  // namespace

extern "C" int64_t narrowgauge_job_bytes() { return sizeof(Job); }

// DRAWS + 2 LAGS of a rule, or -1 if this file has no branch for its number.
extern "C" int64_t narrowgauge_rule(int64_t rule) {
  switch (rule) {
    case ADAMW: return AdamW<true>::DRAWS + 2 * AdamW<true>::LAGS;
    case LION: return Lion::DRAWS + 2 * Lion::LAGS;
    case SGD: return Sgd::DRAWS + 2 * Sgd::LAGS;
    default: return -1;
  }
}

// Steps parts `first` to `last` of `parts` of every job: runs of whole tiles, so threads share no data.
extern "C" void narrowgauge_step(int64_t first, int64_t last, const Job* jobs, int64_t count, int64_t parts) {
  for (int64_t j = 0; j < count; j++) {
    const Job& job = jobs[j];
    const int64_t tiles = job.rows * ((job.columns + job.tile - 1) / job.tile);
    step_of(job)(job, tiles * first / parts, tiles * last / parts);
  }
}
