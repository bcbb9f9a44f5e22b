// What the block codecs share; private to each translation unit, as vec.h.
#pragma once

#include "abi.h"
#include "vec.h"

namespace {

constexpr float kUp = 0x1p100f, kDown = 0x1p-100f;
constexpr float kTiny = kDown;  // below it 255 / range may overflow and range / 255 lose digits
constexpr int64_t kStreamFrom = 32ll << 20;  // output bytes from which caching the output is of no use
constexpr int32_t kInfinity = 0x7f800000;    // bits; larger ones without sign are NaN

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline float fp32_at(const uint8_t* p) {
  float a;
  memcpy(&a, p, sizeof a);
  return a;
}

inline int32_t bits_of(float a) {
  int32_t bits;
  memcpy(&bits, &a, sizeof bits);
  return bits;
}

inline float float_of(int32_t bits) {
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}

inline bool aligned(const float* p) { return (uintptr_t)p % sizeof(VF) == 0; }

}  // namespace
