// Arithmetic in bytes, as `arithmetic = "int8"` asks for: 32 columns of an input share a scale, their largest magnitude
// becomes 127, and products with weights of 8 or 4 bits are whole numbers until they are scaled. This is what all
// processors share; narrow_rounded.h has the products of few tokens, wide_rounded.h those of many.

#pragma once

#include <cmath>

#include "matrix.h"

constexpr int64_t kRoundedColumns = 32;  // that share a scale

typedef int8_t bN __attribute__((vector_size(4 * kLanes)));
typedef uint8_t ubN __attribute__((vector_size(4 * kLanes)));
typedef int8_t b32 __attribute__((vector_size(32)));
typedef uint8_t ub32 __attribute__((vector_size(32)));

// --- four products a lane ---------------------------------------------------------------------------------------------
// One inner loop for each instruction set: start + the sum of a lane's four products of an unsigned and a signed byte.

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define JOULEBENCH_VNNI
inline w8 add_products(w8 start, ub32 u, b32 s) { return (w8)_mm256_dpbusd_epi32((__m256i)start, (__m256i)u, (__m256i)s); }
#elif defined(__AVXVNNI__)
#define JOULEBENCH_VNNI
inline w8 add_products(w8 start, ub32 u, b32 s) {
  return (w8)_mm256_dpbusd_avx_epi32((__m256i)start, (__m256i)u, (__m256i)s);
}
#elif defined(JOULEBENCH_AVX2)  // two products are added in 16 bits: exact where u is at most 127, or 128 and s a magnitude
inline w8 add_products(w8 start, ub32 u, b32 s) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)u, (__m256i)s);
  return start + (w8)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
inline w8 add_products(w8 start, ub32 u, b32 s) {
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 4; k++) start[i] += int32_t(u[4 * i + k]) * s[4 * i + k];
  return start;
}
#endif

#if defined(JOULEBENCH_AVX512)
#if defined(JOULEBENCH_VNNI)
inline wN add_products(wN start, ubN u, bN s) { return (wN)_mm512_dpbusd_epi32((__m512i)start, (__m512i)u, (__m512i)s); }
#else
inline wN add_products(wN start, ubN u, bN s) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)u, (__m512i)s);
  return start + (wN)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#endif
#endif

// Without VNNI. Nibbles: two products a half of a lane, in 16 bits; eight such sums are 30480 at most. Bytes, of which two
// products fill 16 bits already: two halves of a lane, each of which holds one byte, in 32 bits.
#if defined(JOULEBENCH_AVX2) && !defined(JOULEBENCH_VNNI)
inline w8 add_word_pairs(w8 start, w8 u, w8 s) {
  return (w8)_mm256_add_epi16((__m256i)start, _mm256_maddubs_epi16((__m256i)u, (__m256i)s));
}
inline w8 add_half_products(w8 start, w8 a, w8 b) { return start + (w8)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline w8 with_pairs(w8 start, w8 pairs) { return start + (w8)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#if defined(JOULEBENCH_AVX512)
inline wN add_word_pairs(wN start, wN u, wN s) {
  return (wN)_mm512_add_epi16((__m512i)start, _mm512_maddubs_epi16((__m512i)u, (__m512i)s));
}
inline wN add_half_products(wN start, wN a, wN b) { return start + (wN)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
inline wN with_pairs(wN start, wN pairs) { return start + (wN)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
#endif
constexpr bool kAddsPairs = true;
#else
constexpr bool kAddsPairs = false;
#endif

inline w8 add_word_products(w8 start, w8 u, w8 s) { return add_products(start, (ub32)u, (b32)s); }
#if defined(JOULEBENCH_AVX512)
inline wN add_word_products(wN start, wN u, wN s) { return add_products(start, (ubN)u, (bN)s); }
#endif

// What is added to signed weights so that they are unsigned; sums start with what that is too much. Without VNNI weights
// give their signs to the input instead, for larger ones would not fit 16 bits.
#if defined(JOULEBENCH_VNNI)
constexpr bool kMultipliesBytes = true;
constexpr int kRaisedBy = 128;
inline wN add_signed_products(wN start, bN weight, bN x) { return add_products(start, (ubN)weight ^ 0x80, x); }
#else
constexpr bool kMultipliesBytes = false;
constexpr int kRaisedBy = 0;
inline wN add_signed_products(wN start, bN weight, bN x) {
#if defined(JOULEBENCH_AVX512)
  const __m512i w = (__m512i)weight;
  const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), (__m512i)x);
  return add_products(start, (ubN)_mm512_abs_epi8(w), (bN)turned);
#elif defined(JOULEBENCH_AVX2)
  const __m256i w = (__m256i)weight;
  return add_products(start, (ubN)_mm256_abs_epi8(w), (bN)_mm256_sign_epi8((__m256i)x, w));
#else
  for (int i = 0; i < kLanes; i++)
    for (int k = 0; k < 4; k++) start[i] += int32_t(weight[4 * i + k]) * x[4 * i + k];
  return start;
#endif
}
#endif

// --- rounding ---------------------------------------------------------------------------------------------------------

template <class F>
inline F magnitude(F x) {
  typedef decltype(x < x) W;
  return (F)((W)x & 0x7FFFFFFF);
}

// To the nearest whole number, of two the even one. x: |x| < 2^31.
#if defined(JOULEBENCH_AVX512)
inline wN nearest(fN x) { return (wN)_mm512_maskz_cvtps_epi32(kAll, (__m512)x); }
#endif
inline w8 nearest(f8 x) {
#if defined(JOULEBENCH_AVX2)
  return (w8)_mm256_cvtps_epi32((__m256)x);
#else
  w8 whole;
  for (int i = 0; i < 8; i++) whole[i] = int32_t(std::nearbyint(x[i]));
  return whole;
#endif
}

// Too small for a scale that has an inverse: all of them count as zeros.
constexpr float kLeastLargest = 1e-34f;

// What the largest magnitude of 32 columns makes of them: value = whole number * scale. not_a_number: 0, or NaN where one of
// the columns is none or is infinite, which the scale then carries on.
template <class F>
inline void scales_of(F largest, F not_a_number, F& scale, F& inverse) {
  const F none = {};
  scale = (largest > kLeastLargest ? largest / 127.0f : none) + not_a_number;
  inverse = largest > kLeastLargest ? (none + 127.0f) / largest : none;
}

inline float largest_of(f4 v) {
  const f4 pairs = __builtin_shufflevector(v, v, 2, 3, 2, 3), most = v > pairs ? v : pairs;
  return std::max(most[0], most[1]);
}
inline float largest_of(f8 v) {
  const f4 low = __builtin_shufflevector(v, v, 0, 1, 2, 3), high = __builtin_shufflevector(v, v, 4, 5, 6, 7);
  return largest_of(low > high ? low : high);
}
#if defined(JOULEBENCH_AVX512)
inline float largest_of(fN v) {
  const f8 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const f8 high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return largest_of(low > high ? low : high);
}
#endif

// The lowest bytes of whole numbers within -128..127.
inline void store_bytes(int8_t* to, wN whole) {
#if defined(JOULEBENCH_AVX512)
  _mm_storeu_si128((__m128i*)to, _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)whole));
#elif defined(JOULEBENCH_AVX2)  // GCC 12 converts a vector of words one by one
  const __m128i halves =
      _mm_packs_epi32(_mm256_castsi256_si128((__m256i)whole), _mm256_extracti128_si256((__m256i)whole, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(halves, halves));
#else
  const b8 bytes = __builtin_convertvector(whole, b8);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

// The same where a whole number has three digits, of -128..127 each. A power of two, so that only what is below one is
// rounded; it is 2^-126 at least. The top digit is 127 at most.
inline void scales_of_digits(float largest, float not_a_number, float& scale, float& inverse) {
  const float above = largest * 1.0079f;
  uint32_t bits;
  std::memcpy(&bits, &above, sizeof bits);
  const uint32_t exponent = std::max(bits >> 23, 23u) - 22;  // the scale's
  const uint32_t of_scale = exponent << 23, of_inverse = (254 - exponent) << 23;
  scale = load<float>(&of_scale) + not_a_number;
  inverse = load<float>(&of_inverse);
}

// Up to 32 columns as whole numbers of D digits of a byte, the rest zeros; returns their scale. The top digits come first,
// each digit `apart` bytes behind the one before it.
template <int D = 1>
inline float round_columns(const float* x, int64_t n, int8_t* out, int64_t apart = 0) {
  alignas(64) float padded[kRoundedColumns] = {};
  if (n < kRoundedColumns) x = (const float*)std::memcpy(padded, x, n * sizeof(float));
  fN most = {}, odd = {};
  for (int c = 0; c < kRoundedColumns; c += kLanes) {
    const fN value = load<fN>(x + c);
    most = larger(magnitude(value), most);
    odd += value - value;
  }
  f4 scale, inverse;  // a whole register takes longer to divide
  if constexpr (D == 1) {
    scales_of(f4{} + largest_of(most), f4{} + sum(odd), scale, inverse);
  } else {
    float of_all, inverse_of_all;
    scales_of_digits(largest_of(most), sum(odd), of_all, inverse_of_all);
    scale = f4{} + of_all, inverse = f4{} + inverse_of_all;
  }
  for (int c = 0; c < kRoundedColumns; c += kLanes) {
    wN rest = nearest(load<fN>(x + c) * inverse[0]);
    for (int d = D - 1; d > 0; d--) {
      const wN digit = rest << 24 >> 24;
      store_bytes(out + c + d * apart, digit);
      rest = (rest - digit) >> 8;
    }
    store_bytes(out + c, rest);
  }
  return scale[0];
}
