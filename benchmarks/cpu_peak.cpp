// Loops of one instruction on registers alone: what the CPU's units give, without loads, stores and dependences.
//
// narrowgauge_peak(first, last, unit) runs the loop last - first times. Each pass has SUMS independent sums.
#include <cstdint>

#if defined(__x86_64__)

#define SUMS_12(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define CLOBBERS                                                                                                         \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
      "xmm15", "cc"
#define LOOP(name, isa, op)                                                                                  \
  __attribute__((target(isa), noinline)) static void name(int64_t passes) {                                  \
    if (passes > 0) __asm__ volatile("1:\n\t" SUMS_12(op) "dec %0\n\tjnz 1b\n\tvzeroupper" : "+r"(passes) : : CLOBBERS); \
  }
#define VNNI512(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define VNNI256(i) "%{evex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define MADD(i) "vpmaddwd %%ymm12, %%ymm13, %%ymm14\n\tvpaddd %%ymm14, %%ymm" #i ", %%ymm" #i "\n\t"
#define FMA(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n\t"
LOOP(vnni512, "avx512f,avx512vnni", VNNI512)
LOOP(vnni256, "avx512f,avx512vl,avx512vnni", VNNI256)
LOOP(madd, "avx2", MADD)
LOOP(fma, "avx2,fma", FMA)

extern "C" void narrowgauge_peak(int64_t first, int64_t last, int32_t unit) {
  const int64_t passes = last - first;
  if (unit == 3) vnni512(passes);
  else if (unit == 2) vnni256(passes);
  else if (unit == 0) madd(passes);
  else fma(passes);
}

#else

extern "C" void narrowgauge_peak(int64_t, int64_t, int32_t) {}

#endif
