// One exchange: every rank sends a row to each other one, combines what has come, and sends the result to all.
//
// One thread does all of it. It encodes the next row while the kernel sends the one before, and decodes rows as they
// come. What comes is read in frames whose length is known beforehand, so no memory is allocated for a peer's sake, and
// not a byte of the next exchange is touched.
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "mesh.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

namespace {

constexpr uint32_t kMagic = 0x4e414742;  // "BGAN"
constexpr int kWakeBytes = 128 << 10;    // to come before a waiting thread is woken
enum Phase : uint32_t { kScatter = 0, kGather = 1, kDone = 2 };

struct Frame {
  uint32_t magic, sequence, bucket, phase;
  uint64_t bytes;
};
static_assert(sizeof(Frame) == 24, "no padding on the wire");

// What one peer and this rank have exchanged so far.
struct Peer {
  Phase phase = kScatter;  // of the frame that comes next
  int64_t got = 0;         // bytes of it, with the header
  Frame header;
  bool written = false, sent = false;  // this rank's row for it
  bool unread = false;                 // its final row has come, and was not read yet
  int wake = 1;                        // SO_RCVLOWAT
};

int64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000 + t.tv_nsec / 1000000;
}

class Exchange {
 public:
  Exchange(Mesh* mesh, const Rows& rows, const Steps& steps, const Limits& limits, Problem* problem)
      : mesh_(mesh), rows_(rows), steps_(steps), limits_(limits), problem_(problem), rank_(mesh->rank),
        size_(mesh->size), mine_(rows.bytes[mesh->rank]) {}
  ~Exchange() {
    free(peers_);
    free(polled_);
  }

  bool run() {
    peers_ = static_cast<Peer*>(malloc(static_cast<size_t>(size_) * sizeof *peers_));
    polled_ = static_cast<pollfd*>(malloc(static_cast<size_t>(size_) * sizeof *polled_));
    if (!peers_ || !polled_) return fail("no memory for an exchange of %d ranks", size_);
    for (int r = 0; r < size_; ++r) {
      peers_[r] = Peer{};
      skip_empty(r);
      peers_[r].sent = peers_[r].written = !rows_.bytes[r];
    }
    combined_ = mine_ == 0;
    last_progress_ = now_ms();
    while (true) {
      bool worked = false;
      if (!send(&worked) || !compute(&worked)) return false;
      if (finished()) return true;
      if (!receive(worked)) return false;
    }
  }

 private:
  template <typename... Args>
  bool fail(const char* format, Args... args) {
    tell(problem_, format, args...);
    return false;
  }

  int at(int turn) const { return (rank_ + 1 + turn) % size_; }

  int64_t length_of(const Peer& peer, int r) const { return peer.phase == kScatter ? mine_ : rows_.bytes[r]; }

  // Frames without payload are not sent.
  void skip_empty(int r) {
    Peer& peer = peers_[r];
    if (r == rank_) {
      peer.phase = kDone;
      return;
    }
    if (peer.phase == kScatter && !mine_) peer.phase = kGather;
    if (peer.phase == kGather && !rows_.bytes[r]) peer.phase = kDone;
  }

  bool finished() const {
    if (!combined_ || gathered_ < (mine_ ? size_ - 1 : 0)) return false;
    for (int r = 0; r < size_; ++r)
      if (peers_[r].phase != kDone || peers_[r].unread || !(r == rank_ || peers_[r].sent)) return false;
    return !own_unread_;
  }

  // -- sending: to rank + 1 first and one peer at a time, so that no receiver has all senders at once ------------------

  // False after an error. Returns when the socket is full or nothing is left to send.
  bool send(bool* worked) {
    blocked_ = -1;
    while (turn_ < 2 * (size_ - 1)) {
      const bool gather = turn_ >= size_ - 1;
      const int r = at(turn_ % (size_ - 1));
      const int64_t bytes = gather ? mine_ : rows_.bytes[r];
      if (bytes) {
        if (gather ? !combined_ : !peers_[r].written) return true;
        if (!push(r, gather ? kGather : kScatter, gather ? rows_.rows[rank_] : rows_.rows[r], bytes, worked)) return false;
        if (blocked_ >= 0) return true;
        peers_[r].sent = peers_[r].sent || !gather;
        gathered_ += gather;
      }
      pushed_ = 0;
      ++turn_;
    }
    return true;
  }

  bool push(int r, Phase phase, const uint8_t* row, int64_t bytes, bool* worked) {
    Frame header = {kMagic, mesh_->sequence, limits_.bucket, phase, static_cast<uint64_t>(bytes)};
    const int64_t all = static_cast<int64_t>(sizeof header) + bytes;
    while (pushed_ < all) {
      iovec parts[2];
      msghdr message;
      memset(&message, 0, sizeof message);
      message.msg_iov = parts;
      message.msg_iovlen = split(&header, const_cast<uint8_t*>(row), pushed_, bytes, parts);
      const ssize_t n = sendmsg(mesh_->fds[r], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        blocked_ = r;
        return true;
      }
      if (n < 0) return lost(r, strerror(errno));
      pushed_ += n;
      *worked = true;
      last_progress_ = now_ms();
      if (pushed_ < all) {
        blocked_ = r;  // the kernel took what it had room for
        return true;
      }
    }
    return true;
  }

  static size_t split(Frame* header, uint8_t* payload, int64_t done, int64_t bytes, iovec* parts) {
    const int64_t head = static_cast<int64_t>(sizeof *header);
    size_t num = 0;
    if (done < head) parts[num++] = {reinterpret_cast<uint8_t*>(header) + done, static_cast<size_t>(head - done)};
    const int64_t at = done < head ? 0 : done - head;
    parts[num++] = {payload + at, static_cast<size_t>(bytes - at)};
    return num;
  }

  // -- steps -----------------------------------------------------------------------------------------------------------

  // One step at most, so that the sockets are looked after in between.
  bool compute(bool* worked) {
    for (int k = 0; k < size_ - 1; ++k) {
      const int r = at(k);
      if (peers_[r].written) continue;
      peers_[r].written = *worked = true;
      return step(steps_.write(steps_.self, r, rows_.rows[r]));
    }
    if (mine_ && !own_written_) {
      own_written_ = *worked = true;
      return step(steps_.write(steps_.self, rank_, rows_.peers[rank_]));
    }
    if (!combined_ && all_scattered()) {
      combined_ = own_unread_ = *worked = true;
      return step(steps_.combine(steps_.self));
    }
    if (own_unread_) {
      own_unread_ = false;
      *worked = true;
      return step(steps_.read(steps_.self, rank_));
    }
    for (int k = size_ - 2; k >= 0; --k) {
      const int r = at(k);
      if (!peers_[r].unread) continue;
      peers_[r].unread = false;
      *worked = true;
      return step(steps_.read(steps_.self, r));
    }
    return true;
  }

  bool step(int32_t result) {
    last_progress_ = now_ms();
    if (!result) return true;
    problem_->failed_step = result;
    return fail("a step of the exchange failed");
  }

  bool all_scattered() const {
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && peers_[r].phase == kScatter) return false;
    return true;
  }

  // -- receiving -------------------------------------------------------------------------------------------------------

  // A final row must not come before the row that lies there has gone.
  bool expects(int r) const {
    return peers_[r].phase == kScatter || (peers_[r].phase == kGather && peers_[r].sent);
  }

  bool receive(bool worked) {
    int num = 0;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const int events = (expects(r) ? POLLIN : 0) | (blocked_ == r ? POLLOUT : 0);
      if (!events) continue;
      if (events & POLLIN) wake_at(r);
      polled_[num++] = {mesh_->fds[r], static_cast<short>(events), 0};
    }
    if (!num) return worked || fail("the exchange waits for nothing");  // a fault of this file
    const int64_t pause = limits_.timeout_ms / 2 + 1;
    const int ready = poll(polled_, static_cast<nfds_t>(num), worked ? 0 : static_cast<int>(pause < 60000 ? pause : 60000));
    if (is_cut(mesh_)) return fail("the connections of this mesh were cut");
    if (ready < 0 && errno != EINTR) return fail("poll: %s", strerror(errno));
    if (ready <= 0) return worked || still_waiting();
    for (int k = 0, r = 0; k < num; ++k, ++r) {
      while (mesh_->fds[r] != polled_[k].fd) ++r;
      if ((polled_[k].revents & (POLLIN | POLLHUP | POLLERR)) && expects(r) && !pull(r)) return false;
    }
    return true;
  }

  // Wakes cost more than bytes. Once nothing has come for long, any byte counts.
  void wake_at(int r) {
    Peer& peer = peers_[r];
    const int64_t left = static_cast<int64_t>(sizeof(Frame)) + length_of(peer, r) - peer.got;
    const int want = impatient_ ? 1 : static_cast<int>(left < kWakeBytes ? left : kWakeBytes);
    if (want == peer.wake) return;
    if (!setsockopt(mesh_->fds[r], SOL_SOCKET, SO_RCVLOWAT, &want, sizeof want)) peer.wake = want;
  }

  bool still_waiting() {
    if (now_ms() - last_progress_ < limits_.timeout_ms) {
      impatient_ = now_ms() - last_progress_ >= limits_.timeout_ms / 2;
      return true;
    }
    char ranks[120] = "";
    size_t used = 0;
    for (int r = 0; r < size_ && used < sizeof ranks; ++r)
      if (r != rank_ && (expects(r) || blocked_ == r))
        used += static_cast<size_t>(snprintf(ranks + used, sizeof ranks - used, "%s%d", used ? ", " : "", r));
    return fail("no answer from rank %s within %g s", ranks, static_cast<double>(limits_.timeout_ms) / 1000);
  }

  bool pull(int r) {
    Peer& peer = peers_[r];
    const int64_t bytes = length_of(peer, r), all = static_cast<int64_t>(sizeof(Frame)) + bytes;
    uint8_t* const row = peer.phase == kScatter ? rows_.peers[r] : rows_.rows[r];
    iovec parts[2];
    msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = parts;
    // The header alone first: a row of another length must not touch the payload.
    message.msg_iovlen = split(&peer.header, row, peer.got, bytes, parts);
    if (peer.got < static_cast<int64_t>(sizeof(Frame))) message.msg_iovlen = 1;
    const ssize_t n = recvmsg(mesh_->fds[r], &message, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (n < 0) return lost(r, strerror(errno));
    if (n == 0) return lost(r, "it has closed the connection");
    const bool had_header = peer.got >= static_cast<int64_t>(sizeof(Frame));
    peer.got += n;
    last_progress_ = now_ms();
    impatient_ = false;
    if (!had_header) {
      if (peer.got < static_cast<int64_t>(sizeof(Frame))) return true;
      return check(r, bytes) && pull(r);
    }
    if (peer.got < all) return true;
    peer.unread = peer.phase == kGather;
    peer.phase = static_cast<Phase>(peer.phase + 1);
    peer.got = 0;
    skip_empty(r);
    return true;
  }

  bool check(int r, int64_t bytes) {
    const Frame& h = peers_[r].header;
    if (h.magic != kMagic) return fail("rank %d sent what is no frame", r);
    if (h.sequence != mesh_->sequence)
      return fail("rank %d is at exchange %u of this lane, this rank at %u", r, h.sequence, mesh_->sequence);
    if (h.bucket != limits_.bucket)
      return fail("rank %d exchanges bucket %u, this rank bucket %u", r, h.bucket, limits_.bucket);
    if (h.phase != peers_[r].phase) return fail("rank %d sent phase %u instead of %u", r, h.phase, peers_[r].phase);
    if (h.bytes != static_cast<uint64_t>(bytes))
      return fail("rank %d sent a row of %llu bytes instead of %lld", r, static_cast<unsigned long long>(h.bytes),
                  static_cast<long long>(bytes));
    return true;
  }

  bool lost(int r, const char* why) {
    if (is_cut(mesh_)) return fail("the connections of this mesh were cut");
    return fail("connection to rank %d: %s", r, why);
  }

  Mesh* const mesh_;
  const Rows rows_;
  const Steps steps_;
  const Limits limits_;
  Problem* const problem_;
  const int rank_, size_;
  const int64_t mine_;
  Peer* peers_ = nullptr;
  pollfd* polled_ = nullptr;
  int turn_ = 0;        // of all rows to send, scattered ones first
  int64_t pushed_ = 0;  // bytes of the row in turn
  int blocked_ = -1;    // the peer whose socket is full
  int gathered_ = 0;    // answers sent
  bool own_written_ = false, combined_ = false, own_unread_ = false, impatient_ = false;
  int64_t last_progress_ = 0;
};

}  // namespace

int32_t bagua_mesh_exchange(Mesh* mesh, const Rows* rows, const Steps* steps, const Limits* limits, Problem* problem) {
  problem->text[0] = 0;
  problem->failed_step = 0;
  if (!begin_use(mesh, problem)) return -1;
  const bool done = Exchange(mesh, *rows, *steps, *limits, problem).run();
  ++mesh->sequence;
  mesh->failed = mesh->failed || !done;
  end_use(mesh);
  return done ? 0 : -1;
}
