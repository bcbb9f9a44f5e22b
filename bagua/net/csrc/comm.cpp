#include "comm.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "settings.h"

namespace bagua_net {

Result Comm::test(Request* request, int* done, int* size) {
  *done = 0;
  if (!request->used) {
    BAGUA_WARN("a request was tested that is not under way");
    return kInvalidArgument;
  }
  if (!request->done) {
    const Result result = progress();
    if (!request->done) return result;
  }
  *done = 1;
  if (size) *size = static_cast<int>(request->size);
  request->used = false;
  return kSuccess;
}

Request* Comm::take_request(void* data, size_t size) {
  for (Request& request : requests_) {
    if (request.used) continue;
    request = Request();
    request.comm = this;
    request.used = true;
    request.sequence = next_sequence_++;
    request.data = static_cast<char*>(data);
    request.size = size;
    return &request;
  }
  return nullptr;
}

Result Comm::fail(const char* what, int error) {
  if (error_ == kSuccess) {
    error_ = kRemoteError;
    BAGUA_WARN("connection with %s: %s%s%s", peer_, what, error ? ": " : "", error ? strerror(error) : "");
  }
  return error_;
}

bool Events::open() {
  fd_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  return static_cast<bool>(fd_);
}

bool Events::add(int fd, int index, bool for_output) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLET | (for_output ? EPOLLOUT : 0u);
  event.data.u32 = static_cast<uint32_t>(index);
  return !epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event);
}

int Events::fetch(int* indices, uint32_t* masks) {
  epoll_event events[kMax];
  int num;
  do num = epoll_wait(fd_.get(), events, kMax, 0);
  while (num < 0 && errno == EINTR);
  for (int i = 0; i < num; i++) indices[i] = static_cast<int>(events[i].data.u32), masks[i] = events[i].events;
  return num;
}

}  // namespace bagua_net
