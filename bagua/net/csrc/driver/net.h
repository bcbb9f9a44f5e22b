// A plugin loaded as NCCL loads it, with one face for all versions of its table.

#pragma once

#include <memory>
#include <string>

#include "../nccl_abi.h"

namespace bagua_net {

struct DeviceFacts {
  std::string name;
  int speed_mbit = 0;
  int max_receives = 0;
};

class Net {
 public:
  // Null and a reason, if the library or its table cannot be had. The library stays loaded until the last Net is gone.
  static std::unique_ptr<Net> load(const char* path, int version, std::string& reason);
  virtual ~Net() = default;

  virtual const char* name() const = 0;
  virtual Result init() = 0;
  virtual Result finalize() = 0;
  virtual Result devices(int* num) = 0;
  virtual Result facts(int device, DeviceFacts& out) = 0;
  virtual Result listen(int device, void* handle, void** listener) = 0;
  virtual Result connect(int device, void* handle, void** comm) = 0;
  virtual Result accept(void* listener, void** comm) = 0;
  virtual Result reg(void* comm, void* data, size_t size, void** region) = 0;
  virtual Result dereg(void* comm, void* region) = 0;
  virtual Result isend(void* comm, void* data, size_t size, void* region, void** request) = 0;
  virtual Result irecv(void* comm, void* data, size_t size, void* region, void** request) = 0;
  virtual Result test(void* request, int* done, int* size) = 0;
  virtual Result close_send(void* comm) = 0;
  virtual Result close_recv(void* comm) = 0;
  virtual Result close_listen(void* listener) = 0;
};

int64_t clock_us();

}  // namespace bagua_net
