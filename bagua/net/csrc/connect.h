// Setting up on the sending side. NCCL calls connect again with the same handle until there is a connection; the
// attempt is kept under the number that the first call writes into the handle.

#pragma once

#include <memory>
#include <vector>

#include "send.h"
#include "wire.h"

namespace bagua_net {

class Attempt {
 public:
  Attempt(int device, const Handle& handle);

  // *comm stays null until all flows are connected and greeted. Never waits.
  Result proceed(std::unique_ptr<SendComm>& comm);

 private:
  struct Flow {
    Fd fd;
    bool started = false, connected = false;
    size_t bytes = 0;  // written of the greeting
    Greeting greeting = {};
  };

  Result proceed(Flow& flow);
  Result retry(Flow& flow, int error);

  const int device_;
  Address peer_;
  std::vector<Flow> flows_;
  const int64_t since_us_;
  int64_t retry_at_us_ = 0;
};

// Looks the attempt of a handle up, makes it at the first call, and forgets it at the last one.
Result connect_once(int device, void* handle, std::unique_ptr<SendComm>& comm);
void forget_attempts();

}  // namespace bagua_net
