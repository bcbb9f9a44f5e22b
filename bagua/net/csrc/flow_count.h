// How many flows a connection uses: found by trying. A pure machine, fed with samples and read by level().
//
// It starts with one flow and tries twice as many in turns with the present number, each for a window of busy time.
// More flows stay only if the mean of their windows beats that of the others by 25 %, or by 12 % over more windows: on
// a link that one flow fills, on a shared one, or where a core is the limit, they do not. If twice as many change
// nothing, four times as many are tried once, since the added flow may have got a slow path. A timeout ends a trial at
// once. If segments were lost meanwhile, more flows stay on probation: a stall comes later than the window that caused
// it. After a trial that failed the next one waits, twice as long each time, four times if it did harm. Half as many
// flows are tried now and then, sooner while segments are lost and then in long windows, and stay if they are as good.

#pragma once

#include <stdint.h>

#include <atomic>

namespace bagua_net {

struct Sample {
  int64_t now_us = 0;
  int64_t duration_us = 0;  // time before now in which bytes waited for the network
  uint64_t acked_bytes = 0;
  uint32_t sent_segments = 0;
  uint32_t resent_segments = 0;
  uint32_t rtt_us = 0;
  bool timed_out = false;
};

class FlowCount {
 public:
  FlowCount(int most, bool adaptive) : most_(most), adaptive_(adaptive), level_(adaptive ? 1 : most) {}

  int level() const { return level_.load(std::memory_order_relaxed); }
  int changes() const { return changes_.load(std::memory_order_relaxed); }
  void add(const Sample& sample);  // callers exclude each other

 private:
  enum class Phase { steady, probation, up, down };
  struct Window {
    int64_t settle_us = 0;  // left until it begins
    int64_t us = 0;
    uint64_t acked = 0;
    uint32_t sent = 0, resent = 0;
    bool timed_out = false;

    double rate() const { return us > 0 ? static_cast<double>(acked) / static_cast<double>(us) : 0; }
  };
  struct Rates {  // of the windows of one side
    int num = 0;
    double sum = 0, least = 0;

    void add(double rate);
    double mean() const;
  };
  struct Pause {  // before the next trial of a direction, once one has failed
    int64_t until_us;
    int64_t length_us;
    void extend(int64_t busy_us, bool harmful = false);
  };
  static constexpr int kSteps = 8;

  void steady();
  void probation();
  void try_up();
  void try_down();
  void start(Phase phase, int other, int64_t length_us);
  void settle(int level, Phase phase);
  void open_window(int level);
  double& known(int level);
  void remember(int level, double rate);

  const int most_;
  const bool adaptive_;
  std::atomic<int> level_;
  std::atomic<int> changes_{0};

  int64_t last_us_ = 0;
  int64_t busy_us_ = 0;  // all time in which something waited
  Window window_;
  Phase phase_ = Phase::steady;

  // The trial: windows of base and other in turn. In probation: base is where it came from.
  int base_ = 1, other_ = 1, windows_ = 0;
  int64_t length_us_ = 0, rtt_us_ = 0;
  Rates base_rates_, other_rates_;
  bool further_ = false, lossy_ = false;

  double known_[kSteps] = {};  // best rate of late by number of flows, as powers of two; forgotten slowly
  int64_t forgotten_us_ = 0;
  Pause up_{100000, 500000}, down_{0, 500000};
};

}  // namespace bagua_net
