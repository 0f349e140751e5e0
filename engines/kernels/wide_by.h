// Products of many rows by whatever arithmetic their matrix asks for.

#pragma once

#include "wide.h"
#include "wide_bf16.h"
#include "wide_rounded.h"

// Makes of one packed panel of n rows what `of` is multiplied with. packed: of the first panel.
inline void ready_panel(int64_t panel, int64_t n, const Matrix& of, float* packed) {
  const int lanes = lanes_of(n, panel);
  float* one = packed + panel * kPanel * of.columns;
  if (of.arithmetic == kByInt8) round_panel(of.columns, lanes, is_by_bytes(of), one);
  if (is_by_pairs(of)) pair_panel(of.columns, lanes, one);
}

// multiply_group of wide.h, for what ready_panel left. All rows are stored alike.
template <class F>
inline void multiply_group_by(int n_rows, int64_t columns, const TokenBlock& block, const F& row_at, float* results) {
  const Matrix& first = *row_at(0).matrix;
#ifdef JOULEBENCH_BF16
  if (is_by_pairs(first)) return multiply_group<PairTile>(n_rows, columns, block, row_at, results);
#endif
  if (is_by_bytes(first)) return multiply_group<ByteTile>(n_rows, columns, block, row_at, results);
  multiply_group<FloatTile>(n_rows, columns, block, row_at, results);
}
