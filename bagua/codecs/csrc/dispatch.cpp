#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>

// Compilers know of this one by name since GCC 11.
static bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}
#endif

int32_t bagua_codecs_abi() { return BAGUA_CODECS_ABI; }

int32_t bagua_codecs_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return 1;
#endif
  return 0;
}
