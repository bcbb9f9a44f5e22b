#include "side.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

namespace bagua_net {
namespace {

std::string to_hex(const char* bytes, size_t num) {
  static const char digits[] = "0123456789abcdef";
  std::string made;
  for (size_t i = 0; i < num; i++) {
    made += digits[static_cast<unsigned char>(bytes[i]) >> 4];
    made += digits[bytes[i] & 15];
  }
  return made;
}

std::string from_hex(const std::string& text) {
  std::string made;
  for (size_t i = 0; i + 1 < text.size(); i += 2) made += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return made;
}

// The other process's handles, one line each.
std::vector<std::string> read_handles(int num) {
  std::vector<std::string> made;
  char line[4 * kHandleBytes];
  while (static_cast<int>(made.size()) < num && fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    if (strlen(line) == 2 * kHandleBytes) made.push_back(from_hex(line));
  }
  return made;
}

std::vector<std::string> handles_of(Side& side) {
  std::vector<std::string> made;
  for (const Channel& channel : side.channels())
    if (!channel.sending) made.emplace_back(channel.handle, kHandleBytes);
  return made;
}

}  // namespace

Side::~Side() {
  for (Channel& channel : channels_) {
    if (channel.comm && channel.sending) net_.close_send(channel.comm);
    if (channel.comm && !channel.sending) net_.close_recv(channel.comm);
    if (channel.listener) net_.close_listen(channel.listener);
  }
}

bool Side::listen(int num) {
  for (int i = 0; i < num; i++) {
    Channel channel;
    channel.index = i;
    const Result result = net_.listen(options_.device, channel.handle, &channel.listener);
    if (result != kSuccess) return fail("listen", result);
    channels_.push_back(channel);
  }
  return true;
}

void Side::call(const std::vector<std::string>& handles) {
  int index = 0;
  for (const std::string& handle : handles) {
    Channel channel;
    channel.index = index++;
    channel.sending = true;
    memcpy(channel.handle, handle.data(), kHandleBytes);
    channels_.push_back(channel);
  }
}

bool Side::set_up(bool* ready) {
  *ready = true;
  for (Channel& channel : channels_) {
    if (channel.comm) continue;
    const Result result = channel.sending ? net_.connect(options_.device, channel.handle, &channel.comm)
                                          : net_.accept(channel.listener, &channel.comm);
    if (result != kSuccess) return fail(channel.sending ? "connect" : "accept", result);
    if (!channel.comm) *ready = false;
  }
  return true;
}

bool open_sides(Net& net, const Options& options, std::vector<std::unique_ptr<Side>>& sides) {
  const bool here = options.role == "all";
  const auto make = [&] { return sides.emplace_back(std::make_unique<Side>(net, options)).get(); };
  Side* first = make();
  if (here) {
    Side* second = make();
    if (!second->listen(options.channels)) return report_failure(second->failure()), false;
    first->call(handles_of(*second));
  } else {
    if (options.role != "send" && !first->listen(options.channels)) return report_failure(first->failure()), false;
    for (const std::string& handle : handles_of(*first)) printf("%s\n", to_hex(handle.data(), handle.size()).c_str());
    fflush(stdout);
    if (options.role != "recv") {
      const std::vector<std::string> handles = read_handles(options.channels);
      if (static_cast<int>(handles.size()) < options.channels) return report_failure({"handles", 0}), false;
      first->call(handles);
    }
  }
  const int64_t until = clock_us() + static_cast<int64_t>(1e6 * options.timeout_seconds);
  for (bool all = false; !all;) {
    all = true;
    for (auto& side : sides) {
      bool ready = false;
      if (!side->set_up(&ready)) return report_failure(side->failure()), false;
      all &= ready;
    }
    if (!all && clock_us() > until) return report_failure({"set-up took too long", 0}), false;
    if (!all) sched_yield();
  }
  return true;
}

int report_failure(const Failure& failure) {
  printf("{\"error\": \"%s\", \"result\": %d}\n", failure.where, failure.result);
  fflush(stdout);
  return 3;
}

}  // namespace bagua_net
