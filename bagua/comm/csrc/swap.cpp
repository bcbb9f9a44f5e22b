// Transfers to and from some peers at once. Each is a frame; those of one peer follow one another.
#include <stdlib.h>

#include "flow.h"

namespace {

// The transfers with one peer, in one direction.
struct Queue {
  int64_t next;  // its transfer in turn, or the number of all
  int64_t done;  // bytes of it, with the header
};

class Swap : public Flow {
 public:
  Swap(Mesh* mesh, const Transfer* sends, int64_t num_sends, const Transfer* receives, int64_t num_receives,
       const Limits& limits, Problem* problem)
      : Flow(mesh, limits, problem), sends_(sends), receives_(receives), num_sends_(num_sends),
        num_receives_(num_receives) {}
  ~Swap() {
    free(out_);
    free(headers_);
  }

  bool allocate() {
    const size_t num = static_cast<size_t>(size_);
    out_ = static_cast<Queue*>(malloc(2 * num * sizeof *out_));
    headers_ = static_cast<Frame*>(malloc(num * sizeof *headers_));
    if (!Flow::allocate() || !out_ || !headers_) return fail("no memory for transfers among %d ranks", size_);
    in_ = out_ + size_;
    if (!among_peers(sends_, num_sends_) || !among_peers(receives_, num_receives_))
      return fail("a transfer is not with one of the other %d ranks", size_ - 1);
    for (int r = 0; r < size_; ++r) {
      out_[r] = {after(-1, r, sends_, num_sends_), 0};
      in_[r] = {after(-1, r, receives_, num_receives_), 0};
    }
    return true;
  }

  bool involves(int r) const {
    return names(r, sends_, num_sends_) || names(r, receives_, num_receives_);
  }

  bool run() {
    while (true) {
      bool worked = false, done = true;
      for (int k = 1; k < size_; ++k) {
        const int to = (rank_ + k) % size_, from = (rank_ + size_ - k) % size_;
        if (!push(to, &worked) || !pull(from, &worked)) return false;
        done = done && out_[to].next == num_sends_ && in_[from].next == num_receives_;
      }
      if (done) return true;
      if (worked) continue;
      for (int r = 0; r < size_; ++r) {
        if (in_[r].next < num_receives_) expect(r, 1);
        if (out_[r].next < num_sends_) expect_room(r);
      }
      if (!wait(true)) return false;
    }
  }

 private:
  bool among_peers(const Transfer* transfers, int64_t num) const {
    for (int64_t k = 0; k < num; ++k)
      if (transfers[k].peer < 0 || transfers[k].peer >= size_ || transfers[k].peer == rank_ || transfers[k].bytes < 0)
        return false;
    return true;
  }

  // Frames without payload are not sent.
  static int64_t after(int64_t index, int r, const Transfer* transfers, int64_t num) {
    do ++index;
    while (index < num && (transfers[index].peer != r || !transfers[index].bytes));
    return index;
  }

  static bool names(int r, const Transfer* transfers, int64_t num) {
    for (int64_t k = 0; k < num; ++k)
      if (transfers[k].peer == r) return true;
    return false;
  }

  bool push(int r, bool* worked) {
    Queue& queue = out_[r];
    while (queue.next < num_sends_) {
      const Transfer& t = sends_[queue.next];
      Frame header = frame(r, kSwap, t.bytes);
      iovec parts[2];
      const ssize_t n = send_some(r, parts, split(&header, t.data, queue.done, t.bytes, parts));
      if (n <= 0) return n == 0;
      *worked = true;
      queue.done += n;
      if (queue.done < kFrameBytes + t.bytes) return true;
      queue = {after(queue.next, r, sends_, num_sends_), 0};
    }
    return true;
  }

  bool pull(int r, bool* worked) {
    Queue& queue = in_[r];
    while (queue.next < num_receives_) {
      const Transfer& t = receives_[queue.next];
      const bool had_header = queue.done >= kFrameBytes;
      iovec parts[2];
      size_t num = split(&headers_[r], t.data, queue.done, t.bytes, parts);
      if (!had_header) num = 1;  // a row of another length must not touch the payload
      const ssize_t n = receive_some(r, parts, num);
      if (n <= 0) return n == 0;
      *worked = true;
      queue.done += n;
      if (!had_header && queue.done == kFrameBytes && !check(r, headers_[r], kSwap, t.bytes)) return false;
      if (queue.done == kFrameBytes + t.bytes) queue = {after(queue.next, r, receives_, num_receives_), 0};
      if (had_header) return true;  // the other sockets are looked after in between
    }
    return true;
  }

  const Transfer* const sends_;
  const Transfer* const receives_;
  const int64_t num_sends_, num_receives_;
  Queue *out_ = nullptr, *in_ = nullptr;
  Frame* headers_ = nullptr;
};

}  // namespace

int32_t bagua_mesh_swap(Mesh* mesh, const Transfer* sends, int64_t num_sends, const Transfer* receives,
                        int64_t num_receives, const Limits* limits, Problem* problem) {
  Swap swap(mesh, sends, num_sends, receives, num_receives, *limits, problem);
  return run_on(mesh, swap, problem);
}
