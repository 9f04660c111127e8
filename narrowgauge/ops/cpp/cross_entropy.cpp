// Cross-entropy of logits and its gradient, each in one pass over memory (ops/cross_entropy has the
// contract):
//
//     loss_i  = log sum_j e^x_ij - x_it,  t = labels[i]         0 for a negative label
//     dx_ij   = g_i (e^(x_ij - log sum) - [j = t])
//
// A row is read three times in the forward pass, the second and third time from the cache. Sums are
// float32 in one order (vectors.h), so bits do not depend on the number of threads.

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace {

template <typename In> inline float element(const In* x, int64_t j) { return read(x + j, Part{1})[0]; }

template <typename In> float largest(const In* x, int64_t columns) {
    Floats lanes = all(element(x, 0));
    for_columns(columns, [&](int64_t j, auto how) {
        Floats found = read(x + j, how);
        // Missing elements of a part are read as 0: its first element takes their place.
        if constexpr (std::is_same_v<decltype(how), Part>) {
            for (int64_t k = how.count; k < WIDTH; ++k) found[k] = found[0];
        }
        lanes = found > lanes ? found : lanes;
    });
    float found = lanes[0];
    for (int k = 1; k < WIDTH; ++k) found = lanes[k] > found ? lanes[k] : found;
    return found;
}

template <typename In>
void losses_of(int64_t first, int64_t last, const In* logits, int64_t stride, int64_t columns, const int64_t* labels, float* losses,
               float* sums) {
    for (int64_t i = first; i < last; ++i) {
        const In* x = logits + i * stride;
        const float top = largest(x, columns);
        const float sum = sum_of(columns, [=](int64_t j, auto how) { return exp_of(read(x + j, how) - top); });
        const float log = std::log(sum);
        sums[i] = top + log;
        // In this order the error is that of torch's log_softmax: top may be large.
        losses[i] = labels[i] < 0 ? 0.f : log - (element(x, labels[i]) - top);
    }
}

template <typename In>
void gradients_of(int64_t first, int64_t last, const In* logits, int64_t stride, int64_t columns, const int64_t* labels, const float* sums,
                  const float* gradients, In* out) {
    for (int64_t i = first; i < last; ++i) {
        const In* x = logits + i * stride;
        In* to = out + i * columns;
        if (labels[i] < 0) {
            std::memset(to, 0, columns * sizeof(In));
            continue;
        }
        const float g = gradients[i], sum = sums[i];
        for_columns(columns, [=](int64_t j, auto how) { write(to + j, exp_of(read(x + j, how) - sum) * g, how); });
        const float p = exp_of(all(element(x, labels[i]) - sum))[0];
        write(to + labels[i], all((p - 1.f) * g), Part{1});
    }
}

}  // namespace

extern "C" {

// `first` and `last` count rows. narrow: logits are bfloat16, else float32.
void narrowgauge_cross_entropy(int64_t first, int64_t last, int32_t narrow, const void* logits, int64_t stride, int64_t columns,
                               const int64_t* labels, float* losses, float* sums) {
    if (narrow) losses_of(first, last, static_cast<const uint16_t*>(logits), stride, columns, labels, losses, sums);
    else losses_of(first, last, static_cast<const float*>(logits), stride, columns, labels, losses, sums);
}

void narrowgauge_cross_entropy_gradient(int64_t first, int64_t last, int32_t narrow, const void* logits, int64_t stride, int64_t columns,
                                        const int64_t* labels, const float* sums, const float* gradients, void* out) {
    if (narrow) gradients_of(first, last, static_cast<const uint16_t*>(logits), stride, columns, labels, sums, gradients, static_cast<uint16_t*>(out));
    else gradients_of(first, last, static_cast<const float*>(logits), stride, columns, labels, sums, gradients, static_cast<float*>(out));
}

}  // extern "C"
