// out[m, n] = s_lhs[m] * s_rhs[n] * (sum over k of lhs[m, k] * rhs[n, k]) + bias[n] on INT4 tensor
// cores, for NVRTC.
//
// lhs [M, K] and rhs [N, K] are two's complement with two codes per byte, and the contracted axis
// last. The order of two codes in a byte does not matter, as long as both operands use the same. A
// program of 4 warps computes 128 x 128 results; a warp computes 64 x 64, as 4 x 8 tiles of
//
//     mma.m16n8k64: lane l, g = l / 4, t = l % 4; a word is 8 elements of a row
//     lhs 16 x 64   a0, a1: word t of rows g, g + 8;  a2, a3: word t + 4 of the same        ldmatrix.x4, 16 x 32 bytes
//     rhs  8 x 64   b0, b1: words t, t + 4 of row g                                         half of an ldmatrix.x4, 16 x 32 bytes
//     out 16 x  8   c0, c1: columns 2 t, 2 t + 1 of row g;  c2, c3: the same of row g + 8
//
// A step covers 128 elements, i.e. 64 bytes of each row. Shared memory holds 3 steps (48 KiB): one
// in use, two in flight by cp.async. A row is 4 chunks of 16 bytes, and chunk c of row r is stored
// at c ^ (r / 2 % 4): the 8 rows of one ldmatrix matrix then lie in 8 different groups of banks,
// without conflicts.

constexpr int ROWS = 128, STEP = 64, STAGES = 3, THREADS = 128;  // STEP in bytes
constexpr int CHUNK = 16, CHUNKS = STEP / CHUNK, OPERAND = ROWS * STEP;
constexpr int WARP_ROWS = 64, TILES_M = WARP_ROWS / 16, TILES_N = WARP_ROWS / 8, GROUP = 8;

#ifdef __CUDACC_RTC__

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Copy 16 bytes, or write zeros if `there` is false. cp.async writes zeros for a source size of 0.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? CHUNK : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
// Wait until all but the latest `left` groups of this thread have arrived.
template <int left>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

__device__ __forceinline__ void load_matrices(unsigned (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned short to_bfloat16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#endif

struct Operand {
  const unsigned char* codes;  // [rows, bytes]
  const float* scale;          // [rows], or one number
  int rows, has_one_scale;
};

__device__ __forceinline__ int place(int row, int chunk) { return row * STEP + ((chunk ^ (row / 2 % CHUNKS)) * CHUNK); }

// Fetch rows first ... first + 127, bytes from ... from + 63, into one stage. Elements beyond the
// matrix become zero.
__device__ __forceinline__ void fetch(unsigned char* stage, Operand operand, int first, int from, int bytes) {
#pragma unroll
  for (int i = 0; i < OPERAND / CHUNK / THREADS; ++i) {
    const int index = i * THREADS + threadIdx.x, row = index / CHUNKS, chunk = index % CHUNKS;
    const bool there = first + row < operand.rows && from + chunk * CHUNK < bytes;
    // The address must be valid even if nothing is copied.
    const long long at = there ? static_cast<long long>(first + row) * bytes + from + chunk * CHUNK : 0;
    copy_async(stage + place(row, chunk), operand.codes + at, there);
  }
}

// Multiply one stage: two mma steps of 64 elements along the contracted axis.
__device__ __forceinline__ void multiply_stage(
    int (&sums)[TILES_M][TILES_N][4], const unsigned char* lhs, const unsigned char* rhs, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned a[TILES_M][4], b[TILES_N / 2][4];
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) load_matrices(a[i], lhs + place(i * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
    for (int j = 0; j < TILES_N / 2; ++j)
      load_matrices(b[j], rhs + place(j * 16 + lane % 8 + lane / 16 * 8, half * 2 + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < TILES_M; ++i)
#pragma unroll
      for (int j = 0; j < TILES_N; ++j) multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
}

// Explicit roundings: contracting a product and the bias into one rounding would differ from the
// definition, which rounds both. The order of the scales is the one of times_scales in
// definition.py.
__device__ __forceinline__ float scaled(int sum, float left, float right, bool one_factor, const float* bias, int column) {
  const float x = __int2float_rn(sum);
  const float y = one_factor ? __fmul_rn(x, __fmul_rn(left, right)) : __fmul_rn(__fmul_rn(x, left), right);
  return bias ? __fadd_rn(y, bias[column]) : y;
}

__device__ __forceinline__ void store(void* out, long long at, float x, bool narrow) {
  if (narrow) static_cast<unsigned short*>(out)[at] = to_bfloat16(x);
  else static_cast<float*>(out)[at] = x;
}

// bytes: length of a packed row of both operands, a multiple of 16. out [M, N] is bfloat16 if
// narrow, else float32.
extern "C" __global__ void __launch_bounds__(THREADS, 2) int4_mm(
    const unsigned char* lhs_codes, const unsigned char* rhs_codes, const float* lhs_scale, const float* rhs_scale,
    const float* bias, void* out, int m, int n, int bytes, int lhs_has_one, int rhs_has_one, int narrow) {
  __shared__ __align__(128) unsigned char stages[STAGES][2][OPERAND];
  const Operand lhs{lhs_codes, lhs_scale, m, lhs_has_one}, rhs{rhs_codes, rhs_scale, n, rhs_has_one};
  // Concurrent programs share operands in the L2 cache: 8 rows of programs, column by column.
  const int programs_m = (m + ROWS - 1) / ROWS, programs_n = (n + ROWS - 1) / ROWS;
  const int group = blockIdx.x / (GROUP * programs_n), height = min(GROUP, programs_m - group * GROUP);
  const int within = blockIdx.x % (GROUP * programs_n);
  const int first_m = (group * GROUP + within % height) * ROWS, first_n = within / height * ROWS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / 2 * WARP_ROWS, warp_n = warp % 2 * WARP_ROWS;
  const int steps = (bytes + STEP - 1) / STEP;

  int sums[TILES_M][TILES_N][4] = {};
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) {
    fetch(stages[step][0], lhs, first_m, step * STEP, bytes);
    fetch(stages[step][1], rhs, first_n, step * STEP, bytes);
    commit();
  }
  for (int step = 0, stage = 0; step < steps; ++step) {
    // The newest group may still be in flight; the one of this step has arrived.
    wait<STAGES - 2>();
    // Makes other threads' copies visible, and all threads have read the stage that is filled next.
    __syncthreads();
    const int next = step + STAGES - 1, free = stage == 0 ? STAGES - 1 : stage - 1;
    fetch(stages[free][0], lhs, first_m, next * STEP, bytes);
    fetch(stages[free][1], rhs, first_n, next * STEP, bytes);
    commit();
    multiply_stage(sums, stages[stage][0] + warp_m * STEP, stages[stage][1] + warp_n * STEP, lane);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

#pragma unroll
  for (int i = 0; i < TILES_M; ++i)
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = first_m + warp_m + i * 16 + high * 8 + lane / 4;
      if (row >= m) continue;
      const float left = lhs.scale[lhs.has_one_scale ? 0 : row];
#pragma unroll
      for (int j = 0; j < TILES_N; ++j)
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const int column = first_n + warp_n + j * 8 + lane % 4 * 2 + low;
          if (column >= n) continue;
          const float right = rhs.scale[rhs.has_one_scale ? 0 : column];
          const float x = scaled(sums[i][j][high * 2 + low], left, right, lhs.has_one_scale && rhs.has_one_scale, bias, column);
          store(out, static_cast<long long>(row) * n + column, x, narrow);
        }
    }
}

// Pack codes [rows, inner], one per byte -> [rows, 4 * words], two per byte, the first in the low
// nibble, padded with zeros.
extern "C" __global__ void pack_int4(const signed char* codes, unsigned* packed, int rows, int inner, int words) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(rows) * words) return;
  const long long row = index / words;
  const int from = static_cast<int>(index % words) * 8;
  unsigned word = 0;
  if (from + 8 <= inner && inner % 8 == 0) {
    const uint2 both = *reinterpret_cast<const uint2*>(codes + row * inner + from);
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= ((i < 4 ? both.x >> (8 * i) : both.y >> (8 * i - 32)) & 0xFu) << (4 * i);
  } else {
    for (int i = 0; i < 8 && from + i < inner; ++i) word |= (static_cast<unsigned>(codes[row * inner + from + i]) & 0xFu) << (4 * i);
  }
  packed[index] = word;
}
