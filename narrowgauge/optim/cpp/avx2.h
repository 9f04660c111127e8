// The moments' formats and the rules for processors with AVX2: the same bits as the stages in step.cpp, sixteen elements at a
// time in registers, in one pass that decodes and updates and one that encodes. A compiler's own vectors convert 8-bit codes
// too slowly for it.
//
// A format is a struct made for one tile, from where its codes begin, its scale and its expansion:
//   decode(i)               elements i to i + 15
//   encode(i, x, noise)     writes their codes; x is finite, the scale at least its amax
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "floats.h"

namespace avx2 {

struct Pair { __m256 a, b; };
struct Integers { __m256i a, b; };

inline __m256i all(int32_t x) { return _mm256_set1_epi32(x); }
inline __m256 all(float x) { return _mm256_set1_ps(x); }
inline __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
inline __m256 value(__m256i x) { return _mm256_castsi256_ps(x); }
inline __m256 magnitude(__m256 x) { return _mm256_and_ps(x, value(all(0x7FFFFFFF))); }
inline __m128i load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void store(void* to, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(to), x); }

// Eight codes at `from` and the eight after them, widened as they are read.
inline Integers signed_integers(const void* from) {
  const char* at = static_cast<const char*>(from);
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 8)))};
}
inline Integers integers(const void* from) {
  const char* at = static_cast<const char*>(from);
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 8)))};
}
inline Integers signed_integers(__m128i bytes) {
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Integers integers(__m128i bytes) { return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))}; }
// Back to bytes, in order, saturating to signed 16 bits and then to SIGNED or unsigned 8.
template <bool SIGNED> inline __m128i bytes(Integers x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  return SIGNED ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high);
}

// ---- random bits: the halves of a mixing are those of elements l and l + 8 ------------------------------------------------

struct Noise {
  __m256i count;
  Noise(uint32_t key, uint32_t index)
      : count(_mm256_add_epi32(all(int32_t(key + index / 2)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))) {}
  Integers next() {
    __m256i x = _mm256_mullo_epi32(_mm256_xor_si256(count, _mm256_srli_epi32(count, 16)), all(0x7feb352d));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), all(int32_t(0x846ca68bU)));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    count = _mm256_add_epi32(count, all(8));
    return {_mm256_and_si256(x, all(0xFFFF)), _mm256_srli_epi32(x, 16)};
  }
};
inline __m256 uniform(__m256i noise) { return _mm256_mul_ps(_mm256_add_ps(_mm256_cvtepi32_ps(noise), all(0.5f)), all(0x1p-16f)); }

// ---- formats ------------------------------------------------------------------------------------------------------------

struct None {
  static constexpr bool IS_KEPT = false, EXPANDS = false;
  None(void*, float, int) {}
};

template <int MOST> struct Squared {
  const __m256 unit, inverse;
  explicit Squared(float scale) : unit(all(scale * (1.f / float(MOST * MOST)))), inverse(all(float(MOST * MOST) * (1.f / scale))) {}
  __m256 number(__m256i code) const {
    const __m256 x = _mm256_cvtepi32_ps(code);
    return _mm256_mul_ps(_mm256_mul_ps(x, magnitude(x)), unit);
  }
  __m256i code(__m256 x) const {
    return _mm256_sign_epi32(_mm256_cvtps_epi32(_mm256_sqrt_ps(_mm256_mul_ps(magnitude(x), inverse))), bits(x));
  }
};

struct Squared8 : Squared<127> {
  static constexpr bool IS_KEPT = true, EXPANDS = false;
  int8_t* codes;
  Squared8(void* codes, float scale, int) : Squared(scale), codes(static_cast<int8_t*>(codes)) {}
  Pair decode(int i) const {
    const Integers c = signed_integers(codes + i);
    return {number(c.a), number(c.b)};
  }
  void encode(int i, Pair x, Noise&) const { store(codes + i, bytes<true>({code(x.a), code(x.b)})); }
};

// Two codes of 4 bits in a byte.
inline __m128i unpacked(const uint8_t* from) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), low = _mm_set1_epi8(0xF);
  return _mm_unpacklo_epi8(_mm_and_si128(packed, low), _mm_and_si128(_mm_srli_epi16(packed, 4), low));
}
inline void pack(uint8_t* to, Integers nibbles) {
  const __m128i pairs = _mm_maddubs_epi16(bytes<false>(nibbles), _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
}

struct Dynamic4 {
  static constexpr bool IS_KEPT = true, EXPANDS = false;
  uint8_t* codes;
  const __m256 scale, inverse, levels;
  Dynamic4(void* codes, float scale, int)
      : codes(static_cast<uint8_t*>(codes)), scale(all(scale)), inverse(all(1.f / scale)), levels(_mm256_load_ps(DYNAMIC_LEVELS)) {}
  __m256 number(__m256i code) const {
    const __m256 level = _mm256_permutevar8x32_ps(levels, _mm256_abs_epi32(code));
    const __m256 sign = value(_mm256_and_si256(code, all(INT32_MIN)));
    return _mm256_mul_ps(_mm256_xor_ps(level, sign), scale);
  }
  __m256i code(__m256 x) const {
    const __m256 share = _mm256_mul_ps(magnitude(x), inverse);
    __m256i code = _mm256_setzero_si256();
    for (float boundary : DYNAMIC_BOUNDARIES) code = _mm256_sub_epi32(code, bits(_mm256_cmp_ps(share, all(boundary), _CMP_GT_OQ)));
    return _mm256_sign_epi32(code, bits(x));  // of +0 the sign is 0, and so is the code
  }
  Pair decode(int i) const {
    const Integers c = signed_integers(_mm_sub_epi8(unpacked(codes + i / 2), _mm_set1_epi8(8)));
    return {number(c.a), number(c.b)};
  }
  void encode(int i, Pair x, Noise&) const {
    pack(codes + i / 2, {_mm256_add_epi32(code(x.a), all(8)), _mm256_add_epi32(code(x.b), all(8))});
  }
};

struct Linear4 {
  static constexpr bool IS_KEPT = true, EXPANDS = false;
  uint8_t* codes;
  const __m256 unit, inverse;
  Linear4(void* codes, float scale, int)
      : codes(static_cast<uint8_t*>(codes)), unit(all(scale == 0x1p-94f ? 0.f : scale * (1.f / 16.f))), inverse(all(16.f * (1.f / scale))) {}
  __m256 number(__m256i code) const { return _mm256_mul_ps(_mm256_cvtepi32_ps(code), unit); }
  __m256i code(__m256 x, __m256i noise) const {
    const __m256i c = _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(x, inverse), uniform(noise)));
    return _mm256_sub_epi32(_mm256_min_epi32(_mm256_max_epi32(c, all(1)), all(16)), all(1));
  }
  Pair decode(int i) const {
    const Integers c = integers(_mm_add_epi8(unpacked(codes + i / 2), _mm_set1_epi8(1)));
    return {number(c.a), number(c.b)};
  }
  void encode(int i, Pair x, Noise& noise) const {
    const Integers random = noise.next();
    pack(codes + i / 2, {code(x.a, random.a), code(x.b, random.b)});
  }
};

// The power-of-two scale is added to the exponent bits instead of multiplied.
struct UE5M3 {
  static constexpr bool IS_KEPT = true, EXPANDS = false;
  uint8_t* codes;
  const __m256i origin;
  UE5M3(void* codes, float scale, int)
      : codes(static_cast<uint8_t*>(codes)), origin(all((761 << 20) + int32_t(as_bits(scale) & 0x7F800000U) - (127 << 23))) {}
  __m256 number(__m256i code) const {
    const __m256i shifted = _mm256_add_epi32(_mm256_slli_epi32(code, 20), origin);
    return value(_mm256_andnot_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()), shifted));
  }
  __m256i code(__m256 x, __m256i noise, __m256i from) const {
    const __m256i carried = _mm256_add_epi32(_mm256_sub_epi32(bits(x), from), _mm256_slli_epi32(noise, 4));
    return _mm256_max_epi32(_mm256_srai_epi32(carried, 20), _mm256_min_epi32(bits(x), all(1)));
  }
  Pair decode(int i) const {
    const Integers c = integers(codes + i);
    return {number(c.a), number(c.b)};
  }
  void encode(int i, Pair x, Noise& noise) const {
    const Integers random = noise.next();
    const __m256i from = _mm256_sub_epi32(origin, all(8));
    store(codes + i, bytes<false>({code(x.a, random.a, from), code(x.b, random.b, from)}));
  }
};

template <bool SIGNED, bool EXPANDED> struct E4M3 {
  static constexpr bool IS_KEPT = true, EXPANDS = EXPANDED;
  uint8_t* codes;
  const __m256 scale, inverse, fractions, subnormals, quarters;
  const int log_k;
  E4M3(void* codes, float scale, int log_k)
      : codes(static_cast<uint8_t*>(codes)), scale(all(scale)), inverse(all(1.f / scale)),
        fractions(_mm256_load_ps(expansion_tables.fractions[log_k + 2])),
        subnormals(_mm256_load_ps(expansion_tables.subnormals[log_k + 2])), quarters(_mm256_load_ps(expansion_tables.quarters)),
        log_k(log_k) {}
  __m256 share(__m256i code) const {  // of the scale; the code without its sign
    const __m256i is_subnormal = _mm256_cmpgt_epi32(all(8), code);
    if (!EXPANDED || log_k == 0) {
      const __m256 normal = value(_mm256_add_epi32(_mm256_slli_epi32(code, 20), all((120 - 8) << 23)));
      const __m256 subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(code), all(0x1p-17f));
      return _mm256_blendv_ps(normal, subnormal, value(is_subnormal));
    }
    const __m256i exponent = _mm256_sub_epi32(_mm256_srli_epi32(code, 3), all(15));
    const __m256i octaves = _mm256_sll_epi32(exponent, _mm_cvtsi32_si128(2 - log_k));  // in quarters
    const __m256 power = value(_mm256_slli_epi32(_mm256_add_epi32(_mm256_srai_epi32(octaves, 2), all(127)), 23));
    const __m256 normal = _mm256_mul_ps(_mm256_permutevar8x32_ps(fractions, code), _mm256_permutevar_ps(quarters, octaves));
    return _mm256_blendv_ps(_mm256_mul_ps(normal, power), _mm256_permutevar8x32_ps(subnormals, code), value(is_subnormal));
  }
  __m256 number(__m256i code) const {
    if (!SIGNED) return _mm256_mul_ps(share(code), scale);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 24), all(INT32_MIN));
    return value(_mm256_or_si256(bits(_mm256_mul_ps(share(_mm256_and_si256(code, all(0x7F))), scale)), sign));
  }
  static __m256i rounded_down(__m256 y) {
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(bits(y), 20), all(120 << 3));
    const __m256i subnormal = _mm256_cvttps_epi32(_mm256_mul_ps(y, all(0x1p9f)));
    return _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(all(121 << 23), bits(y)));
  }
  __m256i code(__m256 x, __m256i noise) const {
    const __m256 t = _mm256_mul_ps(magnitude(x), inverse);
    __m256 y = t;
    for (int k = 0; k < log_k; k++) y = _mm256_mul_ps(y, y);
    for (int k = log_k; k < 0; k++) y = _mm256_sqrt_ps(y);
    y = _mm256_mul_ps(y, all(0x1p8f));
    if (SIGNED) {
      const __m256i power = _mm256_max_epi32(_mm256_and_si256(bits(y), all(0x7F800000)), all(121 << 23));
      const __m256 shift = _mm256_mul_ps(value(power), all(0x1.8p20f));
      const __m256i nearest = rounded_down(_mm256_sub_ps(_mm256_add_ps(y, shift), shift));
      return _mm256_or_si256(nearest, _mm256_slli_epi32(_mm256_srli_epi32(bits(x), 31), 7));
    }
    const __m256i low = rounded_down(y);
    const __m256 below = share(low), above = share(_mm256_add_epi32(low, all(1)));
    const __m256 threshold = _mm256_add_ps(below, _mm256_mul_ps(uniform(noise), _mm256_sub_ps(above, below)));
    const __m256i found = _mm256_sub_epi32(low, bits(_mm256_cmp_ps(threshold, t, _CMP_LT_OQ)));
    return _mm256_max_epi32(found, _mm256_min_epi32(bits(t), all(1)));
  }
  Pair decode(int i) const {
    const Integers c = integers(codes + i);
    return {number(c.a), number(c.b)};
  }
  void encode(int i, Pair x, Noise& noise) const {
    const Integers random = SIGNED ? Integers{} : noise.next();
    store(codes + i, bytes<false>({code(x.a, random.a), code(x.b, random.b)}));
  }
};

struct Float16 {  // unsigned
  static constexpr bool IS_KEPT = true, EXPANDS = false;
  uint16_t* codes;
  const __m256 scale, inverse;
  Float16(void* codes, float scale, int) : codes(static_cast<uint16_t*>(codes)), scale(all(scale)), inverse(all(1.f / scale)) {}
  __m256 number(__m128i code) const { return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtph_ps(code), all(0x1p-15f)), scale); }
  __m256i code(__m256 x, __m256i noise) const {
    const __m256 t = _mm256_mul_ps(x, inverse), y = _mm256_mul_ps(t, all(0x1p15f));
    const __m256i carried = _mm256_add_epi32(bits(y), _mm256_srli_epi32(noise, 3));
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(carried, 13), all(112 << 10));
    const __m256i subnormal = _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(y, all(0x1p24f)), uniform(noise)));
    const __m256i found = _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(all(113 << 23), bits(y)));
    return _mm256_max_epi32(found, _mm256_min_epi32(bits(t), all(1)));
  }
  Pair decode(int i) const { return {number(load(codes + i)), number(load(codes + i + 8))}; }
  void encode(int i, Pair x, Noise& noise) const {
    const Integers random = noise.next();
    const __m256i packed = _mm256_packus_epi32(code(x.a, random.a), code(x.b, random.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_permute4x64_epi64(packed, 0xD8));
  }
};

// ---- rules: rules.py has the equations ----------------------------------------------------------------------------------

template <typename CONSTANTS> struct AdamW {
  const __m256 rest1, beta2, rest2, eps, step_size, correction, decay;
  explicit AdamW(const CONSTANTS& c)
      : rest1(all(c.rest1)), beta2(all(c.beta2)), rest2(all(c.rest2)), eps(all(c.eps)), step_size(all(c.step_size)),
        correction(all(c.correction)), decay(all(c.decay)) {}
  __m256 step(__m256 w, __m256 g, __m256& m, __m256& v) const {
    m = _mm256_add_ps(m, _mm256_mul_ps(rest1, _mm256_sub_ps(g, m)));
    v = _mm256_add_ps(_mm256_mul_ps(v, beta2), _mm256_mul_ps(_mm256_mul_ps(rest2, g), g));
    const __m256 denominator = _mm256_add_ps(_mm256_mul_ps(_mm256_sqrt_ps(v), correction), eps);
    return _mm256_add_ps(_mm256_mul_ps(w, decay), _mm256_div_ps(_mm256_mul_ps(step_size, m), denominator));
  }
};

template <typename CONSTANTS> struct Lion {
  const __m256 rest1, rest2, step_size, decay;
  explicit Lion(const CONSTANTS& c) : rest1(all(c.rest1)), rest2(all(c.rest2)), step_size(all(c.step_size)), decay(all(c.decay)) {}
  __m256 step(__m256 w, __m256 g, __m256& m, __m256&) const {
    const __m256 c = _mm256_add_ps(m, _mm256_mul_ps(rest1, _mm256_sub_ps(g, m))), zero = _mm256_setzero_ps();
    const __m256 one = _mm256_or_ps(all(1.f), _mm256_and_ps(c, all(-0.f)));
    const __m256 sign = _mm256_blendv_ps(c, one, _mm256_cmp_ps(c, zero, _CMP_NEQ_OQ));  // NaN and zeros stay
    m = _mm256_add_ps(m, _mm256_mul_ps(rest2, _mm256_sub_ps(g, m)));
    return _mm256_add_ps(_mm256_mul_ps(w, decay), _mm256_mul_ps(step_size, sign));
  }
};

template <typename CONSTANTS> struct Sgd {
  const __m256 beta1, step_size, decay;
  const bool nesterov;
  explicit Sgd(const CONSTANTS& c) : beta1(all(c.beta1)), step_size(all(c.step_size)), decay(all(c.decay)), nesterov(c.nesterov) {}
  __m256 step(__m256 w, __m256 g, __m256& m, __m256&) const {
    const __m256 d = _mm256_add_ps(g, _mm256_mul_ps(decay, w));
    m = _mm256_add_ps(_mm256_mul_ps(m, beta1), d);
    const __m256 direction = nesterov ? _mm256_add_ps(d, _mm256_mul_ps(beta1, m)) : m;
    return _mm256_add_ps(w, _mm256_mul_ps(step_size, direction));
  }
};

// ---- passes -------------------------------------------------------------------------------------------------------------

// The bits of the largest magnitude, NaN being the largest of all; and of the smallest but 0.
template <bool BOTH> struct Extent {
  __m256i largest = _mm256_setzero_si256(), smallest = all(-1);
  void see(__m256 x) {
    const __m256i size = bits(magnitude(x));
    largest = _mm256_max_epi32(largest, size);
    if (BOTH) smallest = _mm256_min_epu32(smallest, _mm256_sub_epi32(size, all(1)));
  }
  uint32_t most() const {
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    return *std::max_element(lanes, lanes + 8);
  }
  uint32_t least() const {  // 0x7F800000 where all are 0
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), smallest);
    return std::min(*std::min_element(lanes, lanes + 8), 0x7F7FFFFFU) + 1;
  }
};

template <class RULE, class FIRST, class SECOND>
inline void update(const RULE rule, const FIRST first, const SECOND second, const float* gradient, float* weight, float* m,
                   float* v, int n, Extent<FIRST::EXPANDS>& first_extent, Extent<SECOND::EXPANDS>& second_extent) {
  Extent<FIRST::EXPANDS> of_first;  // apart from the arguments, which any of the stores might be meant for
  Extent<SECOND::EXPANDS> of_second;
  for (int i = 0; i < n; i += 16) {
    Pair x = first.decode(i), y{};
    if constexpr (SECOND::IS_KEPT) y = second.decode(i);
    for (int half = 0; half < 2; half++) {
      __m256 &a = half ? x.b : x.a, &b = half ? y.b : y.a;
      const int at = i + 8 * half;
      _mm256_storeu_ps(weight + at, rule.step(_mm256_loadu_ps(weight + at), _mm256_loadu_ps(gradient + at), a, b));
      _mm256_store_ps(m + at, a);
      of_first.see(a);
      if constexpr (SECOND::IS_KEPT) {
        _mm256_store_ps(v + at, b);
        of_second.see(b);
      }
    }
  }
  first_extent = of_first;
  second_extent = of_second;
}

template <class FORMAT> inline void encode(const FORMAT format, const float* x, int n, Noise noise) {
  for (int i = 0; i < n; i += 16) format.encode(i, {_mm256_load_ps(x + i), _mm256_load_ps(x + i + 8)}, noise);
}

}  // namespace avx2
