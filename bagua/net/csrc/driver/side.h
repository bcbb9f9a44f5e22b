// One process of a job as its proxy thread sees it: connections that send and connections that receive, set up and then
// moved in turn, with at most eight messages under way on each.

#pragma once

#include <string>
#include <vector>

#include "net.h"

namespace bagua_net {

struct Options {
  std::string plugin;
  std::string mode;      // rate, fuzz, cycles, setup
  std::string role;      // send, recv, both (of one connection each), or all (both processes in one)
  int table = 12;
  int channels = 1;
  size_t bytes = 512 << 10;
  double seconds = 1, warmup_seconds = 0;
  uint64_t seed = 1;
  int messages = 100;    // fuzz: on each channel
  int rounds = 100;      // cycles
  double timeout_seconds = 30;  // for setting up, and for a transfer in which nothing moves
  int device = 0;
};

struct Failure {
  const char* where = nullptr;
  int result = 0;
};

// A connection of either direction, with what a job keeps for it.
struct Channel {
  int index = 0;
  bool sending = false;
  void* listener = nullptr;
  void* comm = nullptr;
  char handle[kHandleBytes] = {};
};

constexpr int kOutstanding = 8;

class Side {
 public:
  Side(Net& net, const Options& options) : net_(net), options_(options) {}
  ~Side();
  Side(const Side&) = delete;

  // Listens for `num` connections; their handles are in channels().
  bool listen(int num);
  // Wants to connect to these handles.
  void call(const std::vector<std::string>& handles);
  // One round over what is not connected yet; *ready if all is.
  bool set_up(bool* ready);

  std::vector<Channel>& channels() { return channels_; }
  const Failure& failure() const { return failure_; }
  bool fail(const char* where, int result) {
    failure_ = {where, result};
    return false;
  }

 private:
  Net& net_;
  const Options& options_;
  std::vector<Channel> channels_;
  Failure failure_;
};

// Modes: each prints one line of JSON on stdout and returns the exit status.
int run_rate(Net& net, const Options& options);
int run_fuzz(Net& net, const Options& options);
int run_cycles(const Options& options);
int run_setup(Net& net, const Options& options);

// Makes the sides that the role asks for, exchanges handles (over stdin and stdout with another process) and waits
// until all is connected. False after a failure, which is printed.
bool open_sides(Net& net, const Options& options, std::vector<std::unique_ptr<Side>>& sides);
int report_failure(const Failure& failure);

}  // namespace bagua_net
