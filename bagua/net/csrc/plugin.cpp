// The tables that NCCL finds, all over one set of functions. They differ in arguments that do not matter here.

#include <string.h>

#include <atomic>
#include <memory>

#include "connect.h"
#include "listen.h"
#include "recv.h"
#include "send.h"
#include "settings.h"

namespace bagua_net {
namespace {

constexpr char kName[] = "Bagua";
constexpr int kMaxComms = 65536;
constexpr size_t kMaxP2pBytes = size_t{1} << 30, kMaxCollectiveBytes = size_t{1} << 29;

std::atomic<int> g_users{0};  // inits that were not finalized; versions below 11 never finalize
char g_context;               // not null, and nothing more

Result init(Logger log) {
  set_logger(log);
  g_users.fetch_add(1);
  if (interfaces().empty()) {
    BAGUA_WARN("no network interface to use (NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY)");
    return kSystemError;
  }
  for (const Interface& each : interfaces()) {
    char text[kAddressText];
    BAGUA_INFO("using %s %s, %s%d flows a connection", each.name, to_text(each.address, text),
               settings().adaptive ? "up to " : "", settings().num_flows);
  }
  return kSuccess;
}

Result init_profiled(Logger log, Profiler) { return init(log); }

Result init_context(void** context, uint64_t, CommConfig*, Logger log, Profiler) {
  *context = &g_context;
  return init(log);
}

Result finalize(void*) {
  if (g_users.fetch_sub(1) == 1) forget_attempts();
  return kSuccess;
}

Result devices(int* num) {
  *num = static_cast<int>(interfaces().size());
  return kSuccess;
}

bool known(int device) {
  if (device >= 0 && static_cast<size_t>(device) < interfaces().size()) return true;
  BAGUA_WARN("there is no device %d", device);
  return false;
}

void fill(PropertiesV6*, int) {}
void fill(PropertiesV8* out, int) { out->registration_is_global = 0; }

template <typename Properties>
void fill(Properties* out, int device) {
  out->registration_is_global = 0;
  out->force_flush = 0;
  out->virtual_device.num = 1;
  out->virtual_device.devices[0] = device;
  out->max_p2p_bytes = kMaxP2pBytes;
  out->max_collective_bytes = kMaxCollectiveBytes;
}

void fill_last(PropertiesV11* out) { out->max_multi_request = 1; }
void fill_last(PropertiesV12* out) {
  out->max_multi_request = 1;
  out->rail = out->plane = -1;
}
void fill_last(void*) {}

template <typename Properties>
Result get_properties(int device, Properties* out) {
  if (!known(device)) return kInvalidArgument;
  const Interface& from = interfaces()[static_cast<size_t>(device)];
  *out = {};  // device type and version 0: a host NIC
  out->name = const_cast<char*>(from.name);
  out->pci_path = *from.pci_path ? const_cast<char*>(from.pci_path) : nullptr;
  out->guid = static_cast<uint64_t>(device);
  out->pointer_support = kPointerHost;
  out->speed_mbit = from.speed_mbit;
  out->max_comms = kMaxComms;
  out->max_receives = 1;
  fill(out, device);
  fill_last(out);
  return kSuccess;
}

Result listen_on(int device, void* handle, void** out) {
  *out = nullptr;
  if (!known(device)) return kInvalidArgument;
  Handle made;
  std::unique_ptr<Listener> listener = Listener::make(device, made);
  if (!listener) return kSystemError;
  memset(handle, 0, kHandleBytes);
  memcpy(handle, &made, sizeof made);
  *out = listener.release();
  return kSuccess;
}

Result listen_in_context(void*, int device, void* handle, void** out) { return listen_on(device, handle, out); }

Result connect_v6(int device, void* handle, void** out) {
  *out = nullptr;
  if (!known(device)) return kInvalidArgument;
  std::unique_ptr<SendComm> comm;
  const Result result = connect_once(device, handle, comm);
  *out = comm.release();
  return result;
}

Result connect_v8(int device, void* handle, void** out, DeviceHandle**) { return connect_v6(device, handle, out); }

Result connect_v10(int device, CommConfig*, void* handle, void** out, DeviceHandle**) {
  return connect_v6(device, handle, out);
}

Result connect_v11(void*, int device, void* handle, void** out, DeviceHandle**) {
  return connect_v6(device, handle, out);
}

Result accept_v6(void* listener, void** out) {
  *out = nullptr;
  std::unique_ptr<RecvComm> comm;
  const Result result = static_cast<Listener*>(listener)->accept(comm);
  *out = comm.release();
  return result;
}

Result accept_v8(void* listener, void** out, DeviceHandle**) { return accept_v6(listener, out); }

Result reg_mr(void*, void* data, size_t, int type, void** region) {
  *region = data;
  return type == kPointerHost ? kSuccess : kInternalError;
}

Result reg_mr_v6(void* comm, void* data, int size, int type, void** region) {
  return reg_mr(comm, data, static_cast<size_t>(size), type, region);
}

Result dereg_mr(void*, void*) { return kSuccess; }

Result send_message(void* comm, void* data, size_t size, void** out) {
  Request* request = nullptr;
  const Result result = static_cast<SendComm*>(comm)->isend(data, size, &request);
  *out = request;
  return result;
}

Result isend_v8(void* comm, void* data, int size, int, void*, void** out) {
  return *out = nullptr, size < 0 ? kInvalidArgument : send_message(comm, data, static_cast<size_t>(size), out);
}

Result isend_v10(void* comm, void* data, size_t size, int, void*, void*, void** out) {
  return send_message(comm, data, size, out);
}

// `*out` may hold a hint of NCCL's: it is always overwritten.
Result receive_message(void* comm, int n, void* data, size_t size, void** out) {
  *out = nullptr;
  if (n != 1) return kInternalError;
  Request* request = nullptr;
  const Result result = static_cast<RecvComm*>(comm)->irecv(data, size, &request);
  *out = request;
  return result;
}

Result irecv_v8(void* comm, int n, void** data, int* sizes, int*, void**, void** out) {
  *out = nullptr;
  if (n != 1) return kInternalError;
  return *sizes < 0 ? kInvalidArgument : receive_message(comm, n, *data, static_cast<size_t>(*sizes), out);
}

Result irecv_v10(void* comm, int n, void** data, size_t* sizes, int*, void**, void**, void** out) {
  *out = nullptr;
  return n != 1 ? kInternalError : receive_message(comm, n, *data, *sizes, out);
}

Result iflush(void*, int, void**, int*, void**, void** out) {
  *out = nullptr;
  return kInternalError;  // host memory needs none, and NCCL asks for none
}

Result test(void* request, int* done, int* sizes) {
  Request* tested = static_cast<Request*>(request);
  return tested->comm->test(tested, done, sizes);
}

Result close_send(void* comm) { return delete static_cast<SendComm*>(comm), kSuccess; }
Result close_recv(void* comm) { return delete static_cast<RecvComm*>(comm), kSuccess; }
Result close_listen(void* listener) { return delete static_cast<Listener*>(listener), kSuccess; }

}  // namespace
}  // namespace bagua_net

#define EXPORT extern "C" __attribute__((visibility("default"))) const

namespace n = bagua_net;

EXPORT n::NetV6 ncclNetPlugin_v6 = {
    n::kName, n::init, n::devices, n::get_properties<n::PropertiesV6>,
    n::listen_on, n::connect_v6, n::accept_v6,
    n::reg_mr_v6, nullptr, n::dereg_mr,
    n::isend_v8, n::irecv_v8, n::iflush, n::test,
    n::close_send, n::close_recv, n::close_listen,
};

EXPORT n::NetV8 ncclNetPlugin_v8 = {
    n::kName, n::init, n::devices, n::get_properties<n::PropertiesV8>,
    n::listen_on, n::connect_v8, n::accept_v8,
    n::reg_mr, nullptr, n::dereg_mr,
    n::isend_v8, n::irecv_v8, n::iflush, n::test,
    n::close_send, n::close_recv, n::close_listen,
    nullptr, nullptr,  // get_device_mr, irecv_consumed
};

EXPORT n::NetV10 ncclNetPlugin_v10 = {
    n::kName, n::init_profiled, n::devices, n::get_properties<n::PropertiesV10>,
    n::listen_on, n::connect_v10, n::accept_v8,
    n::reg_mr, nullptr, n::dereg_mr,
    n::isend_v10, n::irecv_v10, n::iflush, n::test,
    n::close_send, n::close_recv, n::close_listen,
    nullptr, nullptr, nullptr,  // get_device_mr, irecv_consumed, make_virtual_device
};

EXPORT n::NetV11 ncclNetPlugin_v11 = {
    n::kName, n::init_context, n::devices, n::get_properties<n::PropertiesV11>,
    n::listen_in_context, n::connect_v11, n::accept_v8,
    n::reg_mr, nullptr, n::dereg_mr,
    n::isend_v10, n::irecv_v10, n::iflush, n::test,
    n::close_send, n::close_recv, n::close_listen,
    nullptr, nullptr, nullptr,  // get_device_mr, irecv_consumed, make_virtual_device
    n::finalize, nullptr,  // set_attributes
};

EXPORT n::NetV12 ncclNetPlugin_v12 = {
    n::kName, n::init_context, n::devices, n::get_properties<n::PropertiesV12>,
    n::listen_in_context, n::connect_v11, n::accept_v8,
    n::reg_mr, nullptr, n::dereg_mr,
    n::isend_v10, n::irecv_v10, n::iflush, n::test,
    n::close_send, n::close_recv, n::close_listen,
    nullptr, nullptr, nullptr,  // get_device_mr, irecv_consumed, make_virtual_device
    n::finalize, nullptr,  // set_attributes
};
