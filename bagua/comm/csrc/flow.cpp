#include "flow.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

namespace {

constexpr uint32_t kMagic = 0x4e414742;  // "BGAN"

int64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000 + t.tv_nsec / 1000000;
}

bool is_full_or_empty(int error) { return error == EINTR || error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

Flow::Flow(Mesh* mesh, const Limits& limits, Problem* problem)
    : mesh_(mesh), limits_(limits), problem_(problem), rank_(mesh->rank), size_(mesh->size), last_progress_(now_ms()) {}

Flow::~Flow() { free(polled_); }

bool Flow::allocate() {
  polled_ = static_cast<pollfd*>(malloc(static_cast<size_t>(size_) * sizeof *polled_));
  if (!polled_) return fail("no memory for an exchange of %d ranks", size_);
  for (int r = 0; r < size_; ++r) polled_[r] = {-1, 0, 0};
  return true;
}

bool Flow::lost(int r, const char* why) {
  if (is_cut(mesh_)) return fail("the connections of this mesh were cut");
  return fail("connection to rank %d: %s", r, why);
}

Frame Flow::frame(int r, Phase phase, int64_t bytes) const {
  return {kMagic, mesh_->sequences[r], limits_.bucket, phase, static_cast<uint64_t>(bytes)};
}

bool Flow::check(int r, const Frame& h, Phase phase, int64_t bytes) {
  if (h.magic != kMagic) return fail("rank %d sent what is no frame", r);
  if (h.sequence != mesh_->sequences[r])
    return fail("rank %d is at exchange %u of this lane, this rank at %u", r, h.sequence, mesh_->sequences[r]);
  if (h.bucket != limits_.bucket)
    return fail("rank %d exchanges bucket %u, this rank bucket %u", r, h.bucket, limits_.bucket);
  if (h.phase != phase) return fail("rank %d sent phase %u instead of %u", r, h.phase, phase);
  if (h.bytes != static_cast<uint64_t>(bytes))
    return fail("rank %d sent a row of %llu bytes instead of %lld", r, static_cast<unsigned long long>(h.bytes),
                static_cast<long long>(bytes));
  return true;
}

ssize_t Flow::send_some(int r, iovec* parts, size_t num) {
  msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = parts;
  message.msg_iovlen = num;
  const ssize_t n = sendmsg(mesh_->fds[r], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && is_full_or_empty(errno)) return 0;
  if (n < 0) lost(r, strerror(errno));
  if (n > 0) progress();
  return n;
}

ssize_t Flow::receive_some(int r, iovec* parts, size_t num) {
  msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = parts;
  message.msg_iovlen = num;
  const ssize_t n = recvmsg(mesh_->fds[r], &message, MSG_DONTWAIT);
  if (n < 0 && is_full_or_empty(errno)) return 0;
  if (n < 0) lost(r, strerror(errno));
  if (n == 0) lost(r, "closed by that rank");
  if (n <= 0) return -1;
  progress();
  impatient_ = false;
  return n;
}

size_t Flow::split(Frame* header, uint8_t* payload, int64_t done, int64_t bytes, iovec* parts) {
  size_t num = 0;
  if (done < kFrameBytes)
    parts[num++] = {reinterpret_cast<uint8_t*>(header) + done, static_cast<size_t>(kFrameBytes - done)};
  const int64_t at = done < kFrameBytes ? 0 : done - kFrameBytes;
  if (at < bytes) parts[num++] = {payload + at, static_cast<size_t>(bytes - at)};
  return num;
}

// Once nothing has come for long, any byte counts.
void Flow::expect(int r, int wake_bytes) {
  const int want = impatient_ ? 1 : wake_bytes;
  if (want != mesh_->wakes[r] && !setsockopt(mesh_->fds[r], SOL_SOCKET, SO_RCVLOWAT, &want, sizeof want))
    mesh_->wakes[r] = want;
  num_expected_ += !polled_[r].events;
  polled_[r] = {mesh_->fds[r], static_cast<short>(polled_[r].events | POLLIN), 0};
}

void Flow::expect_room(int r) {
  num_expected_ += !polled_[r].events;
  polled_[r] = {mesh_->fds[r], static_cast<short>(polled_[r].events | POLLOUT), 0};
}

bool Flow::wait(bool sleep) {
  if (!num_expected_ && sleep) return fail("the exchange waits for nothing");  // a fault of its code
  const int64_t pause = limits_.timeout_ms / 2 + 1;
  const int ready =
      poll(polled_, static_cast<nfds_t>(size_), sleep ? static_cast<int>(pause < 60000 ? pause : 60000) : 0);
  if (is_cut(mesh_)) return fail("the connections of this mesh were cut");
  if (ready < 0 && errno != EINTR) return fail("poll: %s", strerror(errno));
  const bool goes_on = ready > 0 || !sleep || still_waiting();
  for (int r = 0; r < size_; ++r) polled_[r] = {-1, 0, ready > 0 ? polled_[r].revents : static_cast<short>(0)};
  num_expected_ = 0;
  return goes_on;
}

bool Flow::still_waiting() {
  if (now_ms() - last_progress_ < limits_.timeout_ms) {
    impatient_ = now_ms() - last_progress_ >= limits_.timeout_ms / 2;
    return true;
  }
  char ranks[120] = "";
  size_t used = 0;
  for (int r = 0; r < size_ && used < sizeof ranks; ++r)
    if (polled_[r].events)
      used += static_cast<size_t>(snprintf(ranks + used, sizeof ranks - used, "%s%d", used ? ", " : "", r));
  return fail("no answer from rank %s within %g s", ranks, static_cast<double>(limits_.timeout_ms) / 1000);
}

void Flow::progress() { last_progress_ = now_ms(); }
