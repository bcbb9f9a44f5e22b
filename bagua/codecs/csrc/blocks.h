// What the block codecs share; private to each translation unit, as vec.h.
#pragma once

#include "abi.h"
#include "vec.h"

namespace {

constexpr float kUp = 0x1p100f, kDown = 0x1p-100f;
constexpr float kTiny = kDown;  // below it 255 / range may overflow and range / 255 lose digits
constexpr int64_t kFetch = 2048;             // elements between what is read and what is fetched
constexpr int kLanes = 64, kVectors = kLanes / W;  // partial sums of a block
constexpr int32_t kInfinity = 0x7f800000;    // bits; larger ones without sign are NaN

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Whole blocks that fit a core's first cache; at least one.
inline int64_t scratch_of(int64_t n, int64_t block) {
  constexpr int64_t kScratch = 2048;
  return block >= n ? n : block * (block < kScratch ? kScratch / block : 1);
}

inline float fp32_at(const uint8_t* p) {
  float a;
  memcpy(&a, p, sizeof a);
  return a;
}

inline int32_t bits_of(float a) {
  int32_t bits;
  memcpy(&bits, &a, sizeof bits);
  return bits;
}

inline float float_of(int32_t bits) {
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}

// 0 where v is not finite.
inline VF keep_finite(VF v) { return (VF)((VI)v & (VI)(((VI)v & kInfinity) != kInfinity)); }
inline float keep_finite(float v) { return (bits_of(v) & kInfinity) == kInfinity ? 0.0f : v; }

// The cache line k vectors from p, once for each line.
inline void prefetch(const float* p, int k) {
  if (k * W % 16 == 0) __builtin_prefetch(p + k * W);
}

// e = x[0..W) as it is, or with the residual, which then holds the sum.
template <bool kFeedback>
inline VF input(const float* x, float* residual) {
  VF v = load(x);
  if (kFeedback) {
    v = v + load(residual);
    store(residual, v);
  }
  return v;
}

template <bool kFeedback>
inline float input_one(const float* x, float* residual) {
  if (kFeedback) return *residual = *x + *residual;
  return *x;
}

// W bits from bit i, which is a multiple of W; higher ones may hold anything.
inline int32_t bits_at(const uint8_t* bits, int64_t i) {
  if (W < 16) return bits[i / 8] >> (i % 8);
  uint16_t two;
  memcpy(&two, bits + i / 8, sizeof two);
  return two;
}

// plus where the bit is clear, minus where it is set.
inline VF choose(int32_t bits, VF plus, VF minus) {
#if defined(__AVX512F__)
  return (VF)_mm512_mask_blend_ps((__mmask16)bits, (__m512)plus, (__m512)minus);
#else
  VI each;
  for (int k = 0; k < W; ++k) each[k] = 1 << k;
  return ((bits - VI{}) & each) == each ? minus : plus;
#endif
}

inline bool bit_at(const uint8_t* bits, int64_t i) { return bits[i / 8] >> (i % 8) & 1; }

inline bool aligned(const float* p) { return (uintptr_t)p % sizeof(VF) == 0; }

// What follows is the same for all block codecs. C names the header's bytes, the bits of an element's code, and the
// functions of one block or more.

template <bool kFeedback, typename C>
void encode_rows(const float* x, int64_t x_stride, float* residual, int64_t residual_stride, int64_t rows, int64_t n,
                 int64_t block, uint8_t* head, uint8_t* codes, int64_t wire_stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, head += wire_stride, codes += wire_stride) {
    C::template encode<kFeedback>(x, residual, n, block, head, codes);
    if (kFeedback) residual += residual_stride;
  }
}

template <typename C>
void decode_mean_rows(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n,
                      int64_t block, float weight, float* out) {
  for (int64_t i = 0, k = 0; i < n; i += block, ++k)
    C::mean(head + k * C::kHeader, codes + i * C::kCodeBits / 8, wire_stride, rows, least(block, n - i), weight, out + i);
}

template <typename C>
void decode_mean_encode(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n,
                        int64_t block, float weight, float* residual, float* scratch, uint8_t* head_out,
                        uint8_t* codes_out) {
  const int64_t step = scratch_of(n, block);
  for (int64_t i = 0; i < n; i += step) {
    const int64_t m = least(step, n - i), h = i / block * C::kHeader, c = i * C::kCodeBits / 8;
    decode_mean_rows<C>(head + h, codes + c, wire_stride, rows, m, block, weight, scratch);
    if (residual)
      C::template encode<true>(scratch, residual + i, m, block, head_out + h, codes_out + c);
    else
      C::template encode<false>(scratch, nullptr, m, block, head_out + h, codes_out + c);
  }
}

// d[j] = (x[j] - me[j]) + the sum over k of weights[k] * (peers[k][j] - me[j]).
inline void differ(const float* x, const float* me, const float* peers, int64_t stride, const float* weights,
                   int64_t num_peers, int64_t n, float* d) {
  int64_t j = 0;
  for (; j + W <= n; j += W) {
    const VF mine = load(me + j);
    VF v = load(x + j) - mine;
    for (int64_t k = 0; k < num_peers; ++k) v = v + (load(peers + k * stride + j) - mine) * weights[k];
    store(d + j, v);
  }
  for (; j < n; ++j) {
    float v = x[j] - me[j];
    for (int64_t k = 0; k < num_peers; ++k) v = v + (peers[k * stride + j] - me[j]) * weights[k];
    d[j] = v;
  }
}

// Decodes one row, several blocks of it.
template <typename C>
void decode_blocks(const uint8_t* head, const uint8_t* codes, int64_t n, int64_t block, float* out) {
  for (int64_t i = 0, k = 0; i < n; i += block, ++k)
    C::mean(head + k * C::kHeader, codes + i * C::kCodeBits / 8, 0, 1, least(block, n - i), 1.0f, out + i);
}

template <typename C>
void encode_difference(float* x, float* me, const float* peers, int64_t peers_stride, const float* weights,
                       int64_t num_peers, int64_t n, int64_t block, float* scratch, uint8_t* head, uint8_t* codes) {
  const int64_t step = scratch_of(n, block);
  for (int64_t i = 0; i < n; i += step) {
    const int64_t m = least(step, n - i);
    uint8_t *const h = head + i / block * C::kHeader, *const c = codes + i * C::kCodeBits / 8;
    differ(x + i, me + i, peers + i, peers_stride, weights, num_peers, m, scratch);
    C::template encode<false>(scratch, nullptr, m, block, h, c);
    decode_blocks<C>(h, c, m, block, scratch);
    int64_t j = 0;
    for (; j + W <= m; j += W) {
      const VF v = load(me + i + j) + load(scratch + j);
      store(me + i + j, v);
      store(x + i + j, v);
    }
    for (; j < m; ++j) x[i + j] = me[i + j] = me[i + j] + scratch[j];
  }
}

template <typename C>
void decode_add(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n,
                int64_t block, float* scratch, float* out, int64_t out_stride) {
  const int64_t step = scratch_of(n, block);
  for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += step) {
      const int64_t m = least(step, n - i);
      decode_blocks<C>(head + i / block * C::kHeader, codes + i * C::kCodeBits / 8, m, block, scratch);
      int64_t j = 0;
      for (; j + W <= m; j += W) store(out + i + j, load(out + i + j) + load(scratch + j));
      for (; j < m; ++j) out[i + j] = out[i + j] + scratch[j];
    }
}

#ifdef BAGUA_FMA
// out = torch's lerp(x, other, weight).
template <bool kStream>
void lerp(const float* x, const float* other, float weight, int64_t n, float* out) {
  const bool is_small = weight > -0.5f && weight < 0.5f;
  const float factor = is_small ? weight : weight - 1.0f;
  const VF factors = splat(factor);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const VF a = load(x + i), b = load(other + i);
    __builtin_prefetch(other + i + kFetch);
    const VF y = fmadd(factors, b - a, is_small ? a : b);
    kStream ? stream(out + i, y) : store(out + i, y);
  }
  for (; i < n; ++i) out[i] = __builtin_fmaf(factor, other[i] - x[i], is_small ? x[i] : other[i]);
}

template <typename C>
void encode_lerp(const float* x, const float* other, float weight, float* residual, int64_t n, int64_t block,
                 float* scratch, uint8_t* head, uint8_t* codes) {
  const int64_t step = scratch_of(n, block);
  for (int64_t i = 0; i < n; i += step) {
    const int64_t m = least(step, n - i);
    uint8_t *const h = head + i / block * C::kHeader, *const c = codes + i * C::kCodeBits / 8;
    lerp<false>(x + i, other + i, weight, m, scratch);
    if (residual)
      C::template encode<true>(scratch, residual + i, m, block, h, c);
    else
      C::template encode<false>(scratch, nullptr, m, block, h, c);
  }
}

// `decode` is the codec's own for one row.
template <typename C, typename Decode>
void decode_lerp(const uint8_t* head, const uint8_t* codes, int64_t n, int64_t block, const float* other,
                 float weight, float* scratch, float* out, bool away, Decode decode) {
  const int64_t step = scratch_of(n, block);
  const bool streams = away && aligned(out) && step % W == 0;
  for (int64_t i = 0; i < n; i += step) {
    const int64_t m = least(step, n - i);
    decode(head + i / block * C::kHeader, codes + i * C::kCodeBits / 8, m, scratch);
    (streams ? lerp<true> : lerp<false>)(scratch, other + i, weight, m, out + i);
  }
  if (streams) stream_end();
}

template <typename C>
void decode_mean_lerp(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n,
                      int64_t block, float mean_weight, const float* other, float weight, float* scratch, float* out) {
  const int64_t step = scratch_of(n, block);
  for (int64_t i = 0; i < n; i += step) {
    const int64_t m = least(step, n - i);
    decode_mean_rows<C>(head + i / block * C::kHeader, codes + i * C::kCodeBits / 8, wire_stride, rows, m, block,
                        mean_weight, scratch);
    lerp<false>(scratch, other + i, weight, m, out + i);
  }
}
#endif

}  // namespace

#ifdef BAGUA_FMA
#define BAGUA_BLOCK_CODEC_LERP_FUNCTIONS(codec, C)                                                                 \
  void BAGUA_FN(bagua_##codec##_encode_lerp)(const float* x, const float* other, float weight, float* residual,    \
                                             int64_t n, int64_t block, float* scratch, uint8_t* head,              \
                                             uint8_t* codes) {                                                     \
    encode_lerp<C>(x, other, weight, residual, n, block, scratch, head, codes);                                    \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_decode_lerp)(const uint8_t* head, const uint8_t* codes, int64_t n, int64_t block,  \
                                             const float* other, float weight, float* scratch, float* out,         \
                                             int64_t away) {                                                       \
    const auto decode = [block](const uint8_t* h, const uint8_t* c, int64_t m, float* y) {                         \
      BAGUA_FN(bagua_##codec##_decode)(h, c, 0, 1, m, block, y, 0, INT64_MAX);                                     \
    };                                                                                                             \
    decode_lerp<C>(head, codes, n, block, other, weight, scratch, out, away != 0, decode);                         \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_decode_mean_lerp)(                                                                 \
      const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n, int64_t block,      \
      float mean_weight, const float* other, float weight, float* scratch, float* out) {                           \
    decode_mean_lerp<C>(head, codes, wire_stride, rows, n, block, mean_weight, other, weight, scratch, out);       \
  }
#else
#define BAGUA_BLOCK_CODEC_LERP_FUNCTIONS(codec, C)
#endif

#define BAGUA_BLOCK_CODEC_FUNCTIONS(codec, C)                                                                      \
  void BAGUA_FN(bagua_##codec##_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t block,  \
                                        uint8_t* head, uint8_t* codes, int64_t wire_stride) {                      \
    encode_rows<false, C>(x, x_stride, nullptr, 0, rows, n, block, head, codes, wire_stride);                      \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_encode_feedback)(const float* x, int64_t x_stride, float* residual,                \
                                                 int64_t residual_stride, int64_t rows, int64_t n, int64_t block,  \
                                                 uint8_t* head, uint8_t* codes, int64_t wire_stride) {             \
    encode_rows<true, C>(x, x_stride, residual, residual_stride, rows, n, block, head, codes, wire_stride);        \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_decode_mean)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride,       \
                                             int64_t rows, int64_t n, int64_t block, float weight, float* out) {   \
    decode_mean_rows<C>(head, codes, wire_stride, rows, n, block, weight, out);                                    \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_decode_mean_encode)(                                                               \
      const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n, int64_t block,      \
      float weight, float* residual, float* scratch, uint8_t* head_out, uint8_t* codes_out) {                      \
    decode_mean_encode<C>(head, codes, wire_stride, rows, n, block, weight, residual, scratch, head_out,           \
                          codes_out);                                                                              \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_encode_difference)(float* x, float* me, const float* peers, int64_t peers_stride,  \
                                                   const float* weights, int64_t num_peers, int64_t n,             \
                                                   int64_t block, float* scratch, uint8_t* head, uint8_t* codes) { \
    encode_difference<C>(x, me, peers, peers_stride, weights, num_peers, n, block, scratch, head, codes);          \
  }                                                                                                                \
  void BAGUA_FN(bagua_##codec##_decode_add)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride,        \
                                            int64_t rows, int64_t n, int64_t block, float* scratch, float* out,    \
                                            int64_t out_stride) {                                                  \
    decode_add<C>(head, codes, wire_stride, rows, n, block, scratch, out, out_stride);                             \
  }
