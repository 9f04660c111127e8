// Products of INT8 matrices on the CPU's integer units: out [M, N] = left [M, K] @ right [N, K].T, scaled and rounded.
//
// int8_tile.h has the forms of the inner loop, int8_pack.h the layouts. The right operand is always packed into panels. The left one
// is read where it lies if its rows are contiguous bytes and the form multiplies bytes; else it is packed into panels of
// LEFT_WIDTH rows. Both packed operands lie in memory that the caller owns.
//
// A block of left rows and a part of K stay in the L2 cache while the panels pass by. Sums of a longer K wait in memory between
// its parts. Each thread has its own rows, or its own panels where there are few rows; sums are exact, so bits do not depend on it.
//
// Epilogue, in float32 and in the order of times_scales and with_epilogue of ops/mm/definition.py:
//
//     two scalars    float(sum) * (left * right) + bias
//     else           float(sum) * left * right + bias
//
// then one rounding to bfloat16, to nearest even, subnormals kept (vcvtneps2bf16 would flush them).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "int8_pack.h"
#include "int8_tile.h"

namespace {

constexpr int64_t LEFT_WIDTH = 48;  // rows of a left panel, a multiple of TILE and of GROUP; as in ops/mm/int8_cpp.py
constexpr int64_t PANEL_BYTES = 384 << 10, BLOCK_BYTES = 384 << 10;  // at most, of a panel's part and of a block of left rows

enum Output : int32_t { FLOAT32 = 0, BFLOAT16 = 1, SUMS = 2 };

inline bool adds_offset(Form form) { return form != AVX2 && form != DOTPROD; }
inline int width_of(Form form) { return form == VNNI512 ? 64 : 16; }
inline int depth_of(Form form) { return form == AVX2 ? 2 : 4; }

// One product, with what all its tiles share.
struct Product {
  Form form;
  const uint8_t *left, *right;
  int64_t left_stride;  // bytes from row to row; -1: the left operand is packed
  int64_t m, n, inner;
  const float *left_scale, *right_scale, *bias;
  int32_t left_rows, right_rows;  // whether a row has its own scale
  int32_t output;
  uint8_t* out;
  int64_t out_stride;  // elements

  int64_t steps() const { return (inner + depth_of(form) - 1) / depth_of(form); }
  bool packed() const { return left_stride < 0; }
  int64_t panel_bytes() const { return steps() * width_of(form) * 4; }
};

// Sums of a tile of `rows` rows from `row` on by panel j, over the steps first ... first + count of K.
void sum_tile(const Product& p, int64_t row, int rows, int64_t j, int64_t first, int64_t count, int32_t* sums) {
  const int64_t pitch = width_of(p.form) * 4;
  const uint8_t* right = p.right + j * p.panel_bytes() + first * pitch;
  if (p.packed()) {
    const uint8_t* left = p.left + row / LEFT_WIDTH * p.steps() * LEFT_WIDTH * 4 + row % LEFT_WIDTH * 4 + first * LEFT_WIDTH * 4;
    return multiply_tile(p.form, rows, {left, 4, LEFT_WIDTH * 4, right, count}, sums, first > 0);
  }
  // The last codes of a row may be fewer than a step's: nothing is read beyond them.
  const uint8_t* left = p.left + row * p.left_stride;
  const int64_t rest = p.inner % 4;
  const bool ends = rest && first + count == p.steps();
  multiply_tile(p.form, rows, {left + first * 4, p.left_stride, 4, right, count - ends}, sums, first > 0);
  if (!ends) return;
  uint8_t last[TILE * 4] = {};
  for (int r = 0; r < rows; r++) std::memcpy(last + r * 4, left + r * p.left_stride + p.inner - rest, rest);
  multiply_tile(p.form, rows, {last, 4, 0, right + (count - 1) * pitch, 1}, sums, 1);
}

// 128 * (sum of each left row), which the offset of the right operand added. sums [rows]
void sum_rows(const Product& p, int64_t row, int64_t rows, int32_t* sums) {
  if (!adds_offset(p.form)) {
    std::fill(sums, sums + rows, 0);
    return;
  }
  for (int64_t r = 0; r < rows; r++) {
    int32_t sum = 0;
    if (p.packed()) {
      const uint8_t* words = p.left + (row + r) / LEFT_WIDTH * p.steps() * LEFT_WIDTH * 4 + (row + r) % LEFT_WIDTH * 4;
      for (int64_t k = 0; k < p.steps(); k++)
        for (int b = 0; b < 4; b++) sum += int8_t(words[k * LEFT_WIDTH * 4 + b]);
    } else {
      const int8_t* codes = reinterpret_cast<const int8_t*>(p.left) + (row + r) * p.left_stride;
      for (int64_t k = 0; k < p.inner; k++) sum += codes[k];
    }
    sums[r] = int32_t(uint32_t(sum) * 128u);
  }
}

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Scales and biases of the columns of a panel; 1 and nothing where there is a single scale.
struct Columns {
  float scale[64], bias[64];
};

// Write `count` columns of one row. WIDTH: of the panel.
template <int WIDTH>
inline void finish_row(const Product& p, const int32_t* sums, int32_t offset, float scale, const Columns& columns, int64_t row,
                       int64_t column, int64_t count) {
  if (p.output == SUMS) {
    int32_t* out = reinterpret_cast<int32_t*>(p.out) + row * p.out_stride + column;
    for (int64_t c = 0; c < count; c++) out[c] = int32_t(uint32_t(sums[c]) - uint32_t(offset));
    return;
  }
  float values[WIDTH];
  for (int c = 0; c < WIDTH; c++) values[c] = float(int32_t(uint32_t(sums[c]) - uint32_t(offset))) * scale * columns.scale[c];
  if (p.bias)
    for (int c = 0; c < WIDTH; c++) values[c] += columns.bias[c];
  if (p.output == FLOAT32) {
    std::memcpy(p.out + (row * p.out_stride + column) * 4, values, count * 4);
    return;
  }
  uint16_t narrow[WIDTH];
  for (int c = 0; c < WIDTH; c++) narrow[c] = to_bfloat16(values[c]);
  std::memcpy(p.out + (row * p.out_stride + column) * 2, narrow, count * 2);
}

// Multiply rows [from, to) by panels [begin, end).
template <int WIDTH>
inline void multiply_block(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end, std::vector<int32_t>& sums,
                           std::vector<int32_t>& offsets) {
  const int64_t tiles = (to - from + TILE - 1) / TILE, steps = p.steps();
  const int64_t parts = std::max<int64_t>((steps * WIDTH * 4 + PANEL_BYTES - 1) / PANEL_BYTES, 1), size = (steps + parts - 1) / parts;
  const bool waits = parts > 1, scalars = !p.left_rows && !p.right_rows;
  sums.resize((waits ? tiles : 1) * TILE * WIDTH);
  offsets.resize(to - from);
  sum_rows(p, from, to - from, offsets.data());
  for (int64_t j = begin; j < end; j++) {
    const int64_t column = j * WIDTH, count = std::min<int64_t>(WIDTH, p.n - column);
    Columns columns;
    for (int64_t c = 0; c < WIDTH; c++) {
      const int64_t n = column + std::min(c, count - 1);
      columns.scale[c] = scalars || p.output == SUMS ? 1.f : p.right_scale[p.right_rows ? n : 0];
      columns.bias[c] = p.bias ? p.bias[n] : 0.f;
    }
    for (int64_t first = 0; first < steps; first += size) {
      const int64_t length = std::min(size, steps - first);
      for (int64_t i = 0; i < tiles; i++) {
        const int64_t row = from + i * TILE;
        const int rows = int(std::min<int64_t>(TILE, to - row));
        int32_t* tile = sums.data() + (waits ? i * TILE * WIDTH : 0);
        sum_tile(p, row, rows, j, first, length, tile);
        if (first + length < steps) continue;
        for (int r = 0; r < rows; r++) {
          const float left = p.output == SUMS ? 1.f : p.left_scale[p.left_rows ? row + r : 0];
          const float scale = scalars && p.output != SUMS ? left * p.right_scale[0] : left;
          finish_row<WIDTH>(p, tile + r * WIDTH, offsets[row + r - from], scale, columns, row + r, column, count);
        }
      }
    }
  }
}

template <int WIDTH>
inline void multiply_range(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end) {
  // Whole left panels, so that a tile never crosses from one to the next.
  const int64_t part = std::min<int64_t>(p.steps() * 4, PANEL_BYTES / WIDTH);
  const int64_t block = std::max<int64_t>(BLOCK_BYTES / std::max<int64_t>(part, 1) / LEFT_WIDTH, 1) * LEFT_WIDTH;
  std::vector<int32_t> sums, offsets;
  for (int64_t row = from; row < to; row += block)
    multiply_block<WIDTH>(p, row, std::min(row + block, to), begin, end, sums, offsets);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) void multiply_64(const Product& p, int64_t from, int64_t to,
                                                                              int64_t begin, int64_t end) {
  multiply_range<64>(p, from, to, begin, end);
}
__attribute__((target("avx2"))) void multiply_16(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end) {
  multiply_range<16>(p, from, to, begin, end);
}
#else
void multiply_64(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end) { multiply_range<64>(p, from, to, begin, end); }
void multiply_16(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end) { multiply_range<16>(p, from, to, begin, end); }
#endif

}  // namespace

extern "C" {

// Bit f is set if this processor has form f.
int32_t narrowgauge_int8_forms() {
  int32_t found = 0;
  for (int32_t form = 0; form < FORMS; form++) found |= int32_t(has(Form(form))) << form;
  return found;
}

// Pack panels first ... last of x [rows, inner] int8 with strides (row_stride, stride), one of which is 1. right: 1 for panels of
// the right operand, 0 for those of the left one.
void narrowgauge_int8_pack(int64_t first, int64_t last, const int8_t* x, int64_t rows, int64_t inner, int64_t row_stride,
                           int64_t stride, int32_t form, int32_t right, uint8_t* panels) {
  const Form chosen = Form(form);
  const int64_t width = right ? width_of(chosen) : LEFT_WIDTH;
  const int64_t size = (inner + depth_of(chosen) - 1) / depth_of(chosen) * width * 4;
  const uint8_t flip = right && adds_offset(chosen) ? 0x80 : 0;
#ifdef NARROWGAUGE_PACKS
  for (int64_t p = first; p < last; p++) {
    if (chosen == AVX2) pack_panel<Pair>(x, p * width, rows, inner, row_stride, stride, width, flip, panels + p * size);
    else pack_panel<Byte>(x, p * width, rows, inner, row_stride, stride, width, flip, panels + p * size);
  }
#endif
}

// Compute out [m, n] for the units first ... last: left panels of LEFT_WIDTH rows, or panels of the right operand (by_columns).
//
// left_stride   bytes from row to row of the left operand; -1: it is packed
// bias          [n] float32 or null
// output        FLOAT32, BFLOAT16, or SUMS, which are int32 and not scaled
// out_stride    elements from row to row of out
void narrowgauge_int8_multiply(int64_t first, int64_t last, const uint8_t* left, int64_t left_stride, const uint8_t* right, int64_t m,
                               int64_t n, int64_t inner, int32_t form, int32_t by_columns, const float* left_scale, int32_t left_rows,
                               const float* right_scale, int32_t right_rows, const float* bias, int32_t output, uint8_t* out,
                               int64_t out_stride) {
  const Product p = {Form(form), left,  right,      left_stride, m,      n,   inner,     left_scale, right_scale,
                     bias,       left_rows, right_rows, output,      out,    out_stride};
  const int64_t from = by_columns ? 0 : first * LEFT_WIDTH, to = by_columns ? m : std::min(last * LEFT_WIDTH, m);
  const int64_t panels = (n + width_of(p.form) - 1) / width_of(p.form);
  const int64_t begin = by_columns ? first : 0, end = by_columns ? last : panels;
  if (p.form == VNNI512) multiply_64(p, from, to, begin, end);
  else multiply_16(p, from, to, begin, end);
}

}  // extern "C"
