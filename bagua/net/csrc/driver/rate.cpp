// Mode "rate": messages of one size as fast as they go, and the bytes that arrive in a span of time.

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include <algorithm>
#include <thread>

#include "side.h"

namespace bagua_net {
namespace {

constexpr int64_t kBinUs = 100000;

double thread_cpu_s() {
  rusage used;
  getrusage(RUSAGE_THREAD, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

struct Stream {
  Channel* channel = nullptr;
  std::vector<char> memory;
  void* region = nullptr;
  void* requests[kOutstanding] = {};
  uint64_t posted = 0, finished = 0;
  bool last = false;   // the empty message that ends the channel is posted (sending) or has come
  uint64_t bytes = 0;  // done
  uint64_t bytes_at_begin = 0, bytes_in_span = 0;
};

struct Span {
  int64_t first_us = 0, begin_us = 0, end_us = 0;
  double cpu_begin_s = 0, cpu_s = 0;
};

class Transfer {
 public:
  Transfer(Net& net, const Options& options, Side& side) : net_(net), options_(options), side_(side) {
    for (Channel& channel : side.channels()) {
      Stream& stream = streams_.emplace_back();
      stream.channel = &channel;
      stream.memory.assign(options.bytes * kOutstanding, static_cast<char>(channel.index + 1));
      net.reg(channel.comm, stream.memory.data(), stream.memory.size(), &stream.region);
    }
  }

  bool run() {
    const auto limit_us = static_cast<int64_t>(1e6 * options_.timeout_seconds);
    int64_t moved_us = clock_us();
    for (;;) {
      bool all_done = true, any = false;
      for (Stream& stream : streams_) {
        if (!step(stream, &any)) return false;
        all_done &= stream.last && (stream.finished == stream.posted || !stream.channel->sending);
      }
      const int64_t now = clock_us();
      if (all_done) return true;
      if (any) moved_us = now;
      else if (now - moved_us > limit_us) return side_.fail("nothing moves", 0);
      else sched_yield();
      keep_time(now);
    }
  }

  void print(const char* role) const {
    double bytes = 0;
    std::string channels, bins;
    bool sending = true;
    for (const Stream& stream : streams_) {
      if (streams_.size() > 1 && stream.channel->sending && has_receiving()) continue;
      bytes += static_cast<double>(stream.bytes_in_span);
      channels += (channels.empty() ? "" : ", ") + std::to_string(stream.bytes_in_span);
      sending = stream.channel->sending;
    }
    for (const uint64_t each : bins_) bins += (bins.empty() ? "" : ", ") + std::to_string(each);
    const double span_s = 1e-6 * static_cast<double>(span_.end_us - span_.begin_us);
    printf("{\"role\": \"%s\", \"sending\": %s, \"bytes\": %.0f, \"span_s\": %.6f, \"cpu_s\": %.6f, ", role,
           sending ? "true" : "false", bytes, span_s, span_.cpu_s);
    printf("\"channels\": [%s], \"bin_s\": 0.1, \"bins\": [%s]}\n", channels.c_str(), bins.c_str());
    fflush(stdout);
  }

 private:
  bool has_receiving() const {
    return std::any_of(streams_.begin(), streams_.end(), [](const Stream& s) { return !s.channel->sending; });
  }

  bool step(Stream& stream, bool* any) {
    const bool sending = stream.channel->sending;
    const bool room = stream.posted - stream.finished < kOutstanding && !(stream.last && sending);
    if (room && !post(stream, any)) return false;
    if (stream.finished == stream.posted || (stream.last && !sending)) return true;
    int done = 0, size = -1;
    const Result result = net_.test(stream.requests[stream.finished % kOutstanding], &done, &size);
    if (result != kSuccess) return side_.fail(sending ? "test of a send" : "test of a receive", result);
    if (!done) return true;
    *any = true;
    stream.finished++;
    stream.bytes += static_cast<uint64_t>(size);
    if (!sending && !size) stream.last = true;
    if (!span_.first_us) start_time();
    if (bins_owner(stream)) bins_.back() += static_cast<uint64_t>(size);
    return true;
  }

  bool bins_owner(const Stream& stream) const {
    return !bins_.empty() && (!stream.channel->sending || !has_receiving());
  }

  bool post(Stream& stream, bool* any) {
    char* data = stream.memory.data() + options_.bytes * (stream.posted % kOutstanding);
    void** request = &stream.requests[stream.posted % kOutstanding];
    Channel& channel = *stream.channel;
    const bool ends = channel.sending && over_;
    const size_t bytes = ends ? 0 : options_.bytes;
    const Result result = channel.sending ? net_.isend(channel.comm, data, bytes, stream.region, request)
                                          : net_.irecv(channel.comm, data, options_.bytes, stream.region, request);
    if (result != kSuccess) return side_.fail(channel.sending ? "isend" : "irecv", result);
    if (!*request) return true;
    *any = true;
    stream.posted++;
    stream.last |= ends;
    return true;
  }

  void start_time() {
    span_.first_us = clock_us();
    bins_.push_back(0);
    printf("moving\n");
    fflush(stdout);
  }

  void keep_time(int64_t now) {
    if (!span_.first_us) return;
    const int64_t begin = span_.first_us + static_cast<int64_t>(1e6 * options_.warmup_seconds);
    const int64_t end = begin + static_cast<int64_t>(1e6 * options_.seconds);
    if (now - span_.first_us >= kBinUs * static_cast<int64_t>(bins_.size()) && !span_.end_us) bins_.push_back(0);
    if (!span_.begin_us && now >= begin) {
      span_.begin_us = now;
      span_.cpu_begin_s = thread_cpu_s();
      for (Stream& stream : streams_) stream.bytes_at_begin = stream.bytes;
    }
    if (!span_.end_us && now >= end) {
      span_.end_us = now;
      span_.cpu_s = thread_cpu_s() - span_.cpu_begin_s;
      for (Stream& stream : streams_) stream.bytes_in_span = stream.bytes - stream.bytes_at_begin;
    }
    // The other side's span may have begun a little later.
    if (now >= end + 200000) over_ = true;
  }

  Net& net_;
  const Options& options_;
  Side& side_;
  std::vector<Stream> streams_;
  Span span_;
  std::vector<uint64_t> bins_;
  bool over_ = false;
};

}  // namespace

int run_rate(Net& net, const Options& options) {
  std::vector<std::unique_ptr<Side>> sides;
  if (!open_sides(net, options, sides)) return 3;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (auto& side : sides) transfers.push_back(std::make_unique<Transfer>(net, options, *side));
  bool good[2] = {true, true};
  std::thread other;
  if (sides.size() == 2) other = std::thread([&] { good[1] = transfers[1]->run(); });
  good[0] = transfers[0]->run();
  if (other.joinable()) other.join();
  for (size_t i = 0; i < sides.size(); i++) {
    if (!good[i]) return report_failure(sides[i]->failure());
    transfers[i]->print(options.role.c_str());
  }
  // Receives that got nothing are still under way on the other side: it ends first, then stdin does.
  if (sides.size() == 1) while (getchar() != EOF) {}
  return 0;
}

}  // namespace bagua_net
