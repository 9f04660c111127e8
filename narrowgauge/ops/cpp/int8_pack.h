// Panels of an INT8 operand: the words that the integer units multiply, in the order in which a tile reads them.
//
// A panel has `width` rows (a multiple of 16) of a matrix [rows, K] and one step after the other along K:
//
//     Byte   [K/4][width][4] int8: a step is 4 codes of each row, xor `flip`. 0x80 makes code + 128 of a code
//     Pair   [K/2][width][2] int16: a step is 2 codes of each row, widened
//
// One step of a row is one word of 32 bits in both. A matrix has one of two orders in memory. If K is contiguous, 4 rows by
// 4 words are transposed. If the rows are, codes of neighbouring steps along K are interleaved. Both take two shuffles of
// 128 bits for each 16 bytes, which is half a percent of the product's time; loops over single bytes took a quarter of it.
// Rows and codes beyond the edges are 0 (before the xor). Nothing is read beyond the matrix.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

namespace {

constexpr int GROUP = 16;  // rows of a panel that are packed at a time

#ifdef __SSE2__
#define NARROWGAUGE_PACKS 1
typedef __m128i Block;
inline Block load(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
inline void store(void* x, Block v) { _mm_storeu_si128(static_cast<__m128i*>(x), v); }
inline Block low8(Block a, Block b) { return _mm_unpacklo_epi8(a, b); }
inline Block high8(Block a, Block b) { return _mm_unpackhi_epi8(a, b); }
inline Block low16(Block a, Block b) { return _mm_unpacklo_epi16(a, b); }
inline Block high16(Block a, Block b) { return _mm_unpackhi_epi16(a, b); }
inline Block low32(Block a, Block b) { return _mm_unpacklo_epi32(a, b); }
inline Block high32(Block a, Block b) { return _mm_unpackhi_epi32(a, b); }
inline Block low64(Block a, Block b) { return _mm_unpacklo_epi64(a, b); }
inline Block high64(Block a, Block b) { return _mm_unpackhi_epi64(a, b); }
inline Block sign_of(Block a) { return _mm_cmpgt_epi8(_mm_setzero_si128(), a); }
inline Block flipped(Block a, uint8_t flip) { return _mm_xor_si128(a, _mm_set1_epi8(char(flip))); }
#elif defined(__ARM_NEON)
#define NARROWGAUGE_PACKS 1
typedef uint8x16_t Block;
inline Block load(const void* x) { return vld1q_u8(static_cast<const uint8_t*>(x)); }
inline void store(void* x, Block v) { vst1q_u8(static_cast<uint8_t*>(x), v); }
inline Block low8(Block a, Block b) { return vzip1q_u8(a, b); }
inline Block high8(Block a, Block b) { return vzip2q_u8(a, b); }
#define NARROWGAUGE_ZIP(name, zip, type, bits)                                                                       \
  inline Block name(Block a, Block b) {                                                                              \
    return vreinterpretq_u8_##type(zip##_##type(vreinterpretq_##type##_u8(a), vreinterpretq_##type##_u8(b)));        \
  }
NARROWGAUGE_ZIP(low16, vzip1q, u16, 16)
NARROWGAUGE_ZIP(high16, vzip2q, u16, 16)
NARROWGAUGE_ZIP(low32, vzip1q, u32, 32)
NARROWGAUGE_ZIP(high32, vzip2q, u32, 32)
NARROWGAUGE_ZIP(low64, vzip1q, u64, 64)
NARROWGAUGE_ZIP(high64, vzip2q, u64, 64)
#undef NARROWGAUGE_ZIP
inline Block sign_of(Block a) { return vcltzq_s8(vreinterpretq_s8_u8(a)); }
inline Block flipped(Block a, uint8_t flip) { return veorq_u8(a, vdupq_n_u8(flip)); }
#endif

#ifdef NARROWGAUGE_PACKS

struct Byte {
  static constexpr int DEPTH = 4;  // codes of a step
};
struct Pair {
  static constexpr int DEPTH = 2;
};

// Store words [4 rows][4 steps] as [4 steps][4 rows], `pitch` bytes from step to step.
inline void store_transposed(const Block* words, uint8_t* to, int64_t pitch) {
  const Block a = low32(words[0], words[1]), b = low32(words[2], words[3]);
  const Block c = high32(words[0], words[1]), d = high32(words[2], words[3]);
  store(to, low64(a, b));
  store(to + pitch, high64(a, b));
  store(to + 2 * pitch, low64(c, d));
  store(to + 3 * pitch, high64(c, d));
}

// Pack 4 rows of 16 contiguous codes each.
template <class Kind>
inline void pack_square(const int8_t* from, int64_t row_stride, uint8_t flip, uint8_t* to, int64_t pitch) {
  Block codes[4];
  for (int r = 0; r < 4; r++) codes[r] = flipped(load(from + r * row_stride), flip);
  if constexpr (Kind::DEPTH == 4) {
    store_transposed(codes, to, pitch);
  } else {
    Block wide[4];
    for (int r = 0; r < 4; r++) wide[r] = low8(codes[r], sign_of(codes[r]));
    store_transposed(wide, to, pitch);
    for (int r = 0; r < 4; r++) wide[r] = high8(codes[r], sign_of(codes[r]));
    store_transposed(wide, to + 4 * pitch, pitch);
  }
}

// Pack GROUP rows that are contiguous, one step along K.
template <class Kind>
inline void pack_step(const int8_t* from, int64_t stride, uint8_t flip, uint8_t* to) {
  if constexpr (Kind::DEPTH == 4) {
    Block codes[4];
    for (int k = 0; k < 4; k++) codes[k] = flipped(load(from + k * stride), flip);
    const Block a = low8(codes[0], codes[1]), b = low8(codes[2], codes[3]);
    const Block c = high8(codes[0], codes[1]), d = high8(codes[2], codes[3]);
    store(to, low16(a, b));
    store(to + 16, high16(a, b));
    store(to + 32, low16(c, d));
    store(to + 48, high16(c, d));
  } else {
    const Block first = flipped(load(from), flip), second = flipped(load(from + stride), flip);
    const Block a = low8(first, second), b = high8(first, second);
    store(to, low8(a, sign_of(a)));
    store(to + 16, high8(a, sign_of(a)));
    store(to + 32, low8(b, sign_of(b)));
    store(to + 48, high8(b, sign_of(b)));
  }
}

// Copy up to [GROUP, 16] codes, with zeros around them.
inline void framed(const int8_t* from, int64_t rows, int64_t columns, int64_t row_stride, int64_t stride, int8_t* to) {
  std::memset(to, 0, GROUP * 16);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < columns; k++) to[r * 16 + k] = from[r * row_stride + k * stride];
}

// Pack rows [base, base + width) of a matrix, of which stride or row_stride is 1.
template <class Kind>
void pack_panel(const int8_t* x, int64_t base, int64_t rows, int64_t inner, int64_t row_stride, int64_t stride, int64_t width,
                uint8_t flip, uint8_t* panel) {
  constexpr int D = Kind::DEPTH;
  const int64_t steps = (inner + D - 1) / D, pitch = width * 4;
  int8_t frame[GROUP * 16];
  if (stride == 1) {
    for (int64_t g = 0; g < width; g += GROUP) {
      const int64_t present = std::min<int64_t>(std::max<int64_t>(rows - base - g, 0), GROUP);
      const int8_t* from = x + (base + g) * row_stride;
      for (int64_t k = 0; k < inner; k += 16) {
        uint8_t* to = panel + k / D * pitch + g * 4;
        const int8_t* source = from + k;
        int64_t pace = row_stride;
        if (present < GROUP || inner - k < 16) {
          framed(from + k, present, std::min<int64_t>(inner - k, 16), row_stride, 1, frame);
          source = frame;
          pace = 16;
        }
        if (steps - k / D >= 16 / D) {
          for (int r = 0; r < GROUP; r += 4) pack_square<Kind>(source + r * pace, pace, flip, to + r * 4, pitch);
          continue;
        }
        uint8_t whole[16 / D * GROUP * 4];  // the last steps of the panel are fewer than a square's
        for (int r = 0; r < GROUP; r += 4) pack_square<Kind>(source + r * pace, pace, flip, whole + r * 4, GROUP * 4);
        for (int64_t s = 0; s < steps - k / D; s++) std::memcpy(to + s * pitch, whole + s * GROUP * 4, GROUP * 4);
      }
    }
    return;
  }
  for (int64_t s = 0; s < steps; s++) {
    const int64_t depth = std::min<int64_t>(D, inner - s * D);
    for (int64_t g = 0; g < width; g += GROUP) {
      const int64_t present = std::min<int64_t>(std::max<int64_t>(rows - base - g, 0), GROUP);
      const int8_t* from = x + (base + g) * row_stride + s * D * stride;
      uint8_t* to = panel + s * pitch + g * 4;
      if (present == GROUP && depth == D && row_stride == 1) {
        pack_step<Kind>(from, stride, flip, to);
        continue;
      }
      framed(from, depth, present, stride, row_stride, frame);
      pack_step<Kind>(frame, 16, flip, to);
    }
  }
}

#endif

}  // namespace
