// The sending side's view of its flows: rates, retransmissions, pacing, and the line at close.

#include <stdio.h>

#include <algorithm>

#include "send.h"

namespace bagua_net {
namespace {

constexpr int64_t kSampleUs = 2000;
constexpr int64_t kGapUs = 10000;  // not called for so long: what passed meanwhile says nothing
constexpr int64_t kPaceUs = 20000, kPacedUs = 5000000, kBestUs = 1000000;
constexpr uint32_t kFewestResent = 4;
constexpr double kPaceHeadroom = 1.25;
constexpr double kResent = 0.005;  // share of segments from which a flow is paced
constexpr double kLowestPace = 1;  // bytes per us
constexpr int64_t kShortestBusyUs = 500;
constexpr uint32_t kUnansweredProbes = 2;
constexpr int64_t kUnwatchedUs = 1000000;  // after such a pause silence is counted anew

}  // namespace

// Called while something waits for the network.
void SendComm::measure(int64_t now) {
  const int64_t passed = now - sampled_us_;
  if (passed < kSampleUs) return;
  Sample sample;
  sample.now_us = now;
  sample.duration_us = passed;
  double fastest = 0;
  for (Flow& flow : flows_) {
    observe(flow, sample);
    fastest = std::max(fastest, flow.rate);
  }
  // A flow that is thought slow gets little and is measured seldom: it earns another look.
  for (Flow& flow : flows_)
    if (flow.rate > 0 && queued(flow, now) <= 0) flow.rate += 0.01 * (fastest - flow.rate);
  sampled_us_ = now;
  if (passed < kGapUs) path_->add(sample);
  if (!settings().paced || now - paced_us_ < kPaceUs) return;
  paced_us_ = now;
  for (Flow& flow : flows_) pace(flow, now);
}

void SendComm::observe(Flow& flow, Sample& sample) {
  const bool all_acked =
      !flow.written || (flow.state_known && flow.state.acked_bytes - flow.acked_at_first >= flow.written);
  if (all_acked || sample.duration_us > kUnwatchedUs) flow.heard_us = sample.now_us;
  SocketState state;
  if (all_acked || !read_state(flow.fd.get(), state)) return;
  if (flow.state_known) {
    const uint64_t acked = state.acked_bytes - flow.state.acked_bytes;
    const uint64_t busy = state.busy_us - flow.state.busy_us;
    // What a flow still has to deliver that is not used any more says nothing of those that are.
    if (&flow - flows_.data() < path_->level()) sample.acked_bytes += acked;
    sample.sent_segments += state.sent_segments - flow.state.sent_segments;
    sample.resent_segments += state.resent_segments - flow.state.resent_segments;
    sample.rtt_us = std::max(sample.rtt_us, state.rtt_us);
    sample.timed_out |= state.timed_out;
    if (busy >= kShortestBusyUs) {
      const double rate = static_cast<double>(acked) / static_cast<double>(busy);
      flow.rate = flow.rate > 0 ? 0.7 * flow.rate + 0.3 * rate : rate;
    }
  }
  flow.state = state;
  flow.state_known = true;
  // Probes of a full buffer are far apart: silence between two of them says nothing, two without an answer do.
  flow.heard_us = std::max(flow.heard_us, sample.now_us - 1000 * int64_t{state.silent_ms});
  const int64_t limit_us = 1000 * int64_t{settings().timeout_ms};
  const bool unanswered = state.unacked_segments || state.num_probes >= kUnansweredProbes;
  if (limit_us && unanswered && sample.now_us - flow.heard_us > limit_us)
    fail("the peer has not answered for too long");
}

// A flow that loses segments is held to a little above the best rate it had lately, so that they leave evenly. The best
// one: a flow that waits for its receiver, or for its own pace, must not be slowed by that.
void SendComm::pace(Flow& flow, int64_t now) {
  if (!flow.state_known) return;
  const SocketState since = flow.paced_state;
  flow.paced_state = flow.state;
  const uint32_t sent = flow.state.sent_segments - since.sent_segments;
  const uint32_t resent = flow.state.resent_segments - since.resent_segments;
  const uint64_t busy = flow.state.busy_us - since.busy_us;
  if (busy >= kPaceUs / 2) {
    const double rate = static_cast<double>(flow.state.acked_bytes - since.acked_bytes) / static_cast<double>(busy);
    flow.best[0] = std::max(flow.best[0], rate);
  }
  if (now - flow.best_since_us > kBestUs) {
    flow.best[1] = flow.best[0];
    flow.best[0] = 0;
    flow.best_since_us = now;
  }
  const double best = std::max(flow.best[0], flow.best[1]);
  if (resent >= kFewestResent && resent > kResent * sent) flow.paced_until_us = now + kPacedUs;
  if (!flow.paced_until_us) return;
  if (!flow.first_pacing) flow.first_pacing = get_pacing(flow.fd.get());
  if (now > flow.paced_until_us) {
    flow.paced_until_us = 0;
    set_pacing(flow.fd.get(), 0, flow.first_pacing);
  } else if (best > 0) {
    const double rate = 1e6 * kPaceHeadroom * std::max(best, kLowestPace);
    set_pacing(flow.fd.get(), static_cast<uint64_t>(rate), flow.first_pacing);
  }
}

SendComm::~SendComm() {
  if (!settings().stats) return;
  char flows[kMaxFlows * 48] = "";
  size_t used = 0;
  uint64_t bytes = 0;
  for (Flow& flow : flows_) {
    read_state(flow.fd.get(), flow.state);
    bytes += flow.payload;
    const int added = snprintf(flows + used, sizeof flows - used, " %.1f/%.0f/%u",
                               static_cast<double>(flow.payload) / 1e6, 8 * flow.rate, flow.state.resent_segments);
    used = std::min(sizeof flows - 1, used + static_cast<size_t>(std::max(added, 0)));
  }
  fprintf(stderr,
          "bagua-net: to %s: %llu messages, %.1f MB in %.1f s; %d of %zu flows in use, changed %d times; "
          "per flow MB/Mbit/s/resent:%s\n",
          peer_, static_cast<unsigned long long>(messages_), static_cast<double>(bytes) / 1e6,
          static_cast<double>(now_us() - started_us_) / 1e6, path_->level(), flows_.size(), path_->changes(), flows);
}

}  // namespace bagua_net
