// Arithmetic in bytes, as `arithmetic = "int8"` asks for: 32 columns of an input share a scale, their largest magnitude
// becomes 127, and products with weights of 8 or 4 bits are whole numbers until they are scaled. This is what all
// processors share, and the products of few tokens; wide_rounded.h has those of many.
//
// Legend: T tokens.

#pragma once

#include <cmath>
#include <vector>

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

// Up to 32 columns as bytes, the rest zeros; returns their scale.
inline float round_columns(const float* x, int64_t n, int8_t* out) {
  alignas(64) float padded[kRoundedColumns] = {};
  if (n < kRoundedColumns) x = (const float*)std::memcpy(padded, x, n * sizeof(float));
  fN most = {}, odd = {};
  for (int c = 0; c < kRoundedColumns; c += kLanes) {
    const fN value = load<fN>(x + c);
    most = larger(magnitude(value), most);
    odd += value - value;
  }
  f4 scale, inverse;  // a whole register takes longer to divide
  scales_of(f4{} + largest_of(most), f4{} + sum(odd), scale, inverse);
  for (int c = 0; c < kRoundedColumns; c += kLanes) {
    const fN scaled = load<fN>(x + c) * inverse[0];
#if defined(JOULEBENCH_AVX512)
    _mm_storeu_si128((__m128i*)(out + c), _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)nearest(scaled)));
#elif defined(JOULEBENCH_AVX2)  // GCC 12 converts a vector of words one by one
    const __m256i whole = (__m256i)nearest(scaled);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)(out + c), _mm_packs_epi16(halves, halves));
#else
    const b8 bytes = __builtin_convertvector(nearest(scaled), b8);
    std::memcpy(out + c, &bytes, sizeof bytes);
#endif
  }
  return scale[0];
}

// --- inputs of few tokens ---------------------------------------------------------------------------------------------
// A row is cut into what a register of weights meets. int8, 4 kLanes columns: their bytes, what each lane's sum starts
// with, each lane's scale. int4, 8 kLanes columns: the bytes that low nibbles meet, those that high ones meet, starts,
// scales.

constexpr int64_t kOfInt8 = 4 * kLanes, kOfInt4 = 8 * kLanes;

inline int64_t n_pieces(int64_t columns, int64_t of_piece) { return (columns + of_piece - 1) / of_piece; }

inline int64_t rounded_stride(const Matrix& m) {  // in floats
  return m.format == kInt4 ? n_pieces(m.columns, kOfInt4) * 4 * kLanes : n_pieces(m.columns, kOfInt8) * 3 * kLanes;
}

// Bytes of 16 columns that lie behind nibbles of two neighbouring bytes of words: see arrange_nibbles.
inline void interleave(const int8_t* first, const int8_t* second, int8_t* lower, int8_t* upper) {
  for (int i = 0; i < 4; i++) {
    lower[2 * i] = first[i], lower[2 * i + 1] = second[i];
    upper[2 * i] = first[4 + i], upper[2 * i + 1] = second[4 + i];
  }
}

// 64 columns in the order of arranged nibbles.
inline void arrange_columns(const int8_t* columns, int8_t* low, int8_t* high) {
  for (int half = 0; half < 2; half++) {
    const int8_t* from = columns + 32 * half;
    interleave(from, from + 16, low + 8 * half, low + 16 + 8 * half);
    interleave(from + 8, from + 24, high + 8 * half, high + 16 + 8 * half);
  }
}

inline void prepare_int8_bytes(const float* x, int64_t columns, float* prepared) {
  for (int64_t first = 0; first < columns; first += kOfInt8, prepared += 3 * kLanes) {
    for (int64_t c = 0; c < kOfInt8; c += kRoundedColumns) {
      const int64_t n = std::clamp<int64_t>(columns - first - c, 0, kRoundedColumns);
      const f8 scale = f8{} + round_columns(x + first + c, n, (int8_t*)prepared + c);
      store(prepared + 2 * kLanes + c / 4, scale);
    }
    const wN total = add_products(wN{}, ubN{} + 1, load<bN>(prepared));
    std::memcpy(prepared + kLanes, &(const wN&)(total * -kRaisedBy), sizeof total);
  }
}

inline void prepare_int4_bytes(const float* x, int64_t columns, float* prepared) {
  for (int64_t first = 0; first < columns; first += kOfInt4, prepared += 4 * kLanes) {
    for (int64_t block = 0; block < kOfInt4; block += kNibbleBlock) {
      int8_t bytes[kNibbleBlock];
      float scales[2];
      const int64_t n = std::clamp<int64_t>(columns - first - block, 0, kNibbleBlock);
      for (int half = 0; half < 2; half++)
        scales[half] = round_columns(x + first + block + 32 * half, n / 2, bytes + 32 * half);
      arrange_columns(bytes, (int8_t*)prepared + block / 2, (int8_t*)(prepared + kLanes) + block / 2);
      store(prepared + 3 * kLanes + block / 8,
            f8{scales[0], scales[0], scales[1], scales[1], scales[0], scales[0], scales[1], scales[1]});
    }
    const wN low = add_products(wN{}, ubN{} + 8, load<bN>(prepared));
    const wN start = -add_products(low, ubN{} + 8, load<bN>(prepared + kLanes));
    std::memcpy(prepared + 2 * kLanes, &start, sizeof start);
  }
}

// --- products of few tokens -------------------------------------------------------------------------------------------

// The bytes of a row from `first` on that a register holds; behind its last there are zeros.
template <class V>
inline V load_to_end(const void* row, int64_t first, int64_t n_bytes) {
  if (first + int64_t(sizeof(V)) <= n_bytes) return load<V>((const char*)row + first);
  V value = {};
  std::memcpy(&value, (const char*)row + first, n_bytes - first);
  return value;
}

template <int R, int T>
inline void dot_int8_bytes(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  const int64_t stride = rounded_stride(m);
  const int8_t* rows[R];
  for (int r = 0; r < R; r++) rows[r] = (const int8_t*)m.values + (row + r * step) * m.columns;
  fN totals[R][T] = {};
  const auto add = [&](int64_t first, const auto& weight_of) __attribute__((always_inline)) {
    bN weights[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) weights[r] = in_register(weight_of(rows[r]));
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const float* of = x + first / kOfInt8 * 3 * kLanes + t * stride;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const wN parts = add_signed_products(load<wN>(of + kLanes), weights[r], load<bN>(of));
        totals[r][t] += __builtin_convertvector(parts, fN) * load<fN>(of + 2 * kLanes);
      }
    }
  };
  int64_t first = 0;
  for (; first + kOfInt8 <= m.columns; first += kOfInt8) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) ask_ahead(rows[r] + first, kOfInt8);
    add(first, [&](const int8_t* from) { return load<bN>(from + first); });
  }
  if (first < m.columns) add(first, [&](const int8_t* from) { return load_to_end<bN>(from, first, m.columns); });
  sum_each<R * T>([&](int i) { return totals[i / T][i % T]; }, out);
  for (int i = 0; i < R * T; i++) out[i] *= ((const float*)m.scales)[row + i / T * step];
}

// Within 16 bytes: the lower bytes of four words come before their upper ones, so that a lane's four bytes are columns of
// one group of 32.
inline ubN arrange_nibbles(ubN words) {
#if defined(JOULEBENCH_AVX512)
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return (ubN)_mm512_maskz_shuffle_epi8(~__mmask64(0), (__m512i)words, _mm512_maskz_broadcast_i32x4(kAll, order));
#elif defined(JOULEBENCH_AVX2)
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return (ubN)_mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(order));
#else
  return __builtin_shufflevector(words, words, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                 16, 17, 20, 21, 24, 25, 28, 29, 18, 19, 22, 23, 26, 27, 30, 31);
#endif
}

// Arranged nibbles, level + 8 each: the top one of a word is two's complement as it is stored.
inline ubN low_levels(ubN arranged) { return arranged & 0xF; }
inline ubN high_levels(ubN arranged) {
  const uN top = (uN{} + 0x08000800u) & ((uN)wN{0, 0, -1, -1, 0, 0, -1, -1
#if defined(JOULEBENCH_AVX512)
                                                , 0, 0, -1, -1, 0, 0, -1, -1
#endif
                                         });
  return (ubN)((((uN)arranged >> 4) ^ top) & 0x0F0F0F0Fu);
}

// The scale of each lane of the nibbles from column `first` of a row on, whose groups' scales lie at `scales`.
struct NibbleScales {
  int group_bits;
  int64_t columns;

  fN at(const float* scales, int64_t first) const {
    const float* from = scales + (first >> group_bits);
#if defined(JOULEBENCH_AVX512)
    const int64_t n = std::min(kOfInt4, columns - first);
    const __mmask16 there = (1u << ((n + (int64_t(1) << group_bits) - 1) >> group_bits)) - 1;
    const uN group = (uN{0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3} << 5) >> uint32_t(group_bits);
    return (fN)_mm512_maskz_permutexvar_ps(kAll, (__m512i)group, _mm512_maskz_loadu_ps(there, from));
#else
    if (group_bits > 5) return f8{} + from[0];
#if defined(JOULEBENCH_AVX2)  // GCC 12 puts the eight together one by one
    return (f8)_mm256_permute_ps(_mm256_castpd_ps(_mm256_set1_pd(load<double>(from))), 0x50);
#else
    return f8{from[0], from[0], from[1], from[1], from[0], from[0], from[1], from[1]};
#endif
#endif
  }
};

template <int R, int T>
inline void dot_int4_bytes(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  const int64_t stride = rounded_stride(m), row_bytes = m.columns / 2;
  const NibbleScales lanes = {m.group_bits, m.columns};
  const NibbleRows<R, float> rows(m, row, step);
  fN totals[R][T] = {};
  const auto add = [&](int64_t first, const auto& words_of) __attribute__((always_inline)) {
    ubN low[R], high[R];
    fN scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const ubN arranged = arrange_nibbles(words_of(rows.words[r]));
      low[r] = in_register(low_levels(arranged)), high[r] = in_register(high_levels(arranged));
      scales[r] = in_register(lanes.at(rows.scales[r], first));
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const float* of = x + first / kOfInt4 * 4 * kLanes + t * stride;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        wN parts = load<wN>(of + 2 * kLanes);
#if defined(JOULEBENCH_AVX2) && !defined(JOULEBENCH_VNNI)
        const wN pairs = add_word_pairs(wN{}, (wN)low[r], load<wN>(of));
        parts = with_pairs(parts, add_word_pairs(pairs, (wN)high[r], load<wN>(of + kLanes)));
#else
        parts = add_products(add_products(parts, low[r], load<bN>(of)), high[r], load<bN>(of + kLanes));
#endif
        totals[r][t] += __builtin_convertvector(parts, fN) * (load<fN>(of + 3 * kLanes) * scales[r]);
      }
    }
  };
  int64_t first = 0;
  for (; first + kOfInt4 <= m.columns; first += kOfInt4) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) rows.ask(r, first);
    add(first, [&](const uint32_t* words) { return load<ubN>(words + first / 8); });
  }
  if (first < m.columns)
    add(first, [&](const uint32_t* words) { return load_to_end<ubN>(words, first / 2, row_bytes); });
  sum_each<R * T>([&](int i) { return totals[i / T][i % T]; }, out);
}
