// Scales of elements from the running means of their magnitudes; private to each translation unit, as vec.h.
// exchanges/running_scale.py does the same fp32 operations in the same order, so all instruction sets and torch give
// the same bits.
#pragma once

#include "blocks.h"

namespace {

constexpr int64_t kWindow = 256;              // elements
constexpr int32_t kHalfOfOne = 0x3f800000 >> 1;
constexpr float kFloor = (float)(0.1 / kWindow), kDecayLeft = 0.01f, kMost = 1e30f;

// Halves are added to halves. Beyond n, 1 to kWindow, are zeros.
inline float fold(const float* x, int64_t n) {
  alignas(64) float sums[kWindow];
  const float* from = x;
  if (n < kWindow) {
    memset(sums, 0, sizeof sums);
    memcpy(sums, x, (size_t)n * sizeof *x);
    from = sums;
  }
  int64_t half = kWindow / 2;
  for (; half >= W; half /= 2, from = sums)
    for (int64_t i = 0; i < half; i += W) store(sums + i, load(from + i) + load(from + half + i));
  for (; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[half + i];
  return sums[0];
}

inline VF scale(VF magnitude, float mean) { return (VF)(((VI)(magnitude + splat(mean)) >> 1) + kHalfOfOne); }

inline float scale_one(float magnitude, float mean) { return float_of((bits_of(magnitude + mean) >> 1) + kHalfOfOne); }

inline VF moved(VF magnitude, VF x) {
  const VF step = ((VF)((VI)x & 0x7fffffff) - magnitude) * splat(kDecayLeft);
  const VF next = magnitude + keep_finite(step);
  return next < splat(kMost) ? next : splat(kMost);
}

inline float moved_one(float magnitude, float x) {
  const float step = (float_of(bits_of(x) & 0x7fffffff) - magnitude) * kDecayLeft;
  const float next = magnitude + keep_finite(step);
  return next < kMost ? next : kMost;
}

// What is added to the magnitudes of a window of `size` elements; 0 if all of them are zero.
inline float mean_of_window(const float* magnitude, int64_t size) {
  float sum = fold(magnitude, size);
  if (size < kWindow) sum = sum * (float)((double)kWindow / (double)size);
  return sum * kFloor;
}

}  // namespace
