#include "add.h"

#include <string.h>

#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

template <typename T>
void add_as(uint8_t* x, const uint8_t* y, int64_t n) {
  T* const a = reinterpret_cast<T*>(x);
  const T* const b = reinterpret_cast<const T*>(y);
  for (int64_t i = 0; i < n; ++i) a[i] = a[i] + b[i];
}

float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// To the nearest, ties to even.
uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

void add_bfloat16(uint8_t* x, const uint8_t* y, int64_t n) {
  uint16_t* const a = reinterpret_cast<uint16_t*>(x);
  const uint16_t* const b = reinterpret_cast<const uint16_t*>(y);
  for (int64_t i = 0; i < n; ++i)
    a[i] = bfloat16_of(float_of(static_cast<uint32_t>(a[i]) << 16) + float_of(static_cast<uint32_t>(b[i]) << 16));
}

// Exponent and mantissa at their places in fp32, with its bias. Denormals are counted in units of 2^-24: as denormals of
// fp32 they would be zero where these are flushed.
float float_of_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  const uint32_t fill = rest >= 0x7c00 ? 0x7f800000u : 0;
  const uint32_t large = ((rest << 13) + (112u << 23)) | fill;
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  return float_of((rest < 0x400 ? small : large) | sign);
}

// To the nearest, ties to even. What is added to a small number moves the bits that fp16 lacks out of the mantissa.
uint16_t half_of(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t h;
  if (rest > 0x7f800000) {
    h = 0x7e00;
  } else if (rest >= 0x477ff000) {  // rounds to 65536 or more
    h = 0x7c00;
  } else if (rest < 0x38800000) {  // a denormal of fp16
    h = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
  } else {
    h = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(h | sign);
}

void add_float16(uint8_t* x, const uint8_t* y, int64_t n) {
  uint16_t* const a = reinterpret_cast<uint16_t*>(x);
  const uint16_t* const b = reinterpret_cast<const uint16_t*>(y);
  for (int64_t i = 0; i < n; ++i) a[i] = half_of(float_of_half(a[i]) + float_of_half(b[i]));
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) void add_float16_f16c(uint8_t* x, const uint8_t* y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m128i* const at = reinterpret_cast<__m128i*>(x + 2 * i);
    const __m256 a = _mm256_cvtph_ps(_mm_loadu_si128(at));
    const __m256 b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(y + 2 * i)));
    _mm_storeu_si128(at, _mm256_cvtps_ph(_mm256_add_ps(a, b), 0));
  }
  add_float16(x + 2 * i, y + 2 * i, n - i);
}

bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}
#endif

}  // namespace

int64_t element_bytes(int32_t type) { return type == BAGUA_FLOAT64 ? 8 : type == BAGUA_FLOAT32 ? 4 : 2; }

void add(int32_t type, uint8_t* x, const uint8_t* y, int64_t n) {
  if (type == BAGUA_FLOAT32) return add_as<float>(x, y, n);
  if (type == BAGUA_FLOAT64) return add_as<double>(x, y, n);
  if (type == BAGUA_BFLOAT16) return add_bfloat16(x, y, n);
#if defined(__x86_64__)
  static const bool f16c = has_f16c();
  if (f16c) return add_float16_f16c(x, y, n);
#endif
  add_float16(x, y, n);
}
