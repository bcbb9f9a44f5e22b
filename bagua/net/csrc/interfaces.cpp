#include "interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>

#include "settings.h"

namespace bagua_net {
namespace {

constexpr size_t kMaxInterfaces = 32;

// NCCL_SOCKET_IFNAME: names or beginnings of names, separated by commas; `^` in front excludes them, `=` wants whole
// names.
struct Names {
  bool excluding = false, exact = false;
  std::vector<std::string> words;

  explicit Names(const char* text) {
    if (*text == '^') excluding = true, text++;
    if (*text == '=') exact = true, text++;
    std::string word;
    for (;; text++) {
      if (*text && *text != ',') {
        if (*text == ':') while (text[1] && text[1] != ',') text++;  // a port, which NCCL allows here
        else word += *text;
        continue;
      }
      if (!word.empty()) words.push_back(word);
      word.clear();
      if (!*text) return;
    }
  }

  bool admit(const char* name) const {
    bool found = words.empty();
    for (const std::string& word : words) found |= exact ? word == name : !strncmp(name, word.c_str(), word.size());
    return found != excluding;
  }
};

bool same_subnet(const ifaddrs& entry, const Address& other) {
  if (!entry.ifa_netmask || entry.ifa_addr->sa_family != other.any.sa_family) return false;
  const auto* mine = reinterpret_cast<const Address*>(entry.ifa_addr);
  const auto* mask = reinterpret_cast<const Address*>(entry.ifa_netmask);
  if (other.any.sa_family == AF_INET)
    return !((mine->v4.sin_addr.s_addr ^ other.v4.sin_addr.s_addr) & mask->v4.sin_addr.s_addr);
  for (int i = 0; i < 16; i++)
    if ((mine->v6.sin6_addr.s6_addr[i] ^ other.v6.sin6_addr.s6_addr[i]) & mask->v6.sin6_addr.s6_addr[i]) return false;
  return mine->v6.sin6_scope_id == other.v6.sin6_scope_id;
}

void describe(Interface& made) {
  char path[PATH_MAX], real[PATH_MAX];
  snprintf(path, sizeof path, "/sys/class/net/%s/device", made.name);
  if (realpath(path, real) && strlen(real) < sizeof made.pci_path) strcpy(made.pci_path, real);
  made.speed_mbit = 10000;
  snprintf(path, sizeof path, "/sys/class/net/%s/speed", made.name);
  if (FILE* file = fopen(path, "re")) {
    int speed = 0;
    if (fscanf(file, "%d", &speed) == 1 && speed > 0) made.speed_mbit = speed;
    fclose(file);
  }
}

// Those that `names` admits, or those in the subnet of `peer`.
std::vector<Interface> find(const Names& names, int family, const Address* peer = nullptr) {
  std::vector<Interface> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list)) return found;
  for (const ifaddrs* entry = list; entry && found.size() < kMaxInterfaces; entry = entry->ifa_next) {
    if (!entry->ifa_addr) continue;
    const int has = entry->ifa_addr->sa_family;
    if ((has != AF_INET && has != AF_INET6) || (family >= 0 && has != family)) continue;
    if (!(entry->ifa_flags & IFF_UP) || !(entry->ifa_flags & IFF_RUNNING)) continue;
    if (strlen(entry->ifa_name) >= sizeof(Interface::name)) continue;
    Interface made = {};
    memcpy(&made.address, entry->ifa_addr, has == AF_INET ? sizeof made.address.v4 : sizeof made.address.v6);
    if (has == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&made.address.v6.sin6_addr)) continue;  // as NCCL does
    if (peer ? !same_subnet(*entry, *peer) : !names.admit(entry->ifa_name)) continue;
    bool known = false;
    for (const Interface& other : found) known |= !strcmp(other.name, entry->ifa_name);
    if (known) continue;
    strcpy(made.name, entry->ifa_name);
    describe(made);
    found.push_back(made);
  }
  freeifaddrs(list);
  return found;
}

// NCCL_COMM_ID=address:port or [address%interface]:port. Host names are not looked up.
bool comm_id(Address& out) {
  const char* text = getenv("NCCL_COMM_ID");
  if (!text) return false;
  memset(&out, 0, sizeof out);
  std::string host(text);
  const bool bracket = host[0] == '[';
  host = bracket ? host.substr(1, host.find(']') - 1) : host.substr(0, host.rfind(':'));
  if (!bracket) return out.any.sa_family = AF_INET, inet_pton(AF_INET, host.c_str(), &out.v4.sin_addr) == 1;
  const size_t scope = host.find('%');
  out.any.sa_family = AF_INET6;
  if (scope != std::string::npos) out.v6.sin6_scope_id = if_nametoindex(host.c_str() + scope + 1);
  return inet_pton(AF_INET6, host.substr(0, scope).c_str(), &out.v6.sin6_addr) == 1;
}

std::vector<Interface> choose() {
  int family = -1;
  if (const char* text = getenv("NCCL_SOCKET_FAMILY"))
    family = !strcmp(text, "AF_INET") ? AF_INET : !strcmp(text, "AF_INET6") ? AF_INET6 : -1;
  const char* wanted = getenv("NCCL_SOCKET_IFNAME");
  if (wanted && strlen(wanted) > 1) return find(Names(wanted), family);
  std::vector<Interface> found = find(Names("ib"), family);
  Address peer;
  if (found.empty() && comm_id(peer)) found = find(Names(""), -1, &peer);
  for (const char* names : {"^docker,lo,virbr", "docker", "lo", "virbr"})
    if (found.empty()) found = find(Names(names), family);
  return found;
}

}  // namespace

const char* to_text(const Address& address, char (&out)[kAddressText]) {
  char host[INET6_ADDRSTRLEN] = "?";
  const void* bytes = address.any.sa_family == AF_INET ? static_cast<const void*>(&address.v4.sin_addr)
                                                       : static_cast<const void*>(&address.v6.sin6_addr);
  inet_ntop(address.any.sa_family, bytes, host, sizeof host);
  snprintf(out, sizeof out, address.any.sa_family == AF_INET ? "%s:%d" : "[%s]:%d", host, ntohs(address.port()));
  return out;
}

const std::vector<Interface>& interfaces() {
  static const std::vector<Interface> found = choose();
  return found;
}

}  // namespace bagua_net
