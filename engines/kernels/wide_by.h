// Products of many rows by whatever arithmetic their matrix asks for.

#pragma once

#include "scratch.h"
#include "wide.h"
#include "wide_bf16.h"
#include "wide_rounded.h"

// Makes of one packed panel of n rows what `of` is multiplied with. packed: of the first panel.
inline void ready_panel(int64_t panel, int64_t n, const Matrix& of, float* packed) {
  const int lanes = lanes_of(n, panel);
  float* one = packed + panel * kPanel * of.columns;
  if (of.arithmetic == kByInt8) round_panel(of.columns, lanes, rounded_to(of), one);
  if (is_by_pairs(of)) pair_panel(of.columns, lanes, one);
}

// Packs one panel of n rows of input, as ready_panel would leave it; row_of: of `pack`. Rows are rounded before they
// become lanes, for of bytes and pairs there is less to turn.
template <class F>
inline void pack_ready(int64_t panel, int64_t n, const Matrix& of, const F& row_of, float* packed) {
  thread_local Buffer buffer;
  const int64_t columns = of.columns;
  float* one = packed + panel * kPanel * columns;
  const auto pack_rows = [&](const auto& ready, int64_t words, int64_t stride) {
    float* rows = scratch(buffer, kPanel * stride);
    const auto row = [&](int64_t i) -> const float* {
      const float* from = row_of(i);
      float* to = rows + i % kPanel * stride;
      if (from) ready(from, columns, to);
      return from ? to : nullptr;
    };
    pack(panel, n, words, row, one);
  };
  if (is_by_pairs(of)) return pack_rows(prepare_pairs, (columns + 1) / 2, pairs_stride(columns));
  const RoundedTo kind = rounded_to(of);
  if (kind != RoundedTo::kFloats) {
    const int64_t words = n_pieces(columns, kRoundedColumns) * floats_of(kind);
    return pack_rows(kind == RoundedTo::kBytes ? round_row_to_bytes : round_row_to_halves, words, words);
  }
  pack(panel, n, columns, row_of, one);
  ready_panel(panel, n, of, packed);
}

// multiply_group of wide.h, for what ready_panel left. All rows are stored alike.
template <class F>
inline void multiply_group_by(int n_rows, int64_t columns, const TokenBlock& block, const F& row_at, float* results) {
  const Matrix& first = *row_at(0).matrix;
#ifdef JOULEBENCH_BF16
  if (is_by_pairs(first)) return multiply_group<PairTile>(n_rows, columns, block, row_at, results);
#endif
  const RoundedTo kind = rounded_to(first);
  if constexpr (kAddsPairs)
    if (kind == RoundedTo::kHalves)
      return multiply_group<WordTile<Weights::kHalves>>(n_rows, columns, block, row_at, results);
  if constexpr (!kAddsPairs)
    if (kind == RoundedTo::kBytes && first.format == kInt8)
      return multiply_group<WordTile<Weights::kBytes>>(n_rows, columns, block, row_at, results);
  if (kind == RoundedTo::kBytes)
    return multiply_group<WordTile<Weights::kNibbles>>(n_rows, columns, block, row_at, results);
  multiply_group<FloatTile>(n_rows, columns, block, row_at, results);
}
