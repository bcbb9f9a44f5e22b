// Mode "fuzz": messages of all sizes at unsteady moments, every byte of them compared, and every byte around them.

#include <sched.h>
#include <stdio.h>
#include <string.h>

#include <thread>

#include "side.h"

namespace bagua_net {
namespace {

constexpr size_t kGuard = 64;
constexpr char kUntouched = '\xa5';
constexpr size_t kSizes[] = {0, 1, 127, 128, 129, 4095, 65535, 65536, 65537, 524288, 4194304, 16777216};
constexpr uint64_t kShares[] = {12, 10, 10, 12, 10, 10, 9, 9, 9, 6, 2, 1};  // of 100

struct Random {  // xorshift64*
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {
    if (!state) state = 1;
    for (int i = 0; i < 4; i++) next();
  }
  uint64_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
  }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

uint64_t message_seed(uint64_t seed, int channel, uint64_t number) {
  return seed * 1000003 + static_cast<uint64_t>(channel) * 7919 + number + 1;
}

// Both sides know what each message is.
size_t message_size(uint64_t seed, int channel, uint64_t number) {
  Random random(message_seed(seed, channel, number));
  uint64_t left = random.below(100);
  for (size_t i = 0;; i++) {
    if (left < kShares[i]) return kSizes[i];
    left -= kShares[i];
  }
}

void fill_message(char* out, size_t size, uint64_t seed) {
  Random random(~seed);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random.next();
    memcpy(out + i, &word, std::min<size_t>(8, size - i));
  }
}

struct Message {
  void* request = nullptr;
  std::vector<char> memory;
  size_t size = 0, posted = 0;  // of the message, of the buffer
  uint64_t number = 0;
  void* region = nullptr;
};

struct Stream {
  Channel* channel = nullptr;
  std::vector<Message> open;
  uint64_t posted = 0, finished = 0, refused = 0, bytes = 0;
};

class Fuzz {
 public:
  Fuzz(Net& net, const Options& options, Side& side, uint64_t salt)
      : net_(net), options_(options), side_(side), random_(options.seed * 31 + salt) {
    for (Channel& channel : side.channels()) streams_.emplace_back().channel = &channel;
  }

  bool run() {
    const auto total = static_cast<uint64_t>(options_.messages);
    const auto limit_us = static_cast<int64_t>(1e6 * options_.timeout_seconds);
    int64_t moved_us = clock_us();
    for (;;) {
      bool all_done = true, any = false;
      for (Stream& stream : streams_) {
        // Up to 40 at once: more than a connection takes, so that it has to refuse.
        if (stream.posted < total && stream.open.size() < 40 && random_.below(4) && !post(stream, &any)) return false;
        if (!stream.open.empty() && random_.below(3) && !test(stream, &any)) return false;
        all_done &= stream.finished == total;
      }
      const int64_t now = clock_us();
      if (all_done) return true;
      if (any) moved_us = now;
      else if (now - moved_us > limit_us) return side_.fail("nothing moves", 0);
      if (!random_.below(2000)) pause_until_us_ = now + static_cast<int64_t>(random_.below(3000));
      while (clock_us() < pause_until_us_) sched_yield();
      if (!any) sched_yield();
    }
  }

  const std::vector<Stream>& streams() const { return streams_; }

 private:
  bool post(Stream& stream, bool* any) {
    Channel& channel = *stream.channel;
    Message message;
    message.number = stream.posted;
    message.size = message_size(options_.seed, channel.index, message.number);
    const uint64_t seed = message_seed(options_.seed, channel.index, message.number);
    message.posted = message.size + (channel.sending || seed % 2 ? 0 : seed % 5000);
    message.memory.assign(message.posted + 2 * kGuard, kUntouched);
    char* data = message.memory.data() + kGuard;
    if (channel.sending) fill_message(data, message.size, seed);
    net_.reg(channel.comm, data, message.posted, &message.region);
    void* comm = channel.comm;
    const Result result = channel.sending ? net_.isend(comm, data, message.size, message.region, &message.request)
                                          : net_.irecv(comm, data, message.posted, message.region, &message.request);
    if (result != kSuccess) return side_.fail(channel.sending ? "isend" : "irecv", result);
    if (!message.request) return stream.refused++, true;
    *any = true;
    stream.posted++;
    stream.open.push_back(std::move(message));
    return true;
  }

  bool test(Stream& stream, bool* any) {
    // Mostly the oldest, as NCCL does; sometimes another.
    const size_t which = random_.below(8) ? 0 : random_.below(stream.open.size());
    Message& message = stream.open[which];
    const bool sending = stream.channel->sending;
    int done = 0, sizes[2] = {-7, -7};
    const Result result = net_.test(message.request, &done, random_.below(16) ? sizes : nullptr);
    if (result != kSuccess) return side_.fail("test", result);
    if (!done) return true;
    *any = true;
    if (sizes[0] != -7 && sizes[0] != static_cast<int>(message.size)) return side_.fail("wrong size", sizes[0]);
    if (sizes[1] != -7) return side_.fail("test wrote behind the size", sizes[1]);
    if (!sending && !intact(stream, message)) return false;
    // What is done is the caller's again: whoever still reads a sent buffer sends this.
    if (sending) std::fill(message.memory.begin(), message.memory.end(), '\xee');
    net_.dereg(stream.channel->comm, message.region);
    stream.bytes += message.size;
    stream.finished++;
    stream.open.erase(stream.open.begin() + static_cast<std::ptrdiff_t>(which));
    return true;
  }

  bool intact(const Stream& stream, const Message& message) {
    expected_.assign(message.memory.size(), kUntouched);
    const uint64_t seed = message_seed(options_.seed, stream.channel->index, message.number);
    fill_message(expected_.data() + kGuard, message.size, seed);
    if (!memcmp(expected_.data(), message.memory.data(), expected_.size())) return true;
    return side_.fail("wrong bytes", static_cast<int>(message.number));
  }

  Net& net_;
  const Options& options_;
  Side& side_;
  Random random_;
  std::vector<Stream> streams_;
  std::vector<char> expected_;
  int64_t pause_until_us_ = 0;
};

}  // namespace

int run_fuzz(Net& net, const Options& options) {
  std::vector<std::unique_ptr<Side>> sides;
  if (!open_sides(net, options, sides)) return 3;
  std::vector<std::unique_ptr<Fuzz>> runs;
  for (auto& side : sides) runs.push_back(std::make_unique<Fuzz>(net, options, *side, runs.size()));
  bool good[2] = {true, true};
  std::thread other;
  if (sides.size() == 2) other = std::thread([&] { good[1] = runs[1]->run(); });
  good[0] = runs[0]->run();
  if (other.joinable()) other.join();
  uint64_t messages = 0, bytes = 0, refused = 0;
  for (size_t i = 0; i < sides.size(); i++) {
    if (!good[i]) return report_failure(sides[i]->failure());
    for (const Stream& stream : runs[i]->streams()) {
      refused += stream.refused;
      if (!stream.channel->sending) messages += stream.finished, bytes += stream.bytes;
    }
  }
  printf("{\"messages\": %llu, \"bytes\": %llu, \"refused\": %llu}\n", static_cast<unsigned long long>(messages),
         static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(refused));
  return 0;
}

}  // namespace bagua_net
