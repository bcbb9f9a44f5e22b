// Four bits for each element and the largest magnitude of each block, compiled once for each instruction set.
// int4_torch.py does the same fp32 operations in the same order, so all backends give the same bits.
//
// With half = ceil(n / 2) of a block of n elements, byte j holds element j in its low nibble and element
// half + j in its high one, both in two's complement.
#include "blocks.h"

namespace {

constexpr float kSeventh = 1.0f / 7.0f;  // 7 * kSeventh is exactly 1 in fp32, so the largest element is exact
constexpr int32_t kMagnitude = 0x7fffffff;

// The bits of the largest magnitude: a NaN counts as more than an infinity, an infinity as more than a number.
int32_t absmax(const float* x, int64_t n) {
  VI m[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      const VI v = (VI)load(x + i + k * W) & kMagnitude;
      m[k] = v > m[k] ? v : m[k];
    }
  const VI a = m[0] > m[1] ? m[0] : m[1], b = m[2] > m[3] ? m[2] : m[3];
  int32_t most = largest(a > b ? a : b);
  for (; i < n; ++i) {
    const int32_t v = bits_of(x[i]) & kMagnitude;
    most = v > most ? v : most;
  }
  return most;
}

template <bool kSmall>
void quantise(const float* x, int64_t n, float scale, uint8_t* codes) {
  const int64_t half = (n + 1) / 2;
  const auto vector = [&](int64_t i) {
    VF v = load(x + i);
    if (kSmall) v = v * kUp;
    return round_to_code(v * scale) & 15;
  };
  const auto one = [&](int64_t i) {
    const float v = kSmall ? x[i] * kUp : x[i];
    return round_to_code(v * scale) & 15;
  };
  int64_t j = 0;
  for (; j + 4 * W <= n - half; j += 4 * W) {
    VI q[4];
    for (int k = 0; k < 4; ++k) {
      q[k] = vector(j + k * W) | vector(half + j + k * W) << 4;
      __builtin_prefetch(x + n + 2 * (j + k * W));  // the next block, while this one is in L1
      __builtin_prefetch(x + n + 2 * (j + k * W) + W);
    }
    pack4(codes + j, q);
  }
  for (; j < half; ++j) codes[j] = (uint8_t)(one(j) | (half + j < n ? one(half + j) << 4 : 0));
}

void encode_block(const float* x, int64_t n, uint8_t* head, uint8_t* codes) {
  const int32_t bits = absmax(x, n);
  float most = float_of(bits);
  if (bits >= kInfinity) {
    most = __builtin_nanf("");
    memset(codes, 0, (size_t)(n + 1) / 2);
  } else if (most < kTiny) {
    quantise<true>(x, n, most > 0.0f ? 7.0f / (most * kUp) : 0.0f, codes);
  } else {
    quantise<false>(x, n, 7.0f / most, codes);
  }
  memcpy(head, &most, sizeof most);
}

// Elements j and half + j as multiples of a seventh.
struct Pair {
  VF low, high;
};

inline Pair unpack(const uint8_t* codes) {
  const VI v = widen_int(codes);
#if defined(__AVX512F__)
  VF levels;
  for (int q = 0; q < 16; ++q) levels[q] = (float)(q < 8 ? q : q - 16) * kSeventh;
  return {(VF)_mm512_permutexvar_ps((__m512i)v, (__m512)levels),
          (VF)_mm512_permutexvar_ps((__m512i)(v >> 4), (__m512)levels)};
#else
  return {to_float(v << 28 >> 28) * kSeventh, to_float(v << 24 >> 28) * kSeventh};
#endif
}

inline float low_of(uint8_t code) { return (float)((int32_t)((uint32_t)code << 28) >> 28) * kSeventh; }
inline float high_of(uint8_t code) { return (float)((int32_t)((uint32_t)code << 24) >> 28) * kSeventh; }

template <bool kStream>
void decode_block(const uint8_t* codes, int64_t n, float most, float* out) {
  const int64_t half = (n + 1) / 2;
  int64_t j = 0;
  for (; j + W <= n - half; j += W) {
    const Pair p = unpack(codes + j);
    kStream ? stream(out + j, p.low * most) : store(out + j, p.low * most);
    kStream ? stream(out + half + j, p.high * most) : store(out + half + j, p.high * most);
  }
  for (; j < half; ++j) {
    out[j] = low_of(codes[j]) * most;
    if (half + j < n) out[half + j] = high_of(codes[j]) * most;
  }
}

void mean_block(const uint8_t* head, const uint8_t* codes, int64_t stride, int64_t rows, int64_t n, float weight,
                float* out) {
  const int64_t half = (n + 1) / 2;
  int64_t j = 0;
  for (; j + 2 * W <= n - half; j += 2 * W) {
    VF low[2] = {}, high[2] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const float most = fp32_at(head + r * stride);
      for (int k = 0; k < 2; ++k) {
        const Pair p = unpack(codes + r * stride + j + k * W);
        low[k] = low[k] + p.low * most;
        high[k] = high[k] + p.high * most;
      }
    }
    for (int k = 0; k < 2; ++k) {
      store(out + j + k * W, low[k] * weight);
      store(out + half + j + k * W, high[k] * weight);
    }
  }
  for (; j < half; ++j) {
    float low = 0.0f, high = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float most = fp32_at(head + r * stride);
      low = low + low_of(codes[r * stride + j]) * most;
      high = high + high_of(codes[r * stride + j]) * most;
    }
    out[j] = low * weight;
    if (half + j < n) out[half + j] = high * weight;
  }
}

}  // namespace

void BAGUA_FN(bagua_int4_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t block,
                                 uint8_t* head, uint8_t* codes, int64_t wire_stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block)
      encode_block(x + i, least(block, n - i), head + i / block * 4, codes + i / 2);
}

void BAGUA_FN(bagua_int4_decode)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows,
                                 int64_t n, int64_t block, float* out, int64_t out_stride) {
  const bool large = rows * n * 4 >= kStreamFrom;
  for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block) {
      const int64_t m = least(block, n - i);
      const bool both = aligned(out + i) && aligned(out + i + (m + 1) / 2);
      const auto decode = large && both ? decode_block<true> : decode_block<false>;
      decode(codes + i / 2, m, fp32_at(head + i / block * 4), out + i);
    }
  if (large) stream_end();
}

void BAGUA_FN(bagua_int4_decode_mean)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows,
                                      int64_t n, int64_t block, float weight, float* out) {
  for (int64_t i = 0; i < n; i += block)
    mean_block(head + i / block * 4, codes + i / 2, wire_stride, rows, least(block, n - i), weight, out + i);
}
