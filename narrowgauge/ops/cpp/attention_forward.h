// Forward pass of attention and what both passes share; the equations are in attention.cpp.
#pragma once
#include "attention_mask.h"
#include "attention_tiles.h"

namespace {

// Weights that are dropped out: those whose noise is below `threshold`. `scale` multiplies the others.
// The noise of batch b, head h, key k and query q is element ((b * heads + h) * keys + k) * queries + q
// of the key, so both passes compute it where they need it.
struct Dropout {
  uint32_t low, high, threshold;  // of 2^24; 0 drops nothing
  float scale;

  bool is_on() const { return threshold > 0; }
};

// Strides in elements; the last axis is contiguous.
struct Strides {
  int64_t batch, head, token;
};

// In the order of ops/attention16/cpp.py, which fills it.
struct Shape {
  int64_t batch, heads, key_heads, queries, keys, width, value_width;
  int64_t is_causal;    // query i attends to keys 0 to i
  int64_t mask_kind;    // 0: none, 1: bits, 2: added
  int64_t mask_batch, mask_head, mask_block;  // tiles to the next batch, head, block of queries
  Strides q, k, v, y, grad_y, grad_q, grad_k, grad_v;

  int64_t query_blocks() const { return up(queries, BLOCK) / BLOCK; }
  int64_t key_blocks() const { return up(keys, BLOCK) / BLOCK; }
};

struct Mask {
  const void* tiles;
  const uint8_t* states;
};

// One tile: queries of block i and keys of block j.
struct Tile {
  int64_t rows;           // keys, rounded up to whole tiles of 4
  int64_t vectors;        // of 16 queries that exist
  bool is_diagonal;       // key c meets only queries from c on
  bool is_skipped;
  const float* added;     // [64 keys][64 queries], or nullptr
  const uint64_t* shown;  // [64 keys] of 64 bits, or nullptr where every query attends to every key
  uint32_t noise;         // index of its first key and query, modulo 2^32
  uint32_t noise_stride;  // to the next key

  // own  [64] words for the bits of a tile that is more than a mask
  Tile(const Shape& s, const Mask& mask, int64_t batch, int64_t head, int64_t i, int64_t j, uint64_t* own) {
    const int64_t keys = std::min(BLOCK, s.keys - j * BLOCK);
    rows = up(keys, ROWS);
    vectors = up(std::min(BLOCK, s.queries - i * BLOCK), LANES) / LANES;
    is_diagonal = s.is_causal && i == j;
    noise = uint32_t(((batch * s.heads + head) * s.keys + j * BLOCK) * s.queries + i * BLOCK);
    noise_stride = uint32_t(s.queries);
    added = nullptr;
    shown = nullptr;
    const int64_t tile = batch * s.mask_batch + head * s.mask_head + i * s.mask_block + j;
    const State state = s.mask_kind ? State(mask.states[tile]) : EVERYTHING;
    is_skipped = state == NOTHING || (s.is_causal && j > i);
    if (is_skipped) return;
    if (state == SOME && s.mask_kind == 2) added = static_cast<const float*>(mask.tiles) + tile * BLOCK * BLOCK;
    if (state == SOME && s.mask_kind == 1) shown = static_cast<const uint64_t*>(mask.tiles) + tile * BLOCK;
    if (is_diagonal || keys < rows) {
      for (int64_t k = 0; k < BLOCK; k++) {
        own[k] = shown == nullptr ? ALL : shown[k];
        if (is_diagonal) own[k] &= ALL << k;
        if (k >= keys) own[k] = 0;
      }
      shown = own;
    }
  }
  // First vector of queries that keys r to r + 3 meet.
  int64_t first(int64_t r) const { return is_diagonal ? r / LANES : 0; }
  // Noise index of key r and the 16 queries of vector v.
  uint32_t noise_of(int64_t r, int64_t v) const { return noise + uint32_t(r) * noise_stride + uint32_t(v * LANES); }
};

#if defined(__x86_64__)
// `mix` of noise.h, for 16 numbers.
INLINE __m512i mixed(__m512i x) {
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x7FEB352D));
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32(int32_t(0x846CA68B)));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// Bits of the 16 queries from element `index` on whose weight stays.
INLINE __mmask16 kept_of(const Dropout& dropout, uint32_t index) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i inner = mixed(_mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(index + dropout.low))));
  const __m512i noise = _mm512_srli_epi32(mixed(_mm512_xor_si512(inner, _mm512_set1_epi32(int32_t(dropout.high)))), 8);
  return _mm512_cmpge_epu32_mask(noise, _mm512_set1_epi32(int32_t(dropout.threshold)));
}

// Scores of 4 keys and 16 NV queries, -inf where no attention is: bare products, or times `scale` plus
// a mask that is added.
template <int NV>
INLINE void scores_of(const bf16* keys, const bf16* queries, int64_t width, float scale, const Tile& tile, int64_t r0, int64_t v0,
                      __m512 (&s)[ROWS][NV]) {
  clear<NV>(s);
  multiply<NV>(keys + r0 * width, width, queries + 2 * LANES * v0, 2 * BLOCK, width / 2, s);
  if (tile.added != nullptr) {
    const __m512 factor = _mm512_set1_ps(scale);
    const float* from = tile.added + r0 * BLOCK + v0 * LANES;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) s[r][v] = _mm512_fmadd_ps(s[r][v], factor, _mm512_loadu_ps(from + r * BLOCK + LANES * v));
  }
  if (tile.shown != nullptr) {
    const __m512 hidden = _mm512_set1_ps(-INFINITE);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++)
        s[r][v] = _mm512_mask_mov_ps(hidden, __mmask16(tile.shown[r0 + r] >> (LANES * (v0 + v))), s[r][v]);
  }
}

// Scores of a tile -> s [64 keys][64 queries]; raises largest [64]. The order of the maximum's
// operands lets a NaN pass to the next score: it stays in s, and so in the sum of its row.
template <int NV>
inline void write_scores(const bf16* keys, const bf16* queries, int64_t width, float scale, const Tile& tile, int64_t r0, int64_t v0,
                         float* s, float* largest) {
  __m512 found[ROWS][NV];
  scores_of<NV>(keys, queries, width, scale, tile, r0, v0, found);
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    float* top = largest + LANES * (v0 + v);
    __m512 most = _mm512_loadu_ps(top);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      most = _mm512_max_ps(most, found[r][v]);
      _mm512_storeu_ps(s + (r0 + r) * BLOCK + LANES * (v0 + v), found[r][v]);
    }
    _mm512_storeu_ps(top, most);
  }
}

// The state of a block of queries: O [value width][64], and sums and largest scores [64].
struct Running {
  float *y, *total, *largest;
};

// P of a tile from its scores -> panel p [32][64][2], and the new sums and maxima.
//
// kept  [64]: factor of the earlier y
// Sums are of all weights, P has those that stay.
template <bool ADDED>
inline void softmax_tile(const Tile& tile, const Dropout& dropout, const float* scores, const float* largest, float exponent, const Running& run,
                         float* kept, bf16* p) {
  const __m512 factor = _mm512_set1_ps(exponent);
  for (int64_t v = 0; v < tile.vectors; v++) {
    const __m512 top = _mm512_loadu_ps(largest + LANES * v);
    // Without a key so far: exp(-inf) and not NaN.
    const __mmask16 none = _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITE), _CMP_EQ_OQ);
    const __m512 most = _mm512_maskz_mov_ps(__mmask16(~none), top), shift = ADDED ? most : _mm512_mul_ps(most, factor);
    const __m512 k = weight_of<ADDED>(_mm512_loadu_ps(run.largest + LANES * v), shift, factor);
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(run.total + LANES * v), k);
    _mm512_storeu_ps(kept + LANES * v, k);
    const int64_t rows = tile.is_diagonal ? std::min(tile.rows, LANES * (v + 1)) : tile.rows;
    for (int64_t r = 0; r < rows; r += 2) {
      const float* from = scores + r * BLOCK + LANES * v;
      __m512 a = weight_of<ADDED>(_mm512_loadu_ps(from), shift, factor);
      __m512 b = weight_of<ADDED>(_mm512_loadu_ps(from + BLOCK), shift, factor);
      sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
      if (dropout.is_on()) {
        a = _mm512_maskz_mov_ps(kept_of(dropout, tile.noise_of(r, v)), a);
        b = _mm512_maskz_mov_ps(kept_of(dropout, tile.noise_of(r + 1, v)), b);
      }
      _mm512_storeu_si512(p + r * BLOCK + 2 * LANES * v, rounded_pairs(a, b));
    }
    _mm512_storeu_ps(run.total + LANES * v, sum);
    _mm512_storeu_ps(run.largest + LANES * v, top);
  }
}

// One block of keys.
inline void forward_tile(const Shape& s, const Tile& tile, const Dropout& dropout, const bf16* keys, const bf16* values, const bf16* queries, float scale,
                         const Running& run, float* scores, bf16* p) {
  alignas(64) float largest[BLOCK], kept[BLOCK];
  std::memcpy(largest, run.largest, sizeof(largest));
  for (int64_t r = 0; r < tile.rows; r += ROWS) {
    const int64_t v0 = tile.first(r);
    if (v0 < tile.vectors)
      WITH_VECTORS(tile.vectors - v0, write_scores<NV>(keys, queries, s.width, scale, tile, r, v0, scores, largest));
  }
  if (tile.added != nullptr)
    softmax_tile<true>(tile, dropout, scores, largest, LOG2E, run, kept, p);
  else
    softmax_tile<false>(tile, dropout, scores, largest, scale * LOG2E, run, kept, p);
  accumulate_lanes(values, p, tile.rows / 2, s.value_width, tile.vectors, tile.is_diagonal, run.y, kept);
}

// Rows [first, last) of [batch, heads, query blocks].
inline void forward(int64_t first, int64_t last, const Shape& s, const bf16* q, const bf16* k, const bf16* v, const Mask& mask, const Dropout& dropout,
                    float scale, bf16* y, float* lse) {
  const int64_t blocks = s.query_blocks(), key_blocks = s.key_blocks(), group = s.heads / s.key_heads;
  Scratch<bf16> keys(key_blocks * BLOCK * s.width), values(key_blocks * BLOCK * s.value_width), queries(BLOCK * s.width), p(BLOCK * BLOCK);
  Scratch<float> sums(s.value_width * BLOCK), scores(BLOCK * BLOCK);
  const float unit = s.mask_kind == 2 ? 1.0f : scale;  // of the largest scores
  int64_t packed = -1;
  for (int64_t row = first; row < last; row++) {
    const int64_t i = row % blocks, head = row / blocks % s.heads, batch = row / blocks / s.heads, key_head = head / group;
    if (packed != batch * s.key_heads + key_head) {
      packed = batch * s.key_heads + key_head;
      const int64_t seen = s.is_causal ? std::min(s.keys, s.queries) : s.keys;
      for (int64_t j = 0; j * BLOCK < seen; j++) {
        const int64_t count = std::min(BLOCK, s.keys - j * BLOCK);
        copy_rows(k + batch * s.k.batch + key_head * s.k.head + j * BLOCK * s.k.token, s.k.token, count, s.width, keys + j * BLOCK * s.width);
        pack_transposed(v + batch * s.v.batch + key_head * s.v.head + j * BLOCK * s.v.token, s.v.token, count, s.value_width,
                        values + j * BLOCK * s.value_width);
      }
    }
    const int64_t count = std::min(BLOCK, s.queries - i * BLOCK);
    pack_lanes(q + batch * s.q.batch + head * s.q.head + i * BLOCK * s.q.token, s.q.token, count, s.width, queries);
    alignas(64) float total[BLOCK], largest[BLOCK], inverse[BLOCK];
    uint64_t own[BLOCK];
    for (int64_t c = 0; c < BLOCK; c++) total[c] = 0.0f, largest[c] = -INFINITE;
    std::memset(sums, 0, s.value_width * BLOCK * sizeof(float));
    const Running run{sums, total, largest};
    for (int64_t j = 0; j < (s.is_causal ? std::min(key_blocks, i + 1) : key_blocks); j++) {
      const Tile tile(s, mask, batch, head, i, j, own);
      if (!tile.is_skipped)
        forward_tile(s, tile, dropout, keys + j * BLOCK * s.width, values + j * BLOCK * s.value_width, queries, scale, run, scores, p);
    }
    for (int64_t c = 0; c < BLOCK; c++) inverse[c] = total[c] == 0.0f ? 0.0f : dropout.scale / total[c];
    float* logs = lse + (batch * s.heads + head) * s.queries + i * BLOCK;
    for (int64_t c = 0; c < count; c++) logs[c] = largest[c] * unit + std::log(total[c]);
    unpack_lanes(sums, inverse, count, s.value_width, y + batch * s.y.batch + head * s.y.head + i * BLOCK * s.y.token, s.y.token);
  }
}
#endif

}  // namespace
