// The next token of each of some sequences, through all layers.
//
// Legend: T tokens, H hidden, E experts, K experts of one token, R rows of all expert calls, C calls, L layers,
// P pairs of turned features.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "experts.h"
#include "layer.h"
#include "parts.h"
#include "products.h"
#include "scratch.h"

// out[T, H] = the weighted sum of the experts ids[T, K] of each token. An expert that is chosen is called once, with
// exactly its tokens in their order; calls follow one another by number.
inline void run_chosen(const Matrix* matrices, int64_t n_experts, int64_t n_tokens, int64_t top_k, const int64_t* ids_TK,
                       const float* weights_TK, const float* x, float* out, int n_threads) {
  thread_local std::vector<int64_t> next_E, expert_C, first_C, token_R;
  thread_local Buffer weight_buffer;
  const int64_t n_rows = n_tokens * top_k;
  next_E.assign(n_experts, 0), expert_C.clear(), first_C.clear(), token_R.resize(n_rows);
  float* const weight_R = scratch(weight_buffer, n_rows);
  for (int64_t r = 0; r < n_rows; r++) next_E[ids_TK[r]]++;
  int64_t n_before = 0;
  for (int64_t e = 0; e < n_experts; e++) {
    const int64_t n = next_E[e];
    next_E[e] = n_before;
    if (n) expert_C.push_back(e), first_C.push_back(n_before);
    n_before += n;
  }
  first_C.push_back(n_rows);
  for (int64_t pair = 0; pair < n_rows; pair++) {
    const int64_t row = next_E[ids_TK[pair]]++;
    token_R[row] = pair / top_k, weight_R[row] = weights_TK[pair];
  }
  const int64_t n_calls = int64_t(expert_C.size());
  compute_experts({matrices, n_calls, expert_C.data(), first_C.data(), x, token_R.data(), weight_R, n_tokens, out, 0,
                   n_calls}, n_threads);
}

// out[T, H] = what a dense layer or a shared expert gives, whose gate, up and down these are.
inline void run_on_all(const Matrix* matrices, int64_t n_tokens, const float* x, float* out, int n_threads) {
  thread_local std::vector<int64_t> token_T;
  thread_local std::vector<float> one_T;
  const int64_t first = 0, first_C[] = {0, n_tokens};
  token_T.resize(n_tokens);
  std::iota(token_T.begin(), token_T.end(), 0);
  one_T.assign(n_tokens, 1.0f);
  compute_experts({matrices, 1, &first, first_C, x, token_T.data(), one_T.data(), n_tokens, out, 0, 1}, n_threads);
}

// From ids to logits[T, ...], as the layers computed one by one give them, bit for bit: all experts lie at hand, and each
// that is chosen is called as by run_chosen. turns_2T: each token's cosines, then each token's sines. chunks [layers, T]:
// of one token each. ids and weights [layers that have experts, T, K]: what the routers chose.
inline void batch_step(const DecoderLayer* layers, int64_t n_layers, int64_t hidden, const int64_t* id_T, int64_t n_tokens,
                       const float* const* turns_2T, int64_t n_pairs, const Chunk* chunks_LT, int64_t* ids_TK,
                       float* weights_TK, const float* norm, float eps, const Ends& ends, float* logits, int n_threads) {
  const Timed timed(kNorms);  // what all other parts leave
  thread_local Buffer buffer;
  const int64_t n_values = n_tokens * hidden, n_turns = n_tokens * n_pairs;
  float *const x = scratch(buffer, 4 * n_values + 2 * n_turns), *const normed = x + n_values;
  float *const added = normed + n_values, *const shared = added + n_values;
  float *const cos_TP = shared + n_values, *const sin_TP = cos_TP + n_turns;
  for (int64_t i = 0; i < 2 * n_tokens; i++) std::copy_n(turns_2T[i], n_pairs, cos_TP + i * n_pairs);
  scaled_rows(ends.embedding, id_T, n_tokens, ends.scale, x, n_threads);
  for (int64_t l = 0; l < n_layers; l++) {
    const DecoderLayer& layer = layers[l];
    rms_norm_rows(x, n_tokens, hidden, layer.attention_norm, layer.eps, normed, n_threads);
    {
      const Timed timed_block(kHeads);  // what the block's other parts leave
      attention_block(layer.attention, normed, n_tokens, cos_TP, sin_TP, layer.is_turned ? n_pairs : 0,
                      chunks_LT + l * n_tokens, n_tokens, added, n_threads);
    }
    add(x, added, n_values, x, n_threads);
    rms_norm_rows(x, n_tokens, hidden, layer.mlp_norm, layer.eps, normed, n_threads);
    if (layer.always) {
      run_on_all(layer.always, n_tokens, normed, shared, n_threads);
      if (layer.always_gate.rows) gate_rows(layer.always_gate, normed, n_tokens, shared, hidden, shared, n_threads);
    }
    const int64_t top_k = layer.router.top_k, n_experts = layer.router.n_experts;
    if (n_experts) {
      route(layer.router, normed, n_tokens, ids_TK, weights_TK, n_threads);
      run_chosen(layer.experts, n_experts, n_tokens, top_k, ids_TK, weights_TK, normed, added, n_threads);
      if (layer.always) add(added, shared, n_values, added, n_threads);
      ids_TK += n_tokens * top_k, weights_TK += n_tokens * top_k;
    }
    add(x, n_experts ? added : shared, n_values, x, n_threads);
  }
  rms_norm_rows(x, n_tokens, hidden, norm, eps, normed, n_threads);
  const Timed timed_head(kHead);
  const Product product = {&ends.head, ends.head_bias, logits};
  multiply_all(&product, 1, normed, n_tokens, n_threads);
}
