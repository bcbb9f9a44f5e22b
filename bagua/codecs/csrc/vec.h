// The vectors of one instruction set, W floats wide. Nothing here is shared between translation units
// (anonymous namespace): a function compiled for AVX-512 must never be the one the linker keeps for all.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef int32_t V4 __attribute__((vector_size(16)));
typedef float F4 __attribute__((vector_size(16)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));
typedef uint8_t VB __attribute__((vector_size(W)));

inline VF load(const float* p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, VF v) { memcpy(p, &v, sizeof v); }

inline VF splat(float a) { return a - VF{}; }

template <typename T>
inline T vmin(T a, T b) {
  return a < b ? a : b;  // b where either is NaN
}
template <typename T>
inline T vmax(T a, T b) {
  return a > b ? a : b;
}

inline VI vmax(VI a, VI b) {
#if defined(__AVX512F__)
  return (VI)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VI)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

// Lanes 2, 3 to 0, 1; and lane 1 to 0.
inline F4 fold2(F4 a) { return F4{a[2], a[3], a[2], a[3]}; }
inline F4 fold1(F4 a) { return F4{a[1], a[1], a[1], a[1]}; }

// The smallest and the largest of W floats of which none is NaN.
inline float smallest(VF v) {
  F4 part[W / 4];
  memcpy(part, &v, sizeof part);
  F4 m = part[0];
  for (int k = 1; k < W / 4; ++k) m = vmin(part[k], m);
  m = vmin(fold2(m), m);
  return vmin(fold1(m), m)[0];
}

inline float largest(VF v) {
  F4 part[W / 4];
  memcpy(part, &v, sizeof part);
  F4 m = part[0];
  for (int k = 1; k < W / 4; ++k) m = vmax(part[k], m);
  m = vmax(fold2(m), m);
  return vmax(fold1(m), m)[0];
}

// W bytes to W integers.
inline VI widen_int(const uint8_t* p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__SSE2__)
  int32_t four;
  memcpy(&four, p, sizeof four);
  const __m128i zero = _mm_setzero_si128();
  const __m128i half = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero);
  return (VI)_mm_unpacklo_epi16(half, zero);
#else
  VB b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, VI);
#endif
}

inline VF to_float(VI v) { return __builtin_convertvector(v, VF); }

// W bytes to W floats.
inline VF widen(const uint8_t* p) { return to_float(widen_int(p)); }

// W 16-bit integers to W 32-bit ones.
inline VI widen16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (VI)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__SSE2__)
  return (VI)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
#else
  VH h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, VI);
#endif
}

// The sign bits of W floats, the first in the lowest bit.
inline uint32_t sign_bits(VF v) {
#if defined(__AVX512F__)
  return (uint32_t)_mm512_movepi32_mask((__m512i)v);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)v);
#elif defined(__SSE2__)
  return (uint32_t)_mm_movemask_ps((__m128)v);
#else
  uint32_t bits = 0;
  for (int k = 0; k < W; ++k) bits |= (uint32_t)(((VI)v)[k] < 0) << k;
  return bits;
#endif
}

// The largest of W integers.
inline int32_t largest(VI v) {
  V4 part[W / 4];
  memcpy(part, &v, sizeof part);
  V4 m = part[0];
  for (int k = 1; k < W / 4; ++k) m = part[k] > m ? part[k] : m;
#if defined(__SSE2__)
  const V4 a = (V4)_mm_shuffle_epi32((__m128i)m, 0x4E);
  m = a > m ? a : m;
  const V4 b = (V4)_mm_shuffle_epi32((__m128i)m, 0xB1);
  m = b > m ? b : m;
#else
  for (int k = 1; k < 4; ++k) m[0] = m[k] > m[0] ? m[k] : m[0];
#endif
  return m[0];
}

// -2^22..2^22 rounded half to even; NaN gives bits outside the low byte.
inline int32_t round_to_code(float a) {
  const float shifted = a + 12582912.0f;  // 1.5 * 2^23: the last place is worth 1
  int32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4B400000;
}

inline VI round_to_code(VF a) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtps_epi32((__m512)a);
#elif defined(__AVX2__)
  return (VI)_mm256_cvtps_epi32((__m256)a);
#elif defined(__SSE2__)
  return (VI)_mm_cvtps_epi32((__m128)a);
#else
  return (VI)(a + 12582912.0f) - 0x4B400000;
#endif
}

// The low bytes of 4 * W integers that are in 0..255 (others give any byte). What `seen` collects has a bit of kBeyond
// set if any of them was not.
#if defined(__SSE2__) && !defined(__AVX512F__)
constexpr int32_t kBeyond = (int32_t)0xff00ff00;  // two 16-bit integers
#else
constexpr int32_t kBeyond = ~255;
#endif

inline void pack4(uint8_t* p, const VI (&v)[4], VI& seen) {
#if defined(__AVX512F__)
  for (int k = 0; k < 4; ++k) {
    _mm_storeu_si128((__m128i*)(p + k * W), _mm512_cvtepi32_epi8((__m512i)v[k]));
    seen |= v[k];
  }
#elif defined(__AVX2__)
  const __m256i ab = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i cd = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  seen |= (VI)ab | (VI)cd;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work within 128-bit halves
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
#elif defined(__SSE2__)
  const __m128i ab = _mm_packs_epi32((__m128i)v[0], (__m128i)v[1]);
  const __m128i cd = _mm_packs_epi32((__m128i)v[2], (__m128i)v[3]);
  seen |= (VI)ab | (VI)cd;
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(ab, cd));
#else
  for (int k = 0; k < 4; ++k) {
    const VB b = __builtin_convertvector(v[k], VB);
    memcpy(p + k * W, &b, sizeof b);
    seen |= v[k];
  }
#endif
}

inline void pack4(uint8_t* p, const VI (&v)[4]) {
  VI seen{};
  pack4(p, v, seen);
}

// Whether one of W integers has a bit of `mask`.
inline bool any(VI v, int32_t mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(mask)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)v, _mm256_set1_epi32(mask));
#else
  int32_t all = 0;
  for (int k = 0; k < W; ++k) all |= v[k];
  return (all & mask) != 0;
#endif
}

// A store that bypasses the caches; p must be aligned to a whole vector.
inline void stream(float* p, VF v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

#if defined(__FMA__) && defined(__AVX2__)
#define BAGUA_FMA 1
// a * b + c, rounded once.
inline VF fmadd(VF a, VF b, VF c) {
#if defined(__AVX512F__)
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}
#endif

inline void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
