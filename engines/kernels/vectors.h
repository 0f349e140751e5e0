// As many floats at a time as a register holds, and the types they are widened from: sixteen with AVX-512, else eight.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define JOULEBENCH_AVX2
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define JOULEBENCH_AVX512
#endif
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#define JOULEBENCH_NEON
typedef __fp16 half;  // C++ of GCC 12 knows _Float16 on x86 alone
#else
typedef _Float16 half;
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t w8 __attribute__((vector_size(32)));
typedef uint32_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef int8_t b8 __attribute__((vector_size(8)));
typedef uint8_t ub8 __attribute__((vector_size(8)));

// N: a whole register.
#ifdef JOULEBENCH_AVX512
constexpr int kLanes = 16;
typedef float fN __attribute__((vector_size(64)));
typedef int32_t wN __attribute__((vector_size(64)));
typedef uint32_t uN __attribute__((vector_size(64)));
constexpr __mmask16 kAll = 0xFFFF;  // without a mask GCC 12 warns of values that its own headers leave unset
#else
constexpr int kLanes = 8;
typedef f8 fN;
typedef w8 wN;
typedef u8x32 uN;
#endif

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

#ifdef JOULEBENCH_NEON
inline f8 both(float32x4_t low, float32x4_t high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

inline w8 widened(int16x8_t v) {
  return __builtin_shufflevector(vmovl_s16(vget_low_s16(v)), vmovl_s16(vget_high_s16(v)), 0, 1, 2, 3, 4, 5, 6, 7);
}

inline u8x32 widened(uint16x8_t v) {
  return __builtin_shufflevector(vmovl_u16(vget_low_u16(v)), vmovl_u16(vget_high_u16(v)), 0, 1, 2, 3, 4, 5, 6, 7);
}
#endif

inline float sum(f8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

#ifdef JOULEBENCH_AVX512
inline float sum(fN v) {
  return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif

// e^x for x <= 0, to 2e-7: 2^k times a polynomial in the rest, |rest| <= ln 2 / 2 (Cephes' expf).
template <class F>
inline F exp_below_one(F x) {
  typedef decltype(x < x) W;
  x = x < -87.0f ? F{} - 87.0f : x;
  const F shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
  const F k = shifted - 12582912.0f;
  const F r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  F p = F{} + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  const F value = p * r * r + r + 1.0f;
  return value * (F)((__builtin_convertvector(k, W) + 127) << 23);
}

// x * sigmoid(x)
template <class F>
inline F silu(F x) {
  const F e = exp_below_one(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : F{} + 1.0f) / (e + 1.0f);
}

template <class F>
inline void store(float* to, F v) {
  std::memcpy(to, &v, sizeof v);
}

inline float* scratch(std::vector<float>& buffer, int64_t n) {
  if ((int64_t)buffer.size() < n) buffer.resize(n);
  return buffer.data();
}
