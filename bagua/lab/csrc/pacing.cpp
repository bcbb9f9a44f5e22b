// Preloaded into a program, limits the rate of each of its TCP sockets: SO_MAX_PACING_RATE at connect and accept.
// BAGUA_LAB_PACING_BYTES: bytes per second. The kernel paces TCP itself; no queueing discipline is needed.

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#ifndef SO_MAX_PACING_RATE
#define SO_MAX_PACING_RATE 47
#endif

namespace {

void pace(int fd) {
  static const char* text = getenv("BAGUA_LAB_PACING_BYTES");
  if (fd < 0 || !text) return;
  const int saved = errno;
  int domain = 0, type = 0;
  socklen_t size = sizeof domain;
  getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
  size = sizeof type;
  getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size);
  if ((domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM) {
    const unsigned long rate = strtoul(text, nullptr, 10);
    setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
  }
  errno = saved;
}

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int connect(int fd, const sockaddr* address, socklen_t length) {
  static const auto real = next<int (*)(int, const sockaddr*, socklen_t)>("connect");
  pace(fd);
  return real(fd, address, length);
}

EXPORT int accept(int fd, sockaddr* address, socklen_t* length) {
  static const auto real = next<int (*)(int, sockaddr*, socklen_t*)>("accept");
  const int made = real(fd, address, length);
  pace(made);
  return made;
}

EXPORT int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  static const auto real = next<int (*)(int, sockaddr*, socklen_t*, int)>("accept4");
  const int made = real(fd, address, length, flags);
  pace(made);
  return made;
}
