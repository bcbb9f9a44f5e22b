// The network interfaces that NCCL would use, by its own rules and environment variables.

#pragma once

#include <netinet/in.h>

#include <vector>

namespace bagua_net {

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;

  socklen_t length() const { return any.sa_family == AF_INET ? sizeof v4 : sizeof v6; }
  void set_port(uint16_t network_order) { (any.sa_family == AF_INET ? v4.sin_port : v6.sin6_port) = network_order; }
  uint16_t port() const { return any.sa_family == AF_INET ? v4.sin_port : v6.sin6_port; }
};

constexpr size_t kAddressText = 64;
const char* to_text(const Address& address, char (&out)[kAddressText]);

struct Interface {
  char name[16];
  char pci_path[256];  // empty for interfaces without hardware
  int speed_mbit;
  Address address;  // port 0
};

// Found once for the process; the objects stay where they are.
const std::vector<Interface>& interfaces();

}  // namespace bagua_net
