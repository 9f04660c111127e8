// y[i] = x[i] * scale if noise[i] >= dropped, else 0; see ops/dropout.py. The noise is the one of
// ops/random.py.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float load(const float* x) { return *x; }
inline float load(const uint16_t* x) {
    const uint32_t bits = uint32_t(*x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float* y, float value) { *y = value; }
inline void store(uint16_t* y, float value) {  // bfloat16: to nearest, ties to even; NaN stays NaN
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    *y = uint16_t(value != value ? (bits >> 16) | 0x40 : rounded);
}

template <typename T>
void drop(int64_t begin, int64_t end, const T* x, uint32_t low, uint32_t high, uint32_t dropped, float scale, T* y) {
    for (int64_t i = begin; i < end; i++) {
        const uint32_t noise = mix(mix(uint32_t(i) + low) ^ high) >> 8;
        const float value = load(x + i) * scale;
        store(y + i, noise >= dropped ? value : 0.0f);
    }
}

}  // namespace

// Process blocks `first` to `last` of `block` elements each, out of n elements. dropped: p * 2^24,
// rounded up. The index of the noise is the element's index in the whole tensor, so results do not
// depend on the number of threads or the size of a block.
extern "C" void narrowgauge_dropout(int64_t first, int64_t last, int64_t block, const void* x, int32_t narrow, int64_t n,
                                    uint32_t low, uint32_t high, uint32_t dropped, float scale, void* y) {
    const int64_t begin = first * block, end = std::min(last * block, n);
    if (narrow) {
        drop(begin, end, static_cast<const uint16_t*>(x), low, high, dropped, scale, static_cast<uint16_t*>(y));
    } else {
        drop(begin, end, static_cast<const float*>(x), low, high, dropped, scale, static_cast<float*>(y));
    }
}
