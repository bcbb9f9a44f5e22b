// C ABI of the kernels. Each function exists once for each instruction set, told apart by the suffix BAGUA_ISA
// (baseline, avx2, avx512); dispatch.cpp says which of them the machine can run.
//
// A wire row of a block codec is the header of each block, then the codes of all elements. `head` points at the
// first row's header and `codes` at its first code, both rows lie `wire_stride` bytes apart. Wires may have any
// alignment. Strides of fp32 arrays count elements. `block` >= 1 and may exceed n.
#pragma once

#include <stdint.h>

#define BAGUA_CODECS_ABI 12

#define BAGUA_JOIN2(a, b) a##_##b
#define BAGUA_JOIN(a, b) BAGUA_JOIN2(a, b)
#define BAGUA_FN(name) BAGUA_JOIN(name, BAGUA_ISA)
#define BAGUA_API extern "C" __attribute__((visibility("default")))

BAGUA_API int32_t bagua_codecs_abi();
BAGUA_API int32_t bagua_codecs_isa();  // 0 baseline, 1 avx2, 2 avx512: the highest that this CPU runs

#ifdef BAGUA_ISA
// decode: an output of `stream_from` bytes or more is written past the caches.
// decode_mean: out[i] = weight * sum of the decoded rows, in the order of the rows.
// encode_feedback: e = x + residual is encoded; residual = e - what the wire decodes to, 0 where that is not finite.
// decode_mean_encode: encodes what decode_mean gives, plus the residual unless that is null, into one row. Nothing may
// overlap.
// encode_difference: d = (x - me) + the sum of weights[k] * (peers[k] - me), in their order, is encoded; me += what
// the wire decodes to; x = me. decode_add: each row of `out` += the decoded row. `scratch` always holds
// min(n, max(block, 2048)) elements.
#define BAGUA_BLOCK_CODEC(codec)                                                                                 \
  BAGUA_API void BAGUA_FN(bagua_##codec##_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n,     \
                                                  int64_t block, uint8_t* head, uint8_t* codes,                  \
                                                  int64_t wire_stride);                                          \
  BAGUA_API void BAGUA_FN(bagua_##codec##_decode)(const uint8_t* head, const uint8_t* codes,                     \
                                                  int64_t wire_stride, int64_t rows, int64_t n, int64_t block,   \
                                                  float* out, int64_t out_stride, int64_t stream_from);          \
  BAGUA_API void BAGUA_FN(bagua_##codec##_decode_mean)(const uint8_t* head, const uint8_t* codes,                \
                                                       int64_t wire_stride, int64_t rows, int64_t n,             \
                                                       int64_t block, float weight, float* out);                 \
  BAGUA_API void BAGUA_FN(bagua_##codec##_encode_feedback)(                                                      \
      const float* x, int64_t x_stride, float* residual, int64_t residual_stride, int64_t rows, int64_t n,       \
      int64_t block, uint8_t* head, uint8_t* codes, int64_t wire_stride);                                        \
  BAGUA_API void BAGUA_FN(bagua_##codec##_decode_mean_encode)(                                                   \
      const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n, int64_t block,    \
      float weight, float* residual, float* scratch, uint8_t* head_out, uint8_t* codes_out);                     \
  BAGUA_API void BAGUA_FN(bagua_##codec##_encode_difference)(                                                    \
      float* x, float* me, const float* peers, int64_t peers_stride, const float* weights, int64_t num_peers,    \
      int64_t n, int64_t block, float* scratch, uint8_t* head, uint8_t* codes);                                  \
  BAGUA_API void BAGUA_FN(bagua_##codec##_decode_add)(const uint8_t* head, const uint8_t* codes,                 \
                                                      int64_t wire_stride, int64_t rows, int64_t n,              \
                                                      int64_t block, float* scratch, float* out,                 \
                                                      int64_t out_stride)

// Not in the baseline, which has no fused multiply-add. torch's lerp(x, other, weight), bit for bit, is encoded, with
// feedback unless `residual` is null; what is decoded becomes x there. `scratch` as for encode_difference. `away` is
// not 0 if the output is to be written past the caches. decode_mean_lerp: x is what decode_mean gives.
#define BAGUA_BLOCK_CODEC_LERP(codec)                                                                            \
  BAGUA_API void BAGUA_FN(bagua_##codec##_encode_lerp)(const float* x, const float* other, float weight,         \
                                                       float* residual, int64_t n, int64_t block,                \
                                                       float* scratch, uint8_t* head, uint8_t* codes);           \
  BAGUA_API void BAGUA_FN(bagua_##codec##_decode_lerp)(const uint8_t* head, const uint8_t* codes, int64_t n,     \
                                                       int64_t block, const float* other, float weight,          \
                                                       float* scratch, float* out, int64_t away);                \
  BAGUA_API void BAGUA_FN(bagua_##codec##_decode_mean_lerp)(                                                     \
      const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n, int64_t block,    \
      float mean_weight, const float* other, float weight, float* scratch, float* out)

BAGUA_BLOCK_CODEC(minmax_uint8);  // header min, max; one byte for each element
BAGUA_BLOCK_CODEC(int4);          // header absmax; one nibble for each element, `block` even
BAGUA_BLOCK_CODEC(sign);          // header scale; one bit for each element, `block` a multiple of 8
BAGUA_BLOCK_CODEC(eden1);         // header scale and seed; 1 to 4 planes of bits, `block` a power of two in 8..4096
BAGUA_BLOCK_CODEC(eden2);
BAGUA_BLOCK_CODEC(eden3);
BAGUA_BLOCK_CODEC(eden4);
BAGUA_BLOCK_CODEC(eden1x8);       // with a trellis of 8 or 32 states
BAGUA_BLOCK_CODEC(eden1x32);
BAGUA_BLOCK_CODEC(eden2x8);
BAGUA_BLOCK_CODEC_LERP(eden1);
BAGUA_BLOCK_CODEC_LERP(eden2);
BAGUA_BLOCK_CODEC_LERP(eden3);
BAGUA_BLOCK_CODEC_LERP(eden4);
BAGUA_BLOCK_CODEC_LERP(eden1x8);
BAGUA_BLOCK_CODEC_LERP(eden1x32);
BAGUA_BLOCK_CODEC_LERP(eden2x8);
BAGUA_BLOCK_CODEC_LERP(minmax_uint8);
BAGUA_BLOCK_CODEC_LERP(int4);
BAGUA_BLOCK_CODEC_LERP(sign);

// out[i] = weight * sum of rows[r][i], in the order of the rows; the stride counts bytes, rows >= 1.
#define BAGUA_MEAN(type)                                                                                         \
  BAGUA_API void BAGUA_FN(bagua_mean_##type)(const uint8_t* first, int64_t stride, int64_t rows, int64_t n,      \
                                             float weight, float* out)

BAGUA_MEAN(float32);
BAGUA_MEAN(bfloat16);
BAGUA_MEAN(float16);

// A wire row is the indices (ascending) of the k elements of largest magnitude of each block, k_rest of the ragged one,
// then their values; of equal magnitudes the first. A NaN counts as more than an infinity. 1 <= k <= block, n < 2^31;
// the wire is 4-byte aligned. `candidates` holds 2 * capacity integers, capacity >= 0: with few the search is slower.
BAGUA_API void BAGUA_FN(bagua_top_k_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t block,
                                            int64_t k, int64_t k_rest, int32_t* candidates, int64_t capacity,
                                            uint8_t* wire, int64_t wire_stride);

// out[i] = weight * sum over rows of their value at i. A row is `count` ascending indices, then as many values; `at`
// holds `rows` integers. Returns 0, or 1 if a row's indices are not ascending in 0..n-1.
BAGUA_API int32_t BAGUA_FN(bagua_top_k_decode_mean)(const uint8_t* wire, int64_t wire_stride, int64_t rows,
                                                    int64_t count, int64_t n, float weight, int64_t* at, float* out);

// divide: `means` gets what is added to the magnitudes of each 256 elements, x[i] /= their scale. multiply, with the
// same means: x[i] *= their scale, and the magnitudes move towards |x[i]|. Nothing may overlap.
BAGUA_API void BAGUA_FN(bagua_running_scale_divide)(const float* magnitude, int64_t n, float* means, float* x);
BAGUA_API void BAGUA_FN(bagua_running_scale_multiply)(float* magnitude, int64_t n, const float* means, float* x);

// Adam's moments of the elements begin..end-1 of a bucket. `left` is 1 - the decay of the second ones, `floor` is what
// the square of the first ones is multiplied by for the least second moment.
struct bagua_moments {
  float* second;
  const float* first;
  int64_t begin, end;
  float left, floor;
};

// Of n gradients, the mean of the squares (divided by the square of their scales; multiplied by it again) of 256
// elements, times `share`, is noise, which is taken out of the second moments. The magnitudes move towards |g|; null:
// all scales are 1. The moments are in the order of their elements. Nothing may overlap.
BAGUA_API void BAGUA_FN(bagua_denoise)(const float* g, float* magnitude, int64_t n, float share,
                                       const bagua_moments* moments, int64_t count);

// The numbers of a parameter, as _Formulas in algorithms/delayed_moments.py.
struct bagua_late_numbers {
  float scale, shift, share, whole, own, momentum, added, least, largest, to_momentum, change, late;
};

// Adam's moments, what the rank's own gradients have left in the first one, that at the snapshot, the mean of the
// snapshots minus the own one, and that, of n elements each. Nothing may overlap.
struct bagua_late_moments {
  float *first, *second;
  const float* own;
  float *at_snapshot, *difference;
  const float* snapshot;
  bagua_late_numbers numbers;
};

BAGUA_API void BAGUA_FN(bagua_correct_late)(const bagua_late_moments* moments, int64_t n);

// Numbers of _Formulas in algorithms/round_moments.py: 1 / whole, and the weights of v_0, of v and of the square.
struct bagua_round_numbers {
  float scale, shift, whole, share, kept, own, added, largest;
};

// Adam's moments, the sum of the momenta, the second moment at the start of the round, weights and their mean, of n
// elements each. Nothing may overlap.
struct bagua_round_moments {
  float *first, *second;
  const float *momenta, *before, *weights, *mean;
  bagua_round_numbers numbers;
};

BAGUA_API void BAGUA_FN(bagua_infer_round)(const bagua_round_moments* moments, int64_t n);
#endif
