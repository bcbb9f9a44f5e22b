// A sum over all ranks in a ring, as gloo makes it: the same chunks, the same order of additions, hence the same bits.
//
// Chunk c of R begins at rank c - 1 and goes from each rank to the one before it, which adds its own, so that rank c has
// the sum in the end; from there it goes round once more. What a rank sends is one stream of chunks r + 1, r + 2, ...:
// R - 1 partial sums, then R - 1 sums. What it receives is what it sends next. So a byte that has come, and has been
// added to, may leave at once: receiving, adding and sending overlap within a chunk, in pieces of kStep bytes.
#include <stdlib.h>
#include <string.h>

#include "add.h"
#include "flow.h"

namespace {

constexpr int64_t kStep = 256 << 10;           // fits a core's cache, together with what is added to
constexpr int64_t kGlooSegment = 1024 * 1024;  // kMaxSegmentSize in gloo/allreduce.h

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t divide_up(int64_t a, int64_t by) { return a / by + (a % by != 0); }

// Where a stream is.
struct Cursor {
  int64_t block = 0;  // of 2 (R - 1)
  int64_t at = 0;     // bytes of it
  int64_t head = 0;   // bytes of the frame's header
};

class Ring : public Flow {
 public:
  Ring(Mesh* mesh, const Sum& sum, const Limits& limits, Problem* problem)
      : Flow(mesh, limits, problem), sum_(sum), size_of_(element_bytes(sum.type)), bytes_(sum.n * size_of_),
        to_((rank_ + size_ - 1) % size_), from_((rank_ + 1) % size_), blocks_(2 * (size_ - 1)) {
    // As gloo cuts it: at least two segments a rank, of at most kGlooSegment bytes, as many for each rank.
    const int64_t segments = divide_up(most(divide_up(bytes_, kGlooSegment), 2 * size_), size_);  // of a rank
    chunk_ = segments * divide_up(divide_up(bytes_, segments * size_), size_of_) * size_of_;
    for (int64_t k = 0; k < blocks_; ++k) {
      out_bytes_ += length(chunk_of(rank_ + 1 + k));
      in_bytes_ += length(chunk_of(rank_ + 2 + k));
    }
    in_.head = in_bytes_ ? 0 : kFrameBytes;
  }
  ~Ring() { free(scratch_); }

  bool allocate() {
    scratch_ = static_cast<uint8_t*>(malloc(static_cast<size_t>(kStep)));
    return Flow::allocate() && (scratch_ || fail("no memory for the scratch of a sum"));
  }

  bool involves(int r) const { return r == to_ || r == from_; }

  bool run() {
    while (true) {
      bool worked = false;
      if (!pull(&worked) || !push(&worked)) return false;
      if (in_.block == blocks_ && out_.block == blocks_) return true;
      if (worked) continue;
      // Any byte: waiting for more while the window is nearly full leaves the sender to its timer, on links with large
      // segments such as loopback.
      if (awaits_input()) expect(from_, 1);
      if (full_) expect_room(to_);
      if (!wait(true)) return false;
    }
  }

 private:
  int64_t chunk_of(int64_t k) const { return k % size_; }
  int64_t begin(int64_t chunk) const { return least(chunk * chunk_, bytes_); }
  int64_t length(int64_t chunk) const { return begin(chunk + 1) - begin(chunk); }
  bool adds() const { return in_.block < size_ - 1; }

  // -- what comes from rank + 1 ----------------------------------------------------------------------------------------

  // Up to where the block may be written: a sum must not come before the partial sum that lies there has gone.
  int64_t in_end() const {
    const int64_t whole = length(chunk_of(rank_ + 2 + in_.block)), before = in_.block + 1 - size_;
    if (adds() || out_.block > before) return whole;
    return out_.block == before ? out_.at : 0;
  }

  bool awaits_input() const {
    return in_.block < blocks_ && (in_.head < kFrameBytes || in_end() > in_.at + carry_);
  }

  bool pull(bool* worked) {
    while (in_.block < blocks_ && in_.at == length(chunk_of(rank_ + 2 + in_.block))) {
      ++in_.block;
      in_.at = 0;
    }
    if (!awaits_input()) return true;
    if (in_.head < kFrameBytes) return pull_header(worked);
    uint8_t* const x = sum_.x + begin(chunk_of(rank_ + 2 + in_.block)) + in_.at;
    uint8_t* const target = adds() ? scratch_ + carry_ : x;
    iovec part = {target, static_cast<size_t>(least(in_end() - in_.at, kStep) - carry_)};
    const ssize_t n = receive_some(from_, &part, 1);
    if (n <= 0) return n == 0;
    *worked = true;
    if (!adds()) {
      in_.at += n;
      return true;
    }
    const int64_t come = carry_ + n, whole = come / size_of_ * size_of_;
    take(x - sum_.x, whole);
    add(sum_.type, x, scratch_, whole / size_of_);
    memmove(scratch_, scratch_ + whole, static_cast<size_t>(come - whole));
    carry_ = come - whole;
    in_.at += whole;
    return true;
  }

  bool pull_header(bool* worked) {
    iovec part = {reinterpret_cast<uint8_t*>(&header_) + in_.head, static_cast<size_t>(kFrameBytes - in_.head)};
    const ssize_t n = receive_some(from_, &part, 1);
    if (n <= 0) return n == 0;
    *worked = true;
    in_.head += n;
    return in_.head < kFrameBytes || check(from_, header_, kSum, in_bytes_);
  }

  // -- what goes to rank - 1 -------------------------------------------------------------------------------------------

  // Bytes of the block that may go: what has come of it.
  int64_t ready() {
    const int64_t whole = length(chunk_of(rank_ + 1 + out_.block));
    if (out_.block == 0) {
      // Whole elements: the kernel may have taken a part of one, but nothing of it may leave before it is written.
      const int64_t more = least(whole - taken_, out_.at / size_of_ * size_of_ + kStep - taken_);
      if (more > 0) take(begin(chunk_of(rank_ + 1)) + taken_, more);
      taken_ += more > 0 ? more : 0;
      return taken_;
    }
    if (in_.block > out_.block - 1) return whole;
    return in_.block == out_.block - 1 ? in_.at : 0;
  }

  bool push(bool* worked) {
    full_ = false;
    while (out_.block < blocks_) {
      const int64_t chunk = chunk_of(rank_ + 1 + out_.block);
      if (out_.at == length(chunk)) {
        ++out_.block;
        out_.at = 0;
        continue;
      }
      const int64_t end = ready();
      if (end == out_.at) return true;
      Frame header = frame(to_, kSum, out_bytes_);
      iovec parts[2];
      const int64_t done = out_.head < kFrameBytes ? out_.head : kFrameBytes + out_.at;
      ssize_t n = send_some(to_, parts, split(&header, sum_.x + begin(chunk), done, end, parts));
      if (n < 0) return false;
      if (n == 0) {
        full_ = true;
        return true;
      }
      *worked = true;
      const int64_t head = least(n, kFrameBytes - out_.head);
      out_.head += head;
      out_.at += n - head;
    }
    return true;
  }

  // -- the summands of this rank ---------------------------------------------------------------------------------------

  // Puts `bytes` from `offset` on into x, times the factor. Each element is taken once.
  void take(int64_t offset, int64_t bytes) {
    if (!sum_.pieces) return;
    float* const x = reinterpret_cast<float*>(sum_.x);
    for (int64_t i = offset / 4, end = (offset + bytes) / 4, next; i < end; i = next) {
      if (i < sum_.pieces[piece_].lo) piece_ = 0;
      while (i >= sum_.pieces[piece_].hi) ++piece_;
      const Piece& p = sum_.pieces[piece_];
      next = least(p.hi, end);
      const float* const from = p.x + (i - p.lo);
      for (int64_t k = 0; k < next - i; ++k) x[i + k] = from[k] * sum_.factor;
    }
  }

  const Sum sum_;
  const int64_t size_of_, bytes_;
  const int to_, from_;
  const int64_t blocks_;
  int64_t chunk_ = 0;  // bytes of all but the last ones
  int64_t out_bytes_ = 0, in_bytes_ = 0;
  Cursor out_, in_;
  Frame header_;
  uint8_t* scratch_ = nullptr;
  int64_t carry_ = 0;  // bytes in scratch of an element that has not come as a whole
  int64_t taken_ = 0;  // bytes of the first block
  int64_t piece_ = 0;
  bool full_ = false;  // the socket, of sends
};

}  // namespace

int32_t bagua_mesh_sum(Mesh* mesh, const Sum* sum, const Limits* limits, Problem* problem) {
  Ring ring(mesh, *sum, *limits, problem);
  return run_on(mesh, ring, problem);
}
