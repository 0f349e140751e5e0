// The attention block of one token, shared out among ranks that all have its weights and the whole cache: else each would
// read all of them.
//
// Legend: H hidden, M key/value heads, D features of a head, G query heads of a key/value head, P pairs of turned features.

#pragma once

#include <cstdint>
#include <cstring>

#include "exchange.h"
#include "layer.h"
#include "scratch.h"

// A rank computes the key/value heads [M r / N, M (r + 1) / N) and their queries, and gives the others what these heads mix
// and their new keys and values, so that every rank's cache is whole. Then it computes the rows [H r / N, H (r + 1) / N) of
// what goes back, and gives those. Two turns; all ranks have the same bits. False where a rank is lost. x[H], out[H].
inline bool split_attention(const AttentionLayer& layer, const float* x, const float* cos_P, const float* sin_P,
                            int64_t n_pairs, const Chunk& chunk, float* out, Exchange& exchange, int n_threads) {
  thread_local Buffer buffer;
  const int64_t dim = layer.dim, n_kv = layer.n_kv_heads, per_kv = layer.n_heads / n_kv, stride = chunk.head_stride;
  const int64_t q_width = layer.n_heads * dim, kv_width = n_kv * dim, hidden = layer.out.rows;
  float* query = scratch(buffer, 3 * q_width + 4 * kv_width);
  float *key = query + q_width, *value = key + kv_width, *mixed = value + kv_width, *own = mixed + q_width;
  const auto head = [&](int64_t of) { return exchange.first_of(of, n_kv); };
  const int64_t first = head(exchange.rank), end = head(exchange.rank + 1), n_own = end - first;

  const Product into[] = {{&layer.q, layer.q_bias, query, first * per_kv * dim, end * per_kv * dim},
                          {&layer.k, layer.k_bias, key, first * dim, end * dim},
                          {&layer.v, layer.v_bias, value, first * dim, end * dim}};
  narrow_products(into, 3, x, 1, n_threads);
  for (int64_t m = first; m < end; m++) {
    for (int64_t g = 0; g < per_kv; g++)
      ready_head(layer, false, cos_P, sin_P, n_pairs, query + (m * per_kv + g) * dim);
    ready_head(layer, true, cos_P, sin_P, n_pairs, key + m * dim);
  }
  // Of some heads, one after the other: into the cache.
  const auto cached = [&](int64_t from, int64_t n, const float* keys, const float* values) {
    for (int64_t i = 0; i < n; i++) {
      const int64_t to = (from + i) * stride + chunk.position * dim;
      as_kept(layer.kept, [&](auto element) {
        keep(keys + i * dim, dim, (decltype(element)*)chunk.keys + to);
        keep(values + i * dim, dim, (decltype(element)*)chunk.values + to);
      });
    }
  };
  cached(first, n_own, key + first * dim, value + first * dim);
  const int64_t before = first * stride * kBits[layer.kept] / 8;
  const Attention heads = {(char*)chunk.keys + before, (char*)chunk.values + before, layer.kept, stride, n_own * per_kv, n_own,
                           dim, layer.window, layer.scale, layer.sinks ? layer.sinks + first * per_kv : nullptr, false};
  const OneQuery one = {heads, query + first * per_kv * dim, chunk.position, own};
  attend_ones(1, n_own, n_threads, [&](int64_t) { return one; });
  std::memcpy(own + n_own * per_kv * dim, key + first * dim, size_t(n_own * dim) * sizeof(float));
  std::memcpy(own + n_own * (per_kv + 1) * dim, value + first * dim, size_t(n_own * dim) * sizeof(float));
  const bool all = exchange.pass(own, n_own * (per_kv + 2) * dim, [&](int64_t of, const float* part) {
    const int64_t from = head(of), n = head(of + 1) - from;
    std::memcpy(mixed + from * per_kv * dim, part, size_t(n * per_kv * dim) * sizeof(float));
    if (of != exchange.rank) cached(from, n, part + n * per_kv * dim, part + n * (per_kv + 1) * dim);
  });
  if (!all) return false;

  const auto row = [&](int64_t of) { return exchange.first_of(of, hidden); };
  const Product back = {&layer.out, layer.out_bias, out, row(exchange.rank), row(exchange.rank + 1)};
  narrow_products(&back, 1, mixed, 1, n_threads);
  return exchange.pass(out + back.first, back.n_made(), [&](int64_t of, const float* part) {
    if (of != exchange.rank) std::memcpy(out + row(of), part, size_t(row(of + 1) - row(of)) * sizeof(float));
  });
}
