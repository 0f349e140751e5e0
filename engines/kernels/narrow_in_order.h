// Products of a few rows with matrices whose elements stand in column order, and become floats in registers.
//
// Legend: R matrix rows, T tokens.

#pragma once

#include <algorithm>
#include <cstring>

#include "matrix.h"

// Sums that registers hold beside four weights and an input. Of more tokens halves follow one another, or where registers
// are few, blocks of columns do.
constexpr int kMostSums = kLanes == 16 ? 24 : 12;
// The columns that are held in the first cache while four rows meet all tokens; a whole number of registers of any format.
constexpr int64_t kColumnsAtOnce = 128;

// Floats between the inputs of several tokens. Where rows of weights lie a multiple of 4 KB apart, inputs do not: what has
// the same place in such a multiple shares a few places in the first cache. Not measured with AVX-512, and left as it was.
inline int64_t plain_stride(int64_t columns) { return columns + (kLanes == 8 && columns % 1024 == 0 ? 16 : 0); }

// sums[R][T] += R rows of weights, `apart` elements from one to the next, times T inputs, of the last columns from c on.
template <class S, int R, int T>
inline void add_rest(const typename S::element* rows, int64_t apart, int64_t c, int64_t columns, const float* x,
                     fN (&sums)[R][T]) {
  const int64_t rest = columns - c;  // a register that zeros fill: of columns one by one the rounding hung on R and T
  fN weights[R];
  for (int r = 0; r < R; r++) {
    typename S::element last[kLanes] = {};
    std::copy_n(rows + r * apart + c, rest, last);
    weights[r] = S::widen(last);
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    fN input = {};
    std::memcpy(&input, x + t * plain_stride(columns) + c, rest * sizeof(float));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r][t] = add_product(sums[r][t], weights[r], input);
  }
}

// sums[R][T] += the register of columns from c on. Held: what several products take is read once (in_register).
template <class S, bool Held, int R, int T>
__attribute__((always_inline)) inline void add_register(const typename S::element* rows, int64_t apart, int64_t c,
                                                        const float* x, int64_t stride, fN (&sums)[R][T]) {
  const auto held = [](fN value) { return Held ? in_register(value) : value; };
  fN weights[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) weights[r] = held(S::widen(rows + r * apart + c));
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const fN input = held(load<fN>(x + t * stride + c));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r][t] += weights[r] * input;
  }
}

// R matrix rows, `step` rows apart, times T input rows: out[R][T]. As many sums as registers hold.
template <class S, int R, int T>
inline void dot_at_once(const typename S::element* rows, int64_t step, int64_t columns, const float* x, float* out) {
  const int64_t apart = step * columns, stride = plain_stride(columns);
  constexpr int U = sums_of_row(T);
  fN sums[U][R][T] = {};
  const auto add = [&](int64_t c, int u) __attribute__((always_inline)) {
    add_register<S, (T > 2 && kLanes == 16)>(rows, apart, c, x, stride, sums[u]);
  };
  constexpr int64_t kBytes = sizeof(typename S::element), kAtOnce = std::max(kLanes * U * kBytes, kLine);
  int64_t c = 0;
  for (; c + kLanes * U <= columns; c += kLanes * U) {
    if (c * kBytes % kAtOnce == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) ask_ahead(rows + r * apart + c, kAtOnce, ahead_of(R));
    }
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) add(c + kLanes * u, u);
  }
  for (; c + kLanes <= columns; c += kLanes) add(c, 0);
  if (c < columns) add_rest<S>(rows, apart, c, columns, x, sums[0]);
  const auto total = [&](int i) {
    fN total = sums[0][i / T][i % T];
#pragma GCC unroll 4
    for (int u = 1; u < U; u++) total += sums[u][i / T][i % T];
    return total;
  };
  sum_each<R * T>(total, out);
}

// sums[row + r][token + t] += the whole registers of columns c .. end - 1, of R of the rows times T of the tokens.
template <class S, int R, int T, int Rows, int Tokens>
__attribute__((always_inline)) inline void add_columns(const typename S::element* rows, int64_t apart, int64_t c,
                                                       int64_t end, const float* x, int64_t stride, int row, int token,
                                                       fN (&sums)[Rows][Tokens]) {
  typedef typename S::element element;
  constexpr int64_t kOfLine = kLine / sizeof(element);
  const element* const from = rows + row * apart;
  const float* const input_of = x + token * stride;
  fN own[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) own[r][t] = sums[row + r][token + t];
  for (; c + kOfLine <= end; c += kOfLine) {
    // Of several tokens this helps a Zen 3 too (see kAsksAhead).
#pragma GCC unroll 4
    for (int r = 0; r < R && token == 0; r++) __builtin_prefetch(from + r * apart + c + 2 * kColumnsAtOnce);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kOfLine; i += kLanes) add_register<S, true>(from, apart, c + i, input_of, stride, own);
  }
  for (; c + kLanes <= end; c += kLanes) add_register<S, true>(from, apart, c, input_of, stride, own);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) sums[row + r][token + t] = own[r][t];
}

// The same as dot_at_once, bit for bit, of more tokens than registers hold sums of: some columns of all rows meet all tokens
// before the next ones do, so that weights and inputs are read from the first cache when they are read again.
template <class S, int R, int T>
inline void dot_in_blocks(const typename S::element* rows, int64_t step, int64_t columns, const float* x, float* out) {
  const int64_t apart = step * columns, stride = plain_stride(columns);
  constexpr int kPair = std::min(R, 2), A = T <= 6 ? T : (T + 1) / 2, B = T - A;  // of two rows six sums each
  fN sums[R][T] = {};
  for (int64_t first = 0; first < columns; first += kColumnsAtOnce) {
    const int64_t end = std::min(columns, first + kColumnsAtOnce);
#pragma GCC unroll 1
    for (int r = 0; r < R; r += kPair) {
      add_columns<S, kPair, A>(rows, apart, first, end, x, stride, r, 0, sums);
      if constexpr (B > 0) add_columns<S, kPair, B>(rows, apart, first, end, x, stride, r, A, sums);
    }
  }
  const int64_t whole = columns / kLanes * kLanes;
  if (whole < columns) add_rest<S>(rows, apart, whole, columns, x, sums);
  sum_each<R * T>([&](int i) { return sums[i / T][i % T]; }, out);
}

// out[R][T] as dot(number of tokens, x, out) makes it of so many that there are no more than Most sums: half of the tokens
// after the other, for the rows are near then. x: `stride` floats between tokens.
template <int R, int T, int Most, class F>
inline void in_halves(const float* x, int64_t stride, float* out, const F& dot) {
  if constexpr (R * T <= Most) {
    dot(std::integral_constant<int, T>{}, x, out);
  } else {
    constexpr int A = (T + 1) / 2, B = T - A;
    float first[R * A], second[R * B];
    in_halves<R, A, Most>(x, stride, first, dot);
    in_halves<R, B, Most>(x + A * stride, stride, second, dot);
    for (int r = 0; r < R; r++) {
      std::copy_n(first + r * A, A, out + r * T);
      std::copy_n(second + r * B, B, out + r * T + A);
    }
  }
}

template <class S, int R, int T>
inline void dot_in_order(const typename S::element* rows, int64_t step, int64_t columns, const float* x, float* out) {
  // Three tokens of floats wait for memory, which four rows side by side keep busiest.
  constexpr int kMost = sizeof(typename S::element) == 4 ? 3 : 2;
  if constexpr (kLanes == 8 && T > kMost) return dot_in_blocks<S, R, T>(rows, step, columns, x, out);
  else
    in_halves<R, T, kMostSums>(x, plain_stride(columns), out, [&](auto n, const float* some, float* to) {
      dot_at_once<S, R, n>(rows, step, columns, some, to);
    });
}
