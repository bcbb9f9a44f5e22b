// x += y for the types of a sum, with the rounding that gloo has: 16-bit numbers are added in fp32.
#pragma once

#include <stdint.h>

// The bytes of an element.
int64_t element_bytes(int32_t type);
void add(int32_t type, uint8_t* x, const uint8_t* y, int64_t n);
