// CUDA threads of one program on a CPU, for int4_units.cu as it stands: each is a coroutine, `__syncthreads` and the instructions of a
// warp wait for the others, and those do what the PTX manual says (ISA 9.0, "Matrix Fragments for mma.m16n8k64", "ldmatrix").
//
// cp.async is made at once (order & 1) or when it is waited for; threads go forward or backward (order & 2). Shared memory begins as
// another program left it. What a race of copies or a missing barrier changes shows itself in one of the four orders.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct Place { unsigned x; };
struct uint2 { unsigned x, y; };
static Place threadIdx, blockIdx, blockDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

namespace emulated {

constexpr int WARP = 32;
struct Copy { void* to; const void* from; bool there; };
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended = false;
  std::vector<Copy> open;                // cp.async since the last commit
  std::vector<std::vector<Copy>> groups;  // committed and not yet made
};

static std::vector<Thread> threads;
static ucontext_t scheduler;
static int current, order;
static std::function<void()> body;

inline void others() { swapcontext(&threads[current].context, &scheduler); threadIdx.x = current; }

// A barrier of `count` threads, the number of those that came and of the rounds that ended.
struct Barrier { int count = 0, came = 0; long round = 0; };
static Barrier all;
struct Warp { Barrier barrier; unsigned a[WARP][4], b[WARP][2]; const void* rows[WARP]; };
static std::vector<Warp> warps;

inline void meet(Barrier& barrier) {
  const long round = barrier.round;
  if (++barrier.came == barrier.count) barrier.came = 0, ++barrier.round;
  while (barrier.round == round) others();
}

inline void make(const Copy& copy) {
  if (reinterpret_cast<uintptr_t>(copy.to) % 16 || (copy.there && reinterpret_cast<uintptr_t>(copy.from) % 16)) {
    std::fprintf(stderr, "cp.async: an address is no multiple of 16\n");
    std::abort();
  }
  if (copy.there) std::memcpy(copy.to, copy.from, 16);
  else std::memset(copy.to, 0, 16);
}

// The 8 rows of a matrix of ldmatrix lie in different groups of 16 bytes of the 128 that the banks serve at once, or it takes longer.
inline void check_banks(const void* const* rows) {
  unsigned groups = 0;
  for (int row = 0; row < 8; ++row) groups |= 1u << reinterpret_cast<uintptr_t>(rows[row]) / 16 % 8;
  if (groups != 0xff) {
    std::fprintf(stderr, "ldmatrix: two rows of a matrix lie in the same banks\n");
    std::abort();
  }
}

inline int element(unsigned word, int k) { return static_cast<int>(word << (28 - 4 * k)) >> 28; }

inline void thread_main() {
  body();
  threads[current].ended = true;
}

// body() by `count` threads of program `program`.
inline void run(int count, unsigned program, std::function<void()> what) {
  body = std::move(what);
  threads = std::vector<Thread>(count);
  warps = std::vector<Warp>(count / WARP);
  all = Barrier{count};
  for (Warp& warp : warps) warp.barrier.count = WARP;
  blockIdx.x = program, blockDim.x = count;
  for (Thread& thread : threads) {
    thread.stack.reset(new char[1 << 17]);
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.get(), 0, 1 << 17};
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, thread_main, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (int i = 0; i < count; ++i) {
      current = order & 2 ? count - 1 - i : i;
      if (threads[current].ended) continue;
      left = true, threadIdx.x = current;
      swapcontext(&scheduler, &threads[current].context);
    }
  }
}

}  // namespace emulated

inline void __syncthreads() { emulated::meet(emulated::all); }

inline void copy_async(void* to, const void* from, bool there) {
  const emulated::Copy copy{to, from, there};
  if (emulated::order & 1) emulated::make(copy);
  else emulated::threads[emulated::current].open.push_back(copy);
}
inline void commit() {
  auto& thread = emulated::threads[emulated::current];
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}
template <int left>
inline void wait() {
  auto& groups = emulated::threads[emulated::current].groups;
  while (static_cast<int>(groups.size()) > left) {
    for (const auto& copy : groups.front()) emulated::make(copy);
    groups.erase(groups.begin());
  }
}

// ldmatrix.x4: lane 8 i + r gives row r of matrix i; of each matrix, lane l gets word l % 4 of row l / 4.
inline void load_matrices(unsigned (&words)[4], const void* row) {
  const int lane = emulated::current % emulated::WARP;
  auto& warp = emulated::warps[emulated::current / emulated::WARP];
  warp.rows[lane] = row;
  emulated::meet(warp.barrier);
  if (lane == 0)
    for (int i = 0; i < 4; ++i) emulated::check_banks(warp.rows + i * 8);
  for (int i = 0; i < 4; ++i)
    std::memcpy(&words[i], static_cast<const char*>(warp.rows[i * 8 + lane / 4]) + lane % 4 * 4, 4);
  emulated::meet(warp.barrier);
}

// mma.m16n8k64.row.col.s32.s4.s4.s32: lhs 16 x 64 and rhs 64 x 8 are put together from all lanes' registers as the manual has them:
//   a element i of 32: row g + (8 if i / 8 is odd), column t * 8 + i % 8 + (32 if i >= 16);  b element i of 16: row t * 8 + i % 8 + (32 if
//   i >= 8), column g;  c element i: row g + (8 if i >= 2), column t * 2 + i % 2;  g = lane / 4, t = lane % 4.
inline void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = emulated::current % emulated::WARP;
  auto& warp = emulated::warps[emulated::current / emulated::WARP];
  std::memcpy(warp.a[lane], a, sizeof a);
  warp.b[lane][0] = b0, warp.b[lane][1] = b1;
  emulated::meet(warp.barrier);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
    int sum = c[i];
    for (int k = 0; k < 64; ++k) {
      const int from = k % 32 / 8, at = k % 8;  // the lane of a group of four, the element of its word
      const unsigned left = warp.a[row % 8 * 4 + from][(row >= 8 ? 1 : 0) + (k >= 32 ? 2 : 0)];
      const unsigned right = warp.b[column * 4 + from][k >= 32 ? 1 : 0];
      sum += emulated::element(left, at) * emulated::element(right, at);
    }
    c[i] = sum;
  }
  emulated::meet(warp.barrier);
}

inline unsigned short to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
template <typename T>
inline T min(T x, T y) { return x < y ? x : y; }
