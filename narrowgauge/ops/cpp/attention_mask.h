// Masks of attention as tiles of 64 keys x 64 queries, in the order in which the scores are computed.
//
// A tile of a boolean mask is 64 words: bit q of word k says that query q attends to key k. A tile of
// a mask that is added is float32 [64 keys][64 queries]. The state of a tile is NOTHING (none of its
// queries attends to any of its keys: it is skipped), EVERYTHING, or SOME.
#pragma once
#include "attention_tiles.h"

namespace {

enum State : uint8_t { NOTHING = 0, EVERYTHING = 1, SOME = 2 };
constexpr uint64_t ALL = ~uint64_t(0);

// A mask in memory: strides in elements, 0 where it is broadcast.
struct MaskShape {
  int64_t heads, queries, keys, batch_stride, head_stride, query_stride, key_stride;

  int64_t query_blocks() const { return up(queries, BLOCK) / BLOCK; }
  int64_t key_blocks() const { return up(keys, BLOCK) / BLOCK; }
  // First element of tile row `row` of [batch, heads, query blocks].
  int64_t begin(int64_t row) const {
    const int64_t head = row / query_blocks();
    return head / heads * batch_stride + head % heads * head_stride + row % query_blocks() * BLOCK * query_stride;
  }
};

// Transpose 64 x 64 bits, by exchanging blocks of half the size in six steps (Hacker's Delight, 7-3).
inline void transpose_bits(uint64_t* x) {
  uint64_t mask = 0xffffffffull;
  for (int width = 32; width; width >>= 1, mask ^= mask << width)
    for (int i = 0; i < 64; i = ((i | width) + 1) & ~width) {
      const uint64_t t = ((x[i] >> width) ^ x[i | width]) & mask;
      x[i] ^= t << width;
      x[i | width] ^= t;
    }
}

// Bit k of the result is element k, for up to 64 elements that are 0 or 1.
inline uint64_t bits_of(const uint8_t* x, int64_t stride, int64_t count) {
  uint64_t found = 0;
  int64_t k = 0;
  for (; stride == 1 && k + 8 <= count; k += 8) {
    uint64_t eight;
    std::memcpy(&eight, x + k, 8);
    found |= (eight * 0x0102040810204080ull >> 56) << k;  // byte i to bit 56 + i; no two meet
  }
  for (; k < count; k++) found |= uint64_t(x[k * stride] != 0) << k;
  return found;
}

// Tile rows [first, last) of [batch, heads, query blocks] of a boolean mask.
inline void bit_tiles(int64_t first, int64_t last, const uint8_t* mask, const MaskShape& shape, uint64_t* bits, uint8_t* states) {
  const int64_t blocks = shape.key_blocks();
  for (int64_t row = first; row < last; row++) {
    const int64_t rows = std::min(BLOCK, shape.queries - row % shape.query_blocks() * BLOCK);
    const uint8_t* from = mask + shape.begin(row);
    for (int64_t j = 0; j < blocks; j++) {
      uint64_t* to = bits + (row * blocks + j) * BLOCK;
      const int64_t keys = std::min(BLOCK, shape.keys - j * BLOCK);
      const uint64_t valid = keys == BLOCK ? ALL : (uint64_t(1) << keys) - 1;
      uint64_t any = 0, every = valid;
      for (int64_t q = 0; q < BLOCK; q++) {
        // Queries beyond the end are as the last one, so that they do not change the state.
        if (q == 0 || (q < rows && shape.query_stride != 0))
          to[q] = bits_of(from + q * shape.query_stride + j * BLOCK * shape.key_stride, shape.key_stride, keys);
        else
          to[q] = to[q - 1];
        any |= to[q];
        every &= to[q];
      }
      states[row * blocks + j] = any == 0 ? NOTHING : every == valid ? EVERYTHING : SOME;
      if (states[row * blocks + j] == SOME) transpose_bits(to);
    }
  }
}

inline float number(const uint16_t* x) {
  const uint32_t bits = uint32_t(*x) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
inline float number(const float* x) { return *x; }

// The same of a mask that is added. A tile is SOME unless all of it is -inf.
template <class T>
void added_tiles(int64_t first, int64_t last, const T* mask, const MaskShape& shape, float* added, uint8_t* states) {
  const int64_t blocks = shape.key_blocks();
  for (int64_t row = first; row < last; row++) {
    const int64_t rows = std::min(BLOCK, shape.queries - row % shape.query_blocks() * BLOCK);
    for (int64_t j = 0; j < blocks; j++) {
      float* to = added + (row * blocks + j) * BLOCK * BLOCK;
      const T* from = mask + shape.begin(row) + j * BLOCK * shape.key_stride;
      const int64_t keys = std::min(BLOCK, shape.keys - j * BLOCK);
      bool is_nothing = true;
      for (int64_t k = 0; k < BLOCK; k++)
        for (int64_t q = 0; q < BLOCK; q++) {
          float x = 0.0f;
          if (k < keys) {
            x = number(from + std::min(q, rows - 1) * shape.query_stride + k * shape.key_stride);
            is_nothing = is_nothing && x == -INFINITE;
          }
          to[k * BLOCK + q] = x;
        }
      states[row * blocks + j] = is_nothing ? NOTHING : SOME;
    }
  }
}

}  // namespace
