// LANES elements at a time: the vectors that GCC and Clang have beside C++, as wide as those of the processor.
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
constexpr int BLOCK = 16;  // elements that share random bits, see noise.py

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Signed8 __attribute__((vector_size(LANES)));
typedef uint16_t Words __attribute__((vector_size(2 * LANES)));

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
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I to_integer(F x) { return __builtin_convertvector(x, I); }  // toward zero
inline I at_least_one(F x) { return -(x > 0.f); }  // the least code of what is not 0

// What compilers do not find the instructions for (GCC 12): square roots, one of eight or sixteen numbers, codes to integers and back (dropping the
// upper bits).
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

inline U mixed(U x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}
// 16 random bits for each of LANES elements, from element `within` on of a block; see noise.py.
inline U noise16s(uint32_t key, uint32_t block, int within) {
  const U lane = U(LANE) + uint32_t(within);
  return (mixed((lane & 7) + (key + block * 8)) >> ((lane & 8) * 2)) & 0xFFFF;
}
inline F uniform(U bits16) { return (to_float(I(bits16)) + 0.5f) * 0x1p-16f; }

// Two codes of 4 bits in a byte, the first in the low half: lanes in pairs, which a shift by 28 bits brings together.
inline I nibbles(const uint8_t* from) {
  const Pairs x = widened(load<Halves>(from));
  return I((x | x << 28) & 0x0000000F0000000FU);
}
inline void store_nibbles(uint8_t* to, I codes) {
  const Pairs x = Pairs(codes);
  store(to, to_bytes(x | x >> 28));
}

}  // namespace
