// Sums of squares of gradients in float64 per block, and multiplication of gradients by a number;
// see norm.py.
//
//     sums[b] = sum over block b of x^2    16 partial sums by index modulo 16, then added in order
//     x *= factor                          in blocks with a nonzero sum: others contain only zeros
//
// A block is BLOCK elements of one tensor or the rest of a tensor, so sums do not depend on the
// number of threads.

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
// bfloat16, to nearest, ties to even; NaN stays NaN.
void store(uint16_t* x, float value) {
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

// Index of the tensor that contains block b. starts[t] is the first block of tensor t, ascending.
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
