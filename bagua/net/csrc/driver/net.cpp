#include "net.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

namespace bagua_net {
namespace {

void log_to_stderr(int level, unsigned long, const char* file, int line, const char* format, ...) {
  static const bool all = getenv("BAGUA_NET_DRIVER_LOG") != nullptr;
  if (level > kLogWarn && !all) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "%s %s:%d %s\n", level <= kLogWarn ? "WARN" : "INFO", file, line, text);
}

struct Closer {
  void operator()(void* library) const { dlclose(library); }
};

template <typename Table, typename Properties, int version>
class Loaded : public Net {
 public:
  Loaded(std::unique_ptr<void, Closer> library, const Table* table) : library_(std::move(library)), table_(table) {}

  const char* name() const override { return table_->name; }

  Result init() override {
    if constexpr (version >= 11) {
      CommConfig config = {-1};
      return table_->init(&context_, 17, &config, log_to_stderr, nullptr);
    } else if constexpr (version == 10) {
      return table_->init(log_to_stderr, nullptr);
    } else {
      return table_->init(log_to_stderr);
    }
  }

  Result finalize() override {
    if constexpr (version >= 11) return table_->finalize(context_);
    else return kSuccess;
  }

  Result devices(int* num) override { return table_->devices(num); }

  Result facts(int device, DeviceFacts& out) override {
    Properties properties;
    const Result result = table_->get_properties(device, &properties);
    if (result == kSuccess) out = {properties.name, properties.speed_mbit, properties.max_receives};
    return result;
  }

  Result listen(int device, void* handle, void** listener) override {
    if constexpr (version >= 11) return table_->listen(context_, device, handle, listener);
    else return table_->listen(device, handle, listener);
  }

  Result connect(int device, void* handle, void** comm) override {
    DeviceHandle* offload = nullptr;
    if constexpr (version >= 11) {
      return table_->connect(context_, device, handle, comm, &offload);
    } else if constexpr (version == 10) {
      CommConfig config = {-1};
      return table_->connect(device, &config, handle, comm, &offload);
    } else if constexpr (version == 8) {
      return table_->connect(device, handle, comm, &offload);
    } else {
      return table_->connect(device, handle, comm);
    }
  }

  Result accept(void* listener, void** comm) override {
    DeviceHandle* offload = nullptr;
    if constexpr (version >= 8) return table_->accept(listener, comm, &offload);
    else return table_->accept(listener, comm);
  }

  Result reg(void* comm, void* data, size_t size, void** region) override {
    if constexpr (version >= 8) return table_->reg_mr(comm, data, size, kPointerHost, region);
    else return table_->reg_mr(comm, data, static_cast<int>(size), kPointerHost, region);
  }

  Result dereg(void* comm, void* region) override { return table_->dereg_mr(comm, region); }

  Result isend(void* comm, void* data, size_t size, void* region, void** request) override {
    if constexpr (version >= 10) return table_->isend(comm, data, size, 5, region, nullptr, request);
    else return table_->isend(comm, data, static_cast<int>(size), 5, region, request);
  }

  Result irecv(void* comm, void* data, size_t size, void* region, void** request) override {
    int tag = 5;
    *request = reinterpret_cast<void*>(1);  // the hint that NCCL may leave there
    if constexpr (version >= 10) {
      void* parent = nullptr;
      return table_->irecv(comm, 1, &data, &size, &tag, &region, &parent, request);
    } else {
      int narrow = static_cast<int>(size);
      return table_->irecv(comm, 1, &data, &narrow, &tag, &region, request);
    }
  }

  Result test(void* request, int* done, int* size) override { return table_->test(request, done, size); }
  Result close_send(void* comm) override { return table_->close_send(comm); }
  Result close_recv(void* comm) override { return table_->close_recv(comm); }
  Result close_listen(void* listener) override { return table_->close_listen(listener); }

 private:
  std::unique_ptr<void, Closer> library_;
  const Table* table_;
  void* context_ = nullptr;
};

template <typename Table, typename Properties, int version>
std::unique_ptr<Net> make(std::unique_ptr<void, Closer> library, const void* table) {
  return std::make_unique<Loaded<Table, Properties, version>>(std::move(library), static_cast<const Table*>(table));
}

}  // namespace

std::unique_ptr<Net> Net::load(const char* path, int version, std::string& reason) {
  std::unique_ptr<void, Closer> library(dlopen(path, RTLD_NOW | RTLD_LOCAL));
  if (!library) return reason = dlerror(), nullptr;
  const std::string symbol = "ncclNetPlugin_v" + std::to_string(version);
  const void* table = dlsym(library.get(), symbol.c_str());
  if (!table) return reason = "no " + symbol + " in " + path, nullptr;
  switch (version) {
    case 6: return make<NetV6, PropertiesV6, 6>(std::move(library), table);
    case 8: return make<NetV8, PropertiesV8, 8>(std::move(library), table);
    case 10: return make<NetV10, PropertiesV10, 10>(std::move(library), table);
    case 11: return make<NetV11, PropertiesV11, 11>(std::move(library), table);
    case 12: return make<NetV12, PropertiesV12, 12>(std::move(library), table);
    default: return reason = "no table of version " + std::to_string(version), nullptr;
  }
}

int64_t clock_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000 + now.tv_nsec / 1000;
}

}  // namespace bagua_net
