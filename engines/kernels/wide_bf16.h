// Products of many rows in bf16: panels of tokens as in wide.h, of which two columns become a word for each lane where they
// lie.

#pragma once

#include "bf16.h"
#include "wide.h"

template <class F>
inline void pair_lanes(int64_t columns, int lanes, const float* from, float* to) {
  for (int64_t c = 0; c < columns; c += 2) {
    const F second = c + 1 < columns ? load<F>(from + (c + 1) * lanes) : F{};
    const auto words = pair_columns(load<F>(from + c * lanes), second);
    std::memcpy(to + c / 2 * lanes, &words, sizeof words);
  }
}

// Pairs the columns of a packed panel.
inline void pair_panel(int64_t columns, int lanes, float* panel) {
  if (lanes == 8) pair_lanes<f8>(columns, lanes, panel, panel);
  else
    for (int lane = 0; lane < lanes; lane += kLanes) pair_lanes<fN>(columns, lanes, panel + lane, panel + lane);
}

#ifdef JOULEBENCH_BF16

// As `multiply` of wide.h; weights: a word for two columns.
template <class F, int R, int V, bool ByColumn = false, class A = NothingAhead>
inline void multiply_pairs(const int32_t* weights, int64_t stride, const float* panel, int64_t n_words, float* tile,
                           A&& ahead = {}) {
  constexpr int kEach = sizeof(F) / sizeof(float);
  typedef decltype(F{} < F{}) W;
  F sums[R][V] = {};
  for (int64_t k = 0; k < n_words; k++) {
    if (k % (kStrip / 2) == 0) ahead.ask();
    W x[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) x[v] = load<W>(panel + (k * V + v) * kEach);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const W weight = W{} + weights[ByColumn ? k * stride + r : r * stride + k];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] = add_pair_products(sums[r][v], weight, x[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      float* to = tile + (r * V + v) * kEach;
      store(to, load<F>(to) + sums[r][v]);
    }
}

// A tile's rows as they are stored, side by side: see Tile of wide.h.
struct PairTile {
  static constexpr int64_t kStride = kDepth / 2 + 16;
  alignas(64) int32_t weights[kTileRows * kStride];

  void take(int r, const Row& row, int64_t first, int64_t depth) {
    int32_t* to = weights + r * kStride;
    to[(depth + 1) / 2 - 1] = 0;
    std::memcpy(to, (const uint16_t*)row.matrix->values + row.row * row.matrix->columns + first, depth * sizeof(uint16_t));
  }
  static const float* part(const float* panel, int64_t first, int lanes) { return panel + first / 2 * lanes; }
  static int64_t n_strips(int64_t depth) { return (depth + kStrip - 1) / kStrip; }
  void multiply_with(const float* panel, int64_t depth, int lanes, float* tile, Ahead& ahead) const {
    const int64_t n_words = (depth + 1) / 2;
    if (lanes == 32) return multiply_pairs<fN, kTileRows, 2>(weights, kStride, panel, n_words, tile, ahead);
    if (lanes == 16) return multiply_pairs<fN, kTileRows, 1>(weights, kStride, panel, n_words, tile, ahead);
    multiply_pairs<f8, kTileRows, 1>(weights, kStride, panel, n_words, tile, ahead);
  }
};

#endif
