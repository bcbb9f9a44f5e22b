// Sets Adam's moments to those of mean gradients at the end of a round of local steps; algorithms/round_moments.py has
// the formulas. All instruction sets give the same bits; torch, which fuses some operations, the same up to rounding.
#include "abi.h"
#include "root.h"

namespace {

// One element, or a vector of them.
template <typename T>
inline void infer(const bagua_round_moments& a, int64_t i, T zero) {
  const bagua_round_numbers& k = a.numbers;
  const T m = get(a.first + i, zero), v = get(a.second + i, zero), before = get(a.before + i, zero);
  const T x = get(a.weights + i, zero), size = x < zero ? -x : x;
  const T scaled = v * k.scale;
  const T apart = (root(scaled) + k.shift) * (x - get(a.mean + i, zero));
  const T of_all = apart + get(a.momenta + i, zero) * k.whole;
  const T mean_v = before * k.kept + v * k.own + of_all * of_all * k.added;
  // A v that has overflowed makes no steps, and says nothing of others' steps.
  const auto exact = (size <= zero + k.largest) & (scaled <= zero + __FLT_MAX__);
  put(a.second + i, exact ? mean_v : v);
  put(a.first + i, exact ? m + apart * k.share : m);
}

}  // namespace

void BAGUA_FN(bagua_infer_round)(const bagua_round_moments* moments, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) infer(*moments, i, VF{});
  for (; i < n; ++i) infer(*moments, i, 0.0f);
}
