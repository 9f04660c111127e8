// Norms and activations, forward and backward (ops/norm_act/__init__.py has the equations):
//
//     norm_forward, norm_backward               a row is read from memory once, then from the cache
//     activation_forward, activation_backward   one pass
//     part_sums, column_sums                    gradients of weights and biases, from partial sums
//
// Rows of inputs lie `stride` elements apart; results are contiguous. Arithmetic and sums are
// float32. Weights are passed in float32, which is exact. A bfloat16 tensor is rounded once, when
// it is written; n of rms-norm and the activation of a gate are rounded before they are multiplied.
//
// Gradients of weights are added over PARTS of rows whose size depends on the number of rows alone,
// so their bits do not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace {

// Must match `NormArguments` in ops/norm_act/cpp.py.
struct Norm {
    int64_t rows, columns, stride, gradient_stride;
    int64_t part;               // rows of a part (backward)
    int32_t x_narrow, y_narrow; // 1 bfloat16, 0 float32; y: of gy in backward
    int32_t centered, rounds_n;
    float eps, plus;            // plus is added to the weight
};

// Must match `ActivationArguments` in ops/norm_act/cpp.py.
struct Activation {
    int64_t columns, stride, second_stride, gradient_stride;
    int32_t narrow, function;
};

enum Function : int32_t { SILU, GELU, GELU_TANH, RELU, RELU2 };

template <typename Run> void with_dtype(bool narrow, const Run& run) {
    if (narrow) run(uint16_t{});
    else run(float{});
}

// ---- norms ------------------------------------------------------------------------------------

template <bool centered, bool rounds_n, typename In, typename Out>
void norm_rows(int64_t first, int64_t last, const Norm& norm, const In* x, const float* w, const float* b, Out* y, float* means,
               float* rates) {
    const int64_t columns = norm.columns;
    const float plus = norm.plus;
    for (int64_t i = first; i < last; ++i) {
        const In* from = x + i * norm.stride;
        Out* to = y + i * columns;
        const float mean = centered ? sum_of(columns, [=](int64_t j, auto how) { return read(from + j, how); }) / float(columns) : 0.f;
        const float squares = sum_of(columns, [=](int64_t j, auto how) {
            const Floats z = centered ? read(from + j, how) - mean : read(from + j, how);
            return z * z;
        });
        const float rate = 1.f / std::sqrt(squares / float(columns) + norm.eps);
        if (centered) means[i] = mean;
        rates[i] = rate;
        for_columns(columns, [=](int64_t j, auto how) {
            const Floats z = centered ? read(from + j, how) - mean : read(from + j, how);
            Floats n = z * rate;
            if (rounds_n) n = rounded_as<In>(n);
            Floats weight = read(w + j, how);
            if (plus != 0.f) weight += plus;
            Floats found = n * weight;
            if (centered) found += read(b + j, how);
            write(to + j, found, how);
        });
    }
}

// One part: gradients of x, and sums of the gradients of w and b over its rows.
template <bool centered, typename In, typename Gradient>
void norm_part(int64_t first, int64_t last, const Norm& norm, const In* x, const Gradient* gy, const float* w, const float* means,
               const float* rates, In* dx, float* dw, float* db) {
    const int64_t columns = norm.columns;
    const float plus = norm.plus;
    std::memset(dw, 0, columns * sizeof(float));
    if (centered) std::memset(db, 0, columns * sizeof(float));
    for (int64_t i = first; i < last; ++i) {
        const In* from = x + i * norm.stride;
        const Gradient* given = gy + i * norm.gradient_stride;
        In* to = dx + i * columns;
        const float mean = centered ? means[i] : 0.f, rate = rates[i];
        const auto normal = [=](int64_t j, auto how) {
            const Floats z = read(from + j, how);
            return (centered ? z - mean : z) * rate;
        };
        const auto weight = [=](int64_t j, auto how) { return plus != 0.f ? read(w + j, how) + plus : read(w + j, how); };
        float sums[2];
        sums_of(
            columns,
            [=](int64_t j, auto how) {
                const Floats h = read(given + j, how), n = normal(j, how), wh = weight(j, how) * h;
                write(dw + j, read(dw + j, how) + h * n, how);
                if (centered) write(db + j, read(db + j, how) + h, how);
                return Two{wh * n, centered ? wh : Floats{}};
            },
            sums);
        const float with_normal = sums[0] / float(columns), plain = centered ? sums[1] / float(columns) : 0.f;
        for_columns(columns, [=](int64_t j, auto how) {
            const Floats wh = weight(j, how) * read(given + j, how);
            Floats inner = wh - normal(j, how) * with_normal;
            if (centered) inner -= plain;
            write(to + j, inner * rate, how);
        });
    }
}

// ---- activations ------------------------------------------------------------------------------

constexpr float ROOT = 0.7978845608028654f, CUBE = 0.044715f;  // ROOT: sqrt(2 / pi)

inline Floats sigmoid(Floats x) { return 1.f / (1.f + exp_of(-x)); }
inline Floats tanh_share(Floats x) { return sigmoid(2.f * ROOT * (x + CUBE * (x * x * x))); }

struct ValueAndSlope {
    Floats value, slope;
};

template <int32_t function> inline Floats activated(Floats x) {
    if (function == SILU) return x / (1.f + exp_of(-x));
    if (function == GELU) return x * normal_of(x).share;
    if (function == GELU_TANH) return x * tanh_share(x);
    const Floats positive = at_least(x, 0.f);
    return function == RELU ? positive : positive * positive;
}

template <int32_t function> inline ValueAndSlope value_and_slope(Floats x) {
    if (function == SILU) {
        const Floats p = sigmoid(x);
        return {x * p, p * (1.f + x * (1.f - p))};
    }
    if (function == GELU) {
        const Normal p = normal_of(x);
        return {x * p.share, p.share + x * p.density * 0.3989422804014327f};
    }
    if (function == GELU_TANH) {
        const Floats p = tanh_share(x);
        return {x * p, p + x * p * (1.f - p) * (2.f * ROOT) * (1.f + 3.f * CUBE * (x * x))};
    }
    const Floats positive = at_least(x, 0.f);
    if (function == RELU) return {positive, x > 0.f ? all(1.f) : Floats{}};
    return {positive * positive, 2.f * positive};
}

template <int32_t function, bool gated, typename T>
void activate_rows(int64_t first, int64_t last, const Activation& of, const T* x, const T* u, T* y) {
    for (int64_t i = first; i < last; ++i) {
        const T *from = x + i * of.stride, *second = gated ? u + i * of.second_stride : nullptr;
        T* to = y + i * of.columns;
        for_columns(of.columns, [=](int64_t j, auto how) {
            Floats found = activated<function>(read(from + j, how));
            if (gated) found = rounded_as<T>(found) * read(second + j, how);
            write(to + j, found, how);
        });
    }
}

template <int32_t function, bool gated, typename T>
void activation_gradients(int64_t first, int64_t last, const Activation& of, const T* x, const T* u, const T* gy, T* dx, T* du) {
    for (int64_t i = first; i < last; ++i) {
        const T *from = x + i * of.stride, *second = gated ? u + i * of.second_stride : nullptr, *given = gy + i * of.gradient_stride;
        T *to = dx + i * of.columns, *to_second = gated ? du + i * of.columns : nullptr;
        for_columns(of.columns, [=](int64_t j, auto how) {
            const Floats h = read(given + j, how);
            const ValueAndSlope found = value_and_slope<function>(read(from + j, how));
            if (gated) {
                write(to + j, h * read(second + j, how) * found.slope, how);
                write(to_second + j, h * found.value, how);
            } else {
                write(to + j, h * found.slope, how);
            }
        });
    }
}

// Call run(function as a constant, gated as a constant, T{}).
template <typename Run> void with_function(const Activation& of, bool gated, const Run& run) {
    const auto dtypes = [&](auto function, auto is_gated) {
        with_dtype(of.narrow, [&](auto like) { run(function, is_gated, like); });
    };
    const auto forms = [&](auto function) {
        if (gated) dtypes(function, std::true_type{});
        else dtypes(function, std::false_type{});
    };
    if (of.function == SILU) forms(std::integral_constant<int32_t, SILU>{});
    if (of.function == GELU) forms(std::integral_constant<int32_t, GELU>{});
    if (of.function == GELU_TANH) forms(std::integral_constant<int32_t, GELU_TANH>{});
    if (of.function == RELU) forms(std::integral_constant<int32_t, RELU>{});
    if (of.function == RELU2) forms(std::integral_constant<int32_t, RELU2>{});
}

}  // namespace

extern "C" {

// y, and the statistics of each row. `first` and `last` count rows. b and means: of layer-norm.
void narrowgauge_norm_forward(int64_t first, int64_t last, const Norm* given, const void* x, const float* w, const float* b, void* y,
                              float* means, float* rates) {
    const Norm norm = *given;
    with_dtype(norm.x_narrow, [&](auto in) {
        with_dtype(norm.y_narrow, [&](auto out) {
            const auto* from = static_cast<const decltype(in)*>(x);
            auto* to = static_cast<decltype(out)*>(y);
            if (norm.centered) norm_rows<true, false>(first, last, norm, from, w, b, to, means, rates);
            else if (norm.rounds_n) norm_rows<false, true>(first, last, norm, from, w, b, to, means, rates);
            else norm_rows<false, false>(first, last, norm, from, w, b, to, means, rates);
        });
    });
}

// Gradient of x, and sums [parts, columns] of the gradients of w and b. `first` and `last` count
// parts.
void narrowgauge_norm_backward(int64_t first, int64_t last, const Norm* given, const void* x, const void* gy, const float* w,
                               const float* means, const float* rates, void* dx, float* dw, float* db) {
    const Norm norm = *given;
    with_dtype(norm.x_narrow, [&](auto in) {
        with_dtype(norm.y_narrow, [&](auto out) {
            const auto* from = static_cast<const decltype(in)*>(x);
            const auto* gradient = static_cast<const decltype(out)*>(gy);
            auto* to = static_cast<decltype(in)*>(dx);
            for (int64_t part = first; part < last; ++part) {
                const int64_t begin = part * norm.part, end = std::min(begin + norm.part, norm.rows), at = part * norm.columns;
                if (norm.centered) norm_part<true>(begin, end, norm, from, gradient, w, means, rates, to, dw + at, db + at);
                else norm_part<false>(begin, end, norm, from, gradient, w, means, rates, to, dw + at, db);
            }
        });
    });
}

// Sums [columns] over `parts` rows, in their order. `first` and `last` count columns.
void narrowgauge_column_sums(int64_t first, int64_t last, const float* rows, int64_t parts, int64_t columns, float* sums) {
    for_columns(last - first, [=](int64_t j, auto how) {
        Floats sum{};
        for (int64_t part = 0; part < parts; ++part) sum += read(rows + part * columns + first + j, how);
        write(sums + first + j, sum, how);
    });
}

// Sums [parts, columns] of a bfloat16 matrix, each over `part` rows in their order. `first` and `last`
// count parts.
void narrowgauge_part_sums(int64_t first, int64_t last, const uint16_t* x, int64_t rows, int64_t columns, int64_t stride, int64_t part,
                           float* sums) {
    for (int64_t k = first; k < last; ++k) {
        float* const sum = sums + k * columns;
        std::fill(sum, sum + columns, 0.f);
        for (int64_t i = k * part; i < std::min((k + 1) * part, rows); ++i) {
            const uint16_t* const row = x + i * stride;
            for_columns(columns, [=](int64_t j, auto how) { write(sum + j, read(sum + j, how) + read(row + j, how), how); });
        }
    }
}

// u is null for a function of x alone.
void narrowgauge_activation_forward(int64_t first, int64_t last, const Activation* given, const void* x, const void* u, void* y) {
    const Activation of = *given;
    with_function(of, u != nullptr, [&](auto function, auto gated, auto like) {
        using T = decltype(like);
        activate_rows<function.value, gated.value>(first, last, of, static_cast<const T*>(x), static_cast<const T*>(u), static_cast<T*>(y));
    });
}

void narrowgauge_activation_backward(int64_t first, int64_t last, const Activation* given, const void* x, const void* u, const void* gy,
                                     void* dx, void* du) {
    const Activation of = *given;
    with_function(of, u != nullptr, [&](auto function, auto gated, auto like) {
        using T = decltype(like);
        activation_gradients<function.value, gated.value>(first, last, of, static_cast<const T*>(x), static_cast<const T*>(u),
                                                          static_cast<const T*>(gy), static_cast<T*>(dx), static_cast<T*>(du));
    });
}

// The functions of vectors.h, for tests. `first` and `last` count elements.
void narrowgauge_exp(int64_t first, int64_t last, const float* x, float* y) {
    for_columns(last - first, [=](int64_t j, auto how) { write(y + first + j, exp_of(read(x + first + j, how)), how); });
}

void narrowgauge_normal(int64_t first, int64_t last, const float* x, float* y) {
    for_columns(last - first, [=](int64_t j, auto how) { write(y + first + j, normal_of(read(x + first + j, how)).share, how); });
}

void narrowgauge_bfloat16(int64_t first, int64_t last, const float* x, uint16_t* y) {
    for_columns(last - first, [=](int64_t j, auto how) { write(y + first + j, read(x + first + j, how), how); });
}

}  // extern "C"
