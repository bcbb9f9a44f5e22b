// A connection: one direction, several flows. One thread at a time uses it; different connections share nothing but a
// Path. There are no threads here: bytes move inside isend, irecv and test.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "nccl_abi.h"
#include "socket.h"

namespace bagua_net {

class Comm;

struct Request {
  Comm* comm = nullptr;
  bool used = false;
  bool done = false;
  uint32_t sequence = 0;
  char* data = nullptr;
  size_t size = 0;      // of the message; of the buffer until a receiver learns it
  size_t assigned = 0;  // bytes that slices cover
  size_t moved = 0;     // bytes that are written or read
  uint32_t taken = 0;   // sender: slices so far; in stripes: flows that have theirs, as bits
  bool known = false;   // receiver: size is the message's
};

class Comm {
 public:
  virtual ~Comm() = default;
  // Moves what can be moved; the result is the connection's error, if it has one.
  virtual Result progress() = 0;

  // Sets *done, and *size if size is not null; a request that is done is free again.
  Result test(Request* request, int* done, int* size);

 protected:
  Comm() = default;
  // Null if all are in use.
  Request* take_request(void* data, size_t size);
  // Logs, and from now on every call fails.
  Result fail(const char* what, int error = 0);

  Request requests_[kMaxRequests];
  uint32_t next_sequence_ = 0;
  Result error_ = kSuccess;
  char peer_[64] = "";
};

// Waits for no one: events of a set of descriptors, each reported once a change (edge-triggered).
class Events {
 public:
  bool open();
  bool add(int fd, int index, bool for_output);
  // Calls `seen(index, epoll events)` for each; false on failure.
  template <typename F>
  bool poll(F seen) {
    int indices[kMax];
    uint32_t masks[kMax];
    const int num = fetch(indices, masks);
    for (int i = 0; i < num; i++) seen(indices[i], masks[i]);
    return num >= 0;
  }

 private:
  static constexpr int kMax = 32;
  int fetch(int* indices, uint32_t* masks);
  Fd fd_;
};

}  // namespace bagua_net
