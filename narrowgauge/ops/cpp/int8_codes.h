// Codes of an integer format by round to nearest even, 16 or 8 elements at a time: `rounded` of
// rounding.h followed by a conversion to int8, which GCC 12 translates into several times as many
// instructions.
#pragma once

#include "rounding.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512BW__
constexpr int64_t LANES = 16;
using Floats = __m512;
using Codes = __m128i;

inline Floats load_floats(const float* x) { return _mm512_loadu_ps(x); }
inline Floats load_floats(const uint16_t* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
}
inline Floats all(float value) { return _mm512_set1_ps(value); }

// Codes of y, which is a number. bounded: no |y| exceeds what rounds to `max`.
template <bool bounded> inline Codes codes_of(Floats y, Floats max) {
    if (!bounded) y = _mm512_min_ps(_mm512_max_ps(y, _mm512_sub_ps(_mm512_setzero_ps(), max)), max);
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y));
}
inline void store_codes(int8_t* out, Codes codes) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
using Floats = __m256;
using Codes = __m128i;

inline Floats load_floats(const float* x) { return _mm256_loadu_ps(x); }
inline Floats load_floats(const uint16_t* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
}
inline Floats all(float value) { return _mm256_set1_ps(value); }
template <bool bounded> inline Codes codes_of(Floats y, Floats max) {
    if (!bounded) y = _mm256_min_ps(_mm256_max_ps(y, _mm256_sub_ps(_mm256_setzero_ps(), max)), max);
    const __m256i whole = _mm256_cvtps_epi32(y);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    return _mm_packs_epi16(words, words);
}
inline void store_codes(int8_t* out, Codes codes) { _mm_storel_epi64(reinterpret_cast<__m128i*>(out), codes); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
#endif

template <typename In> inline int8_t code_of(const In* x, float reciprocal, const Format& format) {
    return int8_t(rounded<true, false>(load(x) * reciprocal, 0.f, format));
}

// x[j] * reciprocal
struct OfRow {
    float reciprocal;
    float factor(int64_t) const { return reciprocal; }
#ifdef __AVX2__
    Floats factors(int64_t) const { return all(reciprocal); }
#endif
};

// x[j] * reciprocals[j]
struct OfColumns {
    const float* reciprocals;
    float factor(int64_t j) const { return reciprocals[j]; }
#ifdef __AVX2__
    Floats factors(int64_t j) const { return load_floats(reciprocals + j); }
#endif
};

// out[j] = code of x[j] * factor. All x and factors are numbers.
template <bool bounded, typename In, typename Factor>
void codes_of_numbers(const In* x, Factor factor, int64_t n, const Format& format, int8_t* out) {
    int64_t j = 0;
#ifdef __AVX2__
    const Floats max = all(format.max);
    for (; j + LANES <= n; j += LANES) store_codes(out + j, codes_of<bounded>(times(load_floats(x + j), factor.factors(j)), max));
#endif
    for (; j < n; ++j) out[j] = code_of(x + j, factor.factor(j), format);
}

// The same twice, from one read of x.
template <bool bounded, typename In>
void codes_of_both(const In* x, OfRow of_row, OfColumns of_columns, int64_t n, const Format& format, int8_t* out, int8_t* turned) {
    int64_t j = 0;
#ifdef __AVX2__
    const Floats max = all(format.max);
    for (; j + LANES <= n; j += LANES) {
        const Floats values = load_floats(x + j);
        store_codes(out + j, codes_of<bounded>(times(values, of_row.factors(j)), max));
        store_codes(turned + j, codes_of<bounded>(times(values, of_columns.factors(j)), max));
    }
#endif
    for (; j < n; ++j) {
        out[j] = code_of(x + j, of_row.reciprocal, format);
        turned[j] = code_of(x + j, of_columns.reciprocals[j], format);
    }
}

// As `codes_of_numbers`, for any x and factors: what is not a number has code 0.
template <typename In, typename Factor> void codes_of_any(const In* x, Factor factor, int64_t n, const Format& format, int8_t* out) {
    for (int64_t j = 0; j < n; ++j) out[j] = code_of(x + j, factor.factor(j), format);
}

}  // namespace
