// Vectors of float32 at the width of the compiled level, loads and stores of float32 and bfloat16,
// sums with one order on every level, exp and the normal distribution.
//
// Elements are processed WIDTH at a time. The last ones of a row are processed as a `Part`: missing
// elements are read as 0 and are not written. A sum has LANES partial sums, whatever the width:
// lane k adds the elements k, k + LANES, k + 2 LANES, ... in order, and the lanes are added in
// halves. Bits therefore depend neither on the level nor on the number of threads.
//
// Errors of exp and the distribution, found over all exponents (tests/ops/test_norm_act_cpp.py):
//
//     exp   at most 2 units in the last place; subnormal results are within 2**-149
//     P     at most 2**-21, absolutely
//
// Both use fused multiply-adds where the level has them, so their last bits may differ between levels.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int LANES = 64;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

inline Floats all(float x) { return x - Floats{}; }  // +0 - 0 is +0, and -0 - 0 is -0

// ---- loads and stores -------------------------------------------------------------------------

struct Whole {};  // WIDTH elements
struct Part {     // the first `count` elements of WIDTH
    int64_t count;
};

inline Floats read(const float* x, Whole) {
    Floats found;
    std::memcpy(&found, x, sizeof found);
    return found;
}

inline Floats of_bfloat16(Halves x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
    return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

inline Floats read(const uint16_t* x, Whole) {  // bfloat16
    Halves found;
    std::memcpy(&found, x, sizeof found);
    return of_bfloat16(found);
}

// To nearest even as float32. A NaN stays a NaN: rounding its bits could carry into infinity.
inline Words rounded_to_bfloat16(Floats x) {
    const Words bits = (Words)x, nearest = bits + 0x7FFF + ((bits >> 16) & 1);
#if defined(__AVX512F__)
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (Words)_mm512_mask_or_epi32((__m512i)nearest, is_nan, (__m512i)bits, _mm512_set1_epi32(0x400000));
#else
    const Words is_nan = (Words)(x != x);
    return (is_nan & (bits | 0x400000)) | (~is_nan & nearest);
#endif
}

// The instruction makes zeros of subnormals, so rows that have one are rounded by the bits.
inline Halves to_bfloat16(Floats x) {
#if defined(__AVX512BF16__)
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)x, 0x20), 1)) return (Halves)_mm512_cvtneps_pbh((__m512)x);
#endif
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)(rounded_to_bfloat16(x) >> 16));
#elif defined(__AVX2__)
    const __m256i found = (__m256i)(rounded_to_bfloat16(x) >> 16);
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(found, found), 0x08));
#else
    return __builtin_convertvector(rounded_to_bfloat16(x) >> 16, Halves);
#endif
}

inline void write(float* out, Floats x, Whole) { std::memcpy(out, &x, sizeof x); }
inline void write(uint16_t* out, Floats x, Whole) {
    const Halves found = to_bfloat16(x);
    std::memcpy(out, &found, sizeof found);
}

template <typename T> inline Floats read(const T* x, Part part) {
    T buffer[WIDTH] = {};
    std::memcpy(buffer, x, part.count * sizeof(T));
    return read(buffer, Whole{});
}

template <typename T> inline void write(T* out, Floats x, Part part) {
    T buffer[WIDTH];
    write(buffer, x, Whole{});
    std::memcpy(out, buffer, part.count * sizeof(T));
}

// x rounded to T, as float32.
template <typename T> inline Floats rounded_as(Floats x);
template <> inline Floats rounded_as<float>(Floats x) { return x; }
template <> inline Floats rounded_as<uint16_t>(Floats x) {
#if defined(__AVX512BF16__)
    return of_bfloat16(to_bfloat16(x));
#else
    return (Floats)(rounded_to_bfloat16(x) & 0xFFFF0000u);
#endif
}

// Call body(j, Whole or Part) for all columns.
template <typename Body> inline void for_columns(int64_t columns, const Body& body) {
    int64_t j = 0;
    for (; j + WIDTH <= columns; j += WIDTH) body(j, Whole{});
    if (j < columns) body(j, Part{columns - j});
}

// ---- sums -------------------------------------------------------------------------------------

struct Two {
    Floats first, second;
};

inline float halved(float* lanes) {
    for (int half = LANES / 2; half; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

// Sums of both results of term(j, Whole or Part) over the columns, as the head of this file says.
template <typename Term> inline void sums_of(int64_t columns, const Term& term, float* found) {
    constexpr int COUNT = LANES / WIDTH;
    float lanes[2][LANES];
    int64_t j = 0;
    {
        Two sums[COUNT] = {};
        for (; j + LANES <= columns; j += LANES) {
#pragma GCC unroll 16
            for (int k = 0; k < COUNT; ++k) {
                const Two found = term(j + k * WIDTH, Whole{});
                sums[k].first += found.first;
                sums[k].second += found.second;
            }
        }
#pragma GCC unroll 16
        for (int k = 0; k < COUNT; ++k) {
            write(lanes[0] + k * WIDTH, sums[k].first, Whole{});
            write(lanes[1] + k * WIDTH, sums[k].second, Whole{});
        }
    }
    const auto add = [&](float* lane, Floats x, auto how) { write(lane, read(lane, how) + x, how); };
    for (float *first = lanes[0], *second = lanes[1]; j < columns; j += WIDTH, first += WIDTH, second += WIDTH) {
        if (columns - j >= WIDTH) {
            const Two found = term(j, Whole{});
            add(first, found.first, Whole{});
            add(second, found.second, Whole{});
        } else {
            const Part rest{columns - j};
            const Two found = term(j, rest);
            add(first, found.first, rest);
            add(second, found.second, rest);
        }
    }
    found[0] = halved(lanes[0]);
    found[1] = halved(lanes[1]);
}

template <typename Term> inline float sum_of(int64_t columns, const Term& term) {
    float found[2];
    sums_of(columns, [&](int64_t j, auto how) { return Two{term(j, how), Floats{}}; }, found);
    return found[0];
}

// ---- functions --------------------------------------------------------------------------------

// NaN survives: of two operands the instructions return the second, and comparisons with NaN are false.
inline Floats at_most(Floats x, float bound) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps(_mm512_set1_ps(bound), (__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps(_mm256_set1_ps(bound), (__m256)x);
#else
    return x > bound ? all(bound) : x;
#endif
}

inline Floats at_least(Floats x, float bound) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps(_mm512_set1_ps(bound), (__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps(_mm256_set1_ps(bound), (__m256)x);
#else
    return x < bound ? all(bound) : x;
#endif
}

// a b + c, rounded once where the level can.
inline Floats multiplied_added(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Floats multiplied_added(Floats a, Floats b, float c) { return multiplied_added(a, b, all(c)); }

inline Floats magnitude_of(Floats x) { return (Floats)((Words)x & 0x7FFFFFFFu); }

// x 2**n for n = `shifted` - SHIFT. The result may be subnormal or infinite, so 2**n is multiplied in
// two steps where no instruction does it.
constexpr float SHIFT = 12582912.f;  // 1.5 * 2**23: adding it rounds to an integer
inline Floats scaled(Floats x, Floats shifted) {
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)x, (__m512)(shifted - SHIFT));
#else
    const Ints power = (Ints)shifted - 0x4B400000, first = power >> 1, second = power - first;
    return x * (Floats)((first + 127) << 23) * (Floats)((second + 127) << 23);
#endif
}

// e**x = 2**n e**r,  r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2]. ln 2 is split so that n times its first
// part is exact. The polynomial has the least relative error, 2**-28, among those that begin 1 + r.
inline Floats exp_of(Floats x) {
    constexpr float LOG2_E = 1.44269504088896341f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    x = at_least(at_most(x, 89.f), -105.f);
    const Floats shifted = multiplied_added(x, all(LOG2_E), SHIFT), n = shifted - SHIFT;
    const Floats r = multiplied_added(n, all(-LN2_LOW), multiplied_added(n, all(-LN2_HIGH), x));
    Floats p = multiplied_added(r, all(1.381459878757596e-3f), 8.368716575205326e-3f);
    p = multiplied_added(p, r, 4.166838899254799e-2f);
    p = multiplied_added(p, r, 1.666652113199234e-1f);
    p = multiplied_added(p, r, 4.999999403953552e-1f);
    p = multiplied_added(p, r, 1.f);
    p = multiplied_added(p, r, 1.f);
    return scaled(p, shifted);
}

struct Normal {
    Floats share, density;  // the normal distribution P(x), and e^(-x^2 / 2)
};

// Abramowitz and Stegun 7.1.26: P(-|x|) = t Q(t) e^(-x^2 / 2) / 2,  t = 1 / (1 + 0.3275911 |x| / sqrt 2).
// torch's vectors take the same for erf.
inline Normal normal_of(Floats x) {
    const Floats density = exp_of(-0.5f * (x * x));
    const Floats t = 1.f / multiplied_added(magnitude_of(x), all(0.231641888f), 1.f);
    Floats q = multiplied_added(t, all(0.5307027145f), -0.7265760135f);
    q = multiplied_added(q, t, 0.7107068705f);
    q = multiplied_added(q, t, -0.142248368f);
    q = multiplied_added(q, t, 0.127414796f);
    const Floats tail = q * t * density;
    return {x < 0.f ? tail : 1.f - tail, density};
}

}  // namespace
