#include "recv.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

namespace bagua_net {
namespace {

constexpr size_t kBytesPerCall = 1 << 20;  // of one flow: the others want their turn

}  // namespace

std::unique_ptr<RecvComm> RecvComm::make(std::vector<Fd> sockets, const Address& peer) {
  std::unique_ptr<RecvComm> made(new RecvComm());
  to_text(peer, made->peer_);
  bool good = made->events_.open();
  made->flows_.resize(sockets.size());
  for (size_t i = 0; good && i < sockets.size(); i++) {
    made->flows_[i].fd = std::move(sockets[i]);
    good = made->events_.add(made->flows_[i].fd.get(), static_cast<int>(i), false);
  }
  if (good) return made;
  BAGUA_WARN("connection with %s: %s", made->peer_, strerror(errno));
  return nullptr;
}

Result RecvComm::irecv(void* data, size_t size, Request** out) {
  *out = nullptr;
  if (error_ != kSuccess) return error_;
  Request* request = take_request(data, size);
  if (!request) return progress();
  pending_++;
  *out = request;
  return progress();
}

Result RecvComm::progress() {
  if (error_ != kSuccess || !pending_) return error_;
  const bool good = events_.poll([this](int index, uint32_t mask) {
    Flow& flow = flows_[static_cast<size_t>(index)];
    flow.readable = true;
    if (mask & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) flow.ending = true;
  });
  if (!good) return fail("cannot wait for events", errno);
  bool any_open = false;
  for (Flow& flow : flows_) {
    if (error_ != kSuccess || !pending_) return error_;
    const bool waits_for_buffer = flow.header_bytes == sizeof flow.header && !flow.request;
    if ((flow.readable || waits_for_buffer) && !flow.closed) read(flow);
    any_open |= !flow.closed;
  }
  // Flows end one by one; what is still in the others counts.
  if (!any_open && pending_) return fail("closed by the peer");
  return error_;
}

// Until the flow is empty, waits for a buffer, or has had its share.
void RecvComm::read(Flow& flow) {
  size_t budget = kBytesPerCall;
  while (error_ == kSuccess) {
    if (flow.header_bytes == sizeof flow.header && !flow.request && !begin_slice(flow)) return;
    iovec parts[2];
    size_t num = 0, wanted = 0;
    size_t header_left = sizeof flow.header - flow.header_bytes;
    if (flow.request) {
      parts[num++] = {flow.request->data + flow.header.offset + flow.position, flow.header.length - flow.position};
      header_left = 0;  // the next header is read with the rest of the slice, into `next`
    }
    SliceHeader next;
    parts[num++] = flow.request ? iovec{&next, sizeof next}
                                : iovec{reinterpret_cast<char*>(&flow.header) + flow.header_bytes, header_left};
    for (size_t i = 0; i < num; i++) wanted += parts[i].iov_len;
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = num;
    const ssize_t got = recvmsg(flow.fd.get(), &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      flow.readable = false;
      return;
    }
    if (got < 0) {
      fail("lost", errno);
      return;
    }
    if (!got) {
      flow.closed = true;
      if (flow.request || flow.header_bytes) fail("closed by the peer within a message");
      return;
    }
    size_t bytes = static_cast<size_t>(got);
    if (flow.request) {
      const size_t payload = std::min(bytes, flow.header.length - flow.position);
      flow.position += payload;
      bytes -= payload;
      if (flow.position == flow.header.length) {
        end_slice(flow);
        flow.header = next;
        flow.header_bytes = bytes;
      }
    } else {
      flow.header_bytes += bytes;
    }
    if (static_cast<size_t>(got) < wanted && !flow.ending) {
      flow.readable = false;  // that was all; what comes later is a new event
      if (flow.header_bytes < sizeof flow.header || flow.request) return;
    }
    if (static_cast<size_t>(got) >= budget || !pending_) return;
    budget -= static_cast<size_t>(got);
  }
}

// False if the flow has to wait for a buffer, or is broken.
bool RecvComm::begin_slice(Flow& flow) {
  const SliceHeader& header = flow.header;
  if (const char* wrong = fault(header)) return fail(wrong), false;
  if (static_cast<int32_t>(header.sequence - next_sequence_) >= 0) return false;  // not posted yet
  Request* request = posted(header.sequence);
  if (!request) return fail("a slice of a message that is complete"), false;
  if (!request->known) {
    if (header.total > request->size) return fail("a message is larger than the buffer for it"), false;
    request->size = header.total;
    request->known = true;
  }
  if (header.total != request->size) return fail("slices of a message disagree on its size"), false;
  if (header.length > request->size - request->assigned) return fail("a message has more slices than bytes"), false;
  request->assigned += header.length;
  flow.request = request;
  flow.position = 0;
  if (!header.length) {
    end_slice(flow);
    flow.header_bytes = 0;
  }
  return true;
}

void RecvComm::end_slice(Flow& flow) {
  Request* request = flow.request;
  flow.request = nullptr;
  request->moved += flow.header.length;
  if (request->moved < request->size) return;
  request->done = true;
  pending_--;
}

Request* RecvComm::posted(uint32_t sequence) {
  for (Request& request : requests_)
    if (request.used && !request.done && request.sequence == sequence) return &request;
  return nullptr;
}

}  // namespace bagua_net
