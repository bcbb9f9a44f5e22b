// What all exchanges share: frames over the sockets of a mesh, checks of what comes, and waiting.
//
// One thread does all of an exchange. What comes is read in frames whose length is known beforehand, so no memory is
// allocated for a peer's sake, and not a byte of the next exchange is touched.
#pragma once

#include <poll.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "mesh.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

// Of a frame. A peer that is in another kind of exchange is told by it.
enum Phase : uint32_t { kScatter = 0, kGather = 1, kDone = 2, kSum = 3, kSwap = 4, kVersion = 5 };

struct Frame {
  uint32_t magic, sequence, bucket, phase;
  uint64_t bytes;
};
static_assert(sizeof(Frame) == 24, "no padding on the wire");
constexpr int64_t kFrameBytes = sizeof(Frame);

class Flow {
 public:
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

 protected:
  Flow(Mesh* mesh, const Limits& limits, Problem* problem);
  ~Flow();

  bool allocate();
  template <typename... Args>
  bool fail(const char* format, Args... args) {
    tell(problem_, format, args...);
    return false;
  }
  bool lost(int r, const char* why);

  Frame frame(int r, Phase phase, int64_t bytes) const;
  bool check(int r, const Frame& header, Phase phase, int64_t bytes);

  // Bytes of the header and payload that the kernel took or gave; 0: none now, -1: a failure.
  ssize_t send_some(int r, iovec* parts, size_t num);
  ssize_t receive_some(int r, iovec* parts, size_t num);
  // What is left of header and payload once `done` bytes of both are.
  static size_t split(Frame* header, uint8_t* payload, int64_t done, int64_t bytes, iovec* parts);

  // For `wait`: who sleeps is woken when this peer's frame has `wake_bytes` more, or when its socket has room.
  void expect(int r, int wake_bytes);
  void expect_room(int r);
  // False after an error or the timeout. Then `comes` tells from whom something has come. Without `sleep` it only looks.
  bool wait(bool sleep);
  bool comes(int r) const { return polled_[r].revents & (POLLIN | POLLHUP | POLLERR); }
  // A step of work is done.
  void progress();

  Mesh* const mesh_;
  const Limits limits_;
  Problem* const problem_;
  const int rank_, size_;

 private:
  bool still_waiting();

  pollfd* polled_ = nullptr;
  int num_expected_ = 0;
  int64_t last_progress_ = 0;
  bool impatient_ = false;
};

// The body of a call. Both ends of a connection count the exchanges that involve it.
template <typename E>
int32_t run_on(Mesh* mesh, E& exchange, Problem* problem) {
  problem->text[0] = 0;
  problem->failed_step = 0;
  if (!begin_use(mesh, problem)) return -1;
  const bool done = exchange.allocate() && exchange.run();
  for (int r = 0; r < mesh->size; ++r) mesh->sequences[r] += exchange.involves(r);
  mesh->failed = mesh->failed || !done;
  end_use(mesh);
  return done ? 0 : -1;
}
