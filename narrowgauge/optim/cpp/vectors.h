// Vectors of LANES elements: the vector extensions of GCC and Clang, as wide as the target
// processor has them.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int BLOCK = 16;             // elements that share random bits, see noise.py
constexpr int PARTS = BLOCK / LANES;  // vectors of a block

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Signed8 __attribute__((vector_size(LANES)));
typedef uint16_t Words __attribute__((vector_size(2 * LANES)));

// 16-bit values of a block, in the order of packing PARTS vectors. The order of the elements,
// except with AVX2, whose pack instructions work on each 128-bit half.
typedef int16_t H __attribute__((vector_size(2 * BLOCK)));

typedef uint64_t Pairs __attribute__((vector_size(4 * LANES)));
typedef uint8_t Halves __attribute__((vector_size(LANES / 2)));

template <class V> inline V load(const void* from) { V x; std::memcpy(&x, from, sizeof x); return x; }
template <class V> inline void store(void* to, V x) { std::memcpy(to, &x, sizeof x); }

inline I lanes() {
  I x;
  for (int l = 0; l < LANES; l++) x[l] = l;
  return x;
}
const I LANE = lanes();

inline F all(float x) { return F{} + x; }
inline I integers(int32_t x) { return I{} + x; }
inline I bits(F x) { return I(x); }
inline F value(I x) { return F(x); }
inline F with_sign(F magnitude, F x) { return value(bits(magnitude) | (bits(x) & INT32_MIN)); }
inline F magnitude(F x) { return value(bits(x) & 0x7FFFFFFF); }
inline I larger(I a, I b) { return a > b ? a : b; }
inline I smaller(I a, I b) { return a < b ? a : b; }
inline H shorts(int16_t x) { return H{} + x; }
inline H larger(H a, H b) { return a > b ? a : b; }
inline H smaller(H a, H b) { return a < b ? a : b; }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I to_integer(F x) { return __builtin_convertvector(x, I); }  // toward zero
// Smallest code of a number above 0.
inline I at_least_one(F x) { return -(x > 0.f); }

// Operations for which GCC 12 finds no single instruction: square roots, lookups in tables of eight
// or sixteen floats, and conversion between codes and integers (dropping the upper bits).
#if defined(__AVX512F__)
inline F square_root(F x) { return F(_mm512_sqrt_ps(__m512(x))); }
inline F smaller(F a, F b) { return F(_mm512_min_ps(__m512(a), __m512(b))); }  // b beside NaN
inline I to_nearest_integer(F x) { return I(_mm512_cvtps_epi32(__m512(x))); }
inline F lookup8(const float* table, I place) {
  return F(_mm512_permutexvar_ps(__m512i(place), _mm512_castps256_ps512(_mm256_loadu_ps(table))));
}
inline F lookup16(const float* table, I place) { return F(_mm512_permutexvar_ps(__m512i(place), _mm512_loadu_ps(table))); }
inline Pairs widened(Halves x) { return Pairs(_mm512_cvtepu8_epi64(_mm_cvtsi64_si128(int64_t(x)))); }
inline Halves to_bytes(Pairs x) { return Halves(uint64_t(_mm_cvtsi128_si64(_mm512_cvtepi64_epi8(__m512i(x))))); }
inline I widened(Bytes x) { return I(_mm512_cvtepu8_epi32(__m128i(x))); }
inline I widened(Signed8 x) { return I(_mm512_cvtepi8_epi32(__m128i(x))); }
inline I widened(Words x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
inline Bytes to_bytes(I x) { return Bytes(_mm512_cvtepi32_epi8(__m512i(x))); }
inline Words to_words(I x) { return Words(_mm512_cvtepi32_epi16(__m512i(x))); }
#elif defined(__AVX2__)
inline F square_root(F x) { return F(_mm256_sqrt_ps(__m256(x))); }
inline F smaller(F a, F b) { return F(_mm256_min_ps(__m256(a), __m256(b))); }
inline I to_nearest_integer(F x) { return I(_mm256_cvtps_epi32(__m256(x))); }
inline F lookup8(const float* table, I place) { return F(_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), __m256i(place))); }
inline F lookup16(const float* table, I place) { return place < 8 ? lookup8(table, place) : lookup8(table + 8, place); }
inline Pairs widened(Halves x) { return Pairs(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int32_t(uint32_t(x))))); }
inline Halves to_bytes(Pairs x) { return Halves(uint32_t(x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24)); }
inline __m128i low(uint64_t x) { return _mm_cvtsi64_si128(int64_t(x)); }
inline I widened(Bytes x) { return I(_mm256_cvtepu8_epi32(low(uint64_t(x)))); }
inline I widened(Signed8 x) { return I(_mm256_cvtepi8_epi32(low(uint64_t(x)))); }
inline I widened(Words x) { return I(_mm256_cvtepu16_epi32(__m128i(x))); }
inline Words to_words(I x) {
  const __m256i kept = __m256i(x & 0xFFFF);
  return Words(_mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1)));
}
inline Bytes to_bytes(I x) { return Bytes(uint64_t(_mm_cvtsi128_si64(_mm_packus_epi16(__m128i(to_words(x & 0xFF)), __m128i())))); }
#else
inline F square_root(F x) {
  for (int l = 0; l < LANES; l++) x[l] = __builtin_sqrtf(x[l]);
  return x;
}
inline F smaller(F a, F b) { return a < b ? a : b; }
inline I to_nearest_integer(F x) { return to_integer((x + 0x1.8p23f) - 0x1.8p23f); }
inline F lookup8(const float* table, I place) {
  F x;
  for (int l = 0; l < LANES; l++) x[l] = table[place[l]];
  return x;
}
inline F lookup16(const float* table, I place) { return lookup8(table, place); }
inline Pairs widened(Halves x) { return __builtin_convertvector(x, Pairs); }
inline Halves to_bytes(Pairs x) { return __builtin_convertvector(x, Halves); }
template <class V> inline I widened(V x) { return __builtin_convertvector(x, I); }
inline Bytes to_bytes(I x) { return __builtin_convertvector(x, Bytes); }
inline Words to_words(I x) { return __builtin_convertvector(x, Words); }
#endif

// Blocks of 16-bit values. upper, from_upper: upper halves of float32, and back with zero lower
// halves. saturated, from_saturated: int32 and masks to int16 with saturation, and masks back.
// signed_bytes: bytes to int16 with their sign. store_bytes: low bytes of values in 0 ... 255.
#if defined(__AVX512F__)
inline H upper(const F* x) { return H(_mm512_cvtepi32_epi16(_mm512_srli_epi32(__m512i(x[0]), 16))); }
inline void from_upper(H h, F* x) { x[0] = F(_mm512_slli_epi32(_mm512_cvtepu16_epi32(__m256i(h)), 16)); }
inline H saturated(const I* x) { return H(_mm512_cvtsepi32_epi16(__m512i(x[0]))); }
inline void from_saturated(H h, I* x) { x[0] = I(_mm512_cvtepi16_epi32(__m256i(h))); }
inline H signed_bytes(const uint8_t* from) { return H(_mm256_cvtepi8_epi16(load<__m128i>(from))); }
inline void store_bytes(uint8_t* to, H h) { store(to, _mm512_cvtepi32_epi8(_mm512_cvtepi16_epi32(__m256i(h)))); }
#elif defined(__AVX2__)
inline H upper(const F* x) { return H(_mm256_packus_epi32(_mm256_srli_epi32(__m256i(x[0]), 16), _mm256_srli_epi32(__m256i(x[1]), 16))); }
inline void from_upper(H h, F* x) {
  x[0] = F(_mm256_unpacklo_epi16(__m256i(), __m256i(h)));
  x[1] = F(_mm256_unpackhi_epi16(__m256i(), __m256i(h)));
}
inline H saturated(const I* x) { return H(_mm256_packs_epi32(__m256i(x[0]), __m256i(x[1]))); }
// Valid for masks only.
inline void from_saturated(H h, I* x) {
  x[0] = I(_mm256_unpacklo_epi16(__m256i(h), __m256i(h)));
  x[1] = I(_mm256_unpackhi_epi16(__m256i(h), __m256i(h)));
}
inline H signed_bytes(const uint8_t* from) { return H(_mm256_cvtepi8_epi16(_mm_shuffle_epi32(load<__m128i>(from), 0xD8))); }
inline void store_bytes(uint8_t* to, H h) {
  const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(__m256i(h)), _mm256_extracti128_si256(__m256i(h), 1));
  store(to, _mm_shuffle_epi32(packed, 0xD8));
}
#else
typedef int32_t Block32 __attribute__((vector_size(4 * BLOCK)));
typedef int8_t Block8 __attribute__((vector_size(BLOCK)));
inline H upper(const F* x) { return __builtin_convertvector(load<Block32>(x) >> 16, H); }
inline void from_upper(H h, F* x) { store(x, __builtin_convertvector(h, Block32) << 16); }
inline H saturated(const I* x) {
  const Block32 all = load<Block32>(x), above = all > INT16_MAX, below = all < INT16_MIN;
  return __builtin_convertvector((above & INT16_MAX) | (below & INT16_MIN) | (all & ~(above | below)), H);
}
inline void from_saturated(H h, I* x) { store(x, __builtin_convertvector(h, Block32)); }
inline H signed_bytes(const uint8_t* from) { return __builtin_convertvector(load<Block8>(from), H); }
inline void store_bytes(uint8_t* to, H h) { store(to, __builtin_convertvector(h, Block8)); }
#endif

// float16 codes of finite numbers to float32.
inline F from_float16s(Words codes) {
#if defined(__AVX512F__)
  return F(_mm512_cvtph_ps(__m256i(codes)));
#elif defined(__AVX2__) && defined(__F16C__)
  return F(_mm256_cvtph_ps(__m128i(codes)));
#else
  const I c = widened(codes), size = c & 0x7FFF;
  const F x = size < 1024 ? to_float(size) * 0x1p-24f : value((size << 13) + (112 << 23));
  return value(bits(x) | (c & 0x8000) << 16);
#endif
}

inline U mixed(U x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}
// 16 random bits for each element of a block; see noise.py.
inline void block_noise(uint32_t key, uint32_t block, U* random) {
  // One mixing serves both vectors of a block: lower and upper halves.
  if (LANES == 8) {
    const U pair = mixed(U(LANE) + (key + block * 8));
    random[0] = pair & 0xFFFF;
    random[PARTS - 1] = pair >> 16;
    return;
  }
  for (int p = 0; p < PARTS; p++) {
    const U lane = U(LANE) + uint32_t(p * LANES);
    random[p] = (mixed((lane & 7) + (key + block * 8)) >> ((lane & 8) * 2)) & 0xFFFF;
  }
}
#if defined(__AVX512BW__)
// One mixing serves two blocks.
constexpr int SHARING = 2;
typedef uint16_t Shuffle __attribute__((vector_size(64)));
// Lower halves of eight lanes, then their upper halves, as words beside zeros.
inline Shuffle halves_from(int first) {
  Shuffle x{};
  for (int l = 0; l < LANES; l++) x[2 * l] = uint16_t(2 * (first + l % 8) + l / 8);
  return x;
}
const Shuffle HALVES_OF[SHARING] = {halves_from(0), halves_from(8)};
inline void blocks_noise(uint32_t key, uint32_t block, U (*random)[PARTS]) {
  const __m512i both = __m512i(mixed(U(LANE) + (key + block * 8)));
  for (int b = 0; b < SHARING; b++) random[b][0] = U(_mm512_maskz_permutexvar_epi16(0x55555555, __m512i(HALVES_OF[b]), both));
}
#else
constexpr int SHARING = 1;
inline void blocks_noise(uint32_t key, uint32_t block, U (*random)[PARTS]) { block_noise(key, block, *random); }
#endif
inline F uniform(U bits16) { return (to_float(I(bits16)) + 0.5f) * 0x1p-16f; }

// Two 4-bit codes per byte, the first in the low half. A shift by 28 bits moves the second into the
// odd lane.
// 64-bit lanes instead of scalars took 4-bit steps from 1.09 to 0.66 ns per element (AVX512).
inline I nibbles(const uint8_t* from) {
  const Pairs x = widened(load<Halves>(from));
  return I((x | x << 28) & 0x0000000F0000000FU);
}
inline void store_nibbles(uint8_t* to, I codes) {
  const Pairs x = Pairs(codes);
  store(to, to_bytes(x | x >> 28));
}

}  // namespace
