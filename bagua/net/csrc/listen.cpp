#include "listen.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>

namespace bagua_net {
namespace {

constexpr size_t kMaxCallers = 256;        // the oldest stranger makes room for a new one
constexpr int64_t kPatienceUs = 10000000;  // with a caller that does not greet

}  // namespace

std::unique_ptr<Listener> Listener::make(int device, Handle& handle) {
  const Interface& interface = interfaces()[static_cast<size_t>(device)];
  std::unique_ptr<Listener> made(new Listener());
  Address address = interface.address;
  socklen_t length = address.length();
  made->fd_ = make_socket(address.any.sa_family);
  if (made->fd_) set_flow_options(made->fd_.get());
  if (!made->fd_ || bind(made->fd_.get(), &address.any, length) || listen(made->fd_.get(), SOMAXCONN) ||
      getsockname(made->fd_.get(), &address.any, &length) ||
      getrandom(&made->secret_, sizeof made->secret_, 0) != sizeof made->secret_) {
    BAGUA_WARN("cannot listen on %s: %s", interface.name, strerror(errno));
    return nullptr;
  }
  made->num_flows_ = static_cast<uint16_t>(settings().num_flows);
  handle = {};
  handle.magic = kMagic;
  handle.version = kVersion;
  handle.num_flows = made->num_flows_;
  handle.secret = made->secret_;
  handle.family = address.any.sa_family;
  handle.port = address.port();
  if (handle.family == AF_INET) memcpy(handle.address, &address.v4.sin_addr, 4);
  else memcpy(handle.address, &address.v6.sin6_addr, 16);
  return made;
}

Result Listener::accept(std::unique_ptr<RecvComm>& comm) {
  const Result result = take_callers();
  if (result != kSuccess) return result;
  const int64_t now = now_us();
  for (size_t i = 0; i < callers_.size();) {
    Caller& caller = callers_[i];
    const bool late = !caller.greeted && now - caller.since_us > kPatienceUs;
    if (!late && (caller.greeted || hear(caller))) {
      i++;
      continue;
    }
    if (late) BAGUA_INFO("a caller did not greet and was dropped");
    if (i + 1 < callers_.size()) std::swap(callers_[i], callers_.back());
    callers_.pop_back();
  }
  return collect(comm);
}

Result Listener::take_callers() {
  for (;;) {
    Caller caller;
    socklen_t length = sizeof caller.address;
    memset(&caller.address, 0, sizeof caller.address);
    caller.fd = Fd(accept4(fd_.get(), &caller.address.any, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!caller.fd) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return kSuccess;
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      BAGUA_WARN("cannot accept: %s%s", strerror(errno), errno == EMFILE ? " (ulimit -n)" : "");
      return kSystemError;
    }
    set_flow_options(caller.fd.get());
    caller.since_us = now_us();
    if (callers_.size() >= kMaxCallers) {
      const auto stranger = std::find_if(callers_.begin(), callers_.end(), [](const Caller& c) { return !c.greeted; });
      callers_.erase(stranger == callers_.end() ? callers_.begin() : stranger);
    }
    callers_.push_back(std::move(caller));
  }
}

bool Listener::hear(Caller& caller) {
  char* into = reinterpret_cast<char*>(&caller.greeting);
  // Not a byte more than the greeting: what follows is slices.
  const ssize_t got = recv(caller.fd.get(), into + caller.bytes, sizeof caller.greeting - caller.bytes, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (!got) return false;
  caller.bytes += static_cast<size_t>(got);
  if (caller.bytes < sizeof caller.greeting) return true;
  const Greeting& greeting = caller.greeting;
  char text[kAddressText];
  if (greeting.magic != kMagic || !(greeting.secret == secret_)) {
    BAGUA_INFO("%s is no peer of ours and was dropped", to_text(caller.address, text));
    return false;
  }
  if (greeting.version != kVersion || greeting.num_flows != num_flows_ || greeting.flow >= num_flows_) {
    BAGUA_WARN("%s speaks version %d with %d flows, not version %d with %d", to_text(caller.address, text),
               greeting.version, greeting.num_flows, kVersion, num_flows_);
    return false;
  }
  return caller.greeted = true;
}

// The flows of the first session that is complete.
Result Listener::collect(std::unique_ptr<RecvComm>& comm) {
  for (const Caller& first : callers_) {
    if (!first.greeted) continue;
    std::vector<Caller*> flows(num_flows_);
    size_t found = 0;
    for (Caller& caller : callers_) {
      if (!caller.greeted || caller.greeting.session != first.greeting.session) continue;
      Caller*& place = flows[caller.greeting.flow];
      if (place) {
        BAGUA_WARN("flow %d came twice", caller.greeting.flow);
        return kRemoteError;
      }
      place = &caller;
      found++;
    }
    if (found < num_flows_) continue;
    const uint64_t session = first.greeting.session;
    const Address peer = first.address;
    std::vector<Fd> sockets;
    for (Caller* caller : flows) sockets.push_back(std::move(caller->fd));
    callers_.erase(std::remove_if(callers_.begin(), callers_.end(),
                                  [session](const Caller& c) { return c.greeted && c.greeting.session == session; }),
                   callers_.end());
    comm = RecvComm::make(std::move(sockets), peer);
    return comm ? kSuccess : kSystemError;
  }
  return kSuccess;
}

}  // namespace bagua_net
