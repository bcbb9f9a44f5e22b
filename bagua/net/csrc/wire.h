// What passes between two plugins: the handle (through NCCL), a greeting on each flow, and a header before each slice.
// All little-endian. Whatever comes from outside is checked by the functions here before it is used.

#pragma once

#include <string.h>

#include "interfaces.h"
#include "nccl_abi.h"
#include "settings.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

namespace bagua_net {

constexpr uint32_t kMagic = 0x4e416742;  // "BgAN"
constexpr uint16_t kVersion = 1;
constexpr size_t kMaxMessage = (size_t{1} << 32) - 1;
constexpr size_t kAlign = 4096;  // slices begin at multiples of this

struct Secret {  // of a listener: who has not seen its handle cannot connect
  uint64_t words[2];

  bool operator==(const Secret& other) const { return words[0] == other.words[0] && words[1] == other.words[1]; }
};

struct Handle {
  uint32_t magic;
  uint16_t version;
  uint16_t num_flows;
  Secret secret;
  uint16_t family;
  uint16_t port;  // network order
  uint32_t scope;
  uint8_t address[16];
  uint64_t attempt;  // the connecting side's; 0 until its first call
};
static_assert(sizeof(Handle) == 56 && sizeof(Handle) <= kHandleBytes);

struct Greeting {
  uint32_t magic;
  uint16_t version;
  uint16_t flow;
  uint16_t num_flows;
  uint16_t zero[3];
  Secret secret;
  uint64_t session;  // the same on all flows of a connection
};
static_assert(sizeof(Greeting) == 40);

struct SliceHeader {
  uint32_t sequence;  // of the message on this connection
  uint32_t offset;
  uint32_t length;
  uint32_t total;  // of the message
};
static_assert(sizeof(SliceHeader) == 16);

// Null, or what is wrong with a handle.
inline const char* fault(const Handle& handle) {
  if (handle.magic != kMagic) return "the peer does not use Bagua-Net: set the plugin on all ranks";
  if (handle.version != kVersion) return "the peer has another version of Bagua-Net";
  if (handle.num_flows < 1 || handle.num_flows > kMaxFlows) return "the handle names an impossible number of flows";
  if (handle.family != AF_INET && handle.family != AF_INET6) return "the handle names an unknown address family";
  return nullptr;
}

inline Address address_of(const Handle& handle) {
  Address made;
  memset(&made, 0, sizeof made);
  made.any.sa_family = handle.family;
  if (handle.family == AF_INET) {
    memcpy(&made.v4.sin_addr, handle.address, 4);
  } else {
    memcpy(&made.v6.sin6_addr, handle.address, 16);
    made.v6.sin6_scope_id = handle.scope;
  }
  made.set_port(handle.port);
  return made;
}

// Null, or what is wrong with a header in itself.
inline const char* fault(const SliceHeader& header) {
  if (header.offset % kAlign) return "a slice begins at an odd place";
  if (header.offset > header.total || header.length > header.total - header.offset) return "a slice leaves its message";
  if (!header.length && header.total) return "an empty slice of a message that is not";
  return nullptr;
}

}  // namespace bagua_net
