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

static_assert(LEFT_ROWS == TILE, "a tile reads one left panel");
constexpr int64_t LEFT_WIDTH = 48;  // left rows that are packed at a time, a multiple of TILE and of GROUP; as in ops/mm/int8_cpp.py
// Bytes at most of a block of left rows, and of a part of a panel. 64 columns come from the L2 cache as fast as they are multiplied, with
// the next part on its way there; 16 columns have to be in L1: 190 GOP/s by AVX2 with 16 KiB, 158 with 32.
constexpr int64_t BLOCK_BYTES = 384 << 10;
constexpr int64_t panel_part_bytes(int width) { return width == 64 ? 192 << 10 : 16 << 10; }

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

// Bring one of `tiles` shares of the panel's part that comes next into the L2 cache: part `first` of panel j, or of the one after
// it if first is 0. A panel that comes from L3 or memory would hold up its first tile.
inline void prefetch_part(const Product& p, int64_t j, int64_t first, int64_t share, int64_t tiles, int64_t end, int64_t count) {
  if (first == 0 && ++j == end) return;
  const int64_t pitch = width_of(p.form) * 4, size = (std::min(count, p.steps() - first) * pitch + tiles - 1) / tiles;
  const uint8_t* part = p.right + j * p.panel_bytes() + first * pitch + share * size;
  for (int64_t b = 0; b < size; b += 64) __builtin_prefetch(part + b, 0, 2);
}

// Ask for the lines that a tile will write, while it is multiplied.
inline void prefetch_result(const Product& p, int64_t row, int rows, int64_t column, int64_t count) {
  const int64_t size = p.output == BFLOAT16 ? 2 : 4;
  for (int r = 0; r < rows; r++)
    for (int64_t b = 0; b < count * size; b += 64) __builtin_prefetch(p.out + ((row + r) * p.out_stride + column) * size + b, 1, 3);
}

// Sums of a tile of `rows` rows from `row` on by panel j, over the steps first ... first + count of K.
void sum_tile(const Product& p, int64_t row, int rows, int64_t j, int64_t first, int64_t count, int32_t* sums) {
  const int64_t pitch = width_of(p.form) * 4;
  const uint8_t* right = p.right + j * p.panel_bytes() + first * pitch;
  if (p.packed()) {
    const uint8_t* left = p.left + row * p.steps() * 4 + first * TILE * 4;
    return multiply_tile(p.form, rows, {left, 4, TILE * 4, right, count}, sums, first > 0);
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

#if defined(__x86_64__)
// 128 * (sum of `count` codes), modulo 2^32
__attribute__((target("avx2"))) int32_t sum_row(const int8_t* codes, int64_t count) {
  const __m256i flip = _mm256_set1_epi8(char(0x80));
  __m256i sums = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 32 <= count; k += 32) {
    const __m256i part = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + k)), flip);
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(part, _mm256_setzero_si256()));
  }
  int64_t lanes[4], sum = -128 * k;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  for (int64_t lane : lanes) sum += lane;
  for (; k < count; k++) sum += codes[k];
  return int32_t(uint32_t(sum * 128));
}

// The same of each row of a left panel. sums [8], of which TILE count
__attribute__((target("avx2"))) void sum_panel(const uint8_t* words, int64_t steps, int32_t* sums) {
  const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(128), mask = _mm256_setr_epi32(-1, -1, -1, -1, -1, -1, 0, 0);
  __m256i found = _mm256_setzero_si256();
  for (int64_t k = 0; k < steps; k++) {
    const __m256i part = _mm256_maskload_epi32(reinterpret_cast<const int*>(words + k * TILE * 4), mask);
    found = _mm256_add_epi32(found, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, part), pairs));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), found);
}
#else
int32_t sum_row(const int8_t*, int64_t) { return 0; }
void sum_panel(const uint8_t*, int64_t, int32_t*) {}
#endif

// 128 * (sum of each left row), which the offset of the right operand added. sums [rows]
void sum_rows(const Product& p, int64_t row, int64_t rows, int32_t* sums) {
  if (!adds_offset(p.form)) {
    std::fill(sums, sums + rows, 0);
    return;
  }
  for (int64_t r = 0; r < rows; r++) {
    if (p.packed()) {
      int32_t whole[8];
      sum_panel(p.left + (row + r) * p.steps() * 4, p.steps(), whole);
      const int64_t count = std::min<int64_t>(TILE, rows - r);
      std::memcpy(sums + r, whole, count * sizeof(int32_t));
      r += count - 1;
    } else {
      sums[r] = sum_row(reinterpret_cast<const int8_t*>(p.left) + (row + r) * p.left_stride, p.inner);
    }
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

// Finishes the rows of a tile one element after the other, as far as the compiler does not vectorize it.
struct Plain {
  template <int WIDTH>
  static inline void finish(const Product& p, const int32_t* sums, int32_t offset, float scale, const Columns& columns, int64_t row,
                            int64_t column, int64_t count) {
    finish_row<WIDTH>(p, sums, offset, scale, columns, row, column, count);
  }
};

#if defined(__x86_64__)
// Whole rows of 16 by intrinsics: in GCC 12's code for the loops an element takes 14 cycles.
struct Avx2 {
  __attribute__((target("avx2"))) static inline __m256i rounded(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7FC0), is_nan);
  }
  template <int WIDTH>
  __attribute__((target("avx2"))) static inline void finish(const Product& p, const int32_t* sums, int32_t offset, float scale,
                                                           const Columns& columns, int64_t row, int64_t column, int64_t count) {
    if (count < WIDTH || p.output == SUMS) return finish_row<WIDTH>(p, sums, offset, scale, columns, row, column, count);
    __m256 values[2];
    for (int v = 0; v < 2; v++) {
      const __m256i whole = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + v * 8));
      values[v] = _mm256_cvtepi32_ps(_mm256_sub_epi32(whole, _mm256_set1_epi32(offset)));
      values[v] = _mm256_mul_ps(_mm256_mul_ps(values[v], _mm256_set1_ps(scale)), _mm256_loadu_ps(columns.scale + v * 8));
      if (p.bias) values[v] = _mm256_add_ps(values[v], _mm256_loadu_ps(columns.bias + v * 8));
    }
    const int64_t place = row * p.out_stride + column;
    if (p.output == FLOAT32) {
      for (int v = 0; v < 2; v++) _mm256_storeu_ps(reinterpret_cast<float*>(p.out) + place + v * 8, values[v]);
      return;
    }
    const __m256i both = _mm256_packus_epi32(rounded(values[0]), rounded(values[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p.out + place * 2), _mm256_permute4x64_epi64(both, 0xD8));
  }
};
#endif

#ifdef NARROWGAUGE_BF16
// A bfloat16 row by vcvtne2ps2bf16: 6 instructions for 16 results, 13 without it.
struct Converted {
  template <int WIDTH>
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))) static inline void finish(
      const Product& p, const int32_t* sums, int32_t offset, float scale, const Columns& columns, int64_t row, int64_t column,
      int64_t count) {
    if (p.output == SUMS || count < 64) return finish_row<WIDTH>(p, sums, offset, scale, columns, row, column, count);
    __m512 values[4];
    const __m512i off = _mm512_set1_epi32(offset);
    const __m512 factor = _mm512_set1_ps(scale);
    __mmask16 subnormal = 0;
    for (int v = 0; v < 4; v++) {
      values[v] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums + v * 16), off));
      values[v] = _mm512_mul_ps(_mm512_mul_ps(values[v], factor), _mm512_loadu_ps(columns.scale + v * 16));
    }
    if (p.bias)
      for (int v = 0; v < 4; v++) values[v] = _mm512_add_ps(values[v], _mm512_loadu_ps(columns.bias + v * 16));
    if (p.output == FLOAT32) {
      float* out = reinterpret_cast<float*>(p.out) + row * p.out_stride + column;
      for (int v = 0; v < 4; v++) _mm512_storeu_ps(out + v * 16, values[v]);
      return;
    }
    for (int v = 0; v < 4; v++) subnormal |= _mm512_fpclass_ps_mask(values[v], 0x20);
    // The instruction takes subnormal numbers for zeros.
    if (subnormal) return finish_row<WIDTH>(p, sums, offset, scale, columns, row, column, count);
    uint16_t* out = reinterpret_cast<uint16_t*>(p.out) + row * p.out_stride + column;
    const __m512i low = (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]), high = (__m512i)_mm512_cvtne2ps_pbh(values[3], values[2]);
    _mm512_storeu_si512(out, low);
    _mm512_storeu_si512(out + 32, high);
  }
};
#endif

// Multiply rows [from, to) by panels [begin, end).
template <int WIDTH, class Finish>
inline void multiply_block(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end, std::vector<int32_t>& sums,
                           std::vector<int32_t>& offsets) {
  constexpr int64_t PART = panel_part_bytes(WIDTH);
  const int64_t tiles = (to - from + TILE - 1) / TILE, steps = p.steps();
  const int64_t parts = std::max<int64_t>((steps * WIDTH * 4 + PART - 1) / PART, 1), size = (steps + parts - 1) / parts;
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
        prefetch_part(p, j, first + length < steps ? first + length : 0, i, tiles, end, length);
        const int64_t row = from + i * TILE;
        const int rows = int(std::min<int64_t>(TILE, to - row));
        int32_t* tile = sums.data() + (waits ? i * TILE * WIDTH : 0);
        const bool ends = first + length == steps;
        if (ends) prefetch_result(p, row, rows, column, count);
        sum_tile(p, row, rows, j, first, length, tile);
        if (!ends) continue;
        for (int r = 0; r < rows; r++) {
          const float left = p.output == SUMS ? 1.f : p.left_scale[p.left_rows ? row + r : 0];
          const float scale = scalars && p.output != SUMS ? left * p.right_scale[0] : left;
          Finish::template finish<WIDTH>(p, tile + r * WIDTH, offsets[row + r - from], scale, columns, row + r, column, count);
        }
      }
    }
  }
}

template <int WIDTH, class Finish>
inline void multiply_range(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end) {
  const int64_t block = std::max<int64_t>(BLOCK_BYTES / (p.steps() * 4) / TILE, 8) * TILE;
  std::vector<int32_t> sums, offsets;
  for (int64_t row = from; row < to; row += block)
    multiply_block<WIDTH, Finish>(p, row, std::min(row + block, to), begin, end, sums, offsets);
}

#define MULTIPLY(name, width, finish)                                                             \
  void name(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end) {             \
    multiply_range<width, finish>(p, from, to, begin, end);                                       \
  }
#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) MULTIPLY(multiply_64, 64, Plain)
__attribute__((target("avx2"))) MULTIPLY(multiply_16, 16, Avx2)
#else
MULTIPLY(multiply_64, 64, Plain)
MULTIPLY(multiply_16, 16, Plain)
#endif
#ifdef NARROWGAUGE_BF16
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))) MULTIPLY(multiply_64_bf16, 64, Converted)
#endif

}  // namespace

extern "C" {

// Bit f is set if this processor has form f.
int32_t narrowgauge_int8_forms() {
  int32_t found = 0;
  for (int32_t form = 0; form < FORMS; form++) found |= int32_t(has(Form(form))) << form;
  return found;
}

// Pack panels first ... last of the rows start ... start + rows of x [.., inner] int8 with strides (row_stride, stride), one of which
// is 1. right: 1 for panels of the right operand, 0 for those of the left one.
void narrowgauge_int8_pack(int64_t first, int64_t last, const int8_t* x, int64_t start, int64_t rows, int64_t inner, int64_t row_stride,
                           int64_t stride, int32_t form, int32_t right, uint8_t* panels) {
  const Form chosen = Form(form);
  const int64_t width = right ? width_of(chosen) : LEFT_WIDTH;
  const int64_t size = (inner + depth_of(chosen) - 1) / depth_of(chosen) * width * 4;
  const uint8_t flip = right && adds_offset(chosen) ? 0x80 : 0;
  x += start * row_stride;
#ifdef NARROWGAUGE_PACKS
  const int64_t at_once = PACKED_ROWS / width;
  for (int64_t p = first; p < last; p += at_once) {
    const int64_t count = std::min(at_once, last - p);
    const auto pack = chosen == AVX2 ? (right ? pack_panels<Pair, false> : pack_panels<Pair, true>)
                                     : (right ? pack_panels<Byte, false> : pack_panels<Byte, true>);
    pack(x, p * width, count, rows, inner, row_stride, stride, width, flip, panels + p * size);
  }
#endif
}

// Compute a part [m, n] of out, from `row` and `column` on, for the units first ... last: TILE rows each, or panels of the right
// operand (by_columns). Packed operands hold this part alone, all others the whole.
//
// left_stride   bytes from row to row of the left operand; -1: it is packed
// codes         the right operand with its strides; null: it is packed. A thread packs the panels that it multiplies first: its own
//               ones (by_columns), or all of them, if it has all units
// bias          [n] float32 or null
// output        FLOAT32, BFLOAT16, or SUMS, which are int32 and not scaled
// out_stride    elements from row to row of out
void narrowgauge_int8_multiply(int64_t first, int64_t last, const uint8_t* left, int64_t left_stride, const int8_t* codes,
                               int64_t row_stride, int64_t stride, uint8_t* right, int64_t row,
                               int64_t column, int64_t m, int64_t n, int64_t inner, int32_t form, int32_t by_columns, const float* left_scale, int32_t left_rows,
                               const float* right_scale, int32_t right_rows, const float* bias, int32_t output, uint8_t* out,
                               int64_t out_stride) {
  const int64_t panels = (n + width_of(Form(form)) - 1) / width_of(Form(form));
  if (codes)
    narrowgauge_int8_pack(by_columns ? first : 0, by_columns ? last : panels, codes, column, n, inner, row_stride, stride, form, 1, right);
  if (left_stride >= 0) left += row * left_stride;
  if (left_rows) left_scale += row;
  if (right_rows) right_scale += column;
  if (bias) bias += column;
  out += (row * out_stride + column) * (output == BFLOAT16 ? 2 : 4);
  const Product p = {Form(form), left,  right,      left_stride, m,      n,   inner,     left_scale, right_scale,
                     bias,       left_rows, right_rows, output,      out,    out_stride};
  const int64_t from = by_columns ? 0 : first * TILE, to = by_columns ? m : std::min(last * TILE, m);
  const int64_t begin = by_columns ? first : 0, end = by_columns ? last : panels;
#ifdef NARROWGAUGE_BF16
  if (p.form == VNNI512 && __builtin_cpu_supports("avx512bf16")) return multiply_64_bf16(p, from, to, begin, end);
#endif
  if (p.form == VNNI512) multiply_64(p, from, to, begin, end);
  else multiply_16(p, from, to, begin, end);
}

}  // extern "C"
