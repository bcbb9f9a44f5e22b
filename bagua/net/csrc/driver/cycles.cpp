// Modes "cycles" (set up and torn down many times, in one process) and "setup" (with a peer that is not there).

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "side.h"

namespace bagua_net {
namespace {

int count_entries(const char* folder) {
  int num = 0;
  if (DIR* open = opendir(folder)) {
    while (readdir(open)) num++;
    closedir(open);
  }
  return num;
}

// Load, connect, one message, close, unload.
bool cycle(const Options& options, Failure& failure) {
  std::string reason;
  const std::unique_ptr<Net> net = Net::load(options.plugin.c_str(), options.table, reason);
  if (!net || net->init() != kSuccess) return failure = {"init", 0}, false;
  {
    std::vector<std::unique_ptr<Side>> sides;
    if (!open_sides(*net, options, sides)) return failure = {"set-up", 0}, false;
    std::vector<char> sent(options.bytes, 'x'), got(options.bytes);
    void *send = nullptr, *receive = nullptr;
    Result result = net->isend(sides[0]->channels()[0].comm, sent.data(), sent.size(), nullptr, &send);
    void* receiver = sides[1]->channels()[0].comm;
    if (result == kSuccess) result = net->irecv(receiver, got.data(), got.size(), nullptr, &receive);
    const int64_t until = clock_us() + static_cast<int64_t>(1e6 * options.timeout_seconds);
    for (int sent_done = 0, got_done = 0; result == kSuccess && (!sent_done || !got_done);) {
      if (!sent_done) result = net->test(send, &sent_done, nullptr);
      if (!got_done && result == kSuccess) result = net->test(receive, &got_done, nullptr);
      if (clock_us() > until) return failure = {"nothing moves", 0}, false;
    }
    if (result != kSuccess || sent != got) return failure = {"message", result}, false;
    // A receive that never gets its message: closing does not wait for it.
    result = net->irecv(receiver, got.data(), got.size(), nullptr, &receive);
    if (result != kSuccess) return failure = {"irecv", result}, false;
  }
  const Result result = net->finalize();
  if (result != kSuccess) return failure = {"finalize", result}, false;
  return true;
}

}  // namespace

int run_cycles(const Options& options) {
  Failure failure;
  int fds = 0, threads = 0;
  for (int i = 0; i < options.rounds; i++) {
    if (!cycle(options, failure)) return report_failure(failure);
    if (i) continue;
    fds = count_entries("/proc/self/fd");
    threads = count_entries("/proc/self/task");
  }
  printf("{\"rounds\": %d, \"fds\": [%d, %d], \"threads\": [%d, %d]}\n", options.rounds, fds,
         count_entries("/proc/self/fd"), threads, count_entries("/proc/self/task"));
  return 0;
}

int run_setup(Net& net, const Options& options) {
  void *listener = nullptr, *comm = nullptr;
  char handle[kHandleBytes], dead[kHandleBytes];
  if (net.listen(options.device, dead, &listener) != kSuccess) return report_failure({"listen", 0});
  net.close_listen(listener);
  if (net.listen(options.device, handle, &listener) != kSuccess) return report_failure({"listen", 0});
  int64_t longest[2] = {}, refused_us = 0;
  int result = kSuccess;
  for (int i = 0; i < 100; i++) {
    const int64_t before = clock_us();
    if (net.accept(listener, &comm) != kSuccess || comm) return report_failure({"accept of nobody", 0});
    longest[0] = std::max(longest[0], clock_us() - before);
  }
  // Nobody listens there any more.
  for (const int64_t begin = clock_us(); result == kSuccess && clock_us() - begin < 5000000;) {
    const int64_t before = clock_us();
    result = net.connect(options.device, dead, &comm);
    longest[1] = std::max(longest[1], clock_us() - before);
    if (comm) return report_failure({"connect to nobody", 0});
    refused_us = clock_us() - begin;
    sched_yield();
  }
  net.close_listen(listener);
  printf("{\"accept_us\": %lld, \"connect_us\": %lld, \"refused_us\": %lld, \"result\": %d}\n",
         static_cast<long long>(longest[0]), static_cast<long long>(longest[1]), static_cast<long long>(refused_us),
         result);
  return 0;
}

}  // namespace bagua_net
