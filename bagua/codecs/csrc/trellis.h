// Trellis-coded quantisation of rotated blocks: the centroid of an element depends on its own code and on those before
// it, and the codes are those of the path of least squared error (Viterbi). All decisions are taken in integers, so
// trellis_torch.py, which has the same tables, finds the same path. A state is the codes so far, the latest lowest, of
// which it keeps log2(kStates) bits; before a block it is 0. A window is a state followed by a code.
#pragma once

#include <utility>

#include "blocks.h"

namespace {

// A vector holds 8 states of 16 bits for each of kRow blocks.
constexpr int kRow = W / 4;

typedef int16_t VS __attribute__((vector_size(16 * kRow)));
using Lanes = std::make_integer_sequence<int, 8 * kRow>;

// The centroid of each window, times 2048.
template <int kBits, int kStates>
struct Trellis;
template <>
struct Trellis<1, 8> {
  static constexpr int16_t kCentroids[16] = {2629, -647, 691,   -2571, 1468,  -1305, -1443, 1373,
                                             -557, 3248, -3213, 522,   -1236, 1443,  1390,  -1885};
};
template <>
struct Trellis<1, 32> {
  static constexpr int16_t kCentroids[64] = {
      -1313, 1527, -1396, 1317, -2535, 751,   -724, 2441,  -1184, 1204,  -3045, 748,   -490, 3128,  -1518, 985,
      -3259, 672,  -457,  3601, -636,  2418,  -2395, 485,  -1028, 1746,  -1332, 1038,  -3568, 322,  -699,  2268,
      969,  -2619, 1394, -1171, 753,   -1897, 2095, -894,  1496,  -1193, 710,   -2472, 3632, -407,  1130,  -1259,
      843,  -1651, 2860, -532,  2792,  -637,  631,  -2888, 1468,  -1271, 1181,  -1256, 415,  -3309, 2640,  -775};
};
template <>
struct Trellis<2, 8> {
  static constexpr int16_t kCentroids[32] = {
      -4793, -1370, 308,   2053,  -2302, -441, 1125,  3361, -1331, -3889, 2009,  327,   -397, -2167, 3137, 1139,
      431,   2161,  -3153, -1076, 1239,  3393, -1978, -313, 2293,  391,   -1083, -3097, 4842, 1256,  -316, -2064};
};

// The upper half of each product.
inline VS high_product(VS a, VS b) {
#if defined(__AVX512F__)
  return (VS)_mm512_mulhi_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VS)_mm256_mulhi_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (VS)_mm_mulhi_epi16((__m128i)a, (__m128i)b);
#else
  VS high;
  for (int k = 0; k < 8 * kRow; ++k) high[k] = (int16_t)(((int32_t)a[k] * b[k]) >> 16);
  return high;
#endif
}

// The lanes of v that kFrom names.
template <int... kFrom>
inline VS lanes_of(VS v) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, kFrom...);
#else
  return __builtin_shuffle(v, VS{(int16_t)kFrom...});
#endif
}

// Lane l of each 8 becomes lane kFirst + l / 2^kBits of them.
template <int kBits, int kFirst, int... kLane>
inline VS spread(VS v, std::integer_sequence<int, kLane...>) {
  return lanes_of<(kLane / 8 * 8 + kFirst + (kLane % 8 >> kBits))...>(v);
}

// The bits of a byte are those of codes, the latest lowest. `of` has the bits of the first plane, the oldest lowest, then
// those of the second.
template <int kBits>
struct Split {
  uint8_t of[256];
  constexpr Split() : of() {
    for (int word = 0; word < 256; ++word)
      for (int bit = 0; bit < 8; ++bit) {
        const int element = 8 / kBits - 1 - bit / kBits, at = bit % kBits * (8 / kBits) + element;
        of[word] = (uint8_t)(of[word] | (word >> bit & 1) << at);
      }
  }
};

template <int kBits, int kStates>
struct Path {
  static constexpr int kGroups = kStates / 8, kCodes = 1 << kBits, kWindows = kStates * kCodes;
  static constexpr int kRows = kStates == 8 ? 2 : 1;  // vectors of each group, so that latencies overlap
  static constexpr int kTogether = kRows * kRow;      // blocks that are searched at once
  static constexpr int kEach = 8 / kBits;             // elements whose codes fill a byte
  static constexpr int16_t kUnreached = 12000;
  static constexpr Split<kBits> kSplit{};

  // The best path to each state: its cost, which is half its squared error in units of 1/128, less what is the same for
  // all paths and what `settle` has taken off; and its latest 16 bits of codes. test_costs_fit_16_bits bounds costs.
  struct Survivors {
    VS cost[kGroups], codes[kGroups];
  };
  // Of each lane. Compiled in: a static that is made at first use needs the C++ library.
  struct Tables {
    int16_t centroid[kCodes][kGroups][8 * kRow], energy[kCodes][kGroups][8 * kRow], code[kGroups][8 * kRow];
    constexpr Tables() : centroid(), energy(), code() {
      for (int from = 0; from < kCodes; ++from)
        for (int state = 0; state < kStates; ++state)
          for (int row = 0; row < kRow; ++row) {
            const int32_t c = Trellis<kBits, kStates>::kCentroids[from * kStates + state];
            const int lane = 8 * row + state % 8;
            centroid[from][state / 8][lane] = (int16_t)c;
            energy[from][state / 8][lane] = (int16_t)((c * c + 0x8000) >> 16);
            code[state / 8][lane] = (int16_t)(state % kCodes);
          }
    }
  };

  static constexpr Tables kTables{};

  static inline VS constant(const int16_t (&lanes)[8 * kRow]) {
    VS v;
    memcpy(&v, lanes, sizeof v);
    return v;
  }

  template <int kGroup, int kFrom>
  static inline void candidate(const Survivors& old, VS x, VS& cost, VS& codes) {
    constexpr int first = (kFrom * kStates + 8 * kGroup) >> kBits;  // the state before, of lane 0
    const VS branch =
        constant(kTables.energy[kFrom][kGroup]) - high_product(x, constant(kTables.centroid[kFrom][kGroup]));
    const VS other = spread<kBits, first % 8>(old.cost[first / 8], Lanes{}) + branch;
    const VS before = spread<kBits, first % 8>(old.codes[first / 8], Lanes{});
    const VS less = kFrom > 0 ? other < cost : ~VS{};
    codes = less ? before : codes;
    cost = less ? other : cost;
  }

  template <int kGroup, int... kFrom>
  static inline void extend(const Survivors& old, VS x, Survivors& next, std::integer_sequence<int, kFrom...>) {
    VS cost{}, codes{};
    (candidate<kGroup, kFrom>(old, x, cost, codes), ...);
    next.cost[kGroup] = cost;
    next.codes[kGroup] = (codes << kBits) | constant(kTables.code[kGroup]);
  }

  template <int kElement, int... kGroup, int... kLane>
  static inline void step(Survivors& now, VS x_of_8, std::integer_sequence<int, kGroup...>,
                          std::integer_sequence<int, kLane...>) {
    const VS x = lanes_of<(kLane / 8 * 8 + kElement)...>(x_of_8);
    Survivors next;
    (extend<kGroup>(now, x, next, std::make_integer_sequence<int, kCodes>{}), ...);
    now = next;
  }

  template <int kFirst, int... kElement>
  static inline void steps(Survivors (&now)[kRows], const VS (&x_of_8)[kRows],
                           std::integer_sequence<int, kElement...>) {
    const auto all_rows = [&](auto element) {
      for (int row = 0; row < kRows; ++row)
        step<decltype(element)::value>(now[row], x_of_8[row], std::make_integer_sequence<int, kGroups>{}, Lanes{});
    };
    (all_rows(std::integral_constant<int, kFirst + kElement>{}), ...);
  }

  // Takes the cost of state 0 off all costs: they stay in 16 bits for the next 8 elements.
  template <int... kLane>
  static inline void settle(Survivors& now, std::integer_sequence<int, kLane...>) {
    const VS base = lanes_of<(kLane / 8 * 8)...>(now.cost[0]);
    for (int g = 0; g < kGroups; ++g) now.cost[g] = now.cost[g] - base;
  }

  // Writes the planes of `count` blocks of n elements, a multiple of 8 up to kLongest: block p begins at x + p * n and
  // has its codes at codes + p * kBits * n / 8. Elements are in units of 1/4096, in -16384..16383; count <= kTogether.
  template <int64_t kLongest>
  static void search(const int16_t* x, int64_t n, int64_t count, uint8_t* codes) {
    VS saved[kLongest / kEach * kRows * kGroups];
    Survivors now[kRows];
    for (int row = 0; row < kRows; ++row) {
      for (int g = 0; g < kGroups; ++g) now[row].cost[g] = VS{} + kUnreached, now[row].codes[g] = VS{};
      for (int p = 0; p < kRow; ++p) now[row].cost[0][8 * p] = 0;
    }
    VS* save = saved;
    const auto keep = [&] {
      for (int row = 0; row < kRows; ++row)
        for (int g = 0; g < kGroups; ++g) *save++ = now[row].codes[g];
    };
    for (int64_t i = 0; i < n; i += 8) {
      VS x_of_8[kRows] = {};
      for (int64_t p = 0; p < count; ++p) memcpy((int16_t*)x_of_8 + 8 * p, x + p * n + i, 16);
      steps<0>(now, x_of_8, std::make_integer_sequence<int, kEach>{});
      keep();
      if (kEach < 8) {
        steps<8 - kEach>(now, x_of_8, std::make_integer_sequence<int, kEach>{});
        keep();
      }
      for (int row = 0; row < kRows; ++row) settle(now[row], Lanes{});
    }
    const int64_t stride = n / 8;
    for (int64_t p = 0; p < count; ++p, codes += kBits * stride) {
      const int row = (int)p / kRow, lane = (int)p % kRow * 8;
      int state = 0;
      for (int s = 1; s < kStates; ++s)
        if (now[row].cost[s / 8][lane + s % 8] < now[row].cost[state / 8][lane + state % 8]) state = s;
      for (int64_t k = n / kEach - 1; k >= 0; --k) {
        const VS* const from = saved + (k * kRows + row) * kGroups + state / 8;
        uint16_t word;
        memcpy(&word, (const uint16_t*)from + lane + state % 8, sizeof word);
        const uint8_t bits = kSplit.of[word & 255];
        if (kBits == 1)
          codes[k] = bits;
        else if (k % 2)
          codes[k / 2] = (uint8_t)(bits << 4), codes[stride + k / 2] = bits & 0xf0;
        else
          codes[k / 2] |= bits & 15, codes[stride + k / 2] |= bits >> 4;
        state = word >> 8 & (kStates - 1);
      }
    }
  }

  // The centroid of each window, by its bits as they lie in the planes: those of the first plane, the oldest lowest,
  // then those of the second.
  struct ByPlanes {
    float of[kWindows];
    int bits[2];  // of each plane
    constexpr ByPlanes() : of(), bits() {
      for (int w = 1; w < kWindows; w *= 2) ++bits[kBits == 1 || bits[0] == bits[1] ? 0 : 1];
      for (int at = 0; at < kWindows; ++at) {
        int window = 0;
        for (int p = 0; p < kBits; ++p)
          for (int d = 0; d < bits[p]; ++d) window |= (at >> (p * bits[0] + bits[p] - 1 - d) & 1) << (d * kBits + p);
        of[at] = (float)Trellis<kBits, kStates>::kCentroids[window] / 2048.0f;
      }
    }
  };

  // The centroids of n elements, a multiple of 8.
  static void expand(const uint8_t* codes, int64_t n, float* z) {
    static constexpr ByPlanes centroids{};
    const int64_t stride = n / 8;
    uint32_t words[kBits] = {};  // two bytes of each plane
    for (int64_t k = 0; k < stride; ++k) {
      for (int p = 0; p < kBits; ++p) words[p] = words[p] >> 8 | (uint32_t)codes[p * stride + k] << 8;
      for (int e = 0; e < 8; ++e) {
        uint32_t at = 0;
        for (int p = 0; p < kBits; ++p)
          at |= (words[p] >> (9 + e - centroids.bits[p]) & ((1u << centroids.bits[p]) - 1)) << p * centroids.bits[0];
        z[8 * k + e] = centroids.of[at];
      }
    }
  }
};

}  // namespace
