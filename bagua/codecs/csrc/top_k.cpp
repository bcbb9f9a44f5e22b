// The k elements of largest magnitude, exactly: a threshold guessed from a sample leaves few candidates, among which
// the k-th is found by counting digits. Where the guess is no good the k-th of all elements is found that way.
#include "blocks.h"

namespace {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int64_t kLine = 16, kLines = 1024;  // the sample: runs of elements
constexpr int64_t kSmall = 4 * kLine * kLines;
constexpr int64_t kFew = 1024;  // up to here counting by bits is faster than by digits
constexpr int64_t kTile = 4096;  // elements of a sum that stay in L1

inline int32_t magnitude(int32_t bits) { return bits & kMagnitude; }

// The k-th largest magnitude, and how many are larger.
struct Rank {
  int32_t kth;
  int64_t larger;
};

// The k-th largest by its bits, the highest first.
template <typename Get>
Rank rank_of_few(int64_t n, int64_t k, Get get) {
  const auto reach = [&](int32_t least) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += get(i) >= least;
    return count;
  };
  int32_t kth = 0;
  for (int bit = 30; bit >= 0; --bit)
    if (reach(kth | 1 << bit) >= k) kth |= 1 << bit;
  return {kth, kth == kMagnitude ? 0 : reach(kth + 1)};
}

// The k-th largest by its digits, the highest first: 11, 10 and 10 bits. `get(i)` is magnitude i of n.
template <typename Get>
Rank rank(int64_t n, int64_t k, Get get) {
  if (n <= kFew) return rank_of_few(n, k, get);
  constexpr int kShift[4] = {31, 20, 10, 0};
  int32_t prefix = 0;
  int64_t larger = 0;
  for (int d = 1; d < 4; ++d) {
    int64_t count[1 << 11] = {};
    const int shift = kShift[d], above = kShift[d - 1];
    const int32_t digit = (1 << (above - shift)) - 1;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t m = get(i);
      if (m >> (above - 1) >> 1 == prefix) ++count[m >> shift & digit];
    }
    int32_t v = digit;
    while (larger + count[v] < k) larger += count[v--];
    prefix = prefix << (above - shift) | v;
  }
  return {prefix, larger};
}

// A magnitude that most likely at least k of n elements reach, and not many more; 0 if it cannot be told.
int32_t guess(const float* x, int64_t n, int64_t k) {
  constexpr int64_t kSample = kLine * kLines;
  int32_t sample[kSample];
  const int64_t step = (n - kLine) / (kLines - 1);
  for (int64_t s = 0; s < kLines; ++s)
    for (int64_t j = 0; j < kLine; ++j) sample[s * kLine + j] = magnitude(bits_of(x[s * step + j]));
  const double share = (double)k * kSample / (double)n;
  const int64_t want = (int64_t)(share + 6.0 * __builtin_sqrt(share)) + 8;  // neighbours are alike: wide margin
  if (want >= kSample) return 0;
  return rank(kSample, want, [&](int64_t i) { return sample[i]; }).kth;
}

// Bits of W magnitudes that are at least `least`, the first in the lowest bit.
inline uint32_t reached(VI m, VI least_minus_1) { return sign_bits((VF)(least_minus_1 - m)); }

// Indices and magnitudes of the elements that reach `least`, ascending; -1 if there are more than fit.
int64_t candidates(const float* x, int64_t n, int32_t least, int32_t* index, int32_t* key, int64_t capacity) {
  const VI below = (VI{} + least) - 1;
  int64_t found = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    uint32_t mask = 0;
    for (int k = 0; k < 32 / W; ++k) mask |= reached((VI)load(x + i + k * W) & kMagnitude, below) << (k * W);
    if (mask == 0) continue;
    if (found + 32 > capacity) return -1;
    do {
      const int64_t at = i + __builtin_ctz(mask);
      index[found] = (int32_t)at;
      key[found++] = magnitude(bits_of(x[at]));
      mask &= mask - 1;
    } while (mask);
  }
  for (; i < n; ++i) {
    const int32_t m = magnitude(bits_of(x[i]));
    if (m < least) continue;
    if (found == capacity) return -1;
    index[found] = (int32_t)i;
    key[found++] = m;
  }
  return found;
}

// Takes those that are larger than the k-th, and of the equal ones the first.
struct Taker {
  int32_t kth;
  int64_t equal;  // still wanted
  const float* x;
  int32_t base, *index;
  float* value;

  void offer(int32_t at, int32_t m) {
    if (m < kth || (m == kth && equal-- <= 0)) return;
    *index++ = base + at;
    *value++ = x[at];
  }
};

// The k largest of one block; `base` is the index of its first element.
void select(const float* x, int64_t n, int64_t k, int64_t base, int32_t* scratch, int64_t capacity, int32_t* index,
            float* value) {
  int32_t *const at = scratch, *const key = scratch + capacity;
  const int32_t least = n < kSmall ? 0 : guess(x, n, k);
  const int64_t found = least > 0 ? candidates(x, n, least, at, key, capacity) : -1;
  if (found >= k) {
    const Rank r = rank(found, k, [&](int64_t i) { return key[i]; });
    Taker taker{r.kth, k - r.larger, x, (int32_t)base, index, value};
    for (int64_t i = 0; i < found; ++i) taker.offer(at[i], key[i]);
    return;
  }
  const Rank r = rank(n, k, [&](int64_t i) { return magnitude(bits_of(x[i])); });
  Taker taker{r.kth, k - r.larger, x, (int32_t)base, index, value};
  for (int64_t i = 0; i < n; ++i) taker.offer((int32_t)i, magnitude(bits_of(x[i])));
}

}  // namespace

void BAGUA_FN(bagua_top_k_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t block, int64_t k,
                                  int64_t k_rest, int32_t* candidates, int64_t capacity, uint8_t* wire,
                                  int64_t wire_stride) {
  const int64_t count = n / block * k + (n % block ? k_rest : 0);
  for (int64_t r = 0; r < rows; ++r, x += x_stride, wire += wire_stride) {
    int32_t* index = (int32_t*)wire;  // rows of a wire are 4-byte aligned
    float* value = (float*)(index + count);
    for (int64_t i = 0; i < n; i += block) {
      const int64_t m = least(block, n - i), kept = m == block ? k : k_rest;
      select(x + i, m, kept, i, candidates, capacity, index, value);
      index += kept;
      value += kept;
    }
  }
}

int32_t BAGUA_FN(bagua_top_k_decode_mean)(const uint8_t* wire, int64_t wire_stride, int64_t rows, int64_t count,
                                          int64_t n, float weight, int64_t* at, float* out) {
  memset(at, 0, (size_t)rows * sizeof *at);
  for (int64_t tile = 0; tile < n; tile += kTile) {
    const int64_t end = least(tile + kTile, n);
    memset(out + tile, 0, (size_t)(end - tile) * sizeof *out);
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* const row = wire + r * wire_stride;
      int64_t j = at[r], last = tile - 1;
      for (; j < count; ++j) {
        int32_t i;
        memcpy(&i, row + 4 * j, sizeof i);
        if (i >= end) break;
        if (i <= last) return 1;
        out[i] = out[i] + fp32_at(row + 4 * (count + j));
        last = i;
      }
      at[r] = j;
    }
    for (int64_t i = tile; i < end; ++i) out[i] = out[i] * weight;
  }
  for (int64_t r = 0; r < rows; ++r)
    if (at[r] != count) return 1;
  return 0;
}
