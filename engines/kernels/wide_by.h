// Products of many rows by whatever arithmetic their matrix asks for.

#pragma once

#include "wide.h"
#include "wide_bf16.h"
#include "wide_rounded.h"

// Makes of a block's packed input what `of` is multiplied with.
inline void ready_block(int64_t n, const Matrix& of, float* packed) {
  if (of.arithmetic == kByInt8) round_block(n, of, packed);
  if (is_by_pairs(of)) pair_block(n, of.columns, packed);
}

// multiply_group of wide.h, for what ready_block left. All rows are stored alike.
template <class F>
inline void multiply_group_by(int n_rows, int64_t columns, const TokenBlock& block, const F& row_at, float* results) {
  const Matrix& first = *row_at(0).matrix;
#ifdef JOULEBENCH_BF16
  if (is_by_pairs(first)) return multiply_group<PairTile>(n_rows, columns, block, row_at, results);
#endif
  if (is_by_bytes(first)) return multiply_group<ByteTile>(n_rows, columns, block, row_at, results);
  multiply_group<FloatTile>(n_rows, columns, block, row_at, results);
}
