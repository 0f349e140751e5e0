// Products of many rows with a matrix, in any of its formats. A GEMM library wants fp32 matrices; this one widens each
// weight once for 64 tokens or so, in blocks that stay in the first cache, which costs a few percent.
//
// Tokens are the lanes: the input is packed into panels of two registers of tokens (the last of a block may be smaller),
// [depth][lanes], so that one weight is multiplied with whole registers and sums need no shuffling. Results come as
// [matrix rows][lanes].
//
// Legend: T tokens, K columns of the matrix.

#pragma once

#if defined(__linux__)
#include <unistd.h>
#endif

#include <algorithm>

#include "matrix.h"
#include "scratch.h"

constexpr int kPanel = 2 * kLanes;    // tokens of a panel; the last of a block has 8, 16, ... where that is enough
constexpr int kTileRows = 12;         // matrix rows that are multiplied together
constexpr int kGroupRows = 4 * kTileRows;    // matrix rows whose results are kept together
constexpr int kKnownRows = kGroupRows + 2 * kTileRows;  // and those that come behind, which are asked for
constexpr int64_t kDepth = 256;       // columns widened at once: 12 rows of them are 12 KB
constexpr int64_t kRowStride = kDepth + 16;  // rows 1 KB apart would share their places in the cache
constexpr int64_t kMaxBlock = 16 * kPanel;   // tokens: kDepth columns of their packed input are half of a second cache
constexpr int64_t kNearBytes = 384 << 10;    // packed input that stays whole in a second cache of any size

// The tokens of a block share one pass over the weights.
struct TokenBlock {
  int64_t first, n;  // rows of the job's input
  float* packed;     // panels of the input, one after the other
};

// Tokens of each block, all but the last alike: as many as may be, for each block reads all weights, but few enough that
// every thread finds something to do.
inline int64_t tokens_per_block(int64_t n_tokens, int64_t n_groups, int n_threads) {
  int64_t most = kMaxBlock;
  while (most > 4 * kPanel && n_groups * ((n_tokens + most - 1) / most) < 8 * n_threads) most /= 2;
  const int64_t n_blocks = (n_tokens + most - 1) / most, panel = n_blocks > 1 ? kPanel : 1;
  return ((n_tokens + n_blocks - 1) / n_blocks + panel - 1) / panel * panel;
}

inline int64_t n_panels(int64_t n_tokens) { return (n_tokens + kPanel - 1) / kPanel; }

inline int lanes_of(int64_t n_tokens, int64_t panel) {
  int lanes = 8;
  while (lanes < kPanel && lanes < n_tokens - panel * kPanel) lanes *= 2;
  return lanes;
}

// Floats that panels of n tokens take, `columns` each.
inline int64_t packed_size(int64_t n_tokens, int64_t columns) {
  const int64_t whole = n_tokens / kPanel;
  return columns * (whole * kPanel + (n_tokens % kPanel == 0 ? 0 : lanes_of(n_tokens, whole)));
}

// Eight rows of eight floats become eight columns.
inline void transpose8(f8 (&r)[8]) {
  f8 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Packs one panel of n rows; row_of(i) is the i-th row's address, or null for a row of zeros.
template <class F>
inline void pack(int64_t panel, int64_t n, int64_t columns, const F& row_of, float* to) {
  alignas(sizeof(f8)) static const float zeros[8] = {};
  const int lanes = lanes_of(n, panel);
  const float* rows[kPanel];
  for (int i = 0; i < lanes; i++) rows[i] = panel * kPanel + i < n ? row_of(panel * kPanel + i) : nullptr;
  const int64_t n_eights = columns / 8 * 8;
  // A line of a row is turned whole: of rows that lie 4 KB apart a cache holds few.
  for (int64_t line = 0; line < n_eights; line += 16)
    for (int eight = 0; eight < lanes; eight += 8)
      for (int64_t c = line; c < std::min(line + 16, n_eights); c += 8) {
        f8 block[8];
        for (int i = 0; i < 8; i++) block[i] = load<f8>(rows[eight + i] ? rows[eight + i] + c : zeros);
        transpose8(block);
        for (int i = 0; i < 8; i++) store(to + (c + i) * lanes + eight, block[i]);
      }
  for (int64_t c = n_eights; c < columns; c++)
    for (int i = 0; i < lanes; i++) to[c * lanes + i] = rows[i] ? rows[i][c] : 0.0f;
}

// Whether a core's second cache has room for the columns of a block's input that a group meets, for those that it meets
// next, 0.5 MB each, and for results. Caches of 1 MB were not tried.
inline bool has_large_second_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const bool is_large = sysconf(_SC_LEVEL2_CACHE_SIZE) >= 2 << 20;
  return is_large;
#else
  return false;
#endif
}

// What stays there.
inline int64_t near_bytes() { return has_large_second_cache() ? 2 * kNearBytes : kNearBytes; }

struct Row {
  const Matrix* matrix;
  int64_t row;
};

// Which rows of a group, and which columns of them, a tile takes.
struct Place {
  int start;
  int64_t first;

  Place along_rows(int64_t columns) const {
    return first + kDepth < columns ? Place{start, first + kDepth} : Place{start + kTileRows, 0};
  }
  Place down_rows(int n_rows) const {
    return start + kTileRows < n_rows ? Place{start + kTileRows, first} : Place{0, first + kDepth};
  }
};

// The lines that a tile takes after the next. They come in pieces too short for the hardware to foresee, and are asked for a
// few at a time while a tile is multiplied: a core waits where it is to ask for many at once. What the next one takes is on
// its way: with few tokens a tile is multiplied in less time than a line may need.
struct Ahead {
  static constexpr int64_t kPair = 2 * kLine;  // asked for together: most rows have as much to take
  const char* starts[kTileRows];
  int64_t n_bytes = 0, byte = 0, at_once = 0;
  int row = kTileRows;  // the next pair is its `byte`; behind the last there is none
  const char *input = nullptr, *input_end = nullptr;  // and lines of the input that are met later
  int64_t input_at_once = 0;

  // From column `first` of the tile's rows on. n_strips: in which they are to be asked for.
  void fill(const Row* rows, int64_t first, int64_t columns, int64_t n_strips) {
    const int64_t bits = kBits[rows[0].matrix->format];
    for (int r = 0; r < kTileRows; r++)
      starts[r] = (const char*)rows[r].matrix->values + (rows[r].row * rows[r].matrix->columns + first) * bits / 8;
    n_bytes = std::min(kDepth, columns - first) * bits / 8;
    row = 0, byte = 0;
    at_once = (kTileRows * ((n_bytes + kPair - 1) / kPair) + n_strips - 1) / n_strips;
  }
  __attribute__((always_inline)) void ask(int64_t n_pairs) {
    int r = row;
    int64_t at = byte;
    for (int64_t i = 0; i < n_pairs && r < kTileRows; i++) {
      __builtin_prefetch(starts[r] + at);
      __builtin_prefetch(starts[r] + at + kLine);
      at += kPair;
      if (at >= n_bytes) at = 0, r++;
    }
    row = r, byte = at;
  }
  __attribute__((always_inline)) void ask() {
    ask(at_once);
    for (int64_t i = 0; i < input_at_once && input < input_end; i++, input += kLine)
      __builtin_prefetch(input, 0, kSecondCache);
  }
  void ask_rest() { ask(INT64_MAX); }
};

// Where nothing is asked for.
struct NothingAhead {
  void ask() const {}
};

constexpr int64_t kStrip = 16;  // columns between which is asked

// tile[r][v] += weight(r, k) * panel(k, v) over k, summed first: short sums of sums round less than one long one. A panel
// is V registers of type F wide. Rows of weights lie `stride` floats apart, or, where they are stored by columns
// (ByColumn), all rows of one k lie together.
template <class F, int R, int V, bool ByColumn = false, class A = NothingAhead>
__attribute__((noinline)) void multiply(const float* weights, int64_t stride, const float* panel, int64_t depth, float* tile,
                     int64_t tile_stride, A&& ahead = {}) {
  constexpr int kEach = sizeof(F) / sizeof(float);
  F sums[R][V] = {};
  for (int64_t k = 0; k < depth; k++) {
    if (k % kStrip == 0) ahead.ask();
    F x[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) x[v] = for_several(load<F>(panel + k * kEach * V + kEach * v));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const float weight = ByColumn ? weights[k * stride + r] : weights[r * stride + k];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] += weight * x[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      float* to = tile + r * tile_stride + kEach * v;
      store(to, load<F>(to) + sums[r][v]);
    }
}

// A tile of twelve rows: as many at once as there are registers for their sums.
inline void multiply_tile(const float* weights, const float* panel, int64_t depth, int lanes, float* tile, Ahead& ahead) {
#ifdef JOULEBENCH_AVX512
  if (lanes == 32) return multiply<fN, kTileRows, 2>(weights, kRowStride, panel, depth, tile, 32, ahead);
  if (lanes == 16) return multiply<fN, kTileRows, 1>(weights, kRowStride, panel, depth, tile, 16, ahead);
#else
  if (lanes == 16) {
    multiply<f8, 6, 2>(weights, kRowStride, panel, depth, tile, 16, ahead);
    return multiply<f8, 6, 2>(weights + 6 * kRowStride, kRowStride, panel, depth, tile + 6 * 16, 16, ahead);
  }
#endif
  multiply<f8, kTileRows, 1>(weights, kRowStride, panel, depth, tile, 8, ahead);
}

// A tile's rows, widened. What a tile is to multiply_group: it takes rows, finds the part of a panel that they meet, and is
// multiplied with it.
struct FloatTile {
  alignas(64) float weights[kTileRows * kRowStride];

  void take(int r, const Row& row, int64_t first, int64_t depth) {
    widen_row(*row.matrix, row.row, first, depth, weights + r * kRowStride);
  }
  static const float* part(const float* panel, int64_t first, int lanes) { return panel + first * lanes; }
  static int64_t n_strips(int64_t depth) { return (depth + kStrip - 1) / kStrip; }
  void multiply_with(const float* panel, int64_t depth, int lanes, float* tile, Ahead& ahead) const {
    multiply_tile(weights, panel, depth, lanes, tile, ahead);
  }
};

// Up to 48 matrix rows times all tokens of a block: results[panel][48][lanes]. row_at(r) names the r-th row, for any r
// below kKnownRows; from n_rows on it may be any row, and the results mean nothing. Rows from 48 on are those that the next
// call begins with: they are asked for.
template <class Tile, class F>
inline void multiply_group(int n_rows, int64_t columns, const TokenBlock& block, const F& row_at, float* results) {
  Tile tile;
  Ahead ahead;
  Row rows[kKnownRows];
  for (int r = 0; r < kKnownRows; r++) rows[r] = row_at(r);
  const int64_t panels = n_panels(block.n);
  // A tile after the other reads rows as they lie. Of input too large to stay near, some columns do, for all tiles.
  const bool is_near = block.n * columns * int64_t(sizeof(float)) <= kNearBytes;
  const bool asks_input = !is_near && has_large_second_cache();
  const auto after = [&](Place here) {
    const bool is_own = here.start < kGroupRows;
    const Place next = is_near ? here.along_rows(columns) : here.down_rows(is_own ? n_rows : kKnownRows);
    return is_own && (next.start >= n_rows || next.first >= columns) ? Place{kGroupRows, 0} : next;
  };
  std::memset(results, 0, panels * kGroupRows * kPanel * sizeof(float));
  for (Place here = {0, 0}, next = after(here), then; here.start < kGroupRows; here = next, next = then) {
    const int64_t depth = std::min(kDepth, columns - here.first);
    for (int r = 0; r < kTileRows; r++) tile.take(r, rows[here.start + r], here.first, depth);
    then = after(next);
    // The columns that this group meets next, or the next group first. Each tile asks for its share of every panel's.
    const int64_t coming = here.first + kDepth < columns ? here.first + kDepth : 0;
    const int64_t behind = std::min(coming + kDepth, columns), n_strips = Tile::n_strips(depth);
    const int64_t n_bytes = (Tile::part(block.packed, behind, kPanel) - Tile::part(block.packed, coming, kPanel)) *
                            int64_t(sizeof(float));
    const int64_t share = asks_input ? n_pieces(n_pieces(n_bytes, kLine), n_pieces(n_rows, kTileRows)) : 0;
    ahead.input_at_once = n_pieces(share, n_strips);
    ahead.fill(rows + then.start, then.first, columns, panels * n_strips);
    for (int64_t p = 0; p < panels; p++) {
      const int lanes = lanes_of(block.n, p);
      const float* const panel = block.packed + p * kPanel * columns;
      const float* const part = Tile::part(panel, here.first, lanes);
      ahead.input = (const char*)Tile::part(panel, coming, lanes) + here.start / kTileRows * share * kLine;
      ahead.input_end = std::min(ahead.input + share * kLine, (const char*)Tile::part(panel, behind, lanes));
      tile.multiply_with(part, depth, lanes, results + p * kGroupRows * kPanel + here.start * lanes, ahead);
    }
    ahead.ask_rest();  // what narrow panels left
  }
}

// Room for the results of a group and a block of any size.
inline float* group_scratch() {
  thread_local Buffer buffer;
  return scratch(buffer, kMaxBlock * kGroupRows);
}

// add(token of the block, first row of eight, their results), then add_one(token, row, result) for what is left. Token after
// token: where rows of the output lie 4 KB apart, what writes a little of each in turn takes ten times as long.
template <class F, class G>
inline void each_result(const TokenBlock& block, int n_rows, const float* results, const F& add, const G& add_one) {
  f8 columns[8][kGroupRows / 8];
  for (int64_t first = 0; first < block.n; first += 8) {  // eight rows become columns at a time
    const int64_t p = first / kPanel;
    const int lanes = lanes_of(block.n, p), n = int(std::min<int64_t>(8, block.n - first));
    const float* from = results + p * kGroupRows * kPanel + first % kPanel;
    for (int row = 0; row + 8 <= n_rows; row += 8) {
      f8 eight[8];
      for (int r = 0; r < 8; r++) eight[r] = load<f8>(from + (row + r) * lanes);
      transpose8(eight);
      for (int t = 0; t < n; t++) columns[t][row / 8] = eight[t];
    }
    for (int t = 0; t < n; t++) {
      int row = 0;
      for (; row + 8 <= n_rows; row += 8) add(first + t, row, columns[t][row / 8]);
      for (; row < n_rows; row++) add_one(first + t, row, from[row * lanes + t]);
    }
  }
}
