// Attention over the cache: what all queries share, and one token of each sequence, for which torch spends 20 to 100
// microseconds on the way to each operation. wide_attention.h has many tokens.
//
// Legend: N query heads, M key/value heads, G = N / M, S positions seen, D features of a head.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kept.h"
#include "pool.h"
#include "scratch.h"
#include "vectors.h"

// What queries may look at: position p sees positions max(0, p - window + 1) .. p, all of the past where window is 0.
// sinks[head], if any, is a score that takes part in the softmax and carries no value.
struct Attention {
  const void* keys;  // [M, S, D] in the form that is kept, `head_stride` of them between heads; values alike
  const void* values;
  int32_t kept;  // that form: of enum Format
  int64_t head_stride, n_heads, n_kv_heads, dim, window;
  float scale;
  const float* sinks;
  // Of enum Arithmetic. By bf16 many queries, keys, shares and values are rounded to bf16; by int8 queries and keys are
  // rounded as inputs are (rounded.h), and shares and values to whole numbers (attention_blocks.h).
  int32_t arithmetic;

  int64_t first_seen(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Positions in the order in which one token goes through them: blocks of eight, two neighbours from each of four places,
// for one place alone is read too slowly; what is left over at the end, where places past the last are the last again.
struct Blocks {
  int64_t n_seen, n_whole, n;

  explicit Blocks(int64_t n_seen) : n_seen(n_seen), n_whole(n_seen / 8), n((n_seen + 7) / 8) {}

  int64_t place(int64_t block, int i) const {
    if (block < n_whole) return i / 2 * 2 * n_whole + 2 * block + i % 2;
    return std::min(8 * n_whole + i, n_seen - 1);
  }
};

// Keys and values that are asked for before they are met, in bytes of each place. A Zen 5 gains by it, and a Zen 4 did not.
constexpr int64_t kKeptAhead = 2048;
template <class E>
__attribute__((always_inline)) inline void ask_kept(const E* from, int64_t n) {
  if constexpr (kIsZen5) ask_ahead(from, n * int64_t(sizeof(E)), kKeptAhead);
}

// Lane i is the sum of r[i]'s lanes, of all i in the same order: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
inline f8 sums_across(const f8 (&r)[8]) {
  f8 fours[2];
#pragma GCC unroll 2
  for (int side = 0; side < 2; side++) {
    const f8 *const of = r + 4 * side;
    f8 pairs[4], columns[4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      pairs[i] = __builtin_shufflevector(of[2 * i], of[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
      pairs[2 + i] = __builtin_shufflevector(of[2 * i], of[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      columns[2 * i] = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13);
      columns[2 * i + 1] = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    fours[side] = (columns[0] + columns[1]) + (columns[2] + columns[3]);
  }
  return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// Query heads of a key/value head that meet a key or a value at once, so that it is read and widened once for them.
constexpr int kHeadsAtOnce = kLanes == 16 ? 2 : 1;

// score_HS[h][i] = scale * query h times key i of eight, rows of scores `apart` from one another. D is a multiple of 8.
template <int H, class E>
inline void score_eight(const E* const (&eight)[8], const float* query_HD, int64_t dim, float scale, float* score_HS,
                        int64_t apart) {
  fN sums[H][8] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    fN keys[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) keys[i] = floats<fN>(eight[i] + d);
#pragma GCC unroll 2
    for (int h = 0; h < H; h++) {
      const fN of_query = load<fN>(query_HD + h * dim + d);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) sums[h][i] = add_product(sums[h][i], of_query, keys[i]);
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < H; h++) {
    f8 halves[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      halves[i] = halved(sums[h][i]);
      if (d < dim) halves[i] = add_product(halves[i], load<f8>(query_HD + h * dim + d), floats<f8>(eight[i] + d));
    }
    store(score_HS + h * apart, scale * sums_across(halves));
  }
}

// out[H][V registers of features] += the values of some blocks by their shares. Rows of shares are `apart`, of out `dim`.
// is_first: no heads before these have met them.
template <class F, int V, int H, class E>
inline void add_values(const Blocks& blocks, int64_t begin, int64_t end, bool is_first, const E* value, int64_t dim,
                       const float* share_HS, int64_t apart, float* out_HD) {
  constexpr int kEach = sizeof(F) / sizeof(float);
  F sums[H][V];
#pragma GCC unroll 2
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[h][v] = load<F>(out_HD + h * dim + kEach * v);
  for (int64_t b = begin; b < end; b++)
    for (int i = 0; i < 8; i++) {
      const E* one = value + blocks.place(b, i) * dim;
      if (is_first) ask_kept(one, V * kEach);
      F shares[H];
#pragma GCC unroll 2
      for (int h = 0; h < H; h++) shares[h] = F{} + share_HS[h * apart + b * 8 + i];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const F some = floats<F>(one + kEach * v);
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) sums[h][v] = add_product(sums[h][v], shares[h], some);
      }
    }
#pragma GCC unroll 2
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out_HD + h * dim + kEach * v, sums[h][v]);
}

// with(first, number of heads as a constant) for all heads of a key/value head.
template <class F>
inline void in_heads(int64_t n, const F& with) {
  int64_t g = 0;
  for (; g + kHeadsAtOnce <= n; g += kHeadsAtOnce) with(g, std::integral_constant<int, kHeadsAtOnce>());
  for (; g < n; g++) with(g, std::integral_constant<int, 1>());
}

// A query token at `position` of one sequence, and its out[N, D]. D is a multiple of 8.
struct OneQuery {
  Attention a;
  const float* query_ND;
  int64_t position;
  float* out_ND;
};

// The heads that share keys and values go through them together, a few blocks at a time that stay in the first cache.
template <class E>
inline void attend_kept(const OneQuery& one, int64_t kv_head) {
  constexpr int64_t kPiece = 4;  // blocks: 8 KB of keys where a head has 64 features
  const Attention& a = one.a;
  const int64_t per_kv = a.n_heads / a.n_kv_heads, dim = a.dim, first = a.first_seen(one.position);
  const Blocks blocks(one.position + 1 - first);
  thread_local Buffer buffer;
  float* score_GS = scratch(buffer, per_kv * blocks.n * 8);  // S in the order of blocks
  const E* key = (const E*)a.keys + kv_head * a.head_stride + first * dim;
  const E* value = (const E*)a.values + kv_head * a.head_stride + first * dim;
  const float* query = one.query_ND + kv_head * per_kv * dim;
  for (int64_t b = 0; b < blocks.n; b++) {
    const E* eight[8];
    for (int i = 0; i < 8; i++) eight[i] = key + blocks.place(b, i) * dim;
    for (int i = 0; i < 8; i++) ask_kept(eight[i], dim);
    in_heads(per_kv, [&](int64_t g, auto n) {
      score_eight<n>(eight, query + g * dim, dim, a.scale, score_GS + (g * blocks.n + b) * 8, blocks.n * 8);
    });
  }
  for (int64_t g = 0; g < per_kv; g++) {
    float* score_S = score_GS + g * blocks.n * 8;
    const float sink = a.sinks ? a.sinks[kv_head * per_kv + g] : -INFINITY;
    for (int64_t s = blocks.n_seen; s < blocks.n * 8; s++) score_S[s] = -INFINITY;
    f8 most = f8{} + sink;
    for (int64_t s = 0; s < blocks.n * 8; s += 8) {
      const f8 score = load<f8>(score_S + s);
      most = score > most ? score : most;
    }
    float largest = sink;
    for (int i = 0; i < 8; i++) largest = std::max(largest, most[i]);
    f8 totals = {};
    for (int64_t s = 0; s < blocks.n * 8; s += 8) {
      const f8 score = load<f8>(score_S + s);
      const f8 share = score == -INFINITY ? f8{} : exp_below_one(score - largest);
      store(score_S + s, share);
      totals += share;
    }
    const float inverse = 1.0f / (sum(totals) + (a.sinks ? std::exp(sink - largest) : 0.0f));
    for (int64_t s = 0; s < blocks.n * 8; s += 8) store(score_S + s, load<f8>(score_S + s) * inverse);
  }
  float* out = one.out_ND + kv_head * per_kv * dim;
  std::memset(out, 0, per_kv * dim * sizeof(float));
  for (int64_t piece = 0; piece < blocks.n; piece += kPiece) {
    const int64_t end_piece = std::min(piece + kPiece, blocks.n);
    in_heads(per_kv, [&](int64_t g, auto n) {
      const auto add = [&](auto of, auto n_registers, int64_t d) {
        add_values<decltype(of), n_registers, n>(blocks, piece, end_piece, g == 0, value + d, dim,
                                                 score_GS + g * blocks.n * 8, blocks.n * 8, out + g * dim + d);
      };
      int64_t d = 0;
      for (; d + 64 <= dim; d += 64) add(fN(), std::integral_constant<int, 64 / kLanes>(), d);
      for (; d < dim; d += 8) add(f8(), std::integral_constant<int, 1>(), d);
    });
  }
}

inline void attend_kv_head(const OneQuery& one, int64_t kv_head) {
  as_kept(one.a.kept, [&](auto element) { attend_kept<decltype(element)>(one, kv_head); });
}

// query_of(i): the i-th of n, all of one layer. Sequences that are decoded together share out their heads as one job.
template <class F>
inline void attend_ones(int64_t n, int64_t n_kv_heads, int n_threads, const F& query_of) {
  in_chunks(n * n_kv_heads, 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++) attend_kv_head(query_of(unit / n_kv_heads), unit % n_kv_heads);
  });
}
