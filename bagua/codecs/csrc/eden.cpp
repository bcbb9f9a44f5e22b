// One to four bits for each element of a rotated block, compiled once for each instruction set. eden_torch.py does the
// same fp32 operations in the same order, so all backends give the same bits. Sums are taken in kLanes partial sums, as
// sign.cpp says. With m elements in a block, padded ones
// included, plane p of its codes begins at byte p * ceil(m / 8).
#include <math.h>

#include "trellis.h"

namespace {

constexpr int64_t kLongest = 4096;  // elements of a block
constexpr int32_t kMagnitude = 0x7fffffff, kSeed = 0xfff;

typedef uint32_t VU __attribute__((vector_size(4 * W)));

// The magnitudes of the centroids, and the squares of the numbers halfway between them.
template <int kBits>
struct Levels;
template <>
struct Levels<1> {
  static constexpr float kCentroids[1] = {1.0f}, kBoundaries[1] = {};
};
template <>
struct Levels<2> {
  static constexpr float kCentroids[2] = {0.4527800346f, 1.5104176085f}, kBoundaries[1] = {0.9635362466f};
};
template <>
struct Levels<3> {
  static constexpr float kCentroids[4] = {0.2450941789f, 0.7560052812f, 1.3439092785f, 2.1519457045f};
  static constexpr float kBoundaries[3] = {0.2505500323f, 1.1024102896f, 3.0552505155f};
};
template <>
struct Levels<4> {
  static constexpr float kCentroids[8] = {0.1283950299f, 0.3880482995f, 0.6567591185f, 0.9423404565f,
                                          1.2562311973f, 1.6180463860f, 2.0690172265f, 2.7325895710f};
  static constexpr float kBoundaries[7] = {0.0666784281f, 0.2729056352f, 0.6392798627f, 1.2084293292f,
                                           2.0653679066f, 3.3986095208f, 5.7638569597f};
};

inline uint32_t mix(uint32_t h) {
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15) * 0x5e8b4d35u;
  return h ^ h >> 16;
}

// out = v * factor with the random signs of a seed.
void flip(const float* v, int64_t n, int32_t seed, float factor, float* out) {
  uint32_t words[kLongest / 32];
  for (int64_t w = 0; w * 32 < n; ++w) words[w] = mix((uint32_t)seed << 16 | (uint32_t)w);
  int64_t i = 0;
  if constexpr (W >= 8) {  // a shift by lane moves each bit to the sign; without such shifts a comparison is faster
    VI up;
    for (int k = 0; k < W; ++k) up[k] = 31 - k;
    for (; i + 32 <= n; i += 32) {
      const VI word = (int32_t)words[i / 32] - VI{};
#pragma GCC unroll 4
      for (int j = 0; j < 32 / W; ++j) {
        const VI sign = (word << (up - j * W)) & ~kMagnitude;
        store(out + i + j * W, (VF)((VI)(load(v + i + j * W) * factor) ^ sign));
      }
    }
  }
  const uint8_t* const bits = (const uint8_t*)words;
  for (; i + W <= n; i += W) {
    const VF a = load(v + i) * factor;
    store(out + i, choose(bits_at(bits, i), a, -a));
  }
  for (; i < n; ++i) out[i] = words[i / 32] >> (i % 32) & 1 ? -(v[i] * factor) : v[i] * factor;
}

// Whether a look-up of one of `count` numbers, in the lanes of a vector, takes one instruction, and saves some.
constexpr bool by_lane(int count) { return W >= 8 && count > 2 && count <= W; }

// Lane `index` of the table, lane by lane.
inline VF lanes_of(VF table, VI index) {
#if defined(__AVX512F__)
  return (VF)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__AVX2__)
  return (VF)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
  VF found;
  for (int i = 0; i < W; ++i) found[i] = table[index[i]];
  return found;
#endif
}

// Lane i ^ k at lane i.
template <int k>
inline VF swapped(VF v) {
#if defined(__AVX512F__)
  if constexpr (k == 8) return (VF)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
  if constexpr (k == 4) return (VF)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  if constexpr (k <= 2) return (VF)_mm512_permute_ps((__m512)v, k == 2 ? 0x4e : 0xb1);
#elif defined(__AVX2__)
  if constexpr (k == 4) return (VF)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
  if constexpr (k <= 2) return (VF)_mm256_permute_ps((__m256)v, k == 2 ? 0x4e : 0xb1);
#else
  VF other;
  for (int i = 0; i < W; ++i) other[i] = v[i ^ k];
  return other;
#endif
}

// Lane i of v and lane i ^ k: their sum where i has not the bit k, their difference where it has.
template <int k>
inline VF across(VF v) {
  VI negate;
  for (int i = 0; i < W; ++i) negate[i] = i & k ? ~kMagnitude : 0;
  return swapped<k>(v) + (VF)((VI)v ^ negate);
}

// Sums and differences within v, of lanes W / 2, ..., 1 apart.
inline VF within(VF v) {
  if constexpr (W > 8) v = across<8>(v);
  if constexpr (W > 4) v = across<4>(v);
  return across<1>(across<2>(v));
}

// Sums and differences of kMany vectors, kMany / 2, ..., 1 apart.
template <int kMany>
inline void butterflies(VF (&v)[kMany]) {
#pragma GCC unroll 8
  for (int half = kMany / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < kMany; ++k)
      if (!(k & half)) {
        const VF a = v[k], b = v[k + half];
        v[k] = a + b;
        v[k + half] = a - b;
      }
}

// The sums and differences of `span` elements whose distances are span / 2, ..., span / kMany.
template <int kMany>
inline void pass(float* v, int64_t n, int64_t span) {
  const int64_t distance = span / kMany;
  for (int64_t first = 0; first < n; first += span)
    for (int64_t i = first; i < first + distance; i += W) {
      VF part[kMany];
#pragma GCC unroll 8
      for (int k = 0; k < kMany; ++k) part[k] = load(v + i + k * distance);
      butterflies(part);
#pragma GCC unroll 8
      for (int k = 0; k < kMany; ++k) store(v + i + k * distance, part[k]);
    }
}

// The same for spans of kMany vectors, down to a distance of one element, times `factor`.
template <int kMany>
inline void last_pass(float* v, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kMany * W) {
    VF part[kMany];
#pragma GCC unroll 8
    for (int k = 0; k < kMany; ++k) part[k] = load(v + i + k * W);
    butterflies(part);
#pragma GCC unroll 8
    for (int k = 0; k < kMany; ++k) store(v + i + k * W, within(part[k]) * factor);
  }
}

// Sums and differences of elements n / 2, ..., 1 apart, times `factor`; n is a power of two.
void hadamard(float* v, int64_t n, float factor) {
  if (n >= 8 * W) {  // three distances at once, so that vectors are loaded and stored seldom
    int64_t span = n;
    for (; span >= 64 * W; span /= 8) pass<8>(v, n, span);
    if (span == 32 * W) pass<4>(v, n, span);
    if (span == 16 * W) pass<2>(v, n, span);
    return last_pass<8>(v, n, factor);
  }
  if (n == 4 * W) return last_pass<4>(v, n, factor);
  if (n == 2 * W) return last_pass<2>(v, n, factor);
  if (n == W) return last_pass<1>(v, n, factor);
  for (int64_t half = n / 2; half > 0; half /= 2)
    for (int64_t first = 0; first < n; first += 2 * half)
      for (int64_t i = first; i < first + half; ++i) {
        const float a = v[i], b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
  for (int64_t i = 0; i < n; ++i) v[i] = v[i] * factor;
}

// The least power of two from n and `least` on: to it a ragged block is padded with zeros.
inline int64_t padded(int64_t n, int64_t least) {
  int64_t size = least;
  while (size < n) size *= 2;
  return size;
}

// By the orthonormal matrix, which is its own inverse.
inline void rotate(float* v, int64_t n) { hadamard(v, n, (float)(1.0 / sqrt((double)n))); }

// The sum of what `vector(i)` gives for W elements and `one(i)` for one.
template <typename Vector, typename One>
inline float lane_sum(int64_t n, Vector vector, One one) {
  VF acc[kVectors] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int k = 0; k < kVectors; ++k) acc[k] = acc[k] + vector(i + k * W);
  float lanes[kLanes];
  memcpy(lanes, acc, sizeof lanes);
  for (int64_t k = 0; i + k < n; ++k) lanes[k] = lanes[k] + one(i + k);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[k + half];
  return lanes[0];
}

// Blocks that are encoded at once.
template <int kBits, int kStates>
constexpr int64_t together() {
  if constexpr (kStates > 1)
    return Path<kBits, kStates>::kTogether;
  else
    return 1;
}

// With kStates > 1 codes are paths through a trellis.
template <int kBits, int kStates = 1>
struct Eden {
  static constexpr int64_t kHeader = 4, kCodeBits = kBits, kLeast = kStates > 1 ? 8 : 1;
  static constexpr int64_t kTogether = together<kBits, kStates>();
  static constexpr int kLevels = 1 << (kBits - 1);
  using L = Levels<kBits>;

  // Writes the planes, returns the sum of |z| times the centroid.
  static float quantise(const float* z, int64_t n, float mean_square, uint8_t* codes) {
    const int64_t stride = (n + 7) / 8;
    float boundaries[kLevels];
    for (int t = 0; t + 1 < kLevels; ++t) boundaries[t] = mean_square * L::kBoundaries[t];
    if (W < 8 || n % kLanes) memset(codes, 0, (size_t)(kBits * stride));
    VF table = {};  // of the centroids
    for (int t = 0; t < (kLevels < W ? kLevels : W); ++t) table[t] = L::kCentroids[t];
    const auto vector = [&](int64_t i) {
      const VF v = load(z + i), square = v * v;
      VI level = {};
      VF magnitude = splat(L::kCentroids[0]);
      for (int t = 0; t + 1 < kLevels; ++t) {
        const VI above = square > splat(boundaries[t]);
        level = level - above;
        if constexpr (!by_lane(kLevels)) magnitude = above ? splat(L::kCentroids[t + 1]) : magnitude;
      }
      if constexpr (by_lane(kLevels)) magnitude = lanes_of(table, level);
      for (int p = 0; p < kBits; ++p) {
        const uint32_t bits = sign_bits(p == 0 ? v : (VF)(level << (32 - p)));
        uint8_t* const to = codes + p * stride + i / 8;
        if constexpr (W < 8)
          *to |= (uint8_t)(bits << (i % 8));
        else
          for (int byte = 0; byte < W / 8; ++byte) to[byte] = (uint8_t)(bits >> 8 * byte);
      }
      return (VF)((VI)v & kMagnitude) * magnitude;
    };
    const auto one = [&](int64_t i) {
      const float v = z[i], square = v * v;
      int level = 0;
      for (int t = 0; t + 1 < kLevels; ++t) level += square > boundaries[t];
      const int code = (bits_of(v) < 0) | level << 1;
      for (int p = 0; p < kBits; ++p) codes[p * stride + i / 8] |= (uint8_t)((code >> p & 1) << (i % 8));
      return float_of(bits_of(v) & kMagnitude) * L::kCentroids[level];
    };
    return lane_sum(n, vector, one);
  }

  // A block that is scaled and rotated.
  struct Rotated {
    int32_t seed;
    float up, energy;
    bool finite;
  };

  template <bool kFeedback>
  static Rotated turn(const float* x, float* residual, int64_t n, int64_t size, float* z) {
    VI most_of = {};
    VU sum_of = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const VF v = input<kFeedback>(x + i, residual + i);
      most_of = vmax((VI)v & kMagnitude, most_of);
      sum_of = sum_of + (VU)(VI)v;
      store(z + i, v);
    }
    int32_t most = largest(most_of);
    uint32_t sum = 0;
    for (int k = 0; k < W; ++k) sum += sum_of[k];
    for (; i < n; ++i) {
      z[i] = input_one<kFeedback>(x + i, residual + i);
      const int32_t bits = bits_of(z[i]);
      sum += (uint32_t)bits;
      most = (bits & kMagnitude) > most ? bits & kMagnitude : most;
    }
    if (most >= kInfinity) return {0, 0.0f, 0.0f, false};
    int32_t exponent = (most >> 23) - 127;
    exponent = exponent < -100 ? -100 : exponent > 120 ? 120 : exponent;
    const float down = float_of((127 - exponent) << 23), up = float_of((127 + exponent) << 23);
    const int32_t seed = (int32_t)(mix(sum) >> 20);
    flip(z, n, seed, down, z);
    for (i = n; i < size; ++i) z[i] = 0.0f;
    rotate(z, size);
    const float energy = lane_sum(
        size,
        [&](int64_t j) {
          const VF v = load(z + j);
          return v * v;
        },
        [&](int64_t j) { return z[j] * z[j]; });
    return {seed, up, energy, true};
  }

  // Divided by the root of the mean square, in units of 1/4096.
  static void to_integers(const float* z, int64_t size, float energy, int16_t* x) {
    const float mean_square = energy / (float)size, factor = mean_square > 0.0f ? 4096.0f / sqrtf(mean_square) : 0.0f;
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      const VF v = vmin(vmax(load(z + i) * factor, splat(-16384.0f)), splat(16383.0f));
      const VH integers = __builtin_convertvector(round_to_code(v), VH);
      memcpy(x + i, &integers, sizeof integers);
    }
    for (; i < size; ++i) {
      const float v = z[i] * factor, most = v > -16384.0f ? v : -16384.0f;
      x[i] = (int16_t)round_to_code(most < 16383.0f ? most : 16383.0f);
    }
  }

  // The sum of z times its centroids.
  static float dot_of(const float* z, const uint8_t* codes, int64_t size) {
    alignas(64) float chosen[kLongest];
    Path<kBits, kStates>::expand(codes, size, chosen);
    return lane_sum(
        size, [&](int64_t j) { return load(z + j) * load(chosen + j); }, [&](int64_t j) { return z[j] * chosen[j]; });
  }

  // At most kTogether blocks of n elements.
  template <bool kFeedback>
  static void encode_blocks(const float* x, float* residual, int64_t n, int64_t count, uint8_t* head, uint8_t* codes) {
    const int64_t size = padded(n, kLeast), bytes = kBits * ((size + 7) / 8);
    alignas(64) float z[kTogether * kLongest];
    Rotated blocks[kTogether];
    for (int64_t p = 0; p < count; ++p)
      blocks[p] = turn<kFeedback>(x + p * n, kFeedback ? residual + p * n : nullptr, n, size, z + p * size);
    if constexpr (kStates > 1) {
      int16_t integers[kTogether * kLongest];
      for (int64_t p = 0; p < count; ++p)
        if (blocks[p].finite)
          to_integers(z + p * size, size, blocks[p].energy, integers + p * size);
        else
          memset(integers + p * size, 0, (size_t)(2 * size));
      Path<kBits, kStates>::template search<kLongest>(integers, size, count, codes);
    }
    for (int64_t p = 0; p < count; ++p, head += kHeader, codes += bytes) {
      int32_t header = kInfinity;
      if (blocks[p].finite) {
        float dot;
        if constexpr (kStates > 1)
          dot = dot_of(z + p * size, codes, size);
        else
          dot = quantise(z + p * size, size, blocks[p].energy / (float)size, codes);
        const float scale = (blocks[p].energy == 0.0f ? 0.0f : blocks[p].energy / dot) * blocks[p].up;
        header = bits_of(scale) < kInfinity ? ((bits_of(scale) + 0x800) & ~kSeed) : kInfinity;
        if (header < kInfinity) header |= blocks[p].seed;
      }
      if (header >= kInfinity) {
        header = 0x7fc00000;
        memset(codes, 0, (size_t)bytes);
      }
      memcpy(head, &header, sizeof header);
      if (!kFeedback) continue;
      float *const left = residual + p * n, *const decoded = z + p * size;
      decode_block(head, codes, n, decoded);
      int64_t i = 0;
      for (; i + W <= n; i += W) store(left + i, keep_finite(load(left + i) - load(decoded + i)));
      for (; i < n; ++i) left[i] = keep_finite(left[i] - decoded[i]);
    }
  }

  static void decode_block(const uint8_t* head, const uint8_t* codes, int64_t n, float* out) {
    const int64_t size = padded(n, kLeast), stride = (size + 7) / 8;
    alignas(64) float all[kLongest];
    float* const z = size == n ? out : all;
    int32_t header;
    memcpy(&header, head, sizeof header);
    if constexpr (kStates > 1)
      Path<kBits, kStates>::expand(codes, size, z);
    else
      nearest(codes, size, stride, z);
    rotate(z, size);
    flip(z, n, header & kSeed, float_of(header & ~kSeed), out);
  }

  // The centroids of `quantise`.
  static void nearest(const uint8_t* codes, int64_t size, int64_t stride, float* z) {
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      VF v[kLevels];
      for (int j = 0; j < kLevels; ++j) v[j] = splat(L::kCentroids[j]);
      for (int p = 1; p < kBits; ++p) {
        const int32_t bits = bits_at(codes + p * stride, i);
        for (int j = 0; j < kLevels >> p; ++j) v[j] = choose(bits, v[2 * j], v[2 * j + 1]);
      }
      store(z + i, choose(bits_at(codes, i), v[0], -v[0]));
    }
    for (; i < size; ++i) {
      int level = 0;
      for (int p = 1; p < kBits; ++p) level |= bit_at(codes + p * stride, i) << (p - 1);
      z[i] = bit_at(codes, i) ? -L::kCentroids[level] : L::kCentroids[level];
    }
  }

  static void mean(const uint8_t* head, const uint8_t* codes, int64_t stride, int64_t rows, int64_t n, float weight,
                   float* out) {
    alignas(64) float row[kLongest];
    for (int64_t r = 0; r < rows; ++r) {
      decode_block(head + r * stride, codes + r * stride, n, row);
      int64_t i = 0;
      for (; i + W <= n; i += W) store(out + i, (r ? load(out + i) : VF{}) + load(row + i));
      for (; i < n; ++i) out[i] = (r ? out[i] : 0.0f) + row[i];
    }
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, load(out + i) * weight);
    for (; i < n; ++i) out[i] = out[i] * weight;
  }

  template <bool kFeedback>
  static void encode(const float* x, float* residual, int64_t n, int64_t block, uint8_t* head, uint8_t* codes) {
    for (int64_t i = 0; i < n;) {
      const int64_t m = least(block, n - i), count = m == block ? least(kTogether, (n - i) / block) : 1;
      encode_blocks<kFeedback>(x + i, kFeedback ? residual + i : nullptr, m, count, head + i / block * kHeader,
                               codes + i * kCodeBits / 8);
      i += count * m;
    }
  }

  static void decode(const uint8_t* head, const uint8_t* codes, int64_t wire_stride, int64_t rows, int64_t n,
                     int64_t block, float* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; ++r, out += out_stride, head += wire_stride, codes += wire_stride)
      for (int64_t i = 0; i < n; i += block)
        decode_block(head + i / block * kHeader, codes + i * kCodeBits / 8, least(block, n - i), out + i);
  }
};

}  // namespace

// Outputs are scratch of the transform, so they are not written past the caches.
#define BAGUA_EDEN(codec, Codec)                                                                                   \
  BAGUA_BLOCK_CODEC_FUNCTIONS(codec, Codec)                                                                        \
  void BAGUA_FN(bagua_##codec##_decode)(const uint8_t* head, const uint8_t* codes, int64_t wire_stride,            \
                                        int64_t rows, int64_t n, int64_t block, float* out, int64_t out_stride,    \
                                        int64_t) {                                                                 \
    Codec::decode(head, codes, wire_stride, rows, n, block, out, out_stride);                                      \
  }                                                                                                                \
  BAGUA_BLOCK_CODEC_LERP_FUNCTIONS(codec, Codec)

using Eden1x8 = Eden<1, 8>;
using Eden1x32 = Eden<1, 32>;
using Eden2x8 = Eden<2, 8>;

BAGUA_EDEN(eden1, Eden<1>)
BAGUA_EDEN(eden2, Eden<2>)
BAGUA_EDEN(eden3, Eden<3>)
BAGUA_EDEN(eden4, Eden<4>)
BAGUA_EDEN(eden1x8, Eden1x8)
BAGUA_EDEN(eden1x32, Eden1x32)
BAGUA_EDEN(eden2x8, Eden2x8)
