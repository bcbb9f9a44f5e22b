// Divides and multiplies by running scales.
#include "running_scale.h"

void BAGUA_FN(bagua_running_scale_divide)(const float* magnitude, int64_t n, float* means, float* x) {
  float most = 0.0f;
  for (int64_t first = 0, k = 0; first < n; first += kWindow, ++k) {
    means[k] = mean_of_window(magnitude + first, least(kWindow, n - first));
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
