// What is written once for an element and for a vector: reading, writing and square roots.
#pragma once

#include "vec.h"

namespace {

inline float root(float x) { return __builtin_sqrtf(x); }

inline VF root(VF x) {
#if defined(__AVX512F__)
  return (VF)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (VF)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (VF)_mm_sqrt_ps((__m128)x);
#else
  for (int k = 0; k < W; ++k) x[k] = root(x[k]);
  return x;
#endif
}

inline float get(const float* p, float) { return *p; }
inline VF get(const float* p, VF) { return load(p); }
inline void put(float* p, float x) { *p = x; }
inline void put(float* p, VF x) { store(p, x); }

}  // namespace
