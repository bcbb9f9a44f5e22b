// Min-max uint8, compiled once for each instruction set (-DBAGUA_ISA=..., -ffp-contract=off).
//
// Every backend does the same IEEE fp32 operations in the same order, so wires and decoded values are equal bit
// for bit on all of them; ranks with different CPUs stay in step. Hence no fused multiply-add.
#include <float.h>

#include "blocks.h"

namespace {

constexpr float kHuge = 0x1p126f;
constexpr int64_t kRowsAtOnce = 64;
constexpr int64_t kAhead = 2048;  // elements between what is encoded and what is fetched

struct Bounds {
  float lo, hi;
};

// Ignores NaN; (+inf, -inf) if there is nothing else.
template <bool kFeedback>
Bounds min_max(const float* x, float* residual, int64_t n) {
  VF lo[4], hi[4];
  for (int k = 0; k < 4; ++k) lo[k] = splat(__builtin_inff()), hi[k] = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      const VF v = input<kFeedback>(x + i + k * W, residual + i + k * W);
      lo[k] = vmin(v, lo[k]);
      hi[k] = vmax(v, hi[k]);
    }
  float a = smallest(vmin(vmin(lo[0], lo[1]), vmin(lo[2], lo[3])));
  float b = largest(vmax(vmax(hi[0], hi[1]), vmax(hi[2], hi[3])));
  for (; i < n; ++i) {
    const float v = input_one<kFeedback>(x + i, residual + i);
    a = v < a ? v : a;
    b = v > b ? v : b;
  }
  return {a + 0.0f, b + 0.0f};  // -0 becomes +0: which zero came first must not show in the header
}

// Bounds of levels of which one is zero, where that lies between them. Steps have 16 digits, so that all is exact that is
// done with them: an element that is 0 stays 0.
Bounds through_zero(Bounds b) {
  const float range = b.hi - b.lo;
  if (!(b.lo < 0.0f && b.hi >= 0.0f && range >= kTiny && range < kHuge)) return b;
  float step = range / 254.0f;
  uint32_t bits;
  memcpy(&bits, &step, sizeof bits);
  bits = (bits + 255) & ~255u;
  memcpy(&step, &bits, sizeof bits);
  const float below = __builtin_ceilf(-b.lo / step);
  return {-(below * step), (255.0f - below) * step};
}

// What one code is worth. x' = lo + (q * step) * down, and down is 1 unless the range is tiny.
struct Step {
  float lo, step, down;
};

Step step_of(const uint8_t* head) {
  const float lo = fp32_at(head);
  const float range = fp32_at(head + 4) - lo;
  const bool tiny = range > 0.0f && range < kTiny;
  return {lo, (tiny ? range * kUp : range) / 255.0f, tiny ? kDown : 1.0f};
}

// False if there was a NaN; codes and residual are then of no use. x and residual are the same or the latter is null.
template <bool kSmall, bool kFeedback>
bool quantise(const float* x, float* residual, int64_t n, float scale, Step s, uint8_t* codes) {
  VI seen{};
  const VF minus_lo = splat(-s.lo);  // x + -lo is x - lo
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    VI q[4];
    for (int k = 0; k < 4; ++k) {
      const VF e = load(x + i + k * W);
      VF d = minus_lo + e;
      if (kSmall) d = d * kUp;
      prefetch(x + i + kAhead, k);  // while this block is in L1
      q[k] = round_to_code(d * scale);
      if (kFeedback) {
        VF y = to_float(q[k]) * s.step;
        if (kSmall) y = y * s.down;
        store(residual + i + k * W, keep_finite(e - (s.lo + y)));
      }
    }
    pack4(codes + i, q, seen);
  }
  bool lost = any(seen, kBeyond);
  for (; i < n; ++i) {
    const float e = x[i];
    float d = e - s.lo;
    if (kSmall) d = d * kUp;
    const int32_t q = round_to_code(d * scale);
    lost |= (q & ~255) != 0;
    codes[i] = (uint8_t)q;
    if (kFeedback) {
      float y = (float)q * s.step;
      if (kSmall) y = y * s.down;
      residual[i] = keep_finite(e - (s.lo + y));
    }
  }
  return !lost;
}

template <bool kFeedback>
void encode_block(const float* x, float* residual, int64_t n, uint8_t* head, uint8_t* codes) {
  Bounds b = through_zero(min_max<kFeedback>(x, residual, n));
  const float range = b.hi - b.lo;
  bool finite = range >= 0.0f && range <= FLT_MAX;
  memcpy(head, &b, sizeof b);
  if (finite) {
    const bool tiny = range < kTiny;
    const float wide = tiny ? range * kUp : range;
    const float scale = wide > 0.0f ? 255.0f / wide : 0.0f;
    const float* const e = kFeedback ? residual : x;
    const Step s = step_of(head);
    finite = tiny ? quantise<true, kFeedback>(e, residual, n, scale, s, codes)
                  : quantise<false, kFeedback>(e, residual, n, scale, s, codes);
  }
  if (!finite) {
    b.lo = b.hi = __builtin_nanf("");
    memcpy(head, &b, sizeof b);
    memset(codes, 0, (size_t)n);
    if (kFeedback) memset(residual, 0, (size_t)n * sizeof *residual);
  }
}

template <bool kSmall, bool kStream>
void decode_block(const uint8_t* codes, int64_t n, Step s, float* out) {
  int64_t i = 0;
  const auto one = [&](int64_t j) {
    float d = (float)codes[j] * s.step;
    if (kSmall) d = d * s.down;
    out[j] = s.lo + d;
  };
  if (kStream)
    for (; i < n && (uintptr_t)(out + i) % sizeof(VF) != 0; ++i) one(i);
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      VF d = widen(codes + i + k * W) * s.step;
      if (kSmall) d = d * s.down;
      const VF y = s.lo + d;
      kStream ? stream(out + i + k * W, y) : store(out + i + k * W, y);
    }
  for (; i < n; ++i) one(i);
}

// Adds up to kRowsAtOnce rows of one block. out = (out or 0) + sum_r (lo_r + q_r * step_r), times weight.
template <bool kSmall>
void add_rows(const uint8_t* codes, int64_t stride, int64_t rows, int64_t n, const Step* s, bool first, float weight,
              float* out) {
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    VF acc[4];
    for (int k = 0; k < 4; ++k) acc[k] = first ? VF{} : load(out + i + k * W);
    const uint8_t* q = codes + i;
    for (int64_t r = 0; r < rows; ++r, q += stride)
      for (int k = 0; k < 4; ++k) {
        VF d = widen(q + k * W) * s[r].step;
        if (kSmall) d = d * s[r].down;
        acc[k] = acc[k] + (s[r].lo + d);
      }
    for (int k = 0; k < 4; ++k) store(out + i + k * W, acc[k] * weight);
  }
  for (; i < n; ++i) {
    float acc = first ? 0.0f : out[i];
    for (int64_t r = 0; r < rows; ++r) {
      float d = (float)codes[r * stride + i] * s[r].step;
      if (kSmall) d = d * s[r].down;
      acc = acc + (s[r].lo + d);
    }
    out[i] = acc * weight;
  }
}

void mean_block(const uint8_t* head, const uint8_t* codes, int64_t stride, int64_t rows, int64_t n, float weight,
                float* out) {
  for (int64_t first = 0; first == 0 || first < rows; first += kRowsAtOnce) {
    const int64_t left = rows - first, count = left < kRowsAtOnce ? left : kRowsAtOnce;
    Step s[kRowsAtOnce];
    bool tiny = false;
    for (int64_t r = 0; r < count; ++r) {
      s[r] = step_of(head + (first + r) * stride);
      tiny |= s[r].down != 1.0f;
    }
    const float w = left <= kRowsAtOnce ? weight : 1.0f;
    const auto add = tiny ? add_rows<true> : add_rows<false>;
    add(codes + first * stride, stride, count, n, s, first == 0, w, out);
  }
}

struct MinMax {
  static constexpr int64_t kHeader = 8, kCodeBits = 8;
  static constexpr auto mean = mean_block;

  template <bool kFeedback>
  static void encode(const float* x, float* residual, int64_t n, int64_t block, uint8_t* head, uint8_t* codes) {
    for (int64_t i = 0, k = 0; i < n; i += block, ++k)
      encode_block<kFeedback>(x + i, kFeedback ? residual + i : nullptr, least(block, n - i), head + k * kHeader,
                              codes + i);
  }
};

}  // namespace

BAGUA_BLOCK_CODEC_FUNCTIONS(minmax_uint8, MinMax)
BAGUA_BLOCK_CODEC_LERP_FUNCTIONS(minmax_uint8, MinMax)

void BAGUA_FN(bagua_minmax_uint8_decode)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride,
                                         int64_t rows, int64_t n, int64_t block, float* out, int64_t out_stride,
                                         int64_t stream_from) {
  const bool large = rows * n * 4 >= stream_from;
  const auto normal = large ? decode_block<false, true> : decode_block<false, false>;
  for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block) {
      const Step s = step_of(head + i / block * 8);
      const auto decode = s.down != 1.0f ? decode_block<true, false> : normal;
      decode(codes + i, least(block, n - i), s, out + i);
    }
  if (large) stream_end();
}
