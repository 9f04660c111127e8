// Calls a kernel once per thread of the OpenMP runtime that torch has loaded, so that kernels and
// torch's operators share one set of threads. A second set would compete with it: after an operator
// torch's idle threads spin for a while on the cores that the other set needs.
//
// Nothing is linked against OpenMP. The caller passes the addresses of the runtime's functions.

#include <cstdint>

namespace {

// A word of the machine: an integer, or an address. Callers pass narrower integers as words too.
using Word = int64_t;
constexpr int WORDS = 22, NUMBERS = 4;
using Kernel = void (*)(int64_t first, int64_t last, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                        Word, Word, Word, Word, Word, Word, Word, Word, Word, double, double, double, double);

// Functions of the runtime. `parallel` is GOMP_parallel: it calls its first argument with the second
// one on each of so many threads, and waits for all of them. Null in a forked process, which has
// none of the runtime's threads: GOMP_parallel would wait for them for ever.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread)();
    int (*threads)();
};

// Written by threads.py.
struct Call {
    const Runtime* runtime;
    Kernel kernel;
    int64_t shares, rows;
    Word words[WORDS];
    double numbers[NUMBERS];
};

void compute(const Call& call, int64_t share) {
    const Word* w = call.words;
    const double* x = call.numbers;
    call.kernel(call.rows * share / call.shares, call.rows * (share + 1) / call.shares, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7],
                w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15], w[16], w[17], w[18], w[19], w[20], w[21], x[0], x[1], x[2], x[3]);
}

// The runtime may give fewer threads than were asked for: each computes every n-th share.
void on_thread(void* given) {
    const Call& call = *static_cast<const Call*>(given);
    const int threads = call.runtime->threads();
    for (int64_t share = call.runtime->thread(); share < call.shares; share += threads) compute(call, share);
}

}  // namespace

// Calls kernel(first, last, ...) for `shares` equal shares of the rows 0 to `rows`; one share by the calling thread.
//
// A kernel has fewer parameters than are passed here. That is defined by no C++ standard, but by the
// calling conventions of x86-64 and AArch64 on Linux: arguments beyond a function's parameters stay
// unread in registers, or on the stack, which the caller clears. Floating-point arguments have
// registers of their own, whose bits are handed on.
extern "C" void narrowgauge_in_shares(const Call* call) {
    const Runtime& runtime = *call->runtime;
    if (call->shares > 1 && runtime.parallel) runtime.parallel(on_thread, const_cast<Call*>(call), unsigned(call->shares), 0);
    else for (int64_t share = 0; share < call->shares; share++) compute(*call, share);
}
