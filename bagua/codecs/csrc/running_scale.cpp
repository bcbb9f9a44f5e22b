// Scales of elements from the running means of their magnitudes. exchanges/running_scale.py does the same fp32
// operations in the same order, so all instruction sets and torch give the same bits.
#include "blocks.h"

namespace {

constexpr int64_t kWindow = 256;              // elements
constexpr int32_t kHalfOfOne = 0x3f800000 >> 1;
constexpr float kFloor = (float)(0.1 / kWindow), kDecayLeft = 0.01f, kMost = 1e30f;

// Halves are added to halves. Beyond n, 1 to kWindow, are zeros.
float fold(const float* x, int64_t n) {
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

}  // namespace

void BAGUA_FN(bagua_running_scale_divide)(const float* magnitude, int64_t n, float* means, float* x) {
  float most = 0.0f;
  for (int64_t first = 0, k = 0; first < n; first += kWindow, ++k) {
    const int64_t size = least(kWindow, n - first);
    float sum = fold(magnitude + first, size);
    if (size < kWindow) sum = sum * (float)((double)kWindow / (double)size);
    means[k] = sum * kFloor;
    most = means[k] > most ? means[k] : most;
  }
  const float instead = most > 0.0f ? most : 1.0f;
  for (int64_t first = 0, k = 0; first < n; first += kWindow, ++k) {
    const float mean = means[k] = means[k] > 0.0f ? means[k] : instead;
    const int64_t end = first + least(kWindow, n - first);
    int64_t i = first;
    for (; i + W <= end; i += W) store(x + i, load(x + i) / scale(load(magnitude + i), mean));
    for (; i < end; ++i) x[i] = x[i] / scale_one(magnitude[i], mean);
  }
}

void BAGUA_FN(bagua_running_scale_multiply)(float* magnitude, int64_t n, const float* means, float* x) {
  for (int64_t first = 0, k = 0; first < n; first += kWindow, ++k) {
    const int64_t end = first + least(kWindow, n - first);
    int64_t i = first;
    for (; i + W <= end; i += W) {
      const VF was = load(magnitude + i), v = load(x + i) * scale(was, means[k]);
      store(x + i, v);
      store(magnitude + i, moved(was, v));
    }
    for (; i < end; ++i) {
      const float was = magnitude[i], v = x[i] * scale_one(was, means[k]);
      x[i] = v;
      magnitude[i] = moved_one(was, v);
    }
  }
}
