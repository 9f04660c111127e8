// Tiles of 32-bit sums in registers: TILE rows of the left operand by one panel of the right one.
//
//     form          instruction             step of K   width   sums    left, right
//     VNNI512       vpdpbusd zmm (EVEX)     4           64      24      int8, code + 128
//     VNNI256       vpdpbusd ymm (EVEX)     4           16      12      int8, code + 128
//     AVX_VNNI      vpdpbusd ymm (VEX)      4           16      12      int8, code + 128
//     AVX2          vpmaddwd, vpaddd ymm    2           16      12      int16, int16
//     DOTPROD       sdot (Arm)              4           16      24      int8, int8
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products to 32 bits. The offset of 128 adds 128 times the sum of the
// left row, which the epilogue subtracts. Sums wrap around modulo 2^32, so intermediate ones may overflow. vpmaddubsw would
// saturate at 16 bits, so AVX2 multiplies codes that were widened to 16 bits.
//
// The loops are inline assembly: GCC 12 spills the sums of the same loops in intrinsics, at half the speed.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

namespace {

constexpr int TILE = 6;

enum Form : int32_t { AVX2 = 0, AVX_VNNI = 1, VNNI256 = 2, VNNI512 = 3, DOTPROD = 4, FORMS = 5 };

// Word of row r and step k of the left operand: left + r * row_stride + k * step_stride, in bytes.
// Step k of the panel: right + k * 4 * width. Sums are written as [TILE][width]; `add` reads what they begin with.
struct Words {
  const uint8_t* left;
  int64_t row_stride, step_stride;
  const uint8_t* right;
  int64_t steps;
};

#if defined(__x86_64__)

// Rows 0 ... ROWS - 1 of a tile. `second` points to row 3.
#define ROW_0(load, use) load("(%[first])") use(0)
#define ROW_1(load, use) load("(%[first],%[stride])") use(1)
#define ROW_2(load, use) load("(%[first],%[stride],2)") use(2)
#define ROW_3(load, use) load("(%[second])") use(3)
#define ROW_4(load, use) load("(%[second],%[stride])") use(4)
#define ROW_5(load, use) load("(%[second],%[stride],2)") use(5)
#define ROWS_1(load, use) ROW_0(load, use)
#define ROWS_2(load, use) ROWS_1(load, use) ROW_1(load, use)
#define ROWS_3(load, use) ROWS_2(load, use) ROW_2(load, use)
#define ROWS_4(load, use) ROWS_3(load, use) ROW_3(load, use)
#define ROWS_5(load, use) ROWS_4(load, use) ROW_4(load, use)
#define ROWS_6(load, use) ROWS_5(load, use) ROW_5(load, use)

// The loop: sums start as zeros or from memory, are multiplied up, and are stored.
#define LOOP(zeros, starts, body, width, stores, ...)                                                               \
  __asm__ volatile("test %[add], %[add]\n\t"                                                                        \
                   "jnz 1f\n\t" zeros "jmp 2f\n"                                                                    \
                   "1:\n\t" starts "2:\n\t"                                                                         \
                   "test %[steps], %[steps]\n\t"                                                                    \
                   "jz 4f\n\t"                                                                                      \
                   ".p2align 5\n"                                                                                   \
                   "3:\n\t" body "add %[pace], %[first]\n\t"                                                        \
                   "add %[pace], %[second]\n\t"                                                                     \
                   "add $" #width ", %[right]\n\t"                                                                  \
                   "dec %[steps]\n\t"                                                                               \
                   "jnz 3b\n"                                                                                       \
                   "4:\n\t" stores "vzeroupper\n\t"                                                                 \
                   : [first] "+r"(first), [second] "+r"(second), [right] "+r"(right), [steps] "+r"(steps)           \
                   : [stride] "r"(words.row_stride), [pace] "r"(words.step_stride), [sums] "r"(sums), [add] "r"(add) \
                   : "cc", "memory", __VA_ARGS__)

#define TILE_FUNCTION(name, isa, rows, ...)                                                    \
  __attribute__((target(isa), noinline)) void name##_##rows(const Words& words, int32_t* sums, int64_t add) { \
    const uint8_t *first = words.left, *second = first + 3 * words.row_stride, *right = words.right;  \
    int64_t steps = words.steps;                                                                  \
    __VA_ARGS__;                                                                                  \
  }

// --- 512 bits: sums of row r in zmm(4 r) ... zmm(4 r + 3), the panel's step in zmm24 ... 27, the left word in zmm28.
#define Z_EACH(r, op) Z_EACH_##r(op)
#define Z_EACH_0(op) op("0", "0", "24") op("1", "64", "25") op("2", "128", "26") op("3", "192", "27")
#define Z_EACH_1(op) op("4", "256", "24") op("5", "320", "25") op("6", "384", "26") op("7", "448", "27")
#define Z_EACH_2(op) op("8", "512", "24") op("9", "576", "25") op("10", "640", "26") op("11", "704", "27")
#define Z_EACH_3(op) op("12", "768", "24") op("13", "832", "25") op("14", "896", "26") op("15", "960", "27")
#define Z_EACH_4(op) op("16", "1024", "24") op("17", "1088", "25") op("18", "1152", "26") op("19", "1216", "27")
#define Z_EACH_5(op) op("20", "1280", "24") op("21", "1344", "25") op("22", "1408", "26") op("23", "1472", "27")
#define Z_ZERO(sum, place, panel) "vpxord %%zmm" sum ", %%zmm" sum ", %%zmm" sum "\n\t"
#define Z_START(sum, place, panel) "vmovdqu32 " place "(%[sums]), %%zmm" sum "\n\t"
#define Z_STORE(sum, place, panel) "vmovdqu32 %%zmm" sum ", " place "(%[sums])\n\t"
#define Z_DOT(sum, place, panel) "vpdpbusd %%zmm28, %%zmm" panel ", %%zmm" sum "\n\t"
#define Z_ZEROS(r) Z_EACH(r, Z_ZERO)
#define Z_STARTS(r) Z_EACH(r, Z_START)
#define Z_STORES(r) Z_EACH(r, Z_STORE)
#define Z_DOTS(r) Z_EACH(r, Z_DOT)
#define Z_LOAD(place) "vpbroadcastd " place ", %%zmm28\n\t"
#define NOTHING(place)
#define Z_PANEL                                                                                       \
  "vmovdqu32 (%[right]), %%zmm24\n\tvmovdqu32 64(%[right]), %%zmm25\n\t"                              \
  "vmovdqu32 128(%[right]), %%zmm26\n\tvmovdqu32 192(%[right]), %%zmm27\n\t"
#define Z_CLOBBERS                                                                                                        \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
      "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28"
#define Z_TILE(rows)                                                                                        \
  TILE_FUNCTION(tile_512, "avx512f,avx512bw,avx512vl,avx512vnni", rows,                                      \
                LOOP(ROWS_##rows(NOTHING, Z_ZEROS), ROWS_##rows(NOTHING, Z_STARTS), Z_PANEL ROWS_##rows(Z_LOAD, Z_DOTS), 256, \
                     ROWS_##rows(NOTHING, Z_STORES), Z_CLOBBERS))
Z_TILE(1)
Z_TILE(2)
Z_TILE(3)
Z_TILE(4)
Z_TILE(5)
Z_TILE(6)

// --- 256 bits: sums of row r in ymm(2 r), ymm(2 r + 1), the panel's step in ymm12 and 13, the left word in ymm14.
#define Y_EACH(r, op) Y_EACH_##r(op)
#define Y_EACH_0(op) op("0", "0", "12") op("1", "32", "13")
#define Y_EACH_1(op) op("2", "64", "12") op("3", "96", "13")
#define Y_EACH_2(op) op("4", "128", "12") op("5", "160", "13")
#define Y_EACH_3(op) op("6", "192", "12") op("7", "224", "13")
#define Y_EACH_4(op) op("8", "256", "12") op("9", "288", "13")
#define Y_EACH_5(op) op("10", "320", "12") op("11", "352", "13")
#define Y_ZERO(sum, place, panel) "vpxor %%ymm" sum ", %%ymm" sum ", %%ymm" sum "\n\t"
#define Y_START(sum, place, panel) "vmovdqu " place "(%[sums]), %%ymm" sum "\n\t"
#define Y_STORE(sum, place, panel) "vmovdqu %%ymm" sum ", " place "(%[sums])\n\t"
#define Y_EVEX_DOT(sum, place, panel) "%{evex%} vpdpbusd %%ymm14, %%ymm" panel ", %%ymm" sum "\n\t"
#define Y_VEX_DOT(sum, place, panel) "%{vex%} vpdpbusd %%ymm14, %%ymm" panel ", %%ymm" sum "\n\t"
#define Y_MADD(sum, place, panel) "vpmaddwd %%ymm14, %%ymm" panel ", %%ymm15\n\tvpaddd %%ymm15, %%ymm" sum ", %%ymm" sum "\n\t"
#define Y_ZEROS(r) Y_EACH(r, Y_ZERO)
#define Y_STARTS(r) Y_EACH(r, Y_START)
#define Y_STORES(r) Y_EACH(r, Y_STORE)
#define Y_EVEX_DOTS(r) Y_EACH(r, Y_EVEX_DOT)
#define Y_VEX_DOTS(r) Y_EACH(r, Y_VEX_DOT)
#define Y_MADDS(r) Y_EACH(r, Y_MADD)
#define Y_LOAD(place) "vpbroadcastd " place ", %%ymm14\n\t"
#define Y_PANEL "vmovdqu (%[right]), %%ymm12\n\tvmovdqu 32(%[right]), %%ymm13\n\t"
#define Y_CLOBBERS                                                                                                        \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
      "xmm15"
#define Y_TILE(name, isa, use, rows)                                                                            \
  TILE_FUNCTION(name, isa, rows,                                                                                \
                LOOP(ROWS_##rows(NOTHING, Y_ZEROS), ROWS_##rows(NOTHING, Y_STARTS), Y_PANEL ROWS_##rows(Y_LOAD, use), 64, \
                     ROWS_##rows(NOTHING, Y_STORES), Y_CLOBBERS))
#define Y_TILES(name, isa, use) \
  Y_TILE(name, isa, use, 1)     \
  Y_TILE(name, isa, use, 2)     \
  Y_TILE(name, isa, use, 3)     \
  Y_TILE(name, isa, use, 4)     \
  Y_TILE(name, isa, use, 5)     \
  Y_TILE(name, isa, use, 6)
Y_TILES(tile_256, "avx512f,avx512bw,avx512vl,avx512vnni", Y_EVEX_DOTS)
Y_TILES(tile_madd, "avx2", Y_MADDS)
#if (defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 10)
#define NARROWGAUGE_BF16 1
#endif
// Compilers and assemblers before these do not have the instructions, and a form is worth no failure to build the others.
#if (defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && __GNUC__ >= 12)
#define NARROWGAUGE_AVX_VNNI 1
Y_TILES(tile_vex, "avx2,avxvnni", Y_VEX_DOTS)
#endif

#define CHOICE(name)                                      \
  switch (rows) {                                         \
    case 1: return name##_1(words, sums, add);            \
    case 2: return name##_2(words, sums, add);            \
    case 3: return name##_3(words, sums, add);            \
    case 4: return name##_4(words, sums, add);            \
    case 5: return name##_5(words, sums, add);            \
    default: return name##_6(words, sums, add);           \
  }

inline bool has(Form form) {
  switch (form) {
    case AVX2: return __builtin_cpu_supports("avx2");
    case VNNI256:
    case VNNI512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2");
#ifdef NARROWGAUGE_AVX_VNNI
    case AVX_VNNI: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("avxvnni");
#endif
    default: return false;
  }
}

// sums [rows][width of a panel], rows <= TILE
inline void multiply_tile(Form form, int rows, const Words& words, int32_t* sums, int64_t add) {
  if (form == VNNI512) CHOICE(tile_512)
  if (form == VNNI256) CHOICE(tile_256)
#ifdef NARROWGAUGE_AVX_VNNI
  if (form == AVX_VNNI) CHOICE(tile_vex)
#endif
  CHOICE(tile_madd)
}

#elif defined(__aarch64__)

inline bool has(Form form) {
  if (form != DOTPROD) return false;
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return false;
#endif
}

// sdot multiplies signed by signed bytes. 24 sums, 4 registers of the panel and one of the left word are 29 of 32 registers.
template <int ROWS>
__attribute__((target("arch=armv8.2-a+dotprod"))) void tile_dot(const Words& words, int32_t* sums, int64_t add) {
  int32x4_t found[ROWS][4];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 4; v++) found[r][v] = add ? vld1q_s32(sums + r * 16 + v * 4) : vdupq_n_s32(0);
  const uint8_t *left = words.left, *right = words.right;
  for (int64_t k = 0; k < words.steps; k++) {
    int8x16_t panel[4];
    for (int v = 0; v < 4; v++) panel[v] = vld1q_s8(reinterpret_cast<const int8_t*>(right) + v * 16);
    for (int r = 0; r < ROWS; r++) {
      int32_t word;
      std::memcpy(&word, left + r * words.row_stride, sizeof word);
      const int8x16_t codes = vreinterpretq_s8_s32(vdupq_n_s32(word));
      for (int v = 0; v < 4; v++) found[r][v] = vdotq_s32(found[r][v], panel[v], codes);
    }
    left += words.step_stride;
    right += 64;
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 4; v++) vst1q_s32(sums + r * 16 + v * 4, found[r][v]);
}

inline void multiply_tile(Form, int rows, const Words& words, int32_t* sums, int64_t add) {
  switch (rows) {
    case 1: return tile_dot<1>(words, sums, add);
    case 2: return tile_dot<2>(words, sums, add);
    case 3: return tile_dot<3>(words, sums, add);
    case 4: return tile_dot<4>(words, sums, add);
    case 5: return tile_dot<5>(words, sums, add);
    default: return tile_dot<6>(words, sums, add);
  }
}

#else

inline bool has(Form) { return false; }
inline void multiply_tile(Form, int, const Words&, int32_t*, int64_t) {}

#endif

}  // namespace
