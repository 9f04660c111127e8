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
inline F magnitude(F x) { return value(bits(x) & 0x7FFFFFFF); }
inline I larger(I a, I b) { return a > b ? a : b; }
inline I smaller(I a, I b) { return a < b ? a : b; }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I to_integer(F x) { return __builtin_convertvector(x, I); }  // toward zero
inline I at_least_one(F x) { return -(x > 0.f); }  // the least code of what is not 0

// What compilers do not find the instructions for (GCC 12): square roots, one of eight numbers, codes to integers and back (dropping the
// upper bits).
#if defined(__AVX512F__)
inline F square_root(F x) { return F(_mm512_sqrt_ps(__m512(x))); }
inline F lookup8(const float* table, I place) {
  return F(_mm512_permutexvar_ps(__m512i(place), _mm512_castps256_ps512(_mm256_loadu_ps(table))));
}
inline I widened(Bytes x) { return I(_mm512_cvtepu8_epi32(__m128i(x))); }
inline I widened(Signed8 x) { return I(_mm512_cvtepi8_epi32(__m128i(x))); }
inline I widened(Words x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
inline Bytes to_bytes(I x) { return Bytes(_mm512_cvtepi32_epi8(__m512i(x))); }
inline Words to_words(I x) { return Words(_mm512_cvtepi32_epi16(__m512i(x))); }
#elif defined(__AVX2__)
inline F square_root(F x) { return F(_mm256_sqrt_ps(__m256(x))); }
inline F lookup8(const float* table, I place) { return F(_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), __m256i(place))); }
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
inline F lookup8(const float* table, I place) {
  F x;
  for (int l = 0; l < LANES; l++) x[l] = table[place[l]];
  return x;
}
template <class V> inline I widened(V x) { return __builtin_convertvector(x, I); }
inline Bytes to_bytes(I x) { return __builtin_convertvector(x, Bytes); }
inline Words to_words(I x) { return __builtin_convertvector(x, Words); }
#endif

// 16 random bits for each of the elements from `index` on, a multiple of LANES; see noise.py.
inline U noise16s(uint32_t key, uint32_t index) {
  const U lane = U(LANE) + (index & 15);
  U x = (lane & 7) + (key + (index >> 4) * 8);
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return ((x ^ (x >> 16)) >> ((lane & 8) * 2)) & 0xFFFF;
}
inline F uniform(U bits16) { return (to_float(I(bits16)) + 0.5f) * 0x1p-16f; }

// Two codes of 4 bits in a byte, the first in the low half.
inline I nibbles(const uint8_t* from) {
  uint32_t words[2] = {};
  std::memcpy(words, from, LANES / 2);
  const U word = U(LANE < 8 ? integers(int32_t(words[0])) : integers(int32_t(words[1])));
  return I(word >> ((U(LANE) & 7) * 4)) & 0xF;
}
inline void store_nibbles(uint8_t* to, I codes) {
  uint64_t pairs[2] = {};  // of bytes with 4 bits each, which come together in steps of 2, 4 and 8 bytes
  store(pairs, to_bytes(codes));
  for (uint64_t& x : pairs) {
    x = (x | x >> 4) & 0x00FF00FF00FF00FFU;
    x = (x | x >> 8) & 0x0000FFFF0000FFFFU;
    x = (x | x >> 16) & 0xFFFFFFFFU;
  }
  const uint64_t packed = pairs[0] | pairs[1] << 32;
  std::memcpy(to, &packed, LANES / 2);
}

}  // namespace
