// Sums of squares of gradients in float64, block by block, and the product of gradients with a number; see norm.py.
//
//     sums[b] = sum over the block of x^2        in 16 sums, one for each residue of the index, then from the first to the last
//     x *= factor                                of blocks whose sum is not zero: the others hold zeros alone
//
// A block is BLOCK elements of one tensor, or what is left of it, so that the sums do not depend on who computes which.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 4096, LANES = 16;

float load(const float* x) { return *x; }
float load(const uint16_t* x) {  // bfloat16
    const uint32_t bits = uint32_t(*x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void store(float* x, float value) { *x = value; }
void store(uint16_t* x, float value) {  // to nearest, ties to even; NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *x = value != value ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
double squares(const T* x, int64_t n) {
    double lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int64_t k = 0; k < LANES; k++) {
            const double value = load(x + i + k);
            lanes[k] += value * value;
        }
    for (int64_t k = 0; i < n; i++, k++) lanes[k] += double(load(x + i)) * double(load(x + i));
    double total = 0;
    for (double each : lanes) total += each;
    return total;
}

template <typename T>
void multiply(T* x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i++) store(x + i, load(x + i) * factor);
}

// The tensor that block b belongs to: starts[t] is its first block, ascending.
int64_t tensor_of(const int64_t* starts, int64_t tensors, int64_t b) {
    return std::upper_bound(starts, starts + tensors, b) - starts - 1;
}

template <typename Work>
void over_blocks(int64_t first, int64_t last, const int64_t* starts, const int64_t* sizes, int64_t tensors, Work work) {
    if (first >= last) return;
    int64_t t = tensor_of(starts, tensors, first);
    for (int64_t b = first; b < last; b++) {
        while (t + 1 < tensors && starts[t + 1] <= b) t++;
        const int64_t begin = (b - starts[t]) * BLOCK;
        work(b, t, begin, std::min(BLOCK, sizes[t] - begin));
    }
}

}  // namespace

extern "C" {

void narrowgauge_squares(int64_t first, int64_t last, const int64_t* starts, const int64_t* sizes, const int64_t* memory,
                         const int64_t* narrow, int64_t tensors, double* sums) {
    over_blocks(first, last, starts, sizes, tensors, [&](int64_t b, int64_t t, int64_t begin, int64_t n) {
        sums[b] = narrow[t] ? squares(reinterpret_cast<const uint16_t*>(memory[t]) + begin, n)
                            : squares(reinterpret_cast<const float*>(memory[t]) + begin, n);
    });
}

void narrowgauge_multiply(int64_t first, int64_t last, const int64_t* starts, const int64_t* sizes, const int64_t* memory,
                          const int64_t* narrow, int64_t tensors, const double* sums, float factor) {
    over_blocks(first, last, starts, sizes, tensors, [&](int64_t b, int64_t t, int64_t begin, int64_t n) {
        if (sums[b] == 0) return;
        if (narrow[t]) multiply(reinterpret_cast<uint16_t*>(memory[t]) + begin, n, factor);
        else multiply(reinterpret_cast<float*>(memory[t]) + begin, n, factor);
    });
}

}  // extern "C"
