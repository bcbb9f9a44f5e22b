// The binary interface between NCCL (2.18 to 2.30) and a network plugin: result codes, properties and function tables
// of versions 6, 8, 10, 11 and 12. A table is a struct object that NCCL finds by its symbol, ncclNetPlugin_vN.
// Source: the plugin headers that NVIDIA publishes with NCCL; layouts are checked below.

#pragma once

#include <stddef.h>
#include <stdint.h>

namespace bagua_net {

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kRemoteError = 6,
};

constexpr int kPointerHost = 1;
constexpr size_t kHandleBytes = 128;
constexpr int kMaxRequests = 32;  // outstanding on one connection

constexpr int kLogWarn = 2, kLogInfo = 3;
constexpr unsigned long kLogNet = 0x10;

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);
using Profiler = Result (*)(void** event, int type, void* parent, int64_t plugin, void* data);
struct DeviceHandle;  // for NICs that a GPU drives; never made here

struct CommConfig {
  int traffic_class;
};

struct VirtualDevice4 {
  int num;
  int devices[4];
};

struct VirtualDevice8 {
  int num;
  int devices[8];
};

struct PropertiesV6 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int speed_mbit;
  int port;
  float latency;
  int max_comms;
  int max_receives;
};

struct PropertiesV8 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int speed_mbit;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
};

struct PropertiesV10 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbit;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevice4 virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
};

struct PropertiesV11 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbit;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevice4 virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
};

struct PropertiesV12 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbit;
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevice8 virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
  int16_t rail;
  int16_t plane;
};

struct NetV6 {
  const char* name;
  Result (*init)(Logger log);
  Result (*devices)(int* num);
  Result (*get_properties)(int device, PropertiesV6* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, void* handle, void** send_comm);
  Result (*accept)(void* listen_comm, void** recv_comm);
  Result (*reg_mr)(void* comm, void* data, int size, int type, void** region);
  Result (*reg_mr_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** region);
  Result (*dereg_mr)(void* comm, void* region);
  Result (*isend)(void* send_comm, void* data, int size, int tag, void* region, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, int* sizes, int* tags, void** regions, void** request);
  Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** regions, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void* send_comm);
  Result (*close_recv)(void* recv_comm);
  Result (*close_listen)(void* listen_comm);
};

struct NetV8 {
  const char* name;
  Result (*init)(Logger log);
  Result (*devices)(int* num);
  Result (*get_properties)(int device, PropertiesV8* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, void* handle, void** send_comm, DeviceHandle** offload);
  Result (*accept)(void* listen_comm, void** recv_comm, DeviceHandle** offload);
  Result (*reg_mr)(void* comm, void* data, size_t size, int type, void** region);
  Result (*reg_mr_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** region);
  Result (*dereg_mr)(void* comm, void* region);
  Result (*isend)(void* send_comm, void* data, int size, int tag, void* region, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, int* sizes, int* tags, void** regions, void** request);
  Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** regions, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void* send_comm);
  Result (*close_recv)(void* recv_comm);
  Result (*close_listen)(void* listen_comm);
  Result (*get_device_mr)(void* comm, void* region, void** device_region);
  Result (*irecv_consumed)(void* recv_comm, int n, void* request);
};

struct NetV10 {
  const char* name;
  Result (*init)(Logger log, Profiler profiler);
  Result (*devices)(int* num);
  Result (*get_properties)(int device, PropertiesV10* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, CommConfig* config, void* handle, void** send_comm, DeviceHandle** offload);
  Result (*accept)(void* listen_comm, void** recv_comm, DeviceHandle** offload);
  Result (*reg_mr)(void* comm, void* data, size_t size, int type, void** region);
  Result (*reg_mr_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** region);
  Result (*dereg_mr)(void* comm, void* region);
  Result (*isend)(void* send_comm, void* data, size_t size, int tag, void* region, void* parent, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** regions, void** parents,
                  void** request);
  Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** regions, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void* send_comm);
  Result (*close_recv)(void* recv_comm);
  Result (*close_listen)(void* listen_comm);
  Result (*get_device_mr)(void* comm, void* region, void** device_region);
  Result (*irecv_consumed)(void* recv_comm, int n, void* request);
  Result (*make_virtual_device)(int* device, void* properties);
};

// Versions 11 and 12 differ in the properties only.
template <typename Properties>
struct NetV11And12 {
  const char* name;
  Result (*init)(void** context, uint64_t comm, CommConfig* config, Logger log, Profiler profiler);
  Result (*devices)(int* num);
  Result (*get_properties)(int device, Properties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listen_comm);
  Result (*connect)(void* context, int device, void* handle, void** send_comm, DeviceHandle** offload);
  Result (*accept)(void* listen_comm, void** recv_comm, DeviceHandle** offload);
  Result (*reg_mr)(void* comm, void* data, size_t size, int type, void** region);
  Result (*reg_mr_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** region);
  Result (*dereg_mr)(void* comm, void* region);
  Result (*isend)(void* send_comm, void* data, size_t size, int tag, void* region, void* parent, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** regions, void** parents,
                  void** request);
  Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** regions, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void* send_comm);
  Result (*close_recv)(void* recv_comm);
  Result (*close_listen)(void* listen_comm);
  Result (*get_device_mr)(void* comm, void* region, void** device_region);
  Result (*irecv_consumed)(void* recv_comm, int n, void* request);
  Result (*make_virtual_device)(int* device, void* properties);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, void* attributes);
};

using NetV11 = NetV11And12<PropertiesV11>;
using NetV12 = NetV11And12<PropertiesV12>;

static_assert(sizeof(PropertiesV6) == 48 && sizeof(PropertiesV8) == 64 && sizeof(PropertiesV10) == 104);
static_assert(sizeof(PropertiesV11) == 112 && sizeof(PropertiesV12) == 128);
static_assert(offsetof(PropertiesV8, speed_mbit) == 32 && offsetof(PropertiesV12, speed_mbit) == 36);
static_assert(offsetof(PropertiesV12, latency) == 44 && offsetof(PropertiesV12, virtual_device) == 64);
static_assert(offsetof(PropertiesV11, max_p2p_bytes) == 88 && offsetof(PropertiesV12, max_p2p_bytes) == 104);
static_assert(offsetof(PropertiesV12, max_multi_request) == 120 && offsetof(PropertiesV12, rail) == 124);
static_assert(sizeof(NetV6) == 136 && sizeof(NetV8) == 152 && sizeof(NetV10) == 160);
static_assert(sizeof(NetV11) == 176 && sizeof(NetV12) == 176);

}  // namespace bagua_net
