// One exchange: every rank sends a row to each other one, combines what has come, and sends the result to all.
//
// One thread encodes the next row while the kernel sends the one before, and decodes rows as they come.
//
// With `swapped` as many frames of the same lengths are sent. The second of a rank is its own version of its row, and
// waits for nothing.
#include <stdlib.h>

#include "flow.h"

namespace {

constexpr int kWakeBytes = 128 << 10;  // wakes cost more than bytes

// What one peer and this rank have exchanged so far.
struct Peer {
  Phase phase = kScatter;  // of the frame that comes next
  int64_t got = 0;         // bytes of it, with the header
  Frame header;
  bool written = false, sent = false;  // this rank's row for it
  bool unread = false;                 // its final row has come, and was not read yet
};

class Exchange : public Flow {
 public:
  Exchange(Mesh* mesh, const Rows& rows, const Steps& steps, const Limits& limits, Problem* problem)
      : Flow(mesh, limits, problem), rows_(rows), steps_(steps), mine_(rows.bytes[mesh->rank]),
        mean_(rows.mean_bytes[mesh->rank]) {}
  ~Exchange() { free(peers_); }

  bool allocate() {
    peers_ = static_cast<Peer*>(malloc(static_cast<size_t>(size_) * sizeof *peers_));
    return Flow::allocate() && (peers_ || fail("no memory for an exchange of %d ranks", size_));
  }

  bool involves(int) const { return true; }

  bool run() {
    if (rows_.swapped && (size_ != 2 || rows_.bytes[0] != rows_.bytes[1]))
      return fail("%d ranks cannot swap rows of %lld and %lld bytes", size_, static_cast<long long>(rows_.bytes[0]),
                  static_cast<long long>(rows_.bytes[size_ - 1]));
    for (int r = 0; r < size_; ++r)
      if (!rows_.bytes[r] != !rows_.mean_bytes[r]) return fail("row %d is empty, or its mean is, but not both", r);
    for (int r = 0; r < size_; ++r) {
      peers_[r] = Peer{};
      skip_empty(r);
      peers_[r].sent = peers_[r].written = !rows_.bytes[r];
    }
    combined_ = mine_ == 0;
    while (true) {
      bool worked = false;
      if (!send(&worked) || !compute(&worked)) return false;
      if (finished()) return true;
      if (!receive(worked)) return false;
    }
  }

 private:
  int at(int turn) const { return (rank_ + 1 + turn) % size_; }

  // Where what goes to rank r is written, what is sent to all, and whether that is there.
  uint8_t* outgoing(int r) const { return rows_.rows[rows_.swapped ? rank_ : r]; }
  uint8_t* answer() const { return rows_.swapped ? rows_.peers[rank_] : rows_.means[rank_]; }
  Phase name_of(Phase phase) const { return rows_.swapped && phase == kGather ? kVersion : phase; }
  bool answered() const { return rows_.swapped ? own_written_ : combined_; }

  int64_t length_of(const Peer& peer, int r) const { return peer.phase == kScatter ? mine_ : rows_.mean_bytes[r]; }

  // Frames without payload are not sent.
  void skip_empty(int r) {
    Peer& peer = peers_[r];
    if (r == rank_) {
      peer.phase = kDone;
      return;
    }
    if (peer.phase == kScatter && !mine_) peer.phase = kGather;
    if (peer.phase == kGather && !rows_.mean_bytes[r]) peer.phase = kDone;
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
      const int64_t bytes = gather ? mean_ : rows_.bytes[r];
      if (bytes) {
        if (gather ? !answered() : !peers_[r].written) return true;
        if (!push(r, gather ? kGather : kScatter, gather ? answer() : outgoing(r), bytes, worked)) return false;
        if (blocked_ >= 0) return true;
        peers_[r].sent = peers_[r].sent || !gather;
        gathered_ += gather;
      }
      pushed_ = 0;
      ++turn_;
    }
    return true;
  }

  bool push(int r, Phase phase, uint8_t* row, int64_t bytes, bool* worked) {
    Frame header = frame(r, name_of(phase), bytes);
    iovec parts[2];
    const ssize_t n = send_some(r, parts, split(&header, row, pushed_, bytes, parts));
    if (n < 0) return false;
    pushed_ += n;
    *worked = *worked || n > 0;
    if (pushed_ < kFrameBytes + bytes) blocked_ = r;  // the kernel took what it had room for
    return true;
  }

  // -- steps -----------------------------------------------------------------------------------------------------------

  // One step at most, so that the sockets are looked after in between.
  bool compute(bool* worked) {
    for (int k = 0; k < size_ - 1; ++k) {
      const int r = at(k);
      if (peers_[r].written) continue;
      peers_[r].written = *worked = true;
      return step(steps_.write(steps_.self, r, outgoing(r)));
    }
    if (mine_ && !own_written_) {
      own_written_ = *worked = true;
      return step(steps_.write(steps_.self, rank_, rows_.peers[rank_]));
    }
    if (!combined_ && all_scattered()) {
      combined_ = own_unread_ = *worked = true;
      return rows_.swapped || step(steps_.combine(steps_.self));
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
    progress();
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

  // A final row must not come before the row that lies there has gone; swapped ones have places of their own.
  bool expects(int r) const {
    return peers_[r].phase == kScatter || (peers_[r].phase == kGather && (peers_[r].sent || rows_.swapped));
  }

  bool receive(bool worked) {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      if (expects(r)) {
        const int64_t left = kFrameBytes + length_of(peers_[r], r) - peers_[r].got;
        expect(r, left < kWakeBytes ? static_cast<int>(left) : kWakeBytes);
      }
      if (blocked_ == r) expect_room(r);
    }
    if (!wait(!worked)) return false;
    for (int r = 0; r < size_; ++r)
      if (comes(r) && expects(r) && !pull(r)) return false;
    return true;
  }

  bool pull(int r) {
    Peer& peer = peers_[r];
    const int64_t bytes = length_of(peer, r);
    uint8_t* const row = peer.phase == kScatter ? rows_.peers[r] : rows_.means[r];
    iovec parts[2];
    size_t num = split(&peer.header, row, peer.got, bytes, parts);
    // The header alone first: a row of another length must not touch the payload.
    const bool had_header = peer.got >= kFrameBytes;
    if (!had_header) num = 1;
    const ssize_t n = receive_some(r, parts, num);
    if (n <= 0) return n == 0;
    peer.got += n;
    if (!had_header) {
      if (peer.got < kFrameBytes) return true;
      return check(r, peer.header, name_of(peer.phase), bytes) && pull(r);
    }
    if (peer.got < kFrameBytes + bytes) return true;
    peer.unread = peer.phase == kGather;
    peer.phase = static_cast<Phase>(peer.phase + 1);
    peer.got = 0;
    skip_empty(r);
    return true;
  }

  const Rows rows_;
  const Steps steps_;
  const int64_t mine_, mean_;  // bytes of this rank's row, and of its mean
  Peer* peers_ = nullptr;
  int turn_ = 0;        // of all rows to send, scattered ones first
  int64_t pushed_ = 0;  // bytes of the row in turn
  int blocked_ = -1;    // the peer whose socket is full
  int gathered_ = 0;    // answers sent
  bool own_written_ = false, combined_ = false, own_unread_ = false;
};

}  // namespace

int32_t bagua_mesh_exchange(Mesh* mesh, const Rows* rows, const Steps* steps, const Limits* limits, Problem* problem) {
  Exchange exchange(mesh, *rows, *steps, *limits, problem);
  return run_on(mesh, exchange, problem);
}
