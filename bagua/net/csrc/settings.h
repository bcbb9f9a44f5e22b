// What the environment chooses. Read once, at the first init.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "nccl_abi.h"

namespace bagua_net {

constexpr int kMaxFlows = 32;

enum class Schedule { rate, pull, stripes };  // stripes: equal parts, for comparison only

struct Settings {
  int num_flows = 8;              // BAGUA_NET_FLOWS: opened for each connection
  bool adaptive = true;           // BAGUA_NET_ADAPT=0: all of them are used at all times
  bool paced = true;              // BAGUA_NET_PACE=0: no pacing after retransmissions
  bool stats = false;             // BAGUA_NET_STATS=1: a line on stderr when a sending connection closes
  size_t slice_bytes = 512 << 10; // BAGUA_NET_SLICE_BYTES: the most a flow takes of a message that is divided
  int lowat_bytes = 256 << 10;    // BAGUA_NET_LOWAT_BYTES: not yet sent bytes that a socket holds
  int buffer_bytes = 0;           // BAGUA_NET_BUFFER_BYTES: of each socket and direction; 0: the kernel's choice
  int timeout_ms = 15000;         // BAGUA_NET_TIMEOUT_S: a peer that is silent for so long is gone; 0: never
  char congestion[16] = "";       // BAGUA_NET_CC: congestion control
  Schedule schedule = Schedule::rate;  // BAGUA_NET_SCHEDULE
};

const Settings& settings();

void set_logger(Logger logger);
// A line in NCCL's log. Warnings go to stderr where NCCL gave no logger.
void log_line(int level, const char* file, int line, const char* format, ...) __attribute__((format(printf, 4, 5)));

#define BAGUA_WARN(...) ::bagua_net::log_line(::bagua_net::kLogWarn, __FILE__, __LINE__, __VA_ARGS__)
#define BAGUA_INFO(...) ::bagua_net::log_line(::bagua_net::kLogInfo, __FILE__, __LINE__, __VA_ARGS__)

int64_t now_us();  // monotonic

}  // namespace bagua_net
