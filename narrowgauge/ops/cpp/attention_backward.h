// Backward pass of attention; the equations are in attention.cpp.
#pragma once
#include "attention_forward.h"

#if defined(__x86_64__)
namespace {

struct Gradients {
  bf16 *q, *k, *v;          // written where a head of keys serves one head of queries
  float *key_sums, *value_sums;  // else: of each head of queries, [batch, heads, keys, width]
};

// A head of queries, packed once for all blocks of keys.
struct PackedQueries {
  Scratch<bf16> lanes, pairs, grad_lanes, grad_pairs;
  Scratch<float> lse, delta, grad;  // [blocks][64], [blocks][64], [blocks][width][64]

  explicit PackedQueries(const Shape& s)
      : lanes(s.query_blocks() * BLOCK * s.width), pairs(s.query_blocks() * BLOCK * s.width),
        grad_lanes(s.query_blocks() * BLOCK * s.value_width), grad_pairs(s.query_blocks() * BLOCK * s.value_width),
        lse(s.query_blocks() * BLOCK), delta(s.query_blocks() * BLOCK), grad(s.query_blocks() * BLOCK * s.width) {}
};

// Sum of a[c] * b[c].
inline float dot(const bf16* a, const bf16* b, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t c = 0; c < width; c += 2 * LANES) {
    const __mmask16 some = __mmask16((1u << std::min<int64_t>(LANES, (width - c) / 2)) - 1);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi32(some, a + c), (__m512bh)_mm512_maskz_loadu_epi32(some, b + c));
  }
  return _mm512_reduce_add_ps(sum);
}

inline void pack_head(const Shape& s, const bf16* q, const bf16* y, const bf16* grad_y, const float* lse, float unit, PackedQueries& to) {
  for (int64_t i = 0; i < s.query_blocks(); i++) {
    const int64_t t = i * BLOCK, count = std::min(BLOCK, s.queries - t);
    pack_lanes(q + t * s.q.token, s.q.token, count, s.width, to.lanes + t * s.width);
    pack_pairs(q + t * s.q.token, s.q.token, count, s.width, to.pairs + t * s.width);
    pack_lanes(grad_y + t * s.grad_y.token, s.grad_y.token, count, s.value_width, to.grad_lanes + t * s.value_width);
    pack_pairs(grad_y + t * s.grad_y.token, s.grad_y.token, count, s.value_width, to.grad_pairs + t * s.value_width);
    for (int64_t c = 0; c < BLOCK; c++) {
      // exp(scores - inf) is 0: for queries beyond the end and those that attend to nothing.
      const bool is_none = c >= count || lse[t + c] == -INFINITE;
      to.lse[t + c] = is_none ? INFINITE : lse[t + c] * unit;
      to.delta[t + c] = c >= count ? 0.0f : dot(y + (t + c) * s.y.token, grad_y + (t + c) * s.grad_y.token, s.value_width);
    }
  }
  std::memset(to.grad, 0, s.query_blocks() * BLOCK * s.width * sizeof(float));
}

// The tile's P and dS as left operands [64 keys][64 queries], and dS as a panel [32][64][2].
struct TileScratch {
  Scratch<bf16> p, ds, ds_pairs;
  Scratch<float> wide;  // [4][64]: P before its rounding, then dS
  TileScratch() : p(BLOCK * BLOCK), ds(BLOCK * BLOCK), ds_pairs(BLOCK * BLOCK), wide(ROWS * BLOCK) {}
};

// 4 keys and 16 NV queries: P = exp(S - lse), dS = P * (grad_y @ v - delta). Of a weight that is
// dropped out, grad_y @ v counts as 0, and P for grad_v too.
template <int NV, bool ADDED>
inline void backward_rows(const Shape& s, const Tile& tile, const Dropout& dropout, const bf16* keys, const bf16* values, const bf16* queries, const bf16* grad_y,
                          const float* lse, const float* delta, float scale, int64_t r0, int64_t v0, TileScratch& to) {
  const int64_t l0 = v0 * LANES;
  __m512 x[ROWS][NV];
  __mmask16 kept[ROWS][NV];
  scores_of<NV>(keys, queries, s.width, scale, tile, r0, v0, x);
  const __m512 factor = _mm512_set1_ps(ADDED ? LOG2E : scale * LOG2E);
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    const __m512 shift = _mm512_loadu_ps(lse + l0 + LANES * v);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const __m512 p = weight_of<ADDED>(x[r][v], shift, factor);
      _mm512_storeu_ps(to.wide + r * BLOCK + l0 + LANES * v, p);
      kept[r][v] = dropout.is_on() ? kept_of(dropout, tile.noise_of(r0 + r, v0 + v)) : __mmask16(0xFFFF);
      _mm256_storeu_si256((__m256i*)(to.p + (r0 + r) * BLOCK + l0 + LANES * v),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(kept[r][v], p)));
    }
  }
  clear<NV>(x);
  multiply<NV>(values + r0 * s.value_width, s.value_width, grad_y + 2 * l0, 2 * BLOCK, s.value_width / 2, x);
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    const __m512 d = _mm512_loadu_ps(delta + l0 + LANES * v), grown = _mm512_set1_ps(dropout.scale);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      x[r][v] = _mm512_mul_ps(_mm512_loadu_ps(to.wide + r * BLOCK + l0 + LANES * v), _mm512_fmsub_ps(_mm512_maskz_mov_ps(kept[r][v], x[r][v]), grown, d));
      _mm256_storeu_si256((__m256i*)(to.ds + (r0 + r) * BLOCK + l0 + LANES * v), (__m256i)_mm512_cvtneps_pbh(x[r][v]));
    }
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r += 2) _mm512_storeu_si512(to.ds_pairs + (r0 + r) * BLOCK + 2 * (l0 + LANES * v), rounded_pairs(x[r][v], x[r + 1][v]));
  }
}

// x [count][width] times factor -> bfloat16 rows `stride` apart; widths are multiples of 16.
inline void round_rows(const float* x, float factor, int64_t count, int64_t width, bf16* to, int64_t stride) {
  for (int64_t r = 0; r < count; r++)
    for (int64_t c = 0; c < width; c += LANES)
      _mm256_storeu_si256((__m256i*)(to + r * stride + c),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(x + r * width + c), _mm512_set1_ps(factor))));
}

// Rows [first, last) of [batch, heads].
inline void backward(int64_t first, int64_t last, const Shape& s, const bf16* q, const bf16* k, const bf16* v, const Mask& mask, const Dropout& dropout,
                     float scale, const bf16* y, const float* lse, const bf16* grad_y, const Gradients& out) {
  const int64_t blocks = s.query_blocks(), group = s.heads / s.key_heads, width = s.width, value_width = s.value_width;
  PackedQueries packed(s);
  TileScratch scratch;
  Scratch<bf16> keys(BLOCK * width), turned(BLOCK * width), values(BLOCK * value_width);
  Scratch<float> grad_k(BLOCK * width), grad_v(BLOCK * value_width);
  alignas(64) float factor[BLOCK];
  for (float& each : factor) each = scale;
  uint64_t own[BLOCK];
  const float unit = s.mask_kind == 2 ? 1.0f : LOG2E;  // of lse, as weight_of reads it
  for (int64_t row = first; row < last; row++) {
    const int64_t head = row % s.heads, batch = row / s.heads, key_head = head / group;
    pack_head(s, q + batch * s.q.batch + head * s.q.head, y + batch * s.y.batch + head * s.y.head,
              grad_y + batch * s.grad_y.batch + head * s.grad_y.head, lse + row * s.queries, unit, packed);
    for (int64_t j = 0; j < s.key_blocks(); j++) {
      const int64_t count = std::min(BLOCK, s.keys - j * BLOCK);
      const bf16* from = k + batch * s.k.batch + key_head * s.k.head + j * BLOCK * s.k.token;
      copy_rows(from, s.k.token, count, width, keys);
      pack_transposed(from, s.k.token, count, width, turned);
      copy_rows(v + batch * s.v.batch + key_head * s.v.head + j * BLOCK * s.v.token, s.v.token, count, value_width, values);
      std::memset(grad_k, 0, BLOCK * width * sizeof(float));
      std::memset(grad_v, 0, BLOCK * value_width * sizeof(float));
      for (int64_t i = s.is_causal ? j : 0; i < blocks; i++) {
        const Tile tile(s, mask, batch, head, i, j, own);
        if (tile.is_skipped) continue;
        const int64_t t = i * BLOCK;
        for (int64_t r = 0; r < tile.rows; r += ROWS) {
          const int64_t v0 = tile.first(r);
          const bf16 *lanes = packed.lanes + t * width, *grads = packed.grad_lanes + t * value_width;
          const float *logs = packed.lse + t, *deltas = packed.delta + t;
          if (v0 >= tile.vectors) continue;
          if (tile.added != nullptr) {
            WITH_VECTORS(tile.vectors - v0,
                         backward_rows<NV, true>(s, tile, dropout, keys, values, lanes, grads, logs, deltas, scale, r, v0, scratch));
          } else {
            WITH_VECTORS(tile.vectors - v0,
                         backward_rows<NV, false>(s, tile, dropout, keys, values, lanes, grads, logs, deltas, scale, r, v0, scratch));
          }
        }
        // On the diagonal 16 keys meet the queries from theirs on.
        const int64_t step = tile.is_diagonal ? LANES : tile.rows;
        for (int64_t r = 0; r < tile.rows && tile.first(r) < tile.vectors; r += step) {
          const int64_t l0 = tile.first(r) * LANES, pairs = (tile.vectors * LANES - l0) / 2, rows = std::min(step, tile.rows - r);
          accumulate(scratch.p + r * BLOCK + l0, BLOCK, packed.grad_pairs + (t + l0) * value_width, value_width, pairs, rows,
                     grad_v + r * value_width);
          accumulate(scratch.ds + r * BLOCK + l0, BLOCK, packed.pairs + (t + l0) * width, width, pairs, rows, grad_k + r * width);
        }
        accumulate_lanes(turned, scratch.ds_pairs, tile.rows / 2, width, tile.vectors, tile.is_diagonal, packed.grad + t * width, nullptr);
      }
      if (group == 1) {
        round_rows(grad_k, scale, count, width, out.k + batch * s.grad_k.batch + head * s.grad_k.head + j * BLOCK * s.grad_k.token, s.grad_k.token);
        round_rows(grad_v, dropout.scale, count, value_width, out.v + batch * s.grad_v.batch + head * s.grad_v.head + j * BLOCK * s.grad_v.token,
                   s.grad_v.token);
      } else {
        std::memcpy(out.key_sums + (row * s.keys + j * BLOCK) * width, grad_k, count * width * sizeof(float));
        std::memcpy(out.value_sums + (row * s.keys + j * BLOCK) * value_width, grad_v, count * value_width * sizeof(float));
      }
    }
    for (int64_t i = 0; i < blocks; i++)
      unpack_lanes(packed.grad + i * BLOCK * width, factor, std::min(BLOCK, s.queries - i * BLOCK), width,
                   out.q + batch * s.grad_q.batch + head * s.grad_q.head + i * BLOCK * s.grad_q.token, s.grad_q.token);
  }
}

// sums [batch, heads, keys, width] of the heads that share a head of keys, for rows [first, last) of
// [batch, key heads, keys]: added in order, times scale.
inline void add_heads(int64_t first, int64_t last, const Shape& s, const float* sums, int64_t width, float scale, bf16* out, const Strides& to) {
  const int64_t group = s.heads / s.key_heads;
  for (int64_t row = first; row < last; row++) {
    const int64_t key = row % s.keys, key_head = row / s.keys % s.key_heads, batch = row / s.keys / s.key_heads;
    const float* from = sums + ((batch * s.heads + key_head * group) * s.keys + key) * width;
    bf16* target = out + batch * to.batch + key_head * to.head + key * to.token;
    for (int64_t c = 0; c < width; c += LANES) {
      __m512 sum = _mm512_loadu_ps(from + c);
      for (int64_t g = 1; g < group; g++) sum = _mm512_add_ps(sum, _mm512_loadu_ps(from + g * s.keys * width + c));
      _mm256_storeu_si256((__m256i*)(target + c), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum, _mm512_set1_ps(scale))));
    }
  }
}

}  // namespace
#endif
