#include "socket.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "settings.h"

#ifndef SO_MAX_PACING_RATE
#define SO_MAX_PACING_RATE 47
#endif
#ifndef TCP_NOTSENT_LOWAT
#define TCP_NOTSENT_LOWAT 25
#endif
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44  // Linux 6.15
#endif

namespace bagua_net {
namespace {

constexpr uint8_t kStateLoss = 4;

// The kernel's struct tcp_info as far as it is read here; the C library's own may end earlier.
struct TcpInfo {
  uint8_t state, ca_state, retransmits, probes, backoff, options, scales, flags;
  uint32_t rto, ato, snd_mss, rcv_mss;
  uint32_t unacked, sacked, lost, retrans, fackets;
  uint32_t last_data_sent, last_ack_sent, last_data_recv, last_ack_recv;
  uint32_t pmtu, rcv_ssthresh, rtt, rttvar, snd_ssthresh, snd_cwnd, advmss, reordering;
  uint32_t rcv_rtt, rcv_space, total_retrans;
  uint64_t pacing_rate, max_pacing_rate, bytes_acked, bytes_received;
  uint32_t segs_out, segs_in, notsent_bytes, min_rtt, data_segs_in, data_segs_out;
  uint64_t delivery_rate, busy_time;
};
static_assert(offsetof(TcpInfo, total_retrans) == 100 && offsetof(TcpInfo, bytes_acked) == 120);
static_assert(offsetof(TcpInfo, data_segs_out) == 156 && offsetof(TcpInfo, busy_time) == 168);

void set(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

Fd make_socket(int family) { return Fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

void set_flow_options(int fd) {
  const Settings& chosen = settings();
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  if (chosen.lowat_bytes) set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, chosen.lowat_bytes);
  if (chosen.buffer_bytes) {
    set(fd, SOL_SOCKET, SO_SNDBUF, chosen.buffer_bytes);
    set(fd, SOL_SOCKET, SO_RCVBUF, chosen.buffer_bytes);
  }
  if (*chosen.congestion)
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, chosen.congestion, static_cast<socklen_t>(strlen(chosen.congestion)));
  // Keepalive finds out who waits for bytes; who sends finds out by asking the socket. TCP_USER_TIMEOUT would end
  // connections to a living peer that takes its time to post a receive: it counts a closed window too.
  if (const int seconds = chosen.timeout_ms / 1000) {
    const int interval = std::max(1, seconds / 6), num = std::clamp((seconds - 1) / interval, 1, 4);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds - num * interval));
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, num);
    set(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, std::max(1000, 250 * seconds));  // a network that is back is found soon
  }
}

bool read_state(int fd, SocketState& out) {
  TcpInfo info;
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) || size < sizeof info) return false;
  out.acked_bytes = info.bytes_acked;
  out.busy_us = info.busy_time;
  out.sent_segments = info.data_segs_out;
  out.resent_segments = info.total_retrans;
  out.rtt_us = info.rtt;
  out.unacked_segments = info.unacked;
  out.silent_ms = info.last_ack_recv;
  out.num_probes = info.probes;
  out.timed_out = info.ca_state == kStateLoss;
  return true;
}

uint64_t get_pacing(int fd) {
  uint64_t rate = 0;
  socklen_t size = sizeof rate;
  if (getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &size)) return ~uint64_t{0};
  if (size == sizeof(uint32_t)) {
    const uint32_t half = static_cast<uint32_t>(rate);
    return half == ~uint32_t{0} ? ~uint64_t{0} : half;
  }
  return rate;
}

void set_pacing(int fd, uint64_t rate, uint64_t first) {
  if (!rate || rate > first) rate = first;
  if (setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate)) {
    const uint32_t half = rate > ~uint32_t{0} ? ~uint32_t{0} : static_cast<uint32_t>(rate);
    setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &half, sizeof half);
  }
}

}  // namespace bagua_net
