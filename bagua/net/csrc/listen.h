// Setting up on the receiving side: a listening socket, and callers that have not shown yet who they are.

#pragma once

#include <memory>
#include <vector>

#include "recv.h"
#include "wire.h"

namespace bagua_net {

class Listener {
 public:
  // Fills in the handle. Null with a line in the log if the device has no usable address.
  static std::unique_ptr<Listener> make(int device, Handle& handle);

  // *comm stays null until all flows of one peer have come. Never waits.
  Result accept(std::unique_ptr<RecvComm>& comm);

 private:
  struct Caller {
    Fd fd;
    Address address;
    int64_t since_us = 0;
    size_t bytes = 0;  // read of the greeting
    Greeting greeting = {};
    bool greeted = false;
  };

  Listener() = default;
  Result take_callers();
  bool hear(Caller& caller);  // false: close it
  Result collect(std::unique_ptr<RecvComm>& comm);

  Fd fd_;
  uint16_t num_flows_ = 0;
  Secret secret_ = {};
  std::vector<Caller> callers_;  // few: only what came within the last seconds
};

}  // namespace bagua_net
