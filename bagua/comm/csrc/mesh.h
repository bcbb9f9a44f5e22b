// The sockets of a mesh and their life.
#pragma once

#include <pthread.h>

#include "abi.h"

struct Mesh {
  int32_t rank, size;
  int32_t* fds;
  uint32_t* sequences;    // of the next exchange with each peer
  int32_t* wakes;         // SO_RCVLOWAT of each socket
  bool failed = false;    // the streams are out of step
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  // Under the lock:
  bool cut = false, busy = false, closing = false;
};

bool begin_use(Mesh* mesh, Problem* problem);
void end_use(Mesh* mesh);
bool is_cut(Mesh* mesh);
// Keeps the first one.
void tell(Problem* problem, const char* format, ...) __attribute__((format(printf, 2, 3)));
