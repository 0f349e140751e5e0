// Products of one input with one or more matrices, for any number of tokens and any storage format: narrow.h for a few
// tokens, wide.h for many.
//
// Legend: T tokens.

#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"
#include "narrow.h"
#include "parts.h"
#include "pool.h"
#include "scratch.h"
#include "wide_by.h"

struct Product {
  const Matrix* matrix;
  const float* bias;  // or null
  float* out;         // [T, rows]
  // Of the rows those that are computed, of one token or a few; end 0: all.
  int64_t first = 0, end = 0;

  int64_t n_made() const { return (end ? end : matrix->rows) - first; }
};

inline void narrow_products(const Product* products, int n_products, const float* x, int64_t n_tokens, int n_threads) {
  thread_local Buffer prepared[kInputs];
  const float* inputs[kInputs] = {};
  int64_t n_rows = 0, bytes = 1;
  for (int i = 0; i < n_products; i++) {
    const Matrix& m = *products[i].matrix;
    const int input = int(input_of(m));
    if (!inputs[input]) inputs[input] = prepared_rows(m, x, n_tokens, prepared[input]);
    n_rows += products[i].n_made();
    bytes = std::max(bytes, row_bytes(m));
  }
  in_row_chunks(n_rows, bytes, 1, n_threads, [&](int64_t begin, int64_t end) {
    int64_t start = 0;
    for (int i = 0; i < n_products; i++) {
      const Product& p = products[i];
      const int64_t rows = p.matrix->rows;
      const float* input = inputs[int(input_of(*p.matrix))];
      const int64_t from = p.first + std::max(begin, start) - start, to = p.first + std::min(end - start, p.n_made());
      in_streams(*p.matrix, from, to, [&](int64_t row, int64_t step, int n) {
        each_dot(*p.matrix, row, step, n, int(n_tokens), input, [&](int r, int t, float result) {
          p.out[t * rows + row + r * step] = result + (p.bias ? p.bias[row + r * step] : 0.0f);
        });
      });
      start += p.n_made();
    }
  });
}

inline void wide_products(const Product* products, int n_products, const float* x, int64_t n_tokens, int n_threads) {
  thread_local Buffer buffer;
  const Matrix& m0 = *products[0].matrix;
  const auto n_groups_of = [](const Product& p) { return (p.matrix->rows + kGroupRows - 1) / kGroupRows; };
  int64_t n_groups = 0;
  for (int i = 0; i < n_products; i++) n_groups += n_groups_of(products[i]);
  const int64_t columns = m0.columns, per_block = tokens_per_block(n_tokens, n_groups, n_threads);
  float* packed = scratch(buffer, packed_size(n_tokens, columns));  // all blocks but the last have whole panels
  const int64_t n_blocks = (n_tokens + per_block - 1) / per_block;
  const auto block_of = [&](int64_t b) {
    return TokenBlock{b * per_block, std::min(per_block, n_tokens - b * per_block), packed + b * per_block * columns};
  };
  {
    const Timed timed(kPacking);
    in_chunks(n_panels(n_tokens), 1, n_threads, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++)
        pack_ready(p, n_tokens, m0, [&](int64_t i) { return x + i * columns; }, packed);
    });
  }
  const int64_t n_units = n_blocks * n_groups;
  in_chunks(n_units, 1, n_threads, [&](int64_t begin, int64_t end) {
    float* results = group_scratch();
    for (int64_t unit = begin; unit < end; unit++) {
      const TokenBlock block = block_of(unit / n_groups);
      int64_t group = unit % n_groups;
      const Product* p = products;
      for (; group >= n_groups_of(*p); p++) group -= n_groups_of(*p);
      const Matrix& m = *p->matrix;
      const int64_t row = group * kGroupRows;
      const int n_rows = int(std::min<int64_t>(kGroupRows, m.rows - row));
      multiply_group_by(n_rows, columns, block, [&](int r) { return Row{&m, std::min(row + r, m.rows - 1)}; }, results);
      float* out = p->out + block.first * m.rows + row;
      const float* bias = p->bias ? p->bias + row : nullptr;
      each_result(
          block, n_rows, results,
          [&](int64_t t, int r, f8 v) { store(out + t * m.rows + r, bias ? v + load<f8>(bias + r) : v); },
          [&](int64_t t, int r, float v) { out[t * m.rows + r] = bias ? v + bias[r] : v; });
    }
  });
}

inline void multiply_all(const Product* products, int n_products, const float* x, int64_t n_tokens, int n_threads) {
  if (n_tokens <= kMaxTokens) return narrow_products(products, n_products, x, n_tokens, n_threads);
  const auto is_like_first = [&](const Product& p) {  // and takes the same packed input
    const Matrix &m = *p.matrix, &first = *products[0].matrix;
    return m.arithmetic == first.arithmetic && rounded_to(m) == rounded_to(first);
  };
  const int n = int(std::find_if_not(products, products + n_products, is_like_first) - products);
  wide_products(products, n, x, n_tokens, n_threads);
  if (n < n_products) multiply_all(products + n, n_products - n, x, n_tokens, n_threads);
}

