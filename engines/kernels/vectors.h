// Eight floats at a time, and the types they are widened from.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define JOULEBENCH_AVX2
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t w8 __attribute__((vector_size(32)));
typedef uint32_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef _Float16 half8 __attribute__((vector_size(16)));
typedef int8_t b8 __attribute__((vector_size(8)));

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline float sum(f8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
