// Eight floats at a time, and the types they are widened from.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

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
typedef uint8_t ub8 __attribute__((vector_size(8)));

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline float sum(f8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// e^x for x <= 0, to 2e-7: 2^k times a polynomial in the rest, |rest| <= ln 2 / 2 (Cephes' expf).
inline f8 exp_below_one(f8 x) {
  x = x < -87.0f ? f8{} - 87.0f : x;
  const f8 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
  const f8 k = shifted - 12582912.0f;
  const f8 r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  f8 p = f8{} + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  const f8 value = p * r * r + r + 1.0f;
  return value * (f8)((__builtin_convertvector(k, w8) + 127) << 23);
}

// x * sigmoid(x)
inline f8 silu(f8 x) {
  const f8 e = exp_below_one(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : f8{} + 1.0f) / (e + 1.0f);
}

inline void store(float* to, f8 v) { std::memcpy(to, &v, sizeof v); }

inline float* scratch(std::vector<float>& buffer, int64_t n) {
  if ((int64_t)buffer.size() < n) buffer.resize(n);
  return buffer.data();
}
