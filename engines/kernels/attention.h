// Attention over the cache. torch spends 20 to 100 microseconds on the way to each operation on one token.
//
// Legend: T query tokens, N query heads, M key/value heads, G = N / M, S positions seen, D features of a head.

#pragma once

#include <cmath>
#include <vector>

#include "pool.h"
#include "vectors.h"
#include "wide.h"

// What queries may look at: position p sees positions max(0, p - window + 1) .. p, all of the past where window is 0.
// sinks[head], if any, is a score that takes part in the softmax and carries no value.
struct Attention {
  const float* keys;  // [M, S, D], `head_stride` floats between heads; values alike
  const float* values;
  int64_t head_stride, n_heads, n_kv_heads, dim, window;
  float scale;
  const float* sinks;

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

// out[8 V features] += the values of some blocks by their shares.
template <int V>
inline void add_values(const Blocks& blocks, int64_t begin, int64_t end, const float* value, int64_t dim,
                       const float* share_S, float* out) {
  f8 sums[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) sums[v] = load<f8>(out + 8 * v);
  for (int64_t b = begin; b < end; b++)
    for (int i = 0; i < 8; i++) {
      const float* one = value + blocks.place(b, i) * dim;
      const float share = share_S[b * 8 + i];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[v] += share * load<f8>(one + 8 * v);
    }
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) store(out + 8 * v, sums[v]);
}

// A query token at `position` of one sequence, and its out[N, D]. D is a multiple of 8.
struct OneQuery {
  Attention a;
  const float* query_ND;
  int64_t position;
  float* out_ND;
};

// The heads that share keys and values go through them together, a few blocks at a time that stay in the first cache.
inline void attend_kv_head(const OneQuery& one, int64_t kv_head) {
  constexpr int64_t kPiece = 4;  // blocks: 8 KB of keys where a head has 64 features
  const Attention& a = one.a;
  const int64_t per_kv = a.n_heads / a.n_kv_heads, dim = a.dim, first = a.first_seen(one.position);
  const int64_t row_bytes = dim * int64_t(sizeof(float));
  const Blocks blocks(one.position + 1 - first);
  thread_local std::vector<float> buffer;
  float* score_GS = scratch(buffer, per_kv * blocks.n * 8);  // S in the order of blocks
  const float* key = a.keys + kv_head * a.head_stride + first * dim;
  const float* value = a.values + kv_head * a.head_stride + first * dim;
  const float* query = one.query_ND + kv_head * per_kv * dim;
  for (int64_t b = 0; b < blocks.n; b++) {
    const float* eight[8];
    for (int i = 0; i < 8; i++) eight[i] = key + blocks.place(b, i) * dim;
    for (int i = 0; i < 8; i++) ask_ahead(eight[i], row_bytes);
    for (int64_t g = 0; g < per_kv; g++) {
      f8 sums[8] = {};
      for (int64_t d = 0; d < dim; d += 8) {
        const f8 of_query = load<f8>(query + g * dim + d);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sums[i] += of_query * load<f8>(eight[i] + d);
      }
      transpose8(sums);
      const f8 half = (sums[0] + sums[1]) + (sums[2] + sums[3]), rest = (sums[4] + sums[5]) + (sums[6] + sums[7]);
      store(score_GS + (g * blocks.n + b) * 8, a.scale * (half + rest));
    }
  }
  for (int64_t g = 0; g < per_kv; g++) {
    float* score_S = score_GS + g * blocks.n * 8;
    const float sink = a.sinks ? a.sinks[kv_head * per_kv + g] : -INFINITY;
    for (int64_t s = blocks.n_seen; s < blocks.n * 8; s++) score_S[s] = -INFINITY;
    float largest = sink;
    for (int64_t s = 0; s < blocks.n * 8; s++) largest = std::max(largest, score_S[s]);
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
    for (int64_t b = piece; b < end_piece; b++)
      for (int i = 0; i < 8; i++) ask_ahead(value + blocks.place(b, i) * dim, row_bytes);
    for (int64_t g = 0; g < per_kv; g++) {
      const float* share_S = score_GS + g * blocks.n * 8;
      int64_t d = 0;
      for (; d + 64 <= dim; d += 64) add_values<8>(blocks, piece, end_piece, value + d, dim, share_S, out + g * dim + d);
      for (; d < dim; d += 8) add_values<1>(blocks, piece, end_piece, value + d, dim, share_S, out + g * dim + d);
    }
  }
}

// query_of(i): the i-th of n, all of one layer. Sequences that are decoded together share out their heads as one job.
template <class F>
inline void attend_ones(int64_t n, int64_t n_kv_heads, int n_threads, const F& query_of) {
  in_chunks(n * n_kv_heads, 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++) attend_kv_head(query_of(unit / n_kv_heads), unit % n_kv_heads);
  });
}

// Queries are lanes, two registers of them at a time, and keys, then values, are what is broadcast; the softmax is kept
// up to date from one block of keys to the next (Milakov and Gimelshein 2018).
constexpr int64_t kKeys = 96;
constexpr int kRegisters = kPanel / kLanes;
#ifdef JOULEBENCH_AVX512
constexpr int kRowsAtOnce = 12;
#else
constexpr int kRowsAtOnce = 6;
#endif

// tile[r][queries] += rows of weights times a panel of queries, for any number of rows.
template <bool ByColumn>
inline void multiply_rows(int64_t n_rows, const float* weights, int64_t stride, const float* panel, int64_t depth,
                          float* tile) {
  const auto row_at = [&](int64_t r) { return ByColumn ? weights + r : weights + r * stride; };
  int64_t r = 0;
  for (; r + kRowsAtOnce <= n_rows; r += kRowsAtOnce)
    multiply<fN, kRowsAtOnce, kRegisters, ByColumn>(row_at(r), stride, panel, depth, tile + r * kPanel, kPanel);
  for (; r + 4 <= n_rows; r += 4)
    multiply<fN, 4, kRegisters, ByColumn>(row_at(r), stride, panel, depth, tile + r * kPanel, kPanel);
  for (; r < n_rows; r++)
    multiply<fN, 1, kRegisters, ByColumn>(row_at(r), stride, panel, depth, tile + r * kPanel, kPanel);
}

inline fN larger(fN a, fN b) { return a > b ? a : b; }

inline void attend_panel(const Attention& a, int64_t head, const float* query_TQ, int64_t query_stride, int64_t position,
                         int64_t n, float* out_TQ) {
  const int64_t dim = a.dim;
  thread_local std::vector<float> buffer;
  float* packed = scratch(buffer, 2 * dim * kPanel + kKeys * kPanel);  // [D][queries]
  float *mixed = packed + dim * kPanel, *score = mixed + dim * kPanel;  // [D][queries], [keys][queries]
  pack(0, kPanel, dim, [&](int64_t i) { return i < n ? query_TQ + i * query_stride : nullptr; }, packed);
  for (int64_t d = 0; d < dim * kPanel; d += kLanes) store(packed + d, a.scale * load<fN>(packed + d));
  std::memset(mixed, 0, dim * kPanel * sizeof(float));

  const float sink = a.sinks ? a.sinks[head] : -INFINITY;
  wN lane[kRegisters];
  fN largest[kRegisters], total[kRegisters];
  for (int part = 0; part < kRegisters; part++) {
    for (int i = 0; i < kLanes; i++) lane[part][i] = kLanes * part + i;
    largest[part] = fN{} + sink;
    total[part] = fN{} + (a.sinks ? 1.0f : 0.0f);
  }
  const int64_t base = head / (a.n_heads / a.n_kv_heads) * a.head_stride, end = position + n;
  for (int64_t first = a.first_seen(position); first < end; first += kKeys) {
    const int64_t n_keys = std::min(kKeys, end - first);
    const float *key = a.keys + base + first * dim, *value = a.values + base + first * dim;
    std::memset(score, 0, n_keys * kPanel * sizeof(float));
    multiply_rows<false>(n_keys, key, dim, packed, dim, score);
    // Only the first and the last blocks hold keys that some of the queries do not see.
    const bool is_masked = first + n_keys > position + 1 || (a.window && first < a.first_seen(end - 1));
    for (int part = 0; part < kRegisters; part++) {
      const auto at = [&](int64_t s) { return score + s * kPanel + kLanes * part; };
      if (is_masked)
        for (int64_t s = 0; s < n_keys; s++) {
          const wN query = lane[part] + int32_t(position), seen = wN{} + int32_t(first + s);
          wN hidden = seen > query;
          if (a.window) hidden |= seen <= query - int32_t(a.window);
          store(at(s), hidden ? fN{} - INFINITY : load<fN>(at(s)));
        }
      fN each[4] = {largest[part], largest[part], largest[part], largest[part]};  // none waits for another
      int64_t s = 0;
      for (; s + 4 <= n_keys; s += 4)
        for (int i = 0; i < 4; i++) each[i] = larger(each[i], load<fN>(at(s + i)));
      for (; s < n_keys; s++) each[0] = larger(each[0], load<fN>(at(s)));
      const fN most = larger(larger(each[0], each[1]), larger(each[2], each[3]));
      const fN base_of = most == -INFINITY ? fN{} : most;  // no key seen yet: every share is e^-inf = 0
      const fN shrink = exp_below_one(largest[part] - base_of);
      fN sums = total[part] * (largest[part] == -INFINITY ? fN{} : shrink);
      for (int64_t s = 0; s < n_keys; s++) {
        const fN one = load<fN>(at(s));
        const fN share = one == -INFINITY ? fN{} : exp_below_one(one - base_of);
        store(at(s), share);
        sums += share;
      }
      for (int64_t d = 0; d < dim; d++) {
        float* of = mixed + d * kPanel + kLanes * part;
        store(of, load<fN>(of) * shrink);
      }
      total[part] = sums, largest[part] = most;
    }
    multiply_rows<true>(dim, value, dim, score, n_keys, mixed);
  }
  float shares[kPanel];
  for (int part = 0; part < kRegisters; part++) store(shares + kLanes * part, 1.0f / total[part]);
  for (int half = 0; half < kPanel / 8; half++) {
    const f8 inverse = load<f8>(shares + 8 * half);
    for (int64_t d = 0; d < dim; d += 8) {
      f8 eight[8];
      for (int i = 0; i < 8; i++) eight[i] = load<f8>(mixed + (d + i) * kPanel + 8 * half) * inverse;
      transpose8(eight);
      for (int64_t i = 8 * half; i < std::min<int64_t>(n, 8 * half + 8); i++) store(out_TQ + i * query_stride + d, eight[i - 8 * half]);
    }
  }
}

// out[T, N D] for n_tokens from `position` on, whose keys and values are in the cache already.
inline void attend_many(const Attention& a, const float* query_TQ, int64_t position, int64_t n_tokens, float* out_TQ,
                        int n_threads) {
  const int64_t panels = n_panels(n_tokens), stride = a.n_heads * a.dim;
  // A head after the other, so that its keys and values are near for all panels. Late panels see more keys: chunks of one,
  // the dearest first.
  in_chunks(a.n_heads * panels, 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t panel = panels - 1 - unit % panels, head = unit / panels, t = panel * kPanel;
      attend_panel(a, head, query_TQ + t * stride + head * a.dim, stride, position + t,
                   std::min<int64_t>(kPanel, n_tokens - t), out_TQ + t * stride + head * a.dim);
    }
  });
}
