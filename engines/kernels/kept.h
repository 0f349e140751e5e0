// Keys and values as a cache keeps them: floats, or rounded to the nearest bf16 or half. What is too large for a half is
// kept as no number, for an infinite key may give a score of minus infinity, which is one that nobody sees.

#pragma once

#include <cstring>

#include "matrix.h"

// f(an element of this form)
template <class F>
inline void as_kept(int32_t format, const F& f) {
  if (format == kBf16) return f(Bf16::element());
  if (format == kFp16) return f(Fp16::element());
  f(Fp32::element());
}

// A register of them as floats.
template <class F>
inline F floats(const float* p) {
  return load<F>(p);
}

template <class F>
inline F floats(const Bf16::element* p) {
  if constexpr (sizeof(F) == sizeof(fN)) return Bf16::widen(p);
#ifdef JOULEBENCH_AVX512
  else return (f8)((u8x32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#endif
}

template <class F>
inline F floats(const Fp16::element* p) {
  if constexpr (sizeof(F) == sizeof(fN)) return Fp16::widen(p);
#ifdef JOULEBENCH_AVX512
  else return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
}

// n of them, a multiple of eight, are kept.
inline void keep(const float* from, int64_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }

inline void keep(const float* from, int64_t n, Bf16::element* to) {
  for (int64_t i = 0; i < n; i += 8) {
    const u8x32 bits = load<u8x32>(from + i), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const w8 is_number = (bits & 0x7FFFFFFF) <= 0x7F800000;
    const h8 some = __builtin_convertvector(is_number ? rounded : bits >> 16 | 0x40, h8);
    std::memcpy(to + i, &some, sizeof some);
  }
}

inline void keep(const float* from, int64_t n, Fp16::element* to) {
  for (int64_t i = 0; i < n; i += 8) {
    const f8 some = load<f8>(from + i), magnitude = (f8)((w8)some & 0x7FFFFFFF);
    const f8 held = magnitude < 65520.0f ? some : f8{} + NAN;  // from there on it would be rounded up to infinity
#if defined(JOULEBENCH_AVX2)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph((__m256)held, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int64_t k = 0; k < 8; k++) to[i + k] = Fp16::element(held[k]);
#endif
  }
}

// n of them, a multiple of eight, as floats: where they lie, or in the room.
inline const float* as_floats(const float* from, int64_t, float*) { return from; }

template <class E>
inline const float* as_floats(const E* from, int64_t n, float* room) {
  for (int64_t i = 0; i < n; i += 8) store(room + i, floats<f8>(from + i));
  return room;
}
