// Corrects Adam's moments with an average of weights that has arrived late; algorithms/delayed_moments.py has the
// formulas. All instruction sets give the same bits; torch, which fuses some operations, the same up to rounding.
#include "abi.h"
#include "root.h"

namespace {

// NaN where `x` is.
template <typename T>
inline T at_least(T x, T low) {
  return x < low ? low : x;
}

// One element, or a vector of them.
template <typename T>
inline void correct(const bagua_late_moments& a, int64_t i, T zero) {
  const bagua_late_numbers& k = a.numbers;
  const T m = get(a.first + i, zero), v = get(a.second + i, zero), own = get(a.own + i, zero);
  const T at_snapshot = get(a.at_snapshot + i, zero), difference = get(a.difference + i, zero);
  const T x = get(a.snapshot + i, zero), size = x < zero ? -x : x;
  const T scaled = v * k.scale, ahead = root(scaled) + k.shift;
  T apart = (zero - ahead * difference) * k.whole + own * k.own + at_snapshot * k.momentum;
  const T g = own / (zero + k.share), mean_g = g + apart;
  T mean_v = at_least(v - g * g * k.added, zero) + mean_g * mean_g * k.added;
  mean_v = at_least(mean_v, v * k.least);
  const auto exact = (size <= zero + k.largest) & (scaled <= zero + __FLT_MAX__);  // v may have overflowed
  apart = exact ? apart : zero;
  put(a.second + i, exact ? mean_v : v);
  put(a.first + i, m + apart * k.to_momentum);
  put(a.at_snapshot + i, at_snapshot + apart * k.change);
  put(a.difference + i, difference - apart / ahead * k.late);
}

}  // namespace

void BAGUA_FN(bagua_correct_late)(const bagua_late_moments* moments, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) correct(*moments, i, VF{});
  for (; i < n; ++i) correct(*moments, i, 0.0f);
}
