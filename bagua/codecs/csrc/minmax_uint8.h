// C ABI of the min-max uint8 kernels. One set of three functions for each instruction set, told apart by the
// suffix BAGUA_ISA (baseline, avx2, avx512); dispatch.cpp says which of them the machine can run.
//
// A wire row is num_blocks x (min fp32, max fp32), then n codes. `head` points at the first row's header and
// `codes` at its first code, both rows lie `wire_stride` bytes apart. Wires may have any alignment.
#pragma once

#include <stdint.h>

#define BAGUA_CODECS_ABI 1

#define BAGUA_JOIN2(a, b) a##_##b
#define BAGUA_JOIN(a, b) BAGUA_JOIN2(a, b)
#define BAGUA_FN(name) BAGUA_JOIN(name, BAGUA_ISA)
#define BAGUA_API extern "C" __attribute__((visibility("default")))

BAGUA_API int32_t bagua_codecs_abi();
BAGUA_API int32_t bagua_codecs_isa();  // 0 baseline, 1 avx2, 2 avx512: the highest that this CPU runs

#ifdef BAGUA_ISA
// Strides of fp32 arrays count elements. `block` >= 1 and may exceed n.
BAGUA_API void BAGUA_FN(bagua_minmax_uint8_encode)(const float* x, int64_t x_stride, int64_t rows, int64_t n,
                                                   int64_t block, uint8_t* head, uint8_t* codes,
                                                   int64_t wire_stride);
BAGUA_API void BAGUA_FN(bagua_minmax_uint8_decode)(const uint8_t* head, const uint8_t* codes,
                                                   int64_t wire_stride, int64_t rows, int64_t n, int64_t block,
                                                   float* out, int64_t out_stride);
// out[i] = weight * sum of the decoded rows.
BAGUA_API void BAGUA_FN(bagua_minmax_uint8_decode_mean)(const uint8_t* head, const uint8_t* codes,
                                                        int64_t wire_stride, int64_t rows, int64_t n,
                                                        int64_t block, float weight, float* out);
#endif
