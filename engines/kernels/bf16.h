// Arithmetic in bf16, as `arithmetic = "bf16"` asks for: inputs are rounded to bf16 as weights are, two columns a lane are
// multiplied at once, and sums are fp32. Only where the processor has the instruction. This is what all products share,
// and those of few tokens; wide_bf16.h has those of many.
//
// Legend: T tokens.

#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"

#if defined(JOULEBENCH_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define JOULEBENCH_BF16
#endif

constexpr int64_t kPairLanes = 2 * kLanes;  // columns that a register of pairs holds

// The bits of bf16 in the upper half of each lane: to the nearest, of two the even one.
template <class F>
inline auto bf16_bits(F x) {
  typedef decltype(x < x) W;
  typedef decltype(W{} + uint32_t{}) Signed;
  const Signed bits = (Signed)x;
  const Signed nearest = bits + 0x7FFF + (bits >> 16 & 1);
  return (x != x ? Signed{} + 0x7FC00000 : nearest) & int32_t(0xFFFF0000);
}

// Two columns of the same lanes as words: the first in the lower half.
template <class F>
inline auto pair_columns(F first, F second) {
  return (bf16_bits(first) >> 16 & 0xFFFF) | bf16_bits(second);
}

#ifdef JOULEBENCH_BF16

constexpr bool kMultipliesPairs = true;

inline fN add_pair_products(fN start, wN a, wN b) {
  return (fN)_mm512_dpbf16_ps((__m512)start, (__m512bh)a, (__m512bh)b);
}
inline f8 add_pair_products(f8 start, w8 a, w8 b) {
  return (f8)_mm256_dpbf16_ps((__m256)start, (__m256bh)a, (__m256bh)b);
}

// As the template above, in two instructions.
inline wN pair_columns(fN first, fN second) {
  typedef uint16_t h32 __attribute__((vector_size(64)));
  const h32 both = (h32)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (wN)__builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10,
                                     26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

#else

constexpr bool kMultipliesPairs = false;  // and nobody asks for it: engines.kernels.tables

inline fN add_pair_products(fN start, wN, wN) { return start; }

#endif

inline bool is_by_pairs(const Matrix& m) { return kMultipliesPairs && m.arithmetic == kByBf16; }

// --- products of few tokens -------------------------------------------------------------------------------------------

inline int64_t pairs_stride(int64_t columns) {  // in floats; the last register is filled with zeros
  return (columns + kPairLanes - 1) / kPairLanes * kLanes;
}

inline void prepare_pairs(const float* x, int64_t columns, float* prepared) {
  uint16_t* to = (uint16_t*)prepared;
  int64_t c = 0;
#ifdef JOULEBENCH_BF16
  for (; c + kLanes <= columns; c += kLanes) {
    const auto some = _mm512_cvtneps_pbh((__m512)load<fN>(x + c));
    std::memcpy(to + c, &some, sizeof some);
  }
#endif
  for (; c + 8 <= columns; c += 8) {
    const h8 eight = __builtin_convertvector((u8x32)bf16_bits(load<f8>(x + c)) >> 16, h8);
    std::memcpy(to + c, &eight, sizeof eight);
  }
  for (; c < columns; c++) to[c] = uint16_t(uint32_t(bf16_bits(f8{} + x[c])[0]) >> 16);
  std::fill(to + columns, to + 2 * pairs_stride(columns), uint16_t(0));
}

template <int R, int T>
inline void dot_pairs(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  const int64_t stride = pairs_stride(m.columns), n_whole = m.columns / kPairLanes, apart = step * m.columns;
  const uint16_t* const rows = (const uint16_t*)m.values + row * m.columns;
  constexpr int U = sums_of_row(T);
  fN sums[U][R][T] = {};
  const auto add = [&](int64_t i, int u, const auto& weight_of) {
    wN weights[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) weights[r] = weight_of(rows + r * apart + i * kPairLanes);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const wN input = load<wN>(x + t * stride + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[u][r][t] = add_pair_products(sums[u][r][t], weights[r], input);
    }
  };
  const auto whole = [](const uint16_t* from) { return load<wN>(from); };
  int64_t i = 0;
  for (; i + U <= n_whole; i += U) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) ask_ahead(rows + r * apart + i * kPairLanes, U * kLine, ahead_of(R));
#pragma GCC unroll 2
    for (int u = 0; u < U; u++) add(i + u, u, whole);
  }
  for (; i < n_whole; i++) add(i, 0, whole);
  if (const int64_t rest = m.columns % kPairLanes)
    add(i, 0, [&](const uint16_t* from) {
      wN weight = {};
      std::memcpy(&weight, from, rest * sizeof(uint16_t));
      return weight;
    });
  const auto total = [&](int i) {
    fN total = sums[0][i / T][i % T];
#pragma GCC unroll 2
    for (int u = 1; u < U; u++) total += sums[u][i / T][i % T];
    return total;
  };
  sum_each<R * T>(total, out);
}
