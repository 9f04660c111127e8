// Attention in bfloat16, forward and backward, on AVX512-BF16.
//
//     S = scale * (Q @ K.T) + mask    float32 sums
//     P = exp(S - lse)                float32, lse = log(sum of exp(S)) of each query
//     y = P @ V                       P in bfloat16
//
//     grad_v = P.T @ grad_y           dP = grad_y @ V.T, delta = sum of y * grad_y of each query
//     grad_q = scale * (dS @ K)       dS = P * (dP - delta), in bfloat16
//     grad_k = scale * (dS.T @ Q)
//
// With dropout P and dP have zeros where a weight is dropped out, and 1 / (1 - rate) of the rest.
//
// Tiling: 64 keys x 64 queries, and always transposed, keys in rows and queries in lanes. So the
// maximum, the sum, lse and delta of a query are lanes of a register, and no product needs its P or dS
// to be transposed: as rows they are the left operand of grad_v and grad_k, and two rows interleaved are
// the right operand of y.T and grad_q.T, which are transposed once per block of queries.
//
// Forward walks the blocks of keys of a block of queries, with a running maximum as FlashAttention-2
// (arXiv 2307.08691). Backward walks the blocks of queries of a block of keys and adds to grad_q in
// float32. Tiles that are hidden are skipped, and on the diagonal the steps are of 16 queries.
// Work is divided by heads and blocks of queries; a result never depends on the division.
//
// Compiled without -ffast-math, since NaN and infinities propagate.
#include "attention_tiles.h"
#include "attention_mask.h"
#include "attention_forward.h"
#include "attention_backward.h"

extern "C" {

// out [1]: 1 if this processor has the instructions.
void narrowgauge_attention_supported(int64_t, int64_t, int32_t* out) {
#if defined(__x86_64__)
  *out = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
#else
  *out = 0;
#endif
}

// Tiles of a mask [batch, heads, queries, keys], for rows of [batch, heads, query blocks]. kind: 0 bool,
// 1 bfloat16, 2 float32.
void narrowgauge_attention_mask(int64_t first, int64_t last, const void* mask, int32_t kind, const int64_t* shape, void* tiles, uint8_t* states) {
  const MaskShape& s = *reinterpret_cast<const MaskShape*>(shape);
  if (kind == 0) bit_tiles(first, last, static_cast<const uint8_t*>(mask), s, static_cast<uint64_t*>(tiles), states);
  if (kind == 1) added_tiles(first, last, static_cast<const uint16_t*>(mask), s, static_cast<float*>(tiles), states);
  if (kind == 2) added_tiles(first, last, static_cast<const float*>(mask), s, static_cast<float*>(tiles), states);
}

#if defined(__x86_64__)
void narrowgauge_attention_forward(int64_t first, int64_t last, const int64_t* shape, const bf16* q, const bf16* k, const bf16* v,
                                   const void* tiles, const uint8_t* states, uint32_t low, uint32_t high, uint32_t threshold, float kept_scale,
                                   float scale, bf16* y, float* lse) {
  forward(first, last, *reinterpret_cast<const Shape*>(shape), q, k, v, {tiles, states}, {low, high, threshold, kept_scale}, scale, y, lse);
}

void narrowgauge_attention_backward(int64_t first, int64_t last, const int64_t* shape, const bf16* q, const bf16* k, const bf16* v,
                                    const void* tiles, const uint8_t* states, uint32_t low, uint32_t high, uint32_t threshold, float kept_scale,
                                    float scale, const bf16* y, const float* lse, const bf16* grad_y, bf16* grad_q, bf16* grad_k, bf16* grad_v, float* key_sums, float* value_sums) {
  backward(first, last, *reinterpret_cast<const Shape*>(shape), q, k, v, {tiles, states}, {low, high, threshold, kept_scale}, scale, y, lse, grad_y,
           {grad_q, grad_k, grad_v, key_sums, value_sums});
}

// The gradient of k (is_value 0) or v from those of its heads of queries.
void narrowgauge_attention_add_heads(int64_t first, int64_t last, const int64_t* shape, const float* sums, int32_t is_value, float scale,
                                     bf16* out) {
  const Shape& s = *reinterpret_cast<const Shape*>(shape);
  add_heads(first, last, s, sums, is_value ? s.value_width : s.width, scale, out, is_value ? s.grad_v : s.grad_k);
}

// y = 2 ** x, 16 elements a row; for tests.
void narrowgauge_attention_exp2(int64_t first, int64_t last, const float* x, float* y) {
  for (int64_t row = first; row < last; row++) _mm512_storeu_ps(y + row * LANES, exp2_of(_mm512_loadu_ps(x + row * LANES)));
}
#else
void narrowgauge_attention_forward(int64_t, int64_t, ...) {}
void narrowgauge_attention_backward(int64_t, int64_t, ...) {}
void narrowgauge_attention_add_heads(int64_t, int64_t, ...) {}
void narrowgauge_attention_exp2(int64_t, int64_t, ...) {}
#endif

}  // extern "C"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
