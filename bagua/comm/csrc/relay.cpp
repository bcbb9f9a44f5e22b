// Passes bytes on between pairs of sockets, for ranks that reach each other faster over this host than directly.
//
// One thread for all pairs of a relay. It looks at no byte: what goes through are frames of meshes and greetings, which
// the ends check. It reads from one socket only once all that it has read before has gone to the other one, so a
// receiver that is slow holds up its sender as it would without a relay.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "abi.h"

namespace {

constexpr int64_t kBuffer = 128 * 1024;  // of one direction; the sockets have more of their own

// From socket `k` of a pair to the other one.
struct Way {
  uint8_t* buffer;
  int64_t begin, end;
};

int64_t now_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000;
}

bool none_now() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

struct Relay {
  int32_t num_pairs;
  int32_t* fds;  // two for each pair; -1 once the pair is closed
  Way* ways;     // likewise
  pollfd* polled;
  uint8_t* memory;
  pthread_t thread;
  std::atomic<int64_t> moved_us, bytes;
  std::atomic<bool> ended;
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // of closing descriptors
};

namespace {

void close_pair(Relay* relay, int32_t pair) {
  pthread_mutex_lock(&relay->lock);
  for (int32_t k = 2 * pair; k < 2 * pair + 2; ++k) {
    if (relay->fds[k] >= 0) close(relay->fds[k]);
    relay->fds[k] = -1;
  }
  pthread_mutex_unlock(&relay->lock);
}

// Reads what has come at socket `k`. False: it has ended, or failed.
bool take(Relay* relay, int32_t k) {
  Way& way = relay->ways[k];
  const ssize_t got = recv(relay->fds[k], way.buffer, kBuffer, MSG_DONTWAIT);
  if (got <= 0) return got < 0 && none_now();
  way.begin = 0;
  way.end = got;
  return true;
}

// Writes what came from socket `k` to the other one, as much as it takes. False: that one has failed.
bool pass_on(Relay* relay, int32_t k) {
  Way& way = relay->ways[k];
  while (way.begin < way.end) {
    const size_t left = static_cast<size_t>(way.end - way.begin);
    const ssize_t sent = send(relay->fds[k ^ 1], way.buffer + way.begin, left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return none_now();
    way.begin += sent;
    relay->bytes += sent;
    relay->moved_us = now_us();
  }
  return true;
}

bool idle(const Way& way) { return way.begin == way.end; }

void* run(void* self) {
  Relay* const relay = static_cast<Relay*>(self);
  const int32_t num = 2 * relay->num_pairs;
  for (;;) {
    bool open = false;
    for (int32_t k = 0; k < num; ++k) {
      // A socket that nothing is wanted of is left out: after its end poll would return at once, again and again.
      const short wanted = static_cast<short>((idle(relay->ways[k]) ? POLLIN : 0) |
                                              (idle(relay->ways[k ^ 1]) ? 0 : POLLOUT));
      relay->polled[k] = {wanted ? relay->fds[k] : -1, wanted, 0};
      open = open || relay->fds[k] >= 0;
    }
    if (!open) break;
    if (poll(relay->polled, static_cast<nfds_t>(num), -1) < 0) continue;
    for (int32_t k = 0; k < num; ++k) {
      const short found = relay->polled[k].revents;
      if (!found || relay->fds[k] < 0) continue;
      bool good = true;
      if (!idle(relay->ways[k ^ 1])) good = pass_on(relay, k ^ 1);
      if (good && idle(relay->ways[k]) && (found & (POLLIN | POLLHUP | POLLERR))) {
        good = take(relay, k) && pass_on(relay, k);
      }
      // A mesh ends both directions at once, so the other end has nothing to wait for either.
      if (!good) close_pair(relay, k / 2);
    }
  }
  relay->ended = true;
  return nullptr;
}

void release(Relay* relay) {
  free(relay->ways);
  free(relay->polled);
  free(relay->memory);
  free(relay->fds);
  delete relay;
}

// Signals are for the interpreter's threads.
bool start(Relay* relay) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  const bool started = !pthread_create(&relay->thread, nullptr, run, relay);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace

Relay* bagua_relay_new(int32_t num_pairs, const int32_t* fds) {
  Relay* const relay = new (std::nothrow) Relay;
  if (!relay) return nullptr;
  const size_t num = 2 * static_cast<size_t>(num_pairs);
  relay->num_pairs = num_pairs;
  relay->fds = static_cast<int32_t*>(malloc(num * sizeof *relay->fds));
  relay->ways = static_cast<Way*>(calloc(num, sizeof *relay->ways));
  relay->polled = static_cast<pollfd*>(calloc(num, sizeof *relay->polled));
  relay->memory = static_cast<uint8_t*>(malloc(num * kBuffer));
  relay->moved_us = now_us();
  relay->bytes = 0;
  relay->ended = false;
  if (!relay->fds || !relay->ways || !relay->polled || !relay->memory) {
    release(relay);
    return nullptr;
  }
  for (size_t k = 0; k < num; ++k) {
    relay->fds[k] = fds[k];
    relay->ways[k].buffer = relay->memory + k * kBuffer;
  }
  if (start(relay)) return relay;
  release(relay);
  return nullptr;
}

int64_t bagua_relay_quiet_us(Relay* relay) { return relay->ended ? -1 : now_us() - relay->moved_us; }

int64_t bagua_relay_bytes(Relay* relay) { return relay->bytes; }

void bagua_relay_cut(Relay* relay) {
  pthread_mutex_lock(&relay->lock);
  for (int32_t k = 0; k < 2 * relay->num_pairs; ++k)
    if (relay->fds[k] >= 0) shutdown(relay->fds[k], SHUT_RDWR);
  pthread_mutex_unlock(&relay->lock);
}

// Its thread does not exist here, and may have held the lock.
void bagua_relay_close_copies(Relay* relay) {
  pthread_mutex_init(&relay->lock, nullptr);
  for (int32_t pair = 0; pair < relay->num_pairs; ++pair) close_pair(relay, pair);
}

void bagua_relay_free(Relay* relay) {
  bagua_relay_cut(relay);
  pthread_join(relay->thread, nullptr);
  release(relay);
}
