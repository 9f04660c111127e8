// Panels of an INT8 operand: the words that the integer units multiply, in the order in which a tile reads them.
//
// A panel has some rows of a matrix [rows, K] and one step after the other along K. Those of the left operand have the 6 rows of a tile,
// and lie close together in the L1 cache, those of the right one have `width`, a multiple of 16:
//
//     Byte   [K/4][rows][4] int8: a step is 4 codes of each row, xor `flip`. 0x80 makes code + 128 of a code
//     Pair   [K/2][rows][2] int16: a step is 2 codes of each row, widened
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

constexpr int GROUP = 16;         // rows that are packed at a time
constexpr int LEFT_ROWS = 6;      // of a left panel
constexpr int PACKED_ROWS = 256;  // at most, of the panels of one call
constexpr int LINE = 64;   // bytes of a cache line
constexpr int AHEAD = 16;  // steps along K between a prefetch and its use

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

// Places of 4 rows of a panel at its first step, 8 bytes each; the next step is `pitch` bytes on.
struct Place {
  uint8_t *first, *second;
};

template <bool LEFT>
inline void put(Place to, Block v) {
  if constexpr (LEFT) {
    std::memcpy(to.first, &v, 8);
    const Block high = high64(v, v);
    std::memcpy(to.second, &high, 8);
  } else {
    store(to.first, v);
  }
}

// Store words [4 rows][4 steps] as [4 steps][4 rows].
template <bool LEFT>
inline void put_transposed(const Block* words, Place to, int64_t pitch) {
  const Block a = low32(words[0], words[1]), b = low32(words[2], words[3]);
  const Block c = high32(words[0], words[1]), d = high32(words[2], words[3]);
  const Block steps[4] = {low64(a, b), high64(a, b), low64(c, d), high64(c, d)};
  for (int s = 0; s < 4; s++) put<LEFT>({to.first + s * pitch, to.second + s * pitch}, steps[s]);
}

// Pack 4 rows of 16 contiguous codes each.
template <class Kind, bool LEFT>
inline void pack_square(const int8_t* from, int64_t row_stride, uint8_t flip, Place to, int64_t pitch) {
  Block codes[4];
  for (int r = 0; r < 4; r++) codes[r] = flipped(load(from + r * row_stride), flip);
  if constexpr (Kind::DEPTH == 4) {
    put_transposed<LEFT>(codes, to, pitch);
  } else {
    Block wide[4];
    for (int r = 0; r < 4; r++) wide[r] = low8(codes[r], sign_of(codes[r]));
    put_transposed<LEFT>(wide, to, pitch);
    for (int r = 0; r < 4; r++) wide[r] = high8(codes[r], sign_of(codes[r]));
    put_transposed<LEFT>(wide, {to.first + 4 * pitch, to.second + 4 * pitch}, pitch);
  }
}

// Pack GROUP rows that are contiguous, one step along K.
template <class Kind, bool LEFT>
inline void pack_step(const int8_t* from, int64_t stride, uint8_t flip, const Place* to, int64_t offset) {
  Block words[4];
  if constexpr (Kind::DEPTH == 4) {
    Block codes[4];
    for (int k = 0; k < 4; k++) codes[k] = flipped(load(from + k * stride), flip);
    const Block a = low8(codes[0], codes[1]), b = low8(codes[2], codes[3]);
    const Block c = high8(codes[0], codes[1]), d = high8(codes[2], codes[3]);
    words[0] = low16(a, b);
    words[1] = high16(a, b);
    words[2] = low16(c, d);
    words[3] = high16(c, d);
  } else {
    const Block first = flipped(load(from), flip), second = flipped(load(from + stride), flip);
    const Block a = low8(first, second), b = high8(first, second);
    words[0] = low8(a, sign_of(a));
    words[1] = high8(a, sign_of(a));
    words[2] = low8(b, sign_of(b));
    words[3] = high8(b, sign_of(b));
  }
  for (int w = 0; w < 4; w++) put<LEFT>({to[w].first + offset, to[w].second + offset}, words[w]);
}

// Copy up to [GROUP, 16] codes, with zeros around them.
inline void framed(const int8_t* from, int64_t rows, int64_t columns, int64_t row_stride, int64_t stride, int8_t* to) {
  std::memset(to, 0, GROUP * 16);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < columns; k++) to[r * 16 + k] = from[r * row_stride + k * stride];
}

// Pack `panels` times `width` rows from row `base` on, of a matrix whose stride or row_stride is 1.
//
// Out of the L2 cache the loads are the time. Rows of a matrix [K, rows] are far apart, which the processor's prefetchers do not follow,
// so codes to come are asked for, and several panels are packed at a time, so that a whole run of each row is read.
template <class Kind, bool LEFT>
void pack_panels(const int8_t* x, int64_t base, int64_t panels, int64_t rows, int64_t inner, int64_t row_stride, int64_t stride,
                 int64_t width, uint8_t flip, uint8_t* panel) {
  constexpr int D = Kind::DEPTH;
  const int64_t steps = (inner + D - 1) / D, pitch = LEFT ? LEFT_ROWS * 4 : width * 4, groups = panels * width / GROUP;
  int8_t frame[GROUP * 16];
  Place places[PACKED_ROWS / 4];
  for (int64_t i = 0; i < groups * 4; i++) {
    const int64_t row = i * 4, rest = LEFT ? row % LEFT_ROWS : row % width;
    uint8_t* first = panel + (row - rest) * steps * 4 + rest * 4;
    // The left operand's panels have 6 rows: of 4 that cross to the next one, two lie there.
    places[i] = {first, LEFT && rest == 4 ? panel + (row + 2) * steps * 4 : first + 8};
  }
  if (stride == 1) {
    for (int64_t g = 0; g < groups; g++) {
      const int64_t present = std::min<int64_t>(std::max<int64_t>(rows - base - g * GROUP, 0), GROUP);
      const int8_t* from = x + (base + g * GROUP) * row_stride;
      for (int64_t k = 0; k < inner; k += 16) {
        const int8_t* source = from + k;
        if (k % LINE == 0)
          for (int r = 0; r < GROUP; r++) __builtin_prefetch(source + (GROUP + r) * row_stride, 0, 2);
        int64_t pace = row_stride;
        if (present < GROUP || inner - k < 16) {
          framed(source, present, std::min<int64_t>(inner - k, 16), row_stride, 1, frame);
          source = frame;
          pace = 16;
        }
        const int64_t offset = k / D * pitch, left = steps - k / D;
        for (int w = 0; w < 4; w++) {
          const Place to = {places[g * 4 + w].first + offset, places[g * 4 + w].second + offset};
          if (left >= 16 / D) {
            pack_square<Kind, LEFT>(source + w * 4 * pace, pace, flip, to, pitch);
            continue;
          }
          uint8_t whole[16 / D * 16];  // the last steps of the panel are fewer than a square's
          pack_square<Kind, false>(source + w * 4 * pace, pace, flip, {whole, whole + 8}, 16);
          for (int64_t s = 0; s < left; s++) {
            std::memcpy(to.first + s * pitch, whole + s * 16, 8);
            std::memcpy(to.second + s * pitch, whole + s * 16 + 8, 8);
          }
        }
      }
    }
    return;
  }
  for (int64_t s = 0; s < steps; s++) {
    const int64_t depth = std::min<int64_t>(D, inner - s * D);
    const int8_t* row = x + base * row_stride + s * D * stride;
    for (int64_t d = 0; d < D; d++)
      for (int64_t i = 0; i < groups * GROUP; i += LINE) __builtin_prefetch(row + (AHEAD * D + d) * stride + i * row_stride, 0, 2);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t present = std::min<int64_t>(std::max<int64_t>(rows - base - g * GROUP, 0), GROUP);
      const int8_t* from = row + g * GROUP * row_stride;
      if (present == GROUP && depth == D && row_stride == 1) {
        pack_step<Kind, LEFT>(from, stride, flip, places + g * 4, s * pitch);
        continue;
      }
      framed(from, depth, present, stride, row_stride, frame);
      pack_step<Kind, LEFT>(frame, 16, flip, places + g * 4, s * pitch);
    }
  }
}

#endif

}  // namespace
