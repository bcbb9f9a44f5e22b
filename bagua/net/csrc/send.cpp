#include "send.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

namespace bagua_net {
namespace {

constexpr int64_t kLookUs = 1000;     // between looks at events while all flows can be written
constexpr size_t kWhole = 64 << 10;   // a message up to this is one slice
// Slices are multiples of this, but for a message's last: with its header it is one packet for the kernel, which takes
// whole segments of together less than 64 KiB at once. 64 KiB would be two, the second one small.
constexpr size_t kPacket = 60 << 10;
static_assert(kPacket % kAlign == 0);
constexpr int kSlicesPerCall = 16;    // the other connections of the thread want their turn
constexpr double kPatience = 1.5;     // a flow may finish this much later than all together would

}  // namespace

std::unique_ptr<SendComm> SendComm::make(std::vector<Fd> sockets, int device, const Address& peer) {
  std::unique_ptr<SendComm> made(new SendComm());
  to_text(peer, made->peer_);
  made->path_ = Path::get(device, peer, static_cast<int>(sockets.size()));
  made->started_us_ = now_us();
  bool good = made->events_.open();
  made->flows_.resize(sockets.size());
  for (size_t i = 0; good && i < sockets.size(); i++) {
    made->flows_[i].fd = std::move(sockets[i]);
    good = made->events_.add(made->flows_[i].fd.get(), static_cast<int>(i), true);
    SocketState state;
    if (good && read_state(made->flows_[i].fd.get(), state)) made->flows_[i].acked_at_first = state.acked_bytes;
  }
  if (good) return made;
  BAGUA_WARN("connection with %s: %s", made->peer_, strerror(errno));
  return nullptr;
}

Result SendComm::isend(void* data, size_t size, Request** out) {
  *out = nullptr;
  if (error_ != kSuccess) return error_;
  if (size > kMaxMessage) {
    BAGUA_WARN("a message of %zu bytes is too large", size);
    return kInvalidArgument;
  }
  Request* request = take_request(data, size);
  if (!request) return progress();
  queue_[(queue_first_ + queue_size_++) % kMaxRequests] = request;
  messages_++;
  *out = request;
  return progress();
}

Result SendComm::progress() {
  if (error_ != kSuccess || (!queue_size_ && !open_slices_)) return error_;
  const int64_t now = now_us();
  if (!look(now)) return error_;
  push(now);
  if (queue_size_ || open_slices_) measure(now);
  return error_;
}

// Asks the kernel which flows can be written again, and whether the peer is still there.
bool SendComm::look(int64_t now) {
  bool blocked = false;
  const int level = path_->level();
  for (int i = 0; i < level && !blocked; i++) blocked = !flows_[static_cast<size_t>(i)].writable;
  if (!blocked && open_slices_ == 0 && now - looked_us_ < kLookUs) return true;
  looked_us_ = now;
  const bool good = events_.poll([this](int index, uint32_t mask) {
    Flow& flow = flows_[static_cast<size_t>(index)];
    if (mask & (EPOLLERR | EPOLLHUP | EPOLLRDHUP | EPOLLIN)) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(flow.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      fail(error ? "lost" : "closed by the peer", error);
    }
    if (mask & EPOLLOUT) flow.writable = true;
  });
  if (!good) fail("cannot wait for events", errno);
  return error_ == kSuccess;
}

void SendComm::push(int64_t now) {
  const int level = std::min(path_->level(), static_cast<int>(flows_.size()));
  for (Flow& flow : flows_)
    if (flow.request && flow.writable) write(flow);
  for (int n = 0; n < kSlicesPerCall && queue_size_ && error_ == kSuccess; n++) {
    const int index = pick(level, now);
    if (index < 0) return;
    Flow& flow = flows_[static_cast<size_t>(index)];
    if (!assign(flow, level)) return;
    write(flow);
  }
}

// The flow that would be through with another slice first, among those that are free; none if even that one would
// be late, since a faster one will be free soon.
int SendComm::pick(int level, int64_t now) const {
  const Schedule schedule = settings().schedule;
  if (level == 1) return flows_[0].writable && !flows_[0].request ? 0 : -1;
  const auto slice = static_cast<double>(slice_of(queue_[queue_first_]->size, level));
  double all_rates = 0, all_queued = 0;
  int num_known = 0;
  for (int i = 0; i < level; i++) {
    const Flow& flow = flows_[static_cast<size_t>(i)];
    all_queued += queued(flow, now);
    all_rates += flow.rate;
    num_known += flow.rate > 0;
  }
  const double usual = num_known ? all_rates / num_known : 1;
  all_rates += usual * (level - num_known);
  int best = -1, soonest = -1;
  double best_time = 1e300, soonest_time = 1e300;
  for (int k = 0; k < level; k++) {
    const int i = (turn_ + k) % level;
    const Flow& flow = flows_[static_cast<size_t>(i)];
    const bool has_stripe = schedule == Schedule::stripes && flow.next_stripe == next_sequence_;
    const double time = (queued(flow, now) + slice) / (flow.rate > 0 ? flow.rate : usual);
    if (time < soonest_time) soonest = i, soonest_time = time;
    if (!flow.writable || flow.request || has_stripe || time >= best_time) continue;
    best = i, best_time = time;
  }
  if (best < 0 || schedule != Schedule::rate || best == soonest) return best;
  return best_time <= kPatience * (all_queued + slice) / all_rates ? best : -1;
}

// Bytes a flow has before it that the peer has not acknowledged, by the last look and the rate since.
double SendComm::queued(const Flow& flow, int64_t now) const {
  if (!flow.state_known) return static_cast<double>(flow.written);
  const double acked = static_cast<double>(flow.state.acked_bytes - flow.acked_at_first);
  const double since = flow.rate * static_cast<double>(now - sampled_us_);
  return std::max(0.0, static_cast<double>(flow.written) - acked - since);
}

size_t SendComm::slice_of(size_t size, int level) const {
  if (level == 1 || size <= kWhole) return size;
  const size_t fair = (size / (2 * static_cast<size_t>(level)) + kPacket - 1) / kPacket * kPacket;
  return std::min(fair, settings().slice_bytes);
}

bool SendComm::assign(Flow& flow, int level) {
  if (settings().schedule == Schedule::stripes) return assign_stripe(flow, level);
  Request* request = queue_[queue_first_];
  const size_t length = std::min(slice_of(request->size, level), request->size - request->assigned);
  flow.header = {request->sequence, static_cast<uint32_t>(request->assigned), static_cast<uint32_t>(length),
                 static_cast<uint32_t>(request->size)};
  flow.request = request;
  flow.position = 0;
  open_slices_++;
  request->assigned += length;
  if (request->assigned == request->size) queue_first_ = (queue_first_ + 1) % kMaxRequests, queue_size_--;
  turn_ = static_cast<int>(&flow - flows_.data()) + 1;
  return true;
}

// Equal parts, the same of each message for a flow. Needs a level that does not change.
bool SendComm::assign_stripe(Flow& flow, int level) {
  const auto index = static_cast<size_t>(&flow - flows_.data());
  for (uint32_t k = 0; k < queue_size_; k++) {
    Request* request = queue_[(queue_first_ + k) % kMaxRequests];
    if (request->sequence != flow.next_stripe) continue;
    flow.next_stripe++;
    const size_t num = static_cast<size_t>(level);
    const size_t stripe = ((request->size + num - 1) / num + kAlign - 1) / kAlign * kAlign;
    const size_t begin = std::min(index * stripe, request->size), end = std::min(begin + stripe, request->size);
    request->taken++;
    if (begin < end || (!request->size && !index)) {
      flow.header = {request->sequence, static_cast<uint32_t>(begin), static_cast<uint32_t>(end - begin),
                     static_cast<uint32_t>(request->size)};
      flow.request = request;
      flow.position = 0;
      open_slices_++;
      request->assigned += end - begin;
    }
    if (!k && request->taken == num) queue_first_ = (queue_first_ + 1) % kMaxRequests, queue_size_--;
    finish_if_complete(request);
    return true;
  }
  return false;
}

void SendComm::write(Flow& flow) {
  if (!flow.request) return;
  const size_t whole = sizeof flow.header + flow.header.length;
  while (flow.position < whole) {
    iovec parts[2];
    int num = 0;
    if (flow.position < sizeof flow.header)
      parts[num++] = {reinterpret_cast<char*>(&flow.header) + flow.position, sizeof flow.header - flow.position};
    const size_t from = std::max(flow.position, sizeof flow.header) - sizeof flow.header;
    if (from < flow.header.length)
      parts[num++] = {flow.request->data + flow.header.offset + from, flow.header.length - from};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(num);
    const ssize_t sent = sendmsg(flow.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      flow.writable = false;
      return;
    }
    if (sent < 0) {
      fail("cannot send", errno);
      return;
    }
    flow.position += static_cast<size_t>(sent);
    flow.written += static_cast<uint64_t>(sent);
  }
  Request* request = flow.request;
  flow.request = nullptr;
  flow.payload += flow.header.length;
  open_slices_--;
  request->moved += flow.header.length;
  finish_if_complete(request);
}

void SendComm::finish_if_complete(Request* request) {
  const bool offered = settings().schedule != Schedule::stripes || request->taken == flows_.size();
  if (offered && request->moved == request->size && request->assigned == request->size) request->done = true;
}

}  // namespace bagua_net
