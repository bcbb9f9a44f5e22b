// Min-max uint8, compiled once for each instruction set (-DBAGUA_ISA=..., -ffp-contract=off).
//
// Every backend does the same IEEE fp32 operations in the same order, so wires and decoded values are equal bit
// for bit on all of them; ranks with different CPUs stay in step. Hence no fused multiply-add.
#include <float.h>

#include "blocks.h"

namespace {

constexpr int64_t kRowsAtOnce = 64;

struct Bounds {
  float lo, hi;
};

// Ignores NaN; (+inf, -inf) if there is nothing else.
Bounds min_max(const float* x, int64_t n) {
  VF lo[4], hi[4];
  for (int k = 0; k < 4; ++k) lo[k] = splat(__builtin_inff()), hi[k] = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      const VF v = load(x + i + k * W);
      lo[k] = vmin(v, lo[k]);
      hi[k] = vmax(v, hi[k]);
    }
  float a[W], b[W];
  store(a, vmin(vmin(lo[0], lo[1]), vmin(lo[2], lo[3])));
  store(b, vmax(vmax(hi[0], hi[1]), vmax(hi[2], hi[3])));
  for (int half = W / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) {
      a[k] = a[k + half] < a[k] ? a[k + half] : a[k];
      b[k] = b[k + half] > b[k] ? b[k + half] : b[k];
    }
  for (; i < n; ++i) {
    a[0] = x[i] < a[0] ? x[i] : a[0];
    b[0] = x[i] > b[0] ? x[i] : b[0];
  }
  return {a[0] + 0.0f, b[0] + 0.0f};  // -0 becomes +0: which zero came first must not show in the header
}

// False if there was a NaN; the codes are then of no use.
template <bool kSmall>
bool quantise(const float* x, int64_t n, float lo, float scale, uint8_t* codes) {
  VI seen{};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    VI q[4];
    for (int k = 0; k < 4; ++k) {
      VF d = load(x + i + k * W) - lo;
      if (kSmall) d = d * kUp;
      __builtin_prefetch(x + i + n + k * W);  // the next block, while this one is in L1
      q[k] = round_to_code(d * scale);
      seen |= q[k];
    }
    pack4(codes + i, q);
  }
  int32_t any = 0;
  for (int k = 0; k < W; ++k) any |= seen[k];
  for (; i < n; ++i) {
    float d = x[i] - lo;
    if (kSmall) d = d * kUp;
    const int32_t q = round_to_code(d * scale);
    any |= q;
    codes[i] = (uint8_t)q;
  }
  return (any & ~255) == 0;
}

void encode_block(const float* x, int64_t n, uint8_t* head, uint8_t* codes) {
  Bounds b = min_max(x, n);
  const float range = b.hi - b.lo;
  bool finite = range >= 0.0f && range <= FLT_MAX;
  if (finite) {
    const bool tiny = range < kTiny;
    const float wide = tiny ? range * kUp : range;
    const float scale = wide > 0.0f ? 255.0f / wide : 0.0f;
    finite = tiny ? quantise<true>(x, n, b.lo, scale, codes) : quantise<false>(x, n, b.lo, scale, codes);
  }
  if (!finite) {
    b.lo = b.hi = __builtin_nanf("");
    memset(codes, 0, (size_t)n);
  }
  memcpy(head, &b, sizeof b);
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
  for (; i + W <= n; i += W) {
    VF d = widen(codes + i) * s.step;
    if (kSmall) d = d * s.down;
    const VF y = s.lo + d;
    kStream ? stream(out + i, y) : store(out + i, y);
  }
  for (; i < n; ++i) one(i);
}

// Adds up to kRowsAtOnce rows of one block. out = (out or base) + sum_r q_r * step_r, times weight.
template <bool kSmall>
void add_rows(const uint8_t* codes, int64_t stride, int64_t rows, int64_t n, const Step* s, const float* base,
              float weight, float* out) {
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    VF acc[4];
    for (int k = 0; k < 4; ++k) acc[k] = base ? splat(*base) : load(out + i + k * W);
    const uint8_t* q = codes + i;
    for (int64_t r = 0; r < rows; ++r, q += stride)
      for (int k = 0; k < 4; ++k) {
        VF d = widen(q + k * W) * s[r].step;
        if (kSmall) d = d * s[r].down;
        acc[k] = acc[k] + d;
      }
    for (int k = 0; k < 4; ++k) store(out + i + k * W, acc[k] * weight);
  }
  for (; i < n; ++i) {
    float acc = base ? *base : out[i];
    for (int64_t r = 0; r < rows; ++r) {
      float d = (float)codes[r * stride + i] * s[r].step;
      if (kSmall) d = d * s[r].down;
      acc = acc + d;
    }
    out[i] = acc * weight;
  }
}

void mean_block(const uint8_t* head, const uint8_t* codes, int64_t stride, int64_t rows, int64_t n, float weight,
                float* out) {
  float base = 0.0f;
  for (int64_t r = 0; r < rows; ++r) base = base + fp32_at(head + r * stride);
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
    add(codes + first * stride, stride, count, n, s, first == 0 ? &base : nullptr, w, out);
  }
}

}  // namespace

void BAGUA_FN(bagua_minmax_uint8_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t block,
                                         uint8_t* head, uint8_t* codes, int64_t wire_stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block)
      encode_block(x + i, least(block, n - i), head + i / block * 8, codes + i);
}

void BAGUA_FN(bagua_minmax_uint8_decode)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride,
                                         int64_t rows, int64_t n, int64_t block, float* out, int64_t out_stride) {
  const bool large = rows * n * 4 >= kStreamFrom;
  const auto normal = large ? decode_block<false, true> : decode_block<false, false>;
  for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
    for (int64_t i = 0; i < n; i += block) {
      const Step s = step_of(head + i / block * 8);
      const auto decode = s.down != 1.0f ? decode_block<true, false> : normal;
      decode(codes + i, least(block, n - i), s, out + i);
    }
  if (large) stream_end();
}

void BAGUA_FN(bagua_minmax_uint8_decode_mean)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride,
                                              int64_t rows, int64_t n, int64_t block, float weight, float* out) {
  for (int64_t i = 0; i < n; i += block)
    mean_block(head + i / block * 8, codes + i, wire_stride, rows, least(block, n - i), weight, out + i);
}
