// Rotary embedding of queries and keys in one call, and its gradient (ops/rotary has the contract):
//
//     y1 = x1 c1 - x2 s1        gradient: x1 = y1 c1 + y2 s2
//     y2 = x2 c2 + x1 s2                  x2 = y2 c2 - y1 s1
//
// Both halves of a head are read once. Products are rounded to bfloat16 before the sum if `rounds`,
// as separate operations of torch would round them, so results are bit-identical to the definition.
// cos and sin are passed in float32, which is exact.

#include <type_traits>

#include "vectors.h"

namespace {

// Must match `RotaryArguments` in ops/rotary/cpp.py.
struct Strides {
    int64_t batch, head, token;
};

struct Side {  // q or k
    int64_t heads;
    Strides in, out;
};

struct Rotary {
    int64_t tokens, half, angle_batch;  // angle_batch: stride of cos and sin, 0 if all examples share them
    Side sides[2];
    int32_t in_narrow[2], out_narrow[2], rounds[2], inverse;
};

template <bool rounds, bool inverse, typename In, typename Out>
void turn_heads(const Rotary& of, int k, int64_t batch, int64_t token, const In* x, const float* cos, const float* sin, Out* y) {
    const Side& side = of.sides[k];
    const int64_t half = of.half;
    x += batch * side.in.batch + token * side.in.token;
    y += batch * side.out.batch + token * side.out.token;
    const auto product = [](Floats a, Floats b) { return rounds ? rounded_as<uint16_t>(a * b) : a * b; };
    for (int64_t head = 0; head < side.heads; ++head, x += side.in.head, y += side.out.head) {
        for_columns(half, [=](int64_t j, auto how) {
            const Floats x1 = read(x + j, how), x2 = read(x + half + j, how);
            const Floats c1 = read(cos + j, how), c2 = read(cos + half + j, how);
            const Floats s1 = read(sin + j, how), s2 = read(sin + half + j, how);
            const Floats y1 = inverse ? product(x1, c1) + product(x2, s2) : product(x1, c1) - product(x2, s1);
            const Floats y2 = inverse ? product(x2, c2) - product(x1, s1) : product(x2, c2) + product(x1, s2);
            write(y + j, y1, how);
            write(y + half + j, y2, how);
        });
    }
}

template <typename Run> void with_constant(bool value, const Run& run) {
    if (value) run(std::true_type{});
    else run(std::false_type{});
}

template <typename Run> void with_dtype(bool narrow, const Run& run) {
    if (narrow) run(uint16_t{});
    else run(float{});
}

}  // namespace

// `first` and `last` count tokens of all examples.
extern "C" void narrowgauge_rotary(int64_t first, int64_t last, const Rotary* given, const void* q, const void* k, const float* cos,
                                   const float* sin, void* q_out, void* k_out) {
    const Rotary of = *given;
    const void* inputs[2] = {q, k};
    void* outputs[2] = {q_out, k_out};
    for (int each = 0; each < 2; ++each) {
        with_dtype(of.in_narrow[each], [&](auto in) {
            with_dtype(of.out_narrow[each], [&](auto out) {
                with_constant(of.rounds[each], [&](auto rounds) {
                    with_constant(of.inverse, [&](auto inverse) {
                        for (int64_t i = first; i < last; ++i) {
                            const int64_t batch = i / of.tokens, token = i % of.tokens;
                            const int64_t angle = batch * of.angle_batch + token * 2 * of.half;
                            turn_heads<rounds.value, inverse.value>(of, each, batch, token, static_cast<const decltype(in)*>(inputs[each]),
                                                                    cos + angle, sin + angle, static_cast<decltype(out)*>(outputs[each]));
                        }
                    });
                });
            });
        });
    }
}
