// A TCP socket of a flow: options, all of them best-effort, and what the kernel tells of it.

#pragma once

#include <stdint.h>

#include "interfaces.h"

namespace bagua_net {

// A closed-on-destruction descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

struct SocketState {
  uint64_t acked_bytes;
  uint64_t busy_us;        // with bytes on their way, since the socket was made
  uint32_t sent_segments;
  uint32_t resent_segments;
  uint32_t rtt_us;
  uint32_t unacked_segments;
  uint32_t silent_ms;      // since the last acknowledgement
  uint32_t num_probes;     // of a peer whose buffer is full, without an answer
  bool timed_out;          // in recovery from a retransmission timeout
};

// A non-blocking socket, or an empty one with errno.
Fd make_socket(int family);
// Before connect or listen: accepted sockets inherit these.
void set_flow_options(int fd);
// False where the kernel tells too little.
bool read_state(int fd, SocketState& out);
// Bytes per second; what the socket had at first is never exceeded. 0 is: as at first.
void set_pacing(int fd, uint64_t rate, uint64_t first);
uint64_t get_pacing(int fd);

}  // namespace bagua_net
