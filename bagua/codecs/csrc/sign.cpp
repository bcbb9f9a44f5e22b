// One bit for each element and the mean magnitude of each block, compiled once for each instruction set.
//
// The magnitudes of a block are summed in kLanes interleaved partial sums, element i in sum i % kLanes, each in
// the order of the elements; then sum k takes in sum k + half for half = kLanes / 2, ..., 1. sign_torch.py does
// the same, so all backends give the same bits.
#include "blocks.h"

namespace {

constexpr int32_t kMagnitude = 0x7fffffff;

// Writes the sign bits, returns the sum of the magnitudes.
template <bool kFeedback>
float encode_bits(const float* x, float* residual, int64_t n, uint8_t* bits) {
  VF acc[kVectors] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    uint64_t word = 0;
    for (int k = 0; k < kVectors; ++k) {
      const VF v = input<kFeedback>(x + i + k * W, residual + i + k * W);
      acc[k] = acc[k] + (VF)((VI)v & kMagnitude);
      word |= (uint64_t)sign_bits(v) << (k * W);
    }
    memcpy(bits + i / 8, &word, sizeof word);
  }
  float lanes[kLanes];
  memcpy(lanes, acc, sizeof lanes);
  uint64_t word = 0;
  for (int64_t k = 0; i + k < n; ++k) {
    const int32_t v = bits_of(input_one<kFeedback>(x + i + k, residual + i + k));
    lanes[k] = lanes[k] + float_of(v & kMagnitude);
    word |= (uint64_t)(v < 0) << k;
  }
  memcpy(bits + i / 8, &word, (size_t)(n - i + 7) / 8);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[k + half];
  return lanes[0];
}

// residual -= the scale with the residual's sign. Both are finite, so is the difference.
void subtract(float* residual, const float* next, int64_t n, float scale) {
  const VI magnitude = (VI)splat(scale);
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      float* const p = residual + i + k * W;
      const VF e = load(p);
      prefetch(next + i, k);
      prefetch(residual + i + n, k);
      store(p, e - (VF)(magnitude | ((VI)e & ~kMagnitude)));
    }
  for (; i < n; ++i) residual[i] = residual[i] - (bits_of(residual[i]) < 0 ? -scale : scale);
}

template <bool kFeedback>
void encode_block(const float* x, float* residual, int64_t n, uint8_t* head, uint8_t* bits) {
  const float sum = encode_bits<kFeedback>(x, residual, n, bits);
  float scale = sum / (float)n;
  if (bits_of(scale) >= kInfinity) {
    scale = __builtin_nanf("");
    memset(bits, 0, (size_t)(n + 7) / 8);
    if (kFeedback) memset(residual, 0, (size_t)n * sizeof *residual);
  } else if (kFeedback) {
    subtract(residual, x + n, n, scale);
  }
  memcpy(head, &scale, sizeof scale);
}

template <bool kStream>
void decode_block(const uint8_t* bits, int64_t n, float scale, float* out) {
  const VF plus = splat(scale), minus = -plus;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      const VF y = choose(bits_at(bits, i + k * W), plus, minus);
      kStream ? stream(out + i + k * W, y) : store(out + i + k * W, y);
    }
  for (; i < n; ++i) out[i] = bit_at(bits, i) ? -scale : scale;
}

void mean_block(const uint8_t* head, const uint8_t* bits, int64_t stride, int64_t rows, int64_t n, float weight,
                float* out) {
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    VF acc[4] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const VF plus = splat(fp32_at(head + r * stride)), minus = -plus;
      for (int k = 0; k < 4; ++k) acc[k] = acc[k] + choose(bits_at(bits + r * stride, i + k * W), plus, minus);
    }
    for (int k = 0; k < 4; ++k) store(out + i + k * W, acc[k] * weight);
  }
  for (; i < n; ++i) {
    float acc = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = fp32_at(head + r * stride);
      acc = acc + (bit_at(bits + r * stride, i) ? -scale : scale);
    }
    out[i] = acc * weight;
  }
}

struct Sign {
  static constexpr int64_t kHeader = 4, kCodeBits = 1;
  static constexpr auto mean = mean_block;

  template <bool kFeedback>
  static void encode(const float* x, float* residual, int64_t n, int64_t block, uint8_t* head, uint8_t* codes) {
    for (int64_t i = 0, k = 0; i < n; i += block, ++k)
      encode_block<kFeedback>(x + i, kFeedback ? residual + i : nullptr, least(block, n - i), head + k * kHeader,
                              codes + i * kCodeBits / 8);
  }
};

}  // namespace

BAGUA_BLOCK_CODEC_FUNCTIONS(sign, Sign)
BAGUA_BLOCK_CODEC_LERP_FUNCTIONS(sign, Sign)

void BAGUA_FN(bagua_sign_decode)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows,
                                 int64_t n, int64_t block, float* out, int64_t out_stride, int64_t stream_from) {
  const bool large = rows * n * 4 >= stream_from;
  for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block) {
      const auto decode = large && aligned(out + i) ? decode_block<true> : decode_block<false>;
      decode(codes + i / 8, least(block, n - i), fp32_at(head + i / block * 4), out + i);
    }
  if (large) stream_end();
}
