#include "settings.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>

namespace bagua_net {
namespace {

std::atomic<Logger> g_logger{nullptr};

// A bad value is named and the default stays: a plugin that refuses to load is silently replaced by NCCL.
long number(const char* name, long low, long high, long otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  errno = 0;
  const long value = strtol(text, &end, 10);
  if (errno || *end || value < low || value > high) {
    BAGUA_WARN("%s=%s is not a number from %ld to %ld; using %ld", name, text, low, high, otherwise);
    return otherwise;
  }
  return value;
}

Settings read_environment() {
  Settings made;
  made.num_flows = static_cast<int>(number("BAGUA_NET_FLOWS", 1, kMaxFlows, made.num_flows));
  made.adaptive = number("BAGUA_NET_ADAPT", 0, 1, 1) == 1;
  made.paced = number("BAGUA_NET_PACE", 0, 1, 1) == 1;
  made.stats = number("BAGUA_NET_STATS", 0, 1, 0) == 1;
  // Multiples of 4 KiB: a GPU may poll flags of 128 bytes inside a buffer while it fills.
  const long slice = number("BAGUA_NET_SLICE_BYTES", 4096, 1 << 30, static_cast<long>(made.slice_bytes));
  made.slice_bytes = static_cast<size_t>(slice) & ~size_t{4095};
  made.lowat_bytes = static_cast<int>(number("BAGUA_NET_LOWAT_BYTES", 0, 1 << 30, made.lowat_bytes));
  made.buffer_bytes = static_cast<int>(number("BAGUA_NET_BUFFER_BYTES", 0, 1 << 30, 0));
  made.timeout_ms = static_cast<int>(number("BAGUA_NET_TIMEOUT_S", 0, 86400, made.timeout_ms / 1000)) * 1000;
  if (const char* name = getenv("BAGUA_NET_CC")) {
    if (strlen(name) < sizeof made.congestion) strcpy(made.congestion, name);
    else BAGUA_WARN("BAGUA_NET_CC=%s is too long for the name of a congestion control", name);
  }
  if (const char* name = getenv("BAGUA_NET_SCHEDULE")) {
    if (!strcmp(name, "pull")) made.schedule = Schedule::pull;
    else if (!strcmp(name, "stripes")) made.schedule = Schedule::stripes;
    else if (*name && strcmp(name, "rate")) BAGUA_WARN("BAGUA_NET_SCHEDULE=%s is not rate, pull or stripes", name);
  }
  return made;
}

}  // namespace

const Settings& settings() {
  static const Settings made = read_environment();
  return made;
}

void set_logger(Logger logger) { g_logger.store(logger, std::memory_order_release); }

void log_line(int level, const char* file, int line, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (const Logger logger = g_logger.load(std::memory_order_acquire))
    logger(level, kLogNet, file, line, "NET/Bagua : %s", text);
  else if (level <= kLogWarn) fprintf(stderr, "bagua-net: %s\n", text);
}

int64_t now_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000 + now.tv_nsec / 1000;
}

}  // namespace bagua_net
