// Weighted sums of rows of fp32, bf16 or fp16, in fp32 and in the order of the rows.
#include "blocks.h"

namespace {

struct Float32 {
  static constexpr int64_t kSize = 4;
  static VF vector(const uint8_t* p) {
    VF v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static float one(const uint8_t* p) { return fp32_at(p); }
};

inline uint16_t half_at(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, sizeof h);
  return h;
}

struct BFloat16 {
  static constexpr int64_t kSize = 2;
  static VF vector(const uint8_t* p) { return (VF)(widen16(p) << 16); }
  static float one(const uint8_t* p) { return float_of((int32_t)((uint32_t)half_at(p) << 16)); }
};

// Exponent and mantissa are moved to their places and the bias is mended; infinities and NaN get all of the exponent.
// Denormals are counted in units of 2^-24: as denormals of fp32 they would be zero where these are flushed.
struct Float16 {
  static constexpr int64_t kSize = 2;
  static constexpr float kUnit = 0x1p-24f;
  static constexpr int32_t kNormal = 1 << 10;
  static constexpr int32_t kNotFinite = 0x1f << 10;
  static constexpr int32_t kBias = (127 - 15) << 23;
  static VF vector(const uint8_t* p) {
#if defined(__AVX512F__)
    return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    const VI h = widen16(p), rest = h & 0x7fff;
    const VI large = ((rest << 13) + kBias) | ((VI)(rest >= kNotFinite) & kInfinity);
    const VI small = (VI)(to_float(rest) * kUnit);
    return (VF)((rest < kNormal ? small : large) | (h & 0x8000) << 16);
#endif
  }
  static float one(const uint8_t* p) {
    const int32_t h = half_at(p), rest = h & 0x7fff;
    const int32_t large = ((rest << 13) + kBias) | (rest >= kNotFinite ? kInfinity : 0);
    const int32_t small = bits_of((float)rest * kUnit);
    return float_of((rest < kNormal ? small : large) | (int32_t)((uint32_t)(h & 0x8000) << 16));
  }
};

template <typename T>
void mean(const uint8_t* first, int64_t stride, int64_t rows, int64_t n, float weight, float* out) {
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    const uint8_t* p = first + i * T::kSize;
    VF acc[4];
    for (int k = 0; k < 4; ++k) acc[k] = T::vector(p + k * W * T::kSize);
    for (int64_t r = 1; r < rows; ++r) {
      p += stride;
      for (int k = 0; k < 4; ++k) acc[k] = acc[k] + T::vector(p + k * W * T::kSize);
    }
    for (int k = 0; k < 4; ++k) store(out + i + k * W, acc[k] * weight);
  }
  for (; i < n; ++i) {
    const uint8_t* p = first + i * T::kSize;
    float acc = T::one(p);
    for (int64_t r = 1; r < rows; ++r) acc = acc + T::one(p + r * stride);
    out[i] = acc * weight;
  }
}

}  // namespace

void BAGUA_FN(bagua_mean_float32)(const uint8_t* first, int64_t stride, int64_t rows, int64_t n, float weight,
                                  float* out) {
  mean<Float32>(first, stride, rows, n, weight, out);
}

void BAGUA_FN(bagua_mean_bfloat16)(const uint8_t* first, int64_t stride, int64_t rows, int64_t n, float weight,
                                   float* out) {
  mean<BFloat16>(first, stride, rows, n, weight, out);
}

void BAGUA_FN(bagua_mean_float16)(const uint8_t* first, int64_t stride, int64_t rows, int64_t n, float weight,
                                  float* out) {
  mean<Float16>(first, stride, rows, n, weight, out);
}
