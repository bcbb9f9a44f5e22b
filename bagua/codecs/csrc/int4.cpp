// Four bits for each element and the largest magnitude of each block, compiled once for each instruction set.
// int4_torch.py does the same fp32 operations in the same order, so all backends give the same bits.
//
// With half = ceil(n / 2) of a block of n elements, byte j holds element j in its low nibble and element
// half + j in its high one, both in two's complement.
#include "blocks.h"

namespace {

constexpr float kSeventh = 1.0f / 7.0f;  // 7 * kSeventh is exactly 1 in fp32, so the largest element is exact
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int64_t kTogether = 1024;  // elements of the blocks that are handled together

// The bits of the largest magnitude: a NaN counts as more than an infinity, an infinity as more than a number.
template <bool kFeedback>
int32_t absmax(const float* x, float* residual, int64_t n) {
  VI m[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      prefetch(x + i + 2 * kTogether, k);
      m[k] = vmax((VI)input<kFeedback>(x + i + k * W, residual + i + k * W) & kMagnitude, m[k]);
    }
  int32_t most = largest(vmax(vmax(m[0], m[1]), vmax(m[2], m[3])));
  for (; i < n; ++i) {
    const int32_t v = bits_of(input_one<kFeedback>(x + i, residual + i)) & kMagnitude;
    most = v > most ? v : most;
  }
  return most;
}

// Bytes of 4 * W codes each in -7..7: low nibbles from one, high ones from the other.
inline void pack_nibbles(uint8_t* p, const VI (&low)[4], const VI (&high)[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto bytes = [](const VI(&v)[4]) {
    return _mm256_packs_epi16(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]),
                              _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]));
  };
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i both = _mm256_or_si256(_mm256_and_si256(bytes(low), mask),
                                       _mm256_andnot_si256(mask, _mm256_slli_epi16(bytes(high), 4)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work within 128-bit halves
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(both, order));
#else
  VI q[4];
  for (int k = 0; k < 4; ++k) q[k] = (low[k] & 15) | ((high[k] & 15) << 4);
  pack4(p, q);
#endif
}

// x and residual are the same or the latter is null.
template <bool kSmall, bool kFeedback>
void quantise(const float* x, float* residual, int64_t n, float most, float scale, uint8_t* codes) {
  const int64_t half = (n + 1) / 2;
  const auto vector = [&](int64_t i) {
    const VF e = load(x + i);
    const VI q = round_to_code((kSmall ? e * kUp : e) * scale);
    if (kFeedback) store(residual + i, e - to_float(q) * kSeventh * most);
    return q;
  };
  const auto one = [&](int64_t i) {
    const float e = x[i];
    const int32_t q = round_to_code((kSmall ? e * kUp : e) * scale);
    if (kFeedback) residual[i] = e - (float)q * kSeventh * most;
    return q & 15;
  };
  int64_t j = 0;
  for (; j + 4 * W <= n - half; j += 4 * W) {
    VI low[4], high[4];
    for (int k = 0; k < 4; ++k) {
      low[k] = vector(j + k * W);
      high[k] = vector(half + j + k * W);
    }
    pack_nibbles(codes + j, low, high);
  }
  for (; j < half; ++j) codes[j] = (uint8_t)(one(j) | (half + j < n ? one(half + j) << 4 : 0));
}

template <bool kFeedback>
void encode_block(const float* x, float* residual, int64_t n, float most, uint8_t* head, uint8_t* codes) {
  if (bits_of(most) >= kInfinity) {
    most = __builtin_nanf("");
    memset(codes, 0, (size_t)(n + 1) / 2);
    if (kFeedback) memset(residual, 0, (size_t)n * sizeof *residual);
  } else if (most < kTiny) {
    quantise<true, kFeedback>(x, residual, n, most, most > 0.0f ? 7.0f / (most * kUp) : 0.0f, codes);
  } else {
    quantise<false, kFeedback>(x, residual, n, most, 7.0f / most, codes);
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

struct Int4 {
  static constexpr int64_t kHeader = 4, kCodeBits = 4;
  static constexpr auto mean = mean_block;

  // The largest magnitudes of a few blocks first: blocks are short, and so they need not wait for each other.
  template <bool kFeedback>
  static void encode(const float* x, float* residual, int64_t n, int64_t block, uint8_t* head, uint8_t* codes) {
    const int64_t group = block >= kTogether / 2 ? 1 : kTogether / block;
    for (int64_t first = 0, k = 0; first < n; first += group * block, k += group) {
      int32_t most[kTogether];
      const int64_t end = least(first + group * block, n);
      for (int64_t i = first, b = 0; i < end; i += block, ++b) {
        most[b] = absmax<kFeedback>(x + i, kFeedback ? residual + i : nullptr, least(block, n - i));
      }
      for (int64_t i = first, b = 0; i < end; i += block, ++b)
        encode_block<kFeedback>(kFeedback ? residual + i : x + i, kFeedback ? residual + i : nullptr,
                                least(block, n - i), float_of(most[b]), head + (k + b) * kHeader,
                                codes + i * kCodeBits / 8);
    }
  }
};

}  // namespace

BAGUA_BLOCK_CODEC_FUNCTIONS(int4, Int4)
BAGUA_BLOCK_CODEC_LERP_FUNCTIONS(int4, Int4)

void BAGUA_FN(bagua_int4_decode)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows,
                                 int64_t n, int64_t block, float* out, int64_t out_stride, int64_t stream_from) {
  const bool large = rows * n * 4 >= stream_from;
  for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block) {
      const int64_t m = least(block, n - i);
      const bool both = aligned(out + i) && aligned(out + i + (m + 1) / 2);
      const auto decode = large && both ? decode_block<true> : decode_block<false>;
      decode(codes + i / 2, m, fp32_at(head + i / block * 4), out + i);
    }
  if (large) stream_end();
}
