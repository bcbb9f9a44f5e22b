#include "connect.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <map>
#include <mutex>

namespace bagua_net {
namespace {

constexpr int64_t kRetryUs = 50000, kRefusedUs = 1500000;  // a peer that refuses for so long is gone

std::mutex g_mutex;

std::map<uint64_t, std::unique_ptr<Attempt>>& attempts() {
  static std::map<uint64_t, std::unique_ptr<Attempt>> all;
  return all;
}

bool passes(int error) {
  return error == ECONNREFUSED || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == ECONNRESET || error == EADDRNOTAVAIL;
}

}  // namespace

Attempt::Attempt(int device, const Handle& handle)
    : device_(device), peer_(address_of(handle)), flows_(handle.num_flows), since_us_(now_us()) {
  const Address& mine = interfaces()[static_cast<size_t>(device)].address;
  // The number of an interface means something on its own host only.
  if (peer_.any.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&peer_.v6.sin6_addr))
    peer_.v6.sin6_scope_id = mine.any.sa_family == AF_INET6 ? mine.v6.sin6_scope_id : 0;
  uint64_t session = 0;
  if (getrandom(&session, sizeof session, GRND_NONBLOCK) != sizeof session) session = static_cast<uint64_t>(now_us());
  for (size_t i = 0; i < flows_.size(); i++) {
    Greeting& greeting = flows_[i].greeting;
    greeting.magic = kMagic;
    greeting.version = kVersion;
    greeting.flow = static_cast<uint16_t>(i);
    greeting.num_flows = handle.num_flows;
    greeting.secret = handle.secret;
    greeting.session = session;
  }
}

Result Attempt::proceed(std::unique_ptr<SendComm>& comm) {
  bool complete = true;
  for (Flow& flow : flows_) {
    const Result result = proceed(flow);
    if (result != kSuccess) return result;
    complete &= flow.bytes == sizeof flow.greeting;
  }
  char text[kAddressText];
  const int64_t limit_us = int64_t{settings().timeout_ms} * 1000;
  if (!complete && limit_us && now_us() - since_us_ > limit_us) {
    BAGUA_WARN("%s does not answer", to_text(peer_, text));
    return kRemoteError;
  }
  if (!complete) return kSuccess;
  std::vector<Fd> sockets;
  for (Flow& flow : flows_) sockets.push_back(std::move(flow.fd));
  comm = SendComm::make(std::move(sockets), device_, peer_);
  return comm ? kSuccess : kSystemError;
}

Result Attempt::proceed(Flow& flow) {
  if (flow.bytes == sizeof flow.greeting) return kSuccess;
  if (!flow.started) {
    if (now_us() < retry_at_us_) return kSuccess;
    flow.fd = make_socket(peer_.any.sa_family);
    if (!flow.fd) {
      BAGUA_WARN("cannot make a socket: %s%s", strerror(errno), errno == EMFILE ? " (ulimit -n)" : "");
      return kSystemError;
    }
    set_flow_options(flow.fd.get());
    flow.started = true;
    if (::connect(flow.fd.get(), &peer_.any, peer_.length()) && errno != EINPROGRESS && errno != EINTR)
      return retry(flow, errno);
  }
  if (!flow.connected) {
    pollfd entry = {flow.fd.get(), POLLOUT, 0};
    if (poll(&entry, 1, 0) <= 0) return kSuccess;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(flow.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) return retry(flow, error);
    flow.connected = true;
  }
  const char* from = reinterpret_cast<const char*>(&flow.greeting) + flow.bytes;
  const ssize_t sent = send(flow.fd.get(), from, sizeof flow.greeting - flow.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) flow.bytes += static_cast<size_t>(sent);
  else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return retry(flow, errno);
  return kSuccess;
}

Result Attempt::retry(Flow& flow, int error) {
  char text[kAddressText];
  if (!passes(error) || now_us() - since_us_ > kRefusedUs) {
    BAGUA_WARN("cannot connect to %s: %s", to_text(peer_, text), strerror(error));
    return kRemoteError;
  }
  flow.fd.reset();
  flow.started = flow.connected = false;
  flow.bytes = 0;
  retry_at_us_ = now_us() + kRetryUs;
  return kSuccess;
}

Result connect_once(int device, void* opaque, std::unique_ptr<SendComm>& comm) {
  Handle handle;
  memcpy(&handle, opaque, sizeof handle);
  if (const char* wrong = fault(handle)) {
    BAGUA_WARN("cannot connect: %s", wrong);
    return kRemoteError;
  }
  static uint64_t number = 0;
  Attempt* attempt = nullptr;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    std::unique_ptr<Attempt>* kept = nullptr;
    if (handle.attempt) {
      const auto found = attempts().find(handle.attempt);
      if (found != attempts().end()) kept = &found->second;
    } else {
      handle.attempt = ++number;
      memcpy(opaque, &handle, sizeof handle);
      kept = &attempts()[handle.attempt];
      *kept = std::make_unique<Attempt>(device, handle);
    }
    if (!kept) {
      BAGUA_WARN("connect was called again after its end");
      return kInvalidArgument;
    }
    attempt = kept->get();
  }
  const Result result = attempt->proceed(comm);
  if (result == kSuccess && !comm) return kSuccess;
  const std::lock_guard<std::mutex> lock(g_mutex);
  attempts().erase(handle.attempt);
  return result;
}

void forget_attempts() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  attempts().clear();
}

}  // namespace bagua_net
