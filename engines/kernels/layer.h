// What a layer is beside its experts: norms, rotary embedding, the attention block, the router.
//
// Legend: T tokens, H hidden, E experts, K experts of one token, N query heads, M key/value heads, S positions,
// D features of a head, P pairs of turned features.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "experts.h"
#include "matrix.h"
#include "parts.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"
#include "vectors.h"
#include "wide_attention.h"

// x / sqrt(mean(x^2) + eps) * weight of one row; out may be x.
inline void rms_norm_row(const float* x, int64_t width, const float* weight, float eps, float* out) {
  const float squares = sum_over(x, width, [](auto v) { return v * v; });
  const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
  for (int64_t c = 0; c < width; c++) out[c] = x[c] * scale * weight[c];
}

inline void rms_norm_rows(const float* x, int64_t n_rows, int64_t width, const float* weight, float eps, float* out,
                          int n_threads) {
  const Timed timed(kNorms);
  in_chunks(n_rows, std::max<int64_t>(1, (1 << 15) / width), n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) rms_norm_row(x + r * width, width, weight, eps, out + r * width);
  });
}

// out[i] = a[i] + b[i]; out may be one of them.
inline void add(const float* a, const float* b, int64_t n, float* out, int n_threads) {
  const Timed timed(kNorms);
  in_chunks(n, 1 << 15, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) out[i] = a[i] + b[i];
  });
}

// Turns the first 2P features in place. Neighbouring pairs come out first members before second ones, as the torch code
// of engines.model.rope leaves them.
inline void turn_row(float* x, const float* cos_P, const float* sin_P, int64_t n_pairs, bool neighbours) {
  if (neighbours) {
    float firsts[512];
    for (int64_t p = 0; p < n_pairs; p++) firsts[p] = x[2 * p];
    for (int64_t p = 0; p < n_pairs; p++) firsts[n_pairs + p] = x[2 * p + 1];
    std::memcpy(x, firsts, 2 * n_pairs * sizeof(float));
  }
  float* second = x + n_pairs;
  for (int64_t p = 0; p < n_pairs; p++) {
    const float a = x[p], b = second[p];
    x[p] = a * cos_P[p] - b * sin_P[p];
    second[p] = b * cos_P[p] + a * sin_P[p];
  }
}

// How many units of one kind a thread should take where each is a few microseconds.
constexpr int64_t kFewRows = 16;

struct AttentionLayer {
  Matrix q, k, v, out;
  const float *q_bias, *k_bias, *v_bias, *out_bias;  // or null
  const float *q_norm, *k_norm;                      // [D], or null
  const float* sinks;                                // [N], or null
  int64_t n_heads, n_kv_heads, dim, window;
  float scale, eps;
  int32_t neighbours;
  int32_t arithmetic;  // of what many queries multiply: of enum Arithmetic, see attention.h
  int32_t kept;        // the form in which caches keep keys and values: of enum Format
};

// Which experts a token goes to. Of equal scores the lower index wins.
inline void route_row(const float* score_E, int64_t n_experts, int64_t top_k, int64_t* ids_K) {
  int64_t n = 0;
  for (int64_t e = 0; e < n_experts; e++) {
    if (n == top_k && !(score_E[e] > score_E[ids_K[n - 1]])) continue;
    int64_t k = n < top_k ? n++ : n - 1;  // the last one gives way
    for (; k > 0 && score_E[e] > score_E[ids_K[k - 1]]; k--) ids_K[k] = ids_K[k - 1];
    ids_K[k] = e;
  }
}

inline void softmax_row(float* x, int64_t n) {
  const float largest = *std::max_element(x, x + n);
  float total = 0;
  for (int64_t i = 0; i < n; i++) total += x[i] = std::exp(x[i] - largest);
  for (int64_t i = 0; i < n; i++) x[i] /= total;
}

// Scores are softmax over all experts, or over the chosen ones where `of_chosen`; bias may be null.
struct Router {
  const float *weight_EH, *bias_E;
  int64_t hidden, n_experts, top_k;
  int32_t of_chosen, normalise;
  float scale;
};

// What a router makes of the logits of one token, which become scores.
inline void choose_row(const Router& router, float* score_E, int64_t* ids_K, float* weights_K) {
  const int64_t n_experts = router.n_experts, top_k = router.top_k;
  if (!router.of_chosen) softmax_row(score_E, n_experts);
  route_row(score_E, n_experts, top_k, ids_K);
  for (int64_t k = 0; k < top_k; k++) weights_K[k] = score_E[ids_K[k]];
  if (router.of_chosen) softmax_row(weights_K, top_k);
  float total = 0;
  for (int64_t k = 0; k < top_k; k++) total += weights_K[k];
  for (int64_t k = 0; k < top_k; k++) weights_K[k] *= (router.normalise ? 1.0f / total : 1.0f) * router.scale;
}

// The experts ids[T, K] of each token and their weights. A few tokens are read one by one, so that a token's choice does
// not hang on who is decoded beside it.
inline void route(const Router& router, const float* x, int64_t n_tokens, int64_t* ids_TK, float* weights_TK,
                  int n_threads) {
  const Timed timed(kRouting);
  thread_local Buffer buffer;
  const int64_t n_experts = router.n_experts, top_k = router.top_k, hidden = router.hidden;
  const Matrix weights = {router.weight_EH, nullptr, n_experts, hidden, kFp32, 0, kByFp32};
  if (n_tokens <= kMaxTokens) {
    float* score_E = scratch(buffer, n_experts);
    const Product scores = {&weights, router.bias_E, score_E};
    for (int64_t t = 0; t < n_tokens; t++, ids_TK += top_k, weights_TK += top_k) {
      narrow_products(&scores, 1, x + t * hidden, 1, n_threads);
      choose_row(router, score_E, ids_TK, weights_TK);
    }
    return;
  }
  float* score_TE = scratch(buffer, n_tokens * n_experts);
  const Product scores = {&weights, router.bias_E, score_TE};
  wide_products(&scores, 1, x, n_tokens, n_threads);
  in_chunks(n_tokens, kFewRows, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      choose_row(router, score_TE + t * n_experts, ids_TK + t * top_k, weights_TK + t * top_k);
  });
}

// The new tokens of one sequence: rows of x from `first_row` on, whose keys and values [M, S, D] belong into the cache
// (`head_stride` numbers between heads) at `position` and on.
struct Chunk {
  void *keys, *values;
  int64_t head_stride, position, first_row, n_tokens;
};

// A query or a key before it is compared: normed and turned.
inline void ready_head(const AttentionLayer& layer, bool is_key, const float* cos_P, const float* sin_P, int64_t n_pairs,
                       float* one_D) {
  if (layer.q_norm) rms_norm_row(one_D, layer.dim, is_key ? layer.k_norm : layer.q_norm, layer.eps, one_D);
  turn_row(one_D, cos_P, sin_P, n_pairs, layer.neighbours);
}

// Queries [T, N D], keys and values [T, M D] of x[T, H]: projected, and queries and keys normed and turned. Then
// done(t) of each token. cos, sin [T, P]; P = 0 turns nothing. query: null where nobody needs them.
template <class F>
inline void project_heads(const AttentionLayer& layer, const float* x, int64_t n_tokens, const float* cos_TP,
                          const float* sin_TP, int64_t n_pairs, float* query, float* key, float* value, int n_threads,
                          const F& done) {
  const int64_t dim = layer.dim, q_width = layer.n_heads * dim, kv_width = layer.n_kv_heads * dim;
  const Product into[] = {
      {&layer.q, layer.q_bias, query}, {&layer.k, layer.k_bias, key}, {&layer.v, layer.v_bias, value}};
  {
    const Timed timed(kInProjections);
    const int64_t first = query ? 0 : 1;
    multiply_all(into + first, 3 - first, x, n_tokens, n_threads);
  }
  in_chunks(n_tokens, kFewRows, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float *cos_P = cos_TP + t * n_pairs, *sin_P = sin_TP + t * n_pairs;
      for (int64_t head = query ? 0 : layer.n_heads; head < layer.n_heads + layer.n_kv_heads; head++) {
        const bool is_key = head >= layer.n_heads;
        float* one = is_key ? key + t * kv_width + (head - layer.n_heads) * dim : query + t * q_width + head * dim;
        ready_head(layer, is_key, cos_P, sin_P, n_pairs, one);
      }
      done(t);
    }
  });
}

// What queries [T, N D] of the chunks' tokens find in their caches, which have their keys and values too, projected back.
// The chunks are all of the tokens, in order.
inline void attend_rows(const AttentionLayer& layer, const float* query, int64_t n_tokens, const Chunk* chunks,
                        int64_t n_chunks, float* out, int n_threads) {
  thread_local Buffer buffer;
  const int64_t q_width = layer.n_heads * layer.dim;
  float* mixed = scratch(buffer, n_tokens * q_width);
  const auto attention_of = [&](const Chunk& chunk) {
    return Attention{chunk.keys, chunk.values, layer.kept, chunk.head_stride, layer.n_heads, layer.n_kv_heads, layer.dim,
                     layer.window, layer.scale, layer.sinks, layer.arithmetic};
  };
  const auto has_many = [](const Chunk& chunk) { return chunk.n_tokens > 1; };
  for (const Chunk *chunk = chunks, *end = chunks + n_chunks; chunk < end;) {
    const Timed timed(kAttending);
    const Chunk* const next = std::find_if(chunk, end, has_many);
    attend_ones(next - chunk, layer.n_kv_heads, n_threads, [&](int64_t i) {
      const int64_t first = chunk[i].first_row * q_width;
      return OneQuery{attention_of(chunk[i]), query + first, chunk[i].position, mixed + first};
    });
    if (next == end) break;
    const int64_t first = next->first_row * q_width;
    attend_many(attention_of(*next), query + first, next->position, next->n_tokens, mixed + first, n_threads);
    chunk = next + 1;
  }
  const Timed timed(kOutProjection);
  const Product back = {&layer.out, layer.out_bias, out};
  multiply_all(&back, 1, mixed, n_tokens, n_threads);
}

// An attention block of x[T, H]: as `project_heads`, then keys and values to the cache of each chunk, then as
// `attend_rows`. out: null where keys and values are all that is needed.
inline void attention_block(const AttentionLayer& layer, const float* x, int64_t n_tokens, const float* cos_TP,
                            const float* sin_TP, int64_t n_pairs, const Chunk* chunks, int64_t n_chunks, float* out,
                            int n_threads) {
  thread_local Buffer buffer;
  const int64_t dim = layer.dim, q_width = layer.n_heads * dim, kv_width = layer.n_kv_heads * dim;
  const int64_t n_queries = out ? n_tokens * q_width : 0;
  float* const made = scratch(buffer, n_queries + 2 * n_tokens * kv_width);
  float *const query = out ? made : nullptr, *const key = made + n_queries, *const value = key + n_tokens * kv_width;
  project_heads(layer, x, n_tokens, cos_TP, sin_TP, n_pairs, query, key, value, n_threads, [&](int64_t t) {
    const Chunk* chunk = chunks;
    while (t >= chunk->first_row + chunk->n_tokens) chunk++;
    for (int64_t head = 0; head < layer.n_kv_heads; head++) {
      const int64_t from = t * kv_width + head * dim, place = chunk->position + t - chunk->first_row;
      const int64_t to = head * chunk->head_stride + place * dim;
      as_kept(layer.kept, [&](auto element) {
        keep(key + from, dim, (decltype(element)*)chunk->keys + to);
        keep(value + from, dim, (decltype(element)*)chunk->values + to);
      });
    }
  });
  if (out) attend_rows(layer, query, n_tokens, chunks, n_chunks, out, n_threads);
}

// A layer without what only some families have: RMS norms before the blocks, SwiGLU, no biases in the feed-forward part.
struct DecoderLayer {
  AttentionLayer attention;
  Router router;                           // n_experts = 0: a dense layer
  const float *attention_norm, *mlp_norm;  // [H]
  const Matrix* experts;                   // gate, up, down of each
  const Matrix* always;                    // gate, up, down of a dense layer or a shared expert; or null
  Matrix always_gate;                      // see gate_rows; no rows: the shared expert counts whole
  float eps;
  int32_t is_turned;
};

// out[T, width] = shared[T, width], what a shared expert gives, as far as its gate lets it through: times the sigmoid of
// x[T, H] by the gate, which is one row. Both may be the same.
inline void gate_rows(const Matrix& gate, const float* x, int64_t n_tokens, const float* shared, int64_t width, float* out,
                      int n_threads) {
  thread_local Buffer buffer;
  float* const score_T = scratch(buffer, n_tokens);
  const Product scores = {&gate, nullptr, score_T};
  multiply_all(&scores, 1, x, n_tokens, n_threads);
  in_chunks(n_tokens, std::max<int64_t>(1, (1 << 15) / width), n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float score = score_T[t], e = exp_below_one(f8{} - std::fabs(score))[0];
      const float open = (score < 0.0f ? e : 1.0f) / (1.0f + e);
      for (int64_t h = t * width; h < (t + 1) * width; h++) out[h] = shared[h] * open;
    }
  });
}

// What lies before the layers and behind them, where a token's id comes and logits go.
struct Ends {
  Matrix embedding, head;
  const float* head_bias;  // or null
  float scale;             // of the embedding
};

// A row of an embedding.
inline void scaled_row(const Matrix& m, int64_t row, float scale, float* out) {
  widen_row(m, row, 0, m.columns, out);
  if (scale == 1.0f) return;
  for (int64_t i = 0; i < m.columns; i++) out[i] *= scale;
}

// out[T, columns] = row row_T[t] of m, as floats, times a scale.
inline void scaled_rows(const Matrix& m, const int64_t* row_T, int64_t n_tokens, float scale, float* out, int n_threads) {
  const Timed timed(kNorms);
  in_chunks(n_tokens, std::max<int64_t>(1, (1 << 15) / m.columns), n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) scaled_row(m, row_T[t], scale, out + t * m.columns);
  });
}
