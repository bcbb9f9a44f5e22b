#include "mesh.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <new>

namespace {

void close_all(Mesh* mesh) {
  for (int32_t r = 0; r < mesh->size; ++r) {
    if (mesh->fds[r] >= 0) close(mesh->fds[r]);
    mesh->fds[r] = -1;
  }
}

// Under the lock.
void shut_down(Mesh* mesh) {
  mesh->cut = true;
  for (int32_t r = 0; r < mesh->size; ++r)
    if (mesh->fds[r] >= 0) shutdown(mesh->fds[r], SHUT_RDWR);
}

}  // namespace

void tell(Problem* problem, const char* format, ...) {
  if (problem->text[0]) return;
  va_list args;
  va_start(args, format);
  vsnprintf(problem->text, sizeof problem->text, format, args);
  va_end(args);
}

bool begin_use(Mesh* mesh, Problem* problem) {
  pthread_mutex_lock(&mesh->lock);
  const bool usable = !mesh->cut && !mesh->closing && !mesh->busy && !mesh->failed;
  if (mesh->busy) {
    tell(problem, "another exchange is in flight on this mesh");
  } else if (!usable) {
    tell(problem, "the connections of this mesh were cut");
  } else {
    mesh->busy = true;
  }
  pthread_mutex_unlock(&mesh->lock);
  return usable;
}

void end_use(Mesh* mesh) {
  pthread_mutex_lock(&mesh->lock);
  mesh->busy = false;
  if (mesh->failed) shut_down(mesh);  // so that the peers fail soon too
  if (mesh->closing) close_all(mesh);
  pthread_mutex_unlock(&mesh->lock);
}

bool is_cut(Mesh* mesh) {
  pthread_mutex_lock(&mesh->lock);
  const bool cut = mesh->cut;
  pthread_mutex_unlock(&mesh->lock);
  return cut;
}

int32_t bagua_mesh_abi() { return BAGUA_MESH_ABI; }

Mesh* bagua_mesh_new(int32_t rank, int32_t size, const int32_t* fds) {
  Mesh* const mesh = new (std::nothrow) Mesh;
  const size_t num = static_cast<size_t>(size);
  int32_t* const own = static_cast<int32_t*>(malloc(2 * num * sizeof *own));
  uint32_t* const sequences = static_cast<uint32_t*>(calloc(num, sizeof *sequences));
  if (!mesh || !own || !sequences) {
    delete mesh;
    free(own);
    free(sequences);
    return nullptr;
  }
  for (int32_t r = 0; r < size; ++r) {
    own[r] = r == rank ? -1 : fds[r];
    own[size + r] = 1;
  }
  mesh->rank = rank;
  mesh->size = size;
  mesh->fds = own;
  mesh->wakes = own + size;
  mesh->sequences = sequences;
  return mesh;
}

int64_t bagua_mesh_round_trip_us(Mesh* mesh) {
  int64_t longest = 0;
  pthread_mutex_lock(&mesh->lock);
  for (int32_t r = 0; r < mesh->size; ++r) {
    tcp_info info;
    memset(&info, 0, sizeof info);
    socklen_t length = sizeof info;
    if (mesh->fds[r] < 0 || getsockopt(mesh->fds[r], IPPROTO_TCP, TCP_INFO, &info, &length)) continue;
    // Before the first round trip it is the greatest number.
    if (info.tcpi_min_rtt != UINT32_MAX && info.tcpi_min_rtt > longest) longest = info.tcpi_min_rtt;
  }
  pthread_mutex_unlock(&mesh->lock);
  return longest;
}

void bagua_mesh_abort(Mesh* mesh) {
  pthread_mutex_lock(&mesh->lock);
  shut_down(mesh);
  pthread_mutex_unlock(&mesh->lock);
}

void bagua_mesh_close(Mesh* mesh) {
  pthread_mutex_lock(&mesh->lock);
  shut_down(mesh);
  mesh->closing = true;
  if (!mesh->busy) close_all(mesh);
  pthread_mutex_unlock(&mesh->lock);
}

// In a forked child. Without the lock: a thread of the parent may have held it, or been in an exchange, and does not
// exist here to end that.
void bagua_mesh_close_copies(Mesh* mesh) {
  pthread_mutex_init(&mesh->lock, nullptr);
  close_all(mesh);
  mesh->failed = mesh->cut = true;
  mesh->busy = false;
}

void bagua_mesh_free(Mesh* mesh) {
  close_all(mesh);
  free(mesh->fds);
  free(mesh->sequences);
  delete mesh;
}
