// Noise of a key, as ops/random.py defines it: element i of the key (low, high) is in [0, 1).
#pragma once

#include <cstdint>

inline uint32_t mix(uint32_t x) {  // the finalizer lowbias32, see ops/random.py
  x = (x ^ (x >> 16)) * 0x7FEB352DU;
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  return x ^ (x >> 16);
}

inline float uniform(uint32_t low, uint32_t high, uint32_t i) {
  return float(int32_t(mix(mix(i + low) ^ high) >> 8)) * 0x1p-24f;
}
