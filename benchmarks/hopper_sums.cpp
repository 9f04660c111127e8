// out[m, n] = sum over k of lhs[m, k] * rhs[k, n], added as Hopper's FP8 tensor cores add (see hopper_sums.py).
//
// The lanes are columns of rhs, LANES at a time; per group of GROUP products two passes: the largest magnitude, then whole numbers.
// All integers stay below 33 * 2**14, all factors are powers of two: the result does not depend on how the compiler vectorizes.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int GROUP = 32, LANES = 64;
constexpr uint32_t EXPONENT = 0x7f800000u, SMALLEST = 40u << 23;

inline uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float number(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// total (LANES) takes GROUP products; `kept` bits stay behind the leading one.
inline void add_group(const float* lhs, const float* rhs, int64_t stride, int count, int kept, float* total) {
  float largest[LANES], up[LANES], down[LANES];
  int32_t sum[LANES];
  for (int n = 0; n < LANES; ++n) largest[n] = number(bits(total[n]) & 0x7fffffffu);
  for (int k = 0; k < count; ++k) {
    const float left = lhs[k];
    const float* right = rhs + k * stride;
    for (int n = 0; n < LANES; ++n) {
      const float magnitude = number(bits(left * right[n]) & 0x7fffffffu);
      largest[n] = magnitude > largest[n] ? magnitude : largest[n];
    }
  }
  for (int n = 0; n < LANES; ++n) {
    const uint32_t exponent = std::max(bits(largest[n]) & EXPONENT, SMALLEST);
    up[n] = number(((254u + kept) << 23) - exponent);  // 2**(kept - e)
    down[n] = number(exponent - (uint32_t(kept) << 23));
    sum[n] = int32_t(total[n] * up[n]);
  }
  for (int k = 0; k < count; ++k) {
    const float left = lhs[k];
    const float* right = rhs + k * stride;
    for (int n = 0; n < LANES; ++n) sum[n] += int32_t(left * right[n] * up[n]);
  }
  const uint32_t mask = ~((1u << (23 - kept)) - 1);
  for (int n = 0; n < LANES; ++n) total[n] = number(bits(float(sum[n])) & mask) * down[n];
}

}  // namespace

// rhs [K, stride], stride a multiple of LANES; out [M, stride]. promote: products after which the sum goes to a float32, 0: never.
extern "C" void hopper_sums(
    const float* lhs, const float* rhs, int64_t rows, int64_t inner, int64_t stride, int64_t promote, int32_t kept, float* out) {
  for (int64_t n = 0; n < stride; n += LANES)
    for (int64_t m = 0; m < rows; ++m) {
      float total[LANES] = {}, result[LANES] = {};
      for (int64_t k = 0; k < inner; k += GROUP) {
        const int count = int(std::min<int64_t>(GROUP, inner - k));
        add_group(lhs + m * inner + k, rhs + k * stride + n, stride, count, kept, total);
        if (promote && (k + GROUP) % promote == 0)
          for (int i = 0; i < LANES; ++i) result[i] += total[i], total[i] = 0;
      }
      for (int i = 0; i < LANES; ++i) out[m * stride + n + i] = result[i] + total[i];
    }
}
