// Two 64-bit sums over the bytes of a tensor, by which a later read tells whether they were written (ops/fingerprint.py).
//
//     words w[i], 8 bytes each, i = 0, 1, ...; the last is padded with zeros
//     d[i] = w[i] xor (i + 1) * GOLDEN
//     a = sum over i of (d[i] mod 2^32) * (d[i] >> 32)     mod 2^64
//     b = sum over i of w[i]                               mod 2^64
//
// b differs whenever one word differs. a depends on the place of each word: it tells permutations and pairs of flipped signs.
// Vectors are those of GCC and Clang, so that one source serves AVX2, AVX-512 and NEON.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, LOW = 0xFFFFFFFF;
constexpr int64_t BLOCK = 8192;  // words of a row; as in ops/fingerprint.py

typedef uint64_t Words __attribute__((vector_size(32)));

}  // namespace

// out [2] receives a and b of the rows first ... last - 1, each of BLOCK words. data [bytes].
extern "C" void narrowgauge_fingerprint(int64_t first, int64_t last, const uint8_t* data, int64_t bytes, uint64_t* out) {
    const int64_t whole = bytes / 8, end = std::min(last * BLOCK, whole);
    int64_t i = first * BLOCK;
    const uint64_t start = uint64_t(i);
    Words a = {0, 0, 0, 0}, b = a, step = {4 * GOLDEN, 4 * GOLDEN, 4 * GOLDEN, 4 * GOLDEN};
    Words key = {(start + 1) * GOLDEN, (start + 2) * GOLDEN, (start + 3) * GOLDEN, (start + 4) * GOLDEN};
    for (; i + 4 <= end; i += 4) {
        Words w;
        std::memcpy(&w, data + 8 * i, sizeof w);
        const Words d = w ^ key;
        a += (d & LOW) * (d >> 32);
        b += w;
        key += step;
    }
    uint64_t place = a[0] + a[1] + a[2] + a[3], sum = b[0] + b[1] + b[2] + b[3];
    for (; i < last * BLOCK && 8 * i < bytes; ++i) {
        uint64_t w = 0;
        std::memcpy(&w, data + 8 * i, std::min<int64_t>(8, bytes - 8 * i));
        const uint64_t d = w ^ (uint64_t(i + 1) * GOLDEN);
        place += (d & LOW) * (d >> 32);
        sum += w;
    }
    out[0] = place;
    out[1] = sum;
}
