// Takes the noise of a codec out of Adam's second moments. algorithms/denoising.py does the same fp32 operations in the
// same order, so all instruction sets and torch give the same bits.
#include "running_scale.h"

namespace {

// The largest mean of a window, 1 if all are zero: `most` is that of the windows before `first`.
float largest_mean(const float* magnitude, int64_t first, int64_t n, float most) {
  for (; first < n; first += kWindow) {
    const float mean = mean_of_window(magnitude + first, least(kWindow, n - first));
    most = mean > most ? mean : most;
  }
  return most > 0.0f ? most : 1.0f;
}

// max(v - left * noise, min(v, factor * m^2)), NaN where v or m is. v where the noise is not known, as squares of the
// gradients have overflowed. For one element, or vectors.
template <typename T>
inline T corrected(T v, T m, T noise, T left, T factor) {
  const T floor = m * m * factor;
  const T low = v < floor ? v : floor;  // NaN where `floor` is
  const T next = v - noise * left;
  const T high = next > low ? next : low;  // NaN where `low` is
  return next == next ? high : v;
}

// y = (g / scale)^2 of a window; the magnitudes move towards |g|.
inline void scaled_squares(const float* g, float* magnitude, int64_t n, float mean, float* scales, float* y) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    __builtin_prefetch(g + i + kFetch);
    __builtin_prefetch(magnitude + i + kFetch);
    const VF x = load(g + i), was = load(magnitude + i), s = scale(was, mean), each = x / s;
    store(scales + i, s);
    store(y + i, each * each);
    store(magnitude + i, moved(was, x));
  }
  for (; i < n; ++i) {
    const float was = magnitude[i], s = scale_one(was, mean), each = g[i] / s;
    scales[i] = s;
    y[i] = each * each;
    magnitude[i] = moved_one(was, g[i]);
  }
}

inline void squares(const float* g, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    __builtin_prefetch(g + i + kFetch);
    store(y + i, load(g + i) * load(g + i));
  }
  for (; i < n; ++i) y[i] = g[i] * g[i];
}

// Gradients that are exactly zero have no noise: rows that nobody uses are cleared.
template <bool kScaled>
void correct(const bagua_moments& moments, int64_t lo, int64_t hi, const float* g, const float* scales, float noise) {
  float* const v = moments.second + (lo - moments.begin);
  const float* const m = moments.first + (lo - moments.begin);
  const VF left = splat(moments.left), factor = splat(moments.floor), zero = splat(0.0f);
  int64_t i = 0;
  for (; i + W <= hi - lo; i += W) {
    __builtin_prefetch(v + i + kFetch);
    __builtin_prefetch(m + i + kFetch);
    VF each = splat(noise);
    if (kScaled) each = each * load(scales + i) * load(scales + i);
    each = load(g + i) == zero ? zero : each;
    store(v + i, corrected(load(v + i), load(m + i), each, left, factor));
  }
  for (; i < hi - lo; ++i) {
    float each = kScaled ? noise * scales[i] * scales[i] : noise;
    each = g[i] == 0.0f ? 0.0f : each;
    v[i] = corrected(v[i], m[i], each, moments.left, moments.floor);
  }
}

template <bool kScaled>
void denoise(const float* g, float* magnitude, int64_t n, float share, const bagua_moments* moments, int64_t count) {
  alignas(64) float scales[kWindow], y[kWindow];
  float most = 0.0f, instead = 0.0f;
  for (int64_t first = 0; first < n; first += kWindow) {
    const int64_t size = least(kWindow, n - first), end = first + size;
    if (kScaled) {
      float mean = mean_of_window(magnitude + first, size);
      most = mean > most ? mean : most;
      if (!(mean > 0.0f)) {
        if (!(instead > 0.0f)) instead = largest_mean(magnitude, first, n, most);
        mean = instead;
      }
      scaled_squares(g + first, magnitude + first, size, mean, scales, y);
    } else {
      squares(g + first, size, y);
    }
    float noise = fold(y, size) / (float)kWindow;
    if (size < kWindow) noise = noise * (float)((double)kWindow / (double)size);
    noise = noise * share;
    while (count > 0 && moments->end <= first) ++moments, --count;
    for (int64_t k = 0; k < count && moments[k].begin < end; ++k) {
      const int64_t lo = moments[k].begin > first ? moments[k].begin : first;
      correct<kScaled>(moments[k], lo, least(moments[k].end, end), g + lo, scales + (lo - first), noise);
    }
  }
}

}  // namespace

void BAGUA_FN(bagua_denoise)(const float* g, float* magnitude, int64_t n, float share, const bagua_moments* moments,
                             int64_t count) {
  (magnitude ? denoise<true> : denoise<false>)(g, magnitude, n, share, moments, count);
}
