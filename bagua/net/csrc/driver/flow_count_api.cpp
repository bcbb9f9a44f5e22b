// FlowCount for tests: a C interface.

#include "../flow_count.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using bagua_net::FlowCount;

EXPORT FlowCount* bagua_net_flow_count_new(int most) { return new FlowCount(most, true); }
EXPORT void bagua_net_flow_count_delete(FlowCount* count) { delete count; }
EXPORT int bagua_net_flow_count_level(const FlowCount* count) { return count->level(); }

EXPORT void bagua_net_flow_count_add(FlowCount* count, int64_t now_us, int64_t duration_us, uint64_t acked_bytes,
                                     uint32_t sent, uint32_t resent, uint32_t rtt_us, int timed_out) {
  bagua_net::Sample sample;
  sample.now_us = now_us;
  sample.duration_us = duration_us;
  sample.acked_bytes = acked_bytes;
  sample.sent_segments = sent;
  sample.resent_segments = resent;
  sample.rtt_us = rtt_us;
  sample.timed_out = timed_out != 0;
  count->add(sample);
}
