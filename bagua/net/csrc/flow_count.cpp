#include "flow_count.h"

#include <algorithm>

namespace bagua_net {
namespace {

constexpr int64_t kSettleUs = 10000, kStartUs = 30000, kWindowUs = 30000, kLongWindowUs = 300000, kWatchUs = 50000;
constexpr int64_t kLongestRttUs = 100000;
constexpr int64_t kProbationUs = 400000;
constexpr int64_t kShortestPauseUs = 500000, kLongestPauseUs = 30000000;
constexpr int64_t kForgetUs = 50000;
constexpr double kForget = 0.98;    // what is left of a remembered rate after that time
constexpr int64_t kLosslessUs = 4000000;
constexpr int kFewestRounds = 2, kMostRounds = 4;
constexpr double kClearGain = 1.25;  // more flows that bring this stay after the fewest rounds,
constexpr double kGain = 1.12;       // after the most rounds this,
constexpr double kSlightGain = 1.05; // and below this they are given up sooner
constexpr double kNow = 0.95;        // what the remembered rate of fewer flows is worth
constexpr double kHarmless = 0.9;    // below this they did harm
constexpr double kAsGood = 0.95;     // fewer may cost this
constexpr double kClearlyLess = 0.8; // a trial of fewer ends sooner
constexpr double kKeep = 1.08;       // this must be left of the gain after probation
constexpr double kStalled = 0.8;     // of the rate that is known: a timeout hurts
constexpr double kResent = 0.005;   // share of segments from which a window is lossy

}  // namespace

void FlowCount::Rates::add(double rate) {
  num++;
  sum += rate;
  least = num == 1 ? rate : std::min(least, rate);
}

// Without the worst of several: the machine may have stopped.
double FlowCount::Rates::mean() const { return num < 2 ? sum : (sum - least) / (num - 1); }

void FlowCount::Pause::extend(int64_t busy_us, bool harmful) {
  until_us = busy_us + length_us;
  length_us = std::min((harmful ? 4 : 2) * length_us, kLongestPauseUs);
}

void FlowCount::add(const Sample& sample) {
  if (!adaptive_ || most_ == 1) return;
  // Connections that share the path sample it in turn: count each moment once.
  const int64_t passed = std::max<int64_t>(0, std::min(sample.duration_us, sample.now_us - last_us_));
  last_us_ = std::max(last_us_, sample.now_us);
  busy_us_ += passed;
  for (; busy_us_ - forgotten_us_ >= kForgetUs; forgotten_us_ += kForgetUs)
    for (double& rate : known_) rate *= kForget;
  if (window_.settle_us > 0) {
    window_.settle_us -= passed;
  } else {
    window_.us += passed;
    window_.acked += sample.acked_bytes;
    window_.sent += sample.sent_segments;
    window_.resent += sample.resent_segments;
  }
  window_.timed_out |= sample.timed_out;
  rtt_us_ = std::min<int64_t>(sample.rtt_us, kLongestRttUs);
  if (phase_ == Phase::up) length_us_ = std::max(length_us_, 8 * rtt_us_);
  switch (phase_) {
    case Phase::steady: return steady();
    case Phase::probation: return probation();
    case Phase::up: return try_up();
    case Phase::down: return try_down();
  }
}

void FlowCount::steady() {
  const int now = level();
  const bool stalled = window_.timed_out && window_.us >= kWatchUs && window_.rate() < kStalled * known(now);
  const bool lossy = stalled || (window_.sent >= 100 && window_.resent > kResent * window_.sent);
  if (window_.us >= kWatchUs) {
    remember(now, window_.rate());
    open_window(now);
  }
  // What is lost shows in long windows only. Without losses fewer flows are tried too, in short ones.
  if (now > 1 && busy_us_ >= down_.until_us + (lossy ? 0 : kLosslessUs))
    return start(Phase::down, now / 2, lossy ? kLongWindowUs : kWindowUs);
  if (now < most_ && busy_us_ >= up_.until_us) {
    further_ = false;
    start(Phase::up, std::min(2 * now, most_), kWindowUs);
  }
}

void FlowCount::probation() {
  if (window_.us < kProbationUs) return;
  const double rate = window_.rate();
  if (rate < kKeep * known(base_)) {
    up_.extend(busy_us_, true);
    return settle(base_, Phase::steady);
  }
  remember(level(), rate);
  up_ = {busy_us_, kShortestPauseUs};
  open_window(level());
  phase_ = Phase::steady;
}

void FlowCount::try_up() {
  const bool at_other = windows_ % 2;
  if (at_other && window_.timed_out) {
    up_.extend(busy_us_, true);
    return settle(base_, Phase::steady);
  }
  if (window_.us < length_us_) return;
  (at_other ? other_rates_ : base_rates_).add(window_.rate());
  lossy_ |= at_other && window_.resent > 0;
  windows_++;
  const int rounds = windows_ / 2;
  if (!at_other || rounds < kFewestRounds) return open_window(at_other ? base_ : other_);
  // Windows are short, and a burst that a token bucket allows may fill one: means count, over more rounds if it is
  // close.
  const double base = std::max(base_rates_.mean(), known(base_) * kNow), other = other_rates_.mean();
  if (other >= (rounds < kMostRounds ? kClearGain : kGain) * base) {
    changes_.fetch_add(1, std::memory_order_relaxed);
    remember(base_, base);
    down_ = {busy_us_ + kLongWindowUs, kShortestPauseUs};
    up_ = {busy_us_, lossy_ ? up_.length_us : kShortestPauseUs};
    return settle(other_, lossy_ ? Phase::probation : Phase::steady);
  }
  if (other >= kSlightGain * base && rounds < kMostRounds) return open_window(base_);
  if (other >= kHarmless * base && !further_ && 2 * other_ <= most_) {
    further_ = true;
    const int from = base_;
    start(Phase::up, 2 * other_, length_us_);
    base_ = from;
    return open_window(from);  // start() took the level of the window that ended
  }
  up_.extend(busy_us_, other < kHarmless * base);
  settle(base_, Phase::steady);
}

void FlowCount::try_down() {
  if (window_.us < length_us_) return;
  const bool at_other = windows_ % 2;
  remember(level(), window_.rate());
  (at_other ? other_rates_ : base_rates_).add(window_.rate());
  windows_++;
  if (!at_other) return open_window(other_);
  const bool fails = other_rates_.mean() < kAsGood * base_rates_.mean();
  const bool soon = other_rates_.mean() < kClearlyLess * base_rates_.mean();
  if (!soon && windows_ < 2 * kFewestRounds) return open_window(base_);
  if (fails) {
    down_.extend(busy_us_);
    return settle(base_, Phase::steady);
  }
  changes_.fetch_add(1, std::memory_order_relaxed);
  down_ = {busy_us_, kShortestPauseUs};
  up_.extend(busy_us_);
  settle(other_, Phase::steady);
}

void FlowCount::start(Phase phase, int other, int64_t length_us) {
  phase_ = phase;
  base_ = level();
  other_ = other;
  windows_ = 0;
  length_us_ = length_us;
  base_rates_ = other_rates_ = Rates();
  lossy_ = false;
  open_window(base_);
}

void FlowCount::settle(int level, Phase phase) {
  phase_ = phase;
  open_window(level);
}

void FlowCount::open_window(int level) {
  level_.store(level, std::memory_order_relaxed);
  window_ = Window();
  const bool unused_before = level > base_ && windows_ < 2;
  window_.settle_us = std::max(unused_before ? kStartUs : kSettleUs, 4 * rtt_us_);
}

double& FlowCount::known(int level) {
  int step = 0;
  while ((1 << step) < level && step + 1 < kSteps) step++;
  return known_[step];
}

void FlowCount::remember(int level, double rate) { known(level) = std::max(known(level), rate); }

}  // namespace bagua_net
