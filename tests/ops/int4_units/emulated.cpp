// The kernels of int4_units.cu on a CPU, every program and every thread (threads.h).

#include "threads.h"

#include "int4_units.cu"

// order: see threads.h. programs: of the grid.
extern "C" void emulated_int4_mm(
    int order, unsigned programs, const unsigned char* lhs, const unsigned char* rhs, const float* lhs_scale, const float* rhs_scale,
    const float* bias, void* out, int m, int n, int bytes, int lhs_has_one, int rhs_has_one, int narrow) {
  static const std::vector<unsigned char> garbage(ROWS * STEP * STAGES, 0x57);
  static const float one = 1;
  static std::vector<float> nowhere(ROWS * ROWS);
  emulated::order = order;
  emulated::run(THREADS, 0, [] {  // what it leaves in shared memory must not be seen
    int4_mm(garbage.data(), garbage.data(), &one, &one, nullptr, nowhere.data(), ROWS, ROWS, STEP * STAGES, 1, 1, 0);
  });
  for (unsigned program = 0; program < programs; ++program)
    emulated::run(THREADS, program, [=] {
      int4_mm(lhs, rhs, lhs_scale, rhs_scale, bias, out, m, n, bytes, lhs_has_one, rhs_has_one, narrow);
    });
}

extern "C" void emulated_pack_int4(const signed char* codes, unsigned* packed, int rows, int inner, int words, unsigned programs, int threads) {
  for (unsigned program = 0; program < programs; ++program) {
    blockIdx.x = program, blockDim.x = threads;
    for (int thread = 0; thread < threads; ++thread) {
      threadIdx.x = thread;
      pack_int4(codes, packed, rows, inner, words);
    }
  }
}
