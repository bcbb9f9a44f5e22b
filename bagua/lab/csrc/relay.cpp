// The switch of an emulated cluster: moves ethernet frames between ports and delays them as links would.
//
// A port is a file descriptor that reads and writes one frame a call, each behind a virtio_net_hdr of 10 bytes
// (a TAP device with IFF_VNET_HDR, or a packet socket with PACKET_VNET_HDR), so that a frame may be a TSO packet
// of 64 KB. A frame is copied once in (read) and once out (write). It takes the time and counts with the bytes of the
// packets that a network card would make of it, each with headers of its own.
//
// A frame's way, in virtual time: [flow cap] -> uplink of the sender, flows served in turn (start-time fair
// queueing) -> [path of the pair of hosts, first in first out, bounded] -> latency and jitter -> downlink of the
// receiver, first in first out, bounded -> port. Each stage
// acts at the time of its event and not at the time at which the machine came to it, so a late wake-up
// costs punctuality and no throughput. The downlink starts with a frame's first byte: a large frame is
// not serialised twice.
//
// Settings and counters are 64-bit words in shared memory (control.py has the same layout).

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace {

constexpr uint64_t kAbi = 1;
constexpr int kHeaderWords = 16;
constexpr int kPortWords = 24;
constexpr int kPairWords = 6;
constexpr size_t kVnetHeader = 10;
constexpr unsigned kTcp4 = 1, kTcp6 = 4, kUdp = 5;  // VIRTIO_NET_HDR_GSO_*: frames that are to be cut
constexpr size_t kStride = 17 * 4096;  // a frame of 64 KB with its headers
constexpr size_t kFrames = 16384;      // untouched ones take no memory
constexpr size_t kFlows = 65536;
constexpr int kBatch = 16;                  // frames read from one port before the others' turn
constexpr int64_t kLate = 1000000;          // ns
constexpr double kBitsNs = 8e9;             // bits in a byte times ns in a second
constexpr uint8_t kMac[4] = {0x02, 0xba, 0x67, 0x75};

enum Header { H_ABI, H_PORTS, H_CPU_NS, H_FRAMES, H_LATE, H_LATE_MAX_NS, H_LATE_SUM_NS, H_WAKES, H_STARVED,
              H_PAIRS };
enum Setting { UP_BPS, DOWN_BPS, LATENCY_NS, JITTER_NS, LOSS, FLOW_BPS, QUEUE_BYTES, CUT };
enum Counter { SENT_BYTES = 8, RECEIVED_BYTES, SENT_FRAMES, RECEIVED_FRAMES, QUEUE_DROPS, LOSS_DROPS, CUT_DROPS,
               PORT_DROPS };
// Of a path from one host to another. 0: no limit, the latency of the hosts' links, an endless queue.
// PAIR_SHARES: 0, or 1 more than the number of the path whose bandwidth and queue this one shares.
enum Pair { PAIR_BPS, PAIR_LATENCY_NS, PAIR_QUEUE_BYTES, PAIR_BYTES, PAIR_DROPS, PAIR_SHARES };
enum Kind : uint32_t { FLOW_READY, UPLINK_FREE, ARRIVE, DELIVER };

struct Frame {
  uint32_t length;  // with the virtio header
  uint32_t bytes;   // on the wire
  uint16_t src, dst;
  uint32_t flow;
  int64_t last;  // when the last byte reaches the stage that comes next, ns
};

struct Event {
  int64_t time;
  int64_t deadline;  // nothing can be due for a port before it: until then the relay may sleep past `time`
  uint64_t serial;  // events of one time run in the order in which they were made
  Kind kind;
  uint32_t index;  // frame, or port for UPLINK_FREE
};

struct Waiting {
  double tag;
  uint64_t serial;
  uint32_t frame;
};

struct Flow {
  int64_t free = 0;     // the cap allows the next frame from then on
  int64_t arrived = 0;  // arrival of the last frame: jitter never reorders a flow
  double tag = 0;       // finish tag of the last frame in the uplink's queue
};

struct Uplink {
  bool busy = false;
  double virtual_time = 0;
  std::vector<Waiting> queue;
};

bool later(const Event& a, const Event& b) { return a.time != b.time ? a.time > b.time : a.serial > b.serial; }
bool behind(const Waiting& a, const Waiting& b) { return a.tag != b.tag ? a.tag > b.tag : a.serial > b.serial; }

int64_t clock_ns(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

class Relay {
 public:
  Relay(int ports, const int* fds, volatile uint64_t* words, uint64_t seed)
      : ports_(ports), fds_(fds, fds + ports), words_(words), random_(seed * 2654435769u + 88172645463325252u),
        flows_(kFlows), uplinks_(ports), down_free_(ports, 0), path_free_(size_t(ports) * ports, 0) {}

  bool allocate() {
    void* memory = mmap(nullptr, kFrames * kStride, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    buffers_ = static_cast<uint8_t*>(memory);
    frames_.resize(kFrames);
    for (size_t i = kFrames; i-- > 0;) free_.push_back(uint32_t(i));
    return true;
  }

  int run(int life_fd) {
    std::vector<pollfd> polled(ports_ + 1);
    for (int i = 0; i < ports_; i++) polled[i] = {fds_[i], POLLIN, 0};
    polled[ports_] = {life_fd, POLLIN, 0};
    int64_t cpu_at = 0;
    for (;;) {
      now_ = clock_ns(CLOCK_MONOTONIC);
      run_due();
      if (now_ - cpu_at > 5000000) {
        header(H_CPU_NS) = uint64_t(clock_ns(CLOCK_PROCESS_CPUTIME_ID));
        cpu_at = now_;
      }
      const bool starved = free_.size() < size_t(kBatch);
      if (starved) header(H_STARVED) = header(H_STARVED) + 1;
      for (int i = 0; i < ports_; i++) polled[i].events = starved ? 0 : POLLIN;
      int64_t wait = 100000000;
      if (!events_.empty()) {
        int64_t deadline = INT64_MAX;
        for (const Event& event : events_) deadline = std::min(deadline, event.deadline);
        wait = std::min(wait, std::max<int64_t>(deadline - clock_ns(CLOCK_MONOTONIC), 0));
      }
      const timespec timeout = {time_t(wait / 1000000000), long(wait % 1000000000)};
      const int ready = ppoll(polled.data(), nfds_t(polled.size()), &timeout, nullptr);
      header(H_WAKES) = header(H_WAKES) + 1;
      if (ready < 0 && errno != EINTR) return errno;
      if (ready <= 0) continue;
      if (polled[ports_].revents) return 0;
      for (int i = 0; i < ports_; i++) {
        if (!polled[i].revents) continue;
        if (!drain(i)) polled[i].fd = -1;
      }
    }
  }

 private:
  volatile uint64_t& header(int i) { return words_[i]; }
  volatile uint64_t& word(int port, int i) { return words_[kHeaderWords + port * kPortWords + i]; }
  volatile uint64_t& pair(int src, int dst, int i) {
    return words_[kHeaderWords + ports_ * kPortWords + (src * ports_ + dst) * kPairWords + i];
  }
  int64_t half_latency(int port) { return int64_t(word(port, LATENCY_NS) / 2); }
  int64_t latency(int src, int dst) {
    const uint64_t own = pair(src, dst, PAIR_LATENCY_NS);
    return int64_t(own ? own : (word(src, LATENCY_NS) + word(dst, LATENCY_NS)) / 2);
  }
  // No frame of `src` can reach a downlink sooner.
  int64_t least_latency(int src) {
    int64_t least = half_latency(src);
    if (!header(H_PAIRS)) return least;
    for (int dst = 0; dst < ports_; dst++) least = std::min(least, latency(src, dst));
    return least;
  }
  double loss(int port) {
    const uint64_t bits = word(port, LOSS);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  void count(int port, int i, uint64_t by = 1) { word(port, i) = word(port, i) + by; }
  uint8_t* buffer(uint32_t frame) { return buffers_ + size_t(frame) * kStride; }
  static double bytes(const Frame& f) { return double(f.bytes); }
  double random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return double(random_ >> 11) * 0x1p-53;
  }
  void drop(uint32_t frame, int port, int counter) {
    count(port, counter);
    free_.push_back(frame);
  }

  void schedule(int64_t time, Kind kind, uint32_t index, int64_t deadline) {
    events_.push_back({time, std::max(time, deadline), ++serial_, kind, index});
    std::push_heap(events_.begin(), events_.end(), later);
  }

  void run_due() {
    while (!events_.empty() && events_.front().time <= now_) {
      const Event event = events_.front();
      std::pop_heap(events_.begin(), events_.end(), later);
      events_.pop_back();
      switch (event.kind) {
        case FLOW_READY: enter_uplink(event.index, event.time); break;
        case UPLINK_FREE: next_on_uplink(int(event.index), event.time); break;
        case ARRIVE: arrive(event.index, event.time); break;
        case DELIVER: deliver(event.index, event.time); break;
      }
    }
  }

  // Reads what a port has; false if the port is gone.
  bool drain(int port) {
    for (int i = 0; i < kBatch && !free_.empty(); i++) {
      const uint32_t index = free_.back();
      const ssize_t got = read(fds_[port], buffer(index), kStride);
      if (got < 0) return errno == EAGAIN || errno == EINTR || errno == ENETDOWN || errno == ENOBUFS || errno == EIO;
      if (got < ssize_t(kVnetHeader) + 14) continue;
      free_.pop_back();
      now_ = clock_ns(CLOCK_MONOTONIC);
      run_due();
      frames_[index].length = uint32_t(got);
      frames_[index].bytes = wire_bytes(buffer(index), size_t(got));
      frames_[index].src = uint16_t(port);
      accept(index);
    }
    return true;
  }

  void accept(uint32_t index) {
    const Frame& f = frames_[index];
    const uint8_t* mac = buffer(index) + kVnetHeader;
    count(f.src, SENT_BYTES, f.bytes);
    count(f.src, SENT_FRAMES);
    header(H_FRAMES) = header(H_FRAMES) + 1;
    if (mac[0] & 1) return flood(index);
    const int dst = memcmp(mac, kMac, sizeof kMac) ? ports_ : mac[4] << 8 | mac[5];
    if (dst >= ports_) return drop(index, f.src, PORT_DROPS);
    send(index, dst);
  }

  void flood(uint32_t index) {
    const Frame f = frames_[index];
    for (int dst = 0; dst < ports_; dst++) {
      if (dst == f.src || free_.empty()) continue;
      const uint32_t copy = free_.back();
      free_.pop_back();
      frames_[copy] = f;
      memcpy(buffer(copy), buffer(index), f.length);
      send(copy, dst);
    }
    free_.push_back(index);
  }

  void send(uint32_t index, int dst) {
    Frame& f = frames_[index];
    f.dst = uint16_t(dst);
    if (word(f.src, CUT) || word(dst, CUT)) return drop(index, f.src, CUT_DROPS);
    f.flow = flow_of(buffer(index) + kVnetHeader, f.length - kVnetHeader);
    f.last = now_;
    const uint64_t a = word(f.src, FLOW_BPS), b = word(dst, FLOW_BPS);
    const uint64_t cap = a && b ? std::min(a, b) : a + b;
    if (cap == 0) return enter_uplink(index, now_);
    Flow& flow = flows_[f.flow];
    const int64_t start = std::max(now_, flow.free);
    flow.free = f.last = start + int64_t(bytes(f) * kBitsNs / double(cap));
    if (start <= now_) return enter_uplink(index, now_);
    schedule(start, FLOW_READY, index, start + least_latency(f.src));
  }

  // Bytes of the packets into which a frame behind its virtio_net_hdr is cut, all with the headers of the first.
  // The checksum of such a frame is not made yet, so the virtio_net_hdr says where its transport header begins.
  static uint32_t wire_bytes(const uint8_t* vnet, size_t got) {
    const size_t length = got - kVnetHeader;
    const unsigned kind = vnet[1] & 0x7f;
    uint16_t segment, transport;
    memcpy(&segment, vnet + 4, sizeof segment);
    memcpy(&transport, vnet + 6, sizeof transport);
    const bool udp = kind == kUdp;
    const bool tcp = kind == kTcp4 || kind == kTcp6;
    if ((!udp && !tcp) || !segment || size_t(transport) + 20 > length) return uint32_t(length);
    const size_t headers = transport + (udp ? 8 : size_t(vnet[kVnetHeader + transport + 12] >> 4) * 4);
    if (headers >= length) return uint32_t(length);
    const size_t packets = (length - headers + segment - 1) / segment;
    return uint32_t(length + (packets - 1) * headers);
  }

  // 5-tuple of TCP and UDP over IPv4 and IPv6, else the two addresses on the wire.
  static uint32_t flow_of(const uint8_t* frame, size_t length) {
    const uint8_t* from = frame;
    size_t n = 12;
    uint64_t hash = 1469598103934665603ull;
    if (length >= 38 && frame[12] == 0x08 && frame[13] == 0x00) {
      const size_t ip_header = size_t(frame[14] & 15) * 4;
      const bool fragment = (frame[20] & 0x3f) || frame[21];
      hash ^= frame[23];
      from = frame + 26;
      n = 8;
      if ((frame[23] == 6 || frame[23] == 17) && !fragment && length >= 14 + ip_header + 4) {
        for (int i = 0; i < 4; i++) hash = (hash ^ frame[14 + ip_header + i]) * 1099511628211ull;
      }
    } else if (length >= 58 && frame[12] == 0x86 && frame[13] == 0xdd) {
      hash ^= frame[20];
      from = frame + 22;
      n = (frame[20] == 6 || frame[20] == 17) ? 36 : 32;
    }
    for (size_t i = 0; i < n; i++) hash = (hash ^ from[i]) * 1099511628211ull;
    return uint32_t((hash ^ hash >> 32) % kFlows);
  }

  void enter_uplink(uint32_t index, int64_t time) {
    const Frame& f = frames_[index];
    Uplink& up = uplinks_[f.src];
    if (!word(f.src, UP_BPS) && !up.busy) return cross(index, time, std::max(time, f.last));
    Flow& flow = flows_[f.flow];
    const double tag = std::max(up.virtual_time, flow.tag);
    flow.tag = tag + bytes(f);
    if (!up.busy) {
      up.virtual_time = tag;
      return serve(index, time);
    }
    up.queue.push_back({tag, ++serial_, index});
    std::push_heap(up.queue.begin(), up.queue.end(), behind);
  }

  void next_on_uplink(int port, int64_t time) {
    Uplink& up = uplinks_[port];
    up.busy = false;
    if (up.queue.empty()) return;
    const Waiting next = up.queue.front();
    std::pop_heap(up.queue.begin(), up.queue.end(), behind);
    up.queue.pop_back();
    up.virtual_time = next.tag;
    serve(next.frame, time);
  }

  void serve(uint32_t index, int64_t time) {
    const Frame& f = frames_[index];
    const uint64_t bps = word(f.src, UP_BPS);
    const int64_t end = bps ? time + int64_t(bytes(f) * kBitsNs / double(bps)) : time;
    uplinks_[f.src].busy = true;
    schedule(end, UPLINK_FREE, f.src, end + least_latency(f.src));
    cross(index, time, std::max(end, f.last));
  }

  // The first byte leaves the uplink at `first`, the last one at `last`.
  void cross(uint32_t index, int64_t first, int64_t last) {
    Frame& f = frames_[index];
    if (const uint64_t bps = pair(f.src, f.dst, PAIR_BPS)) {
      const uint64_t shares = pair(f.src, f.dst, PAIR_SHARES);
      const size_t path = shares && shares <= path_free_.size() ? shares - 1 : size_t(f.src) * ports_ + f.dst;
      int64_t& free = path_free_[path];
      const double backlog = double(std::max<int64_t>(free - first, 0)) * double(bps) / kBitsNs;
      const uint64_t limit = pair(f.src, f.dst, PAIR_QUEUE_BYTES);
      if (limit && backlog > 0 && backlog + bytes(f) > double(limit)) {
        pair(f.src, f.dst, PAIR_DROPS) = pair(f.src, f.dst, PAIR_DROPS) + 1;
        return drop(index, f.dst, QUEUE_DROPS);
      }
      first = std::max(first, free);
      free = first + int64_t(bytes(f) * kBitsNs / double(bps));
      last = std::max(last, free);
    }
    if (header(H_PAIRS)) pair(f.src, f.dst, PAIR_BYTES) = pair(f.src, f.dst, PAIR_BYTES) + f.bytes;
    const double kept = (1 - loss(f.src)) * (1 - loss(f.dst));
    if (kept < 1 && random() >= sqrt(kept)) return drop(index, f.src, LOSS_DROPS);
    int64_t delay = latency(f.src, f.dst);
    const uint64_t jitter = (word(f.src, JITTER_NS) + word(f.dst, JITTER_NS)) / 2;
    if (jitter) delay += int64_t(random() * double(jitter));
    Flow& flow = flows_[f.flow];
    const int64_t arrival = std::max(first + delay, flow.arrived);
    flow.arrived = arrival;
    f.last = last + (arrival - first);
    if (arrival <= now_) return arrive(index, arrival);
    schedule(arrival, ARRIVE, index, f.last);
  }

  void arrive(uint32_t index, int64_t time) {
    const Frame& f = frames_[index];
    const uint64_t bps = word(f.dst, DOWN_BPS);
    int64_t due = std::max(time, f.last);
    if (bps) {
      int64_t& free = down_free_[f.dst];
      const double backlog = double(std::max<int64_t>(free - time, 0)) * double(bps) / kBitsNs;
      const uint64_t limit = word(f.dst, QUEUE_BYTES);
      if (limit && backlog > 0 && backlog + bytes(f) > double(limit)) return drop(index, f.dst, QUEUE_DROPS);
      free = std::max(time, free) + int64_t(bytes(f) * kBitsNs / double(bps));
      due = std::max(free, f.last);
    }
    if (due <= now_) return deliver(index, due);
    schedule(due, DELIVER, index, due);
  }

  void deliver(uint32_t index, int64_t due) {
    const Frame& f = frames_[index];
    if (word(f.src, CUT) || word(f.dst, CUT)) return drop(index, f.src, CUT_DROPS);
    const int64_t late = clock_ns(CLOCK_MONOTONIC) - due;
    if (late > kLate) header(H_LATE) = header(H_LATE) + 1;
    if (uint64_t(std::max<int64_t>(late, 0)) > header(H_LATE_MAX_NS)) header(H_LATE_MAX_NS) = uint64_t(late);
    header(H_LATE_SUM_NS) = header(H_LATE_SUM_NS) + uint64_t(std::max<int64_t>(late, 0));
    if (write(fds_[f.dst], buffer(index), f.length) < 0) return drop(index, f.dst, PORT_DROPS);
    count(f.dst, RECEIVED_BYTES, f.bytes);
    count(f.dst, RECEIVED_FRAMES);
    free_.push_back(index);
  }

  int ports_;
  std::vector<int> fds_;
  volatile uint64_t* words_;
  uint64_t random_;
  std::vector<Flow> flows_;
  std::vector<Uplink> uplinks_;
  std::vector<int64_t> down_free_;
  std::vector<int64_t> path_free_;
  std::vector<Event> events_;
  std::vector<Frame> frames_;
  std::vector<uint32_t> free_;  // last in first out: what was touched last is in the cache
  uint8_t* buffers_ = nullptr;
  uint64_t serial_ = 0;
  int64_t now_ = 0;
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) uint64_t bagua_lab_abi(void) { return kAbi; }

// Words of a pair of hosts, behind those of the ports.
__attribute__((visibility("default"))) int bagua_lab_pair_words(void) { return kPairWords; }

// Runs until `life_fd` has something to read or is hung up. Returns 0, or an errno.
__attribute__((visibility("default"))) int bagua_lab_relay(int ports, const int* fds, int life_fd, uint64_t* words,
                                                           uint64_t seed) {
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  Relay relay(ports, fds, words, seed);
  if (!relay.allocate()) return errno;
  return relay.run(life_fd);
}
}
