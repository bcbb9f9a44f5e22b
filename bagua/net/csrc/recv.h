// The receiving side: reads each flow's slices straight into the buffers they belong to.

#pragma once

#include <memory>
#include <vector>

#include "comm.h"
#include "wire.h"

namespace bagua_net {

class RecvComm : public Comm {
 public:
  // Takes over flows that have greeted. Null with a line in the log if that fails.
  static std::unique_ptr<RecvComm> make(std::vector<Fd> sockets, const Address& peer);

  Result irecv(void* data, size_t size, Request** request);
  Result progress() override;

 private:
  struct Flow {
    Fd fd;
    bool readable = true;
    bool ending = false;  // the peer has closed, or the connection broke: read until that shows
    bool closed = false;  // read to the end, and that was between slices
    SliceHeader header;
    size_t header_bytes = 0;     // read of it
    Request* request = nullptr;  // whose slice is being read
    size_t position = 0;         // in the slice
  };

  RecvComm() = default;
  void read(Flow& flow);
  bool begin_slice(Flow& flow);
  void end_slice(Flow& flow);
  Request* posted(uint32_t sequence);

  std::vector<Flow> flows_;
  Events events_;
  int pending_ = 0;  // requests that are not done
};

}  // namespace bagua_net
