// Products of few tokens in bytes: inputs in one digit, as int8 arithmetic asks for, or in three, which are as good as
// floats (kDigits). See rounded.h.
//
// Legend: D digits of an input, R matrix rows, T tokens.

#pragma once

#include <algorithm>

#include "rounded.h"

// --- inputs of few tokens ---------------------------------------------------------------------------------------------
// A row is cut into what a register of weights meets. int8, 4 kLanes columns: their bytes, what each lane's sum starts
// with, each lane's scale. int4, 8 kLanes columns: of each digit the bytes that low nibbles meet and those that high ones
// meet, then starts, scales.

constexpr int64_t kOfInt8 = 4 * kLanes, kOfInt4 = 8 * kLanes;

// In fp32 arithmetic an input that meets nibbles has three digits where bytes are multiplied: 24 bits, as a float has, with
// one exponent for 32 columns. Such sums are exact until they are scaled, and take less time than making nibbles floats.
constexpr int kDigits = 3;
inline int n_digits(const Matrix& m) { return m.arithmetic == kByInt8 ? 1 : kDigits; }

constexpr int64_t piece_of_int4(int digits) { return (2 * digits + 2) * kLanes; }  // floats

inline int64_t rounded_stride(const Matrix& m) {  // in floats
  return m.format == kInt4 ? n_pieces(m.columns, kOfInt4) * piece_of_int4(n_digits(m))
                           : n_pieces(m.columns, kOfInt8) * 3 * kLanes;
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

// start + what low and high nibbles make of a piece of an input.
template <int D>
__attribute__((always_inline)) inline wN add_nibble_products(wN start, ubN low, ubN high, const float* piece) {
  wN parts = D == 1 ? start : wN{};
#pragma GCC unroll 4
  for (int d = 0; d < D; d++, piece += 2 * kLanes) {
    if (d > 0) parts <<= 8;
#if defined(JOULEBENCH_AVX2) && !defined(JOULEBENCH_VNNI)
    const wN pairs = add_word_pairs(wN{}, (wN)low, load<wN>(piece));
    parts = with_pairs(parts, add_word_pairs(pairs, (wN)high, load<wN>(piece + kLanes)));
#else
    parts = add_products(add_products(parts, low, load<bN>(piece)), high, load<bN>(piece + kLanes));
#endif
  }
  return D == 1 ? parts : parts + start;
}

template <int D>
inline void prepare_int4_bytes(const float* x, int64_t columns, float* prepared) {
  for (int64_t first = 0; first < columns; first += kOfInt4, prepared += piece_of_int4(D)) {
    for (int64_t block = 0; block < kOfInt4; block += kNibbleBlock) {
      int8_t bytes[D][kNibbleBlock];
      float scales[2];
      const int64_t n = std::clamp<int64_t>(columns - first - block, 0, kNibbleBlock);
      for (int half = 0; half < 2; half++)
        scales[half] = round_columns<D>(x + first + block + 32 * half, n / 2, bytes[0] + 32 * half, kNibbleBlock);
      for (int d = 0; d < D; d++) {
        int8_t* low = (int8_t*)(prepared + 2 * d * kLanes) + block / 2;
        arrange_columns(bytes[d], low, low + 4 * kLanes);
      }
      store(prepared + (2 * D + 1) * kLanes + block / 8,
            f8{scales[0], scales[0], scales[1], scales[1], scales[0], scales[0], scales[1], scales[1]});
    }
    const wN start = -add_nibble_products<D>(wN{}, ubN{} + 8, ubN{} + 8, prepared);
    std::memcpy(prepared + 2 * D * kLanes, &start, sizeof start);
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
      const bN bytes = for_several(load<bN>(of));
      const fN scale = for_several(load<fN>(of + 2 * kLanes));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const wN start = kRaisedBy ? load<wN>(of + kLanes) : wN{};
        totals[r][t] += __builtin_convertvector(add_signed_products(start, weights[r], bytes), fN) * scale;
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

// D: digits of an input.
template <int D, int R, int T>
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
      const float* of = x + first / kOfInt4 * piece_of_int4(D) + t * stride;
      const fN scale = load<fN>(of + (2 * D + 1) * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const wN parts = add_nibble_products<D>(load<wN>(of + 2 * D * kLanes), low[r], high[r], of);
        totals[r][t] += __builtin_convertvector(parts, fN) * scale * scales[r];
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
