// The sending side: cuts messages into slices and gives each to a flow that can take it.

#pragma once

#include <memory>
#include <vector>

#include "comm.h"
#include "path.h"
#include "wire.h"

namespace bagua_net {

class SendComm : public Comm {
 public:
  // Takes over flows that are connected and greeted. Null with a line in the log if that fails.
  static std::unique_ptr<SendComm> make(std::vector<Fd> sockets, int device, const Address& peer);
  ~SendComm() override;

  Result isend(void* data, size_t size, Request** request);
  Result progress() override;

 private:
  struct Flow {
    Fd fd;
    bool writable = true;
    Request* request = nullptr;  // whose slice is being written
    SliceHeader header;
    size_t position = 0;  // in header and slice
    uint32_t next_stripe = 0;

    uint64_t written = 0;       // bytes the socket took
    uint64_t acked_at_first = 0;
    bool state_known = false;
    SocketState state = {};     // at the last look
    double rate = 0;            // bytes per us while busy; 0: unknown
    uint64_t payload = 0;
    int64_t heard_us = 0;       // no answer was due before, or the last one came

    uint64_t first_pacing = 0;  // 0: not read yet
    SocketState paced_state = {};  // at the last look for pacing
    double best[2] = {};           // rates of this second and the last one
    int64_t best_since_us = 0;
    int64_t paced_until_us = 0;    // 0: not paced
  };

  SendComm() = default;
  bool look(int64_t now);
  void push(int64_t now);
  int pick(int level, int64_t now) const;
  bool assign(Flow& flow, int level);
  bool assign_stripe(Flow& flow, int level);
  size_t slice_of(size_t size, int level) const;
  void write(Flow& flow);
  void finish_if_complete(Request* request);
  double queued(const Flow& flow, int64_t now) const;
  void measure(int64_t now);
  void observe(Flow& flow, Sample& sample);
  void pace(Flow& flow, int64_t now);

  std::vector<Flow> flows_;
  std::shared_ptr<Path> path_;
  Events events_;
  // Messages with unassigned bytes, oldest first: a ring.
  Request* queue_[kMaxRequests] = {};
  uint32_t queue_first_ = 0, queue_size_ = 0;
  int open_slices_ = 0;
  int turn_ = 0;  // flow at which the next search begins

  int64_t sampled_us_ = 0, looked_us_ = 0, paced_us_ = 0, started_us_ = 0;
  uint64_t messages_ = 0;
};

}  // namespace bagua_net
