// What a layer computes on a CPU. A few tokens are bound by reading the weights, many by arithmetic.
//
// All sums are fp32. Vectors are GCC/Clang vector extensions of eight floats: AVX2 registers on x86, register pairs on
// Arm.
//
// Legend: T tokens, H hidden, R rows of all expert calls, C calls, K experts of one token, M key/value heads,
// S positions, D features of a head, P pairs of turned features.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch.h"
#include "exchange.h"
#include "experts.h"
#include "guess.h"
#include "laid_out.h"
#include "layer.h"
#include "lending.h"
#include "matrix.h"
#include "parts.h"
#include "pool.h"
#include "products.h"
#include "split_attention.h"

// Of one token's experts those that this rank has, and whose turn it is where others have them too; then everybody's are
// added up. first_expert: of the layer, where experts of all layers are numbered.
static bool run_own_experts(const Matrix* matrices, int64_t first_expert, int64_t top_k, const int64_t* ids_K,
                            const float* x, const float* weights_K, int64_t hidden, float* out, Exchange& exchange,
                            int n_threads) {
  thread_local std::vector<int64_t> own;
  thread_local std::vector<float> weights;
  own.clear(), weights.clear();
  const int64_t* const local_E = exchange.local_LE + first_expert;
  const auto is_mine = [&](int64_t expert) {
    if (!exchange.holders_LE) return true;
    const Exchange::Holders *const of_E = exchange.holders_LE + first_expert, &of = of_E[expert];
    const int64_t turn = std::count_if(ids_K, ids_K + top_k, [&](int64_t other) {
      return other < expert && of_E[other].first == of.first;
    });
    return exchange.takers[of.first + turn % of.n] == exchange.rank;
  };
  for (int64_t k = 0; k < top_k; k++) {
    const int64_t expert = ids_K[k];
    if (local_E[expert] >= 0 && is_mine(expert)) own.push_back(local_E[expert]), weights.push_back(weights_K[k]);
  }
  if (own.empty()) std::fill_n(out, hidden, 0.0f);
  else run_experts(matrices, int64_t(own.size()), own.data(), x, weights.data(), out, n_threads);
  return exchange.sum(out, hidden);
}

extern "C" {

// What the compiler was allowed to use here.
const char* joulebench_instruction_set() {
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#ifdef JOULEBENCH_VNNI
  return "AVX-512";
#else
  return "AVX-512 without VNNI";
#endif
#elif defined(JOULEBENCH_AVX2) && defined(__FMA__)
#ifdef JOULEBENCH_VNNI
  return "AVX2 with VNNI";
#else
  return "AVX2";
#endif
#elif defined(__AVX__)
  return "AVX";
#elif defined(__SSE2__)
  return "SSE2";
#elif defined(__ARM_FEATURE_SVE)
  return "SVE";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "none";
#endif
}

// Whether matrices of bf16 are multiplied with inputs rounded to bf16 here.
int32_t joulebench_multiplies_bf16() { return kMultipliesPairs; }

// Whether attention of many tokens multiplies bytes here.
int32_t joulebench_attends_by_bytes() { return kAttendsByBytes; }

// See Pool::choose.
int32_t joulebench_choose(int32_t n_threads, int32_t* ids, int32_t n_ids) { return pool().choose(n_threads, ids, n_ids); }

// See Pool::spin.
void joulebench_spin(int64_t spin_us) { pool().spin(spin_us); }

// out[T, rows] = x[T, columns] m^T + bias; bias may be null.
void joulebench_linear(const Matrix* m, const float* x, int64_t n_tokens, const float* bias, float* out,
                       int32_t n_threads) {
  const Product product = {m, bias, out};
  multiply_all(&product, 1, x, n_tokens, n_threads);
}

// out[T, H] = the weighted sum of SwiGLU experts. Call c computes expert_C[c] for rows first_C[c] .. first_C[c+1]-1; row
// r is token token_R[r] (-1: padding), and its result, times weight_R[r], is added to that token. Only the experts named
// are read. Calls first_made .. end_made - 1 are made, whose experts alone are read; the rest of them, before or after, to
// the same out: it is what all give together, bit for bit.
void joulebench_experts(const Matrix* matrices, int64_t n_calls, const int64_t* expert_C, const int64_t* first_C,
                        const float* hidden_TH, const int64_t* token_R, const float* weight_R, int64_t n_tokens,
                        float* out, int64_t first_made, int64_t end_made, int32_t n_threads) {
  const Experts experts = {matrices, n_calls, expert_C, first_C, hidden_TH, token_R, weight_R, n_tokens, out,
                           first_made, end_made};
  compute_experts(experts, n_threads);
}

void joulebench_rms_norm(const float* x, int64_t n_rows, int64_t width, const float* weight, float eps, float* out,
                         int32_t n_threads) {
  rms_norm_rows(x, n_rows, width, weight, eps, out, n_threads);
}

// out[T, columns] = row row_T[t] of m, as floats, times a scale. Nothing is written where m lacks one of them: then 0 is given back.
int32_t joulebench_rows(const Matrix* m, const int64_t* row_T, int64_t n_tokens, float scale, float* out,
                        int32_t n_threads) {
  if (std::any_of(row_T, row_T + n_tokens, [&](int64_t row) { return row < 0 || row >= m->rows; })) return 0;
  scaled_rows(*m, row_T, n_tokens, scale, out, n_threads);
  return 1;
}

// See add.
void joulebench_add(const float* a, const float* b, int64_t n, float* out, int32_t n_threads) {
  add(a, b, n, out, n_threads);
}

// See attention_block.
void joulebench_attention(const AttentionLayer* layer, const float* x, int64_t n_tokens, const float* cos_TP,
                          const float* sin_TP, int64_t n_pairs, const Chunk* chunks, int64_t n_chunks, float* out,
                          int32_t n_threads) {
  const Timed timed(kHeads);  // what the block's other parts leave
  attention_block(*layer, x, n_tokens, cos_TP, sin_TP, n_pairs, chunks, n_chunks, out, n_threads);
}

// See project_heads and attend_rows, which are the block where keys and values pass other hands between them.
void joulebench_project(const AttentionLayer* layer, const float* x, int64_t n_tokens, const float* cos_TP,
                        const float* sin_TP, int64_t n_pairs, float* query, float* key, float* value, int32_t n_threads) {
  project_heads(*layer, x, n_tokens, cos_TP, sin_TP, n_pairs, query, key, value, n_threads, [](int64_t) {});
}

void joulebench_attend(const AttentionLayer* layer, const float* query, int64_t n_tokens, const Chunk* chunks,
                       int64_t n_chunks, float* out, int32_t n_threads) {
  attend_rows(*layer, query, n_tokens, chunks, n_chunks, out, n_threads);
}

// The first of the largest of n numbers, and its value: NaN where one is no number.
int64_t joulebench_largest(const float* x, int64_t n, float* value) { return largest(x, n, value); }

// See gate_rows.
void joulebench_gate(const Matrix* gate, const float* x, int64_t n_tokens, const float* shared, int64_t width, float* out,
                     int32_t n_threads) {
  const Timed timed(kNorms);
  gate_rows(*gate, x, n_tokens, shared, width, out, n_threads);
}

// See route.
void joulebench_route(const Router* router, const float* x, int64_t n_tokens, int64_t* ids_TK, float* weights_TK,
                      int32_t n_threads) {
  route(*router, x, n_tokens, ids_TK, weights_TK, n_threads);
}

// out[H] = the weighted sum of the experts ids[K] of one token, with the calls that its layout makes of them; see
// run_laid_out. held: null where all experts of the layer lie at hand; else nothing is computed, and 0 returned, where
// one that is called does not.
int32_t joulebench_laid_out(const Matrix* matrices, const DecodeLayout* layout, int64_t n_experts, int64_t top_k,
                            const int64_t* ids, const float* x, const float* weights, float* out, int64_t* rows,
                            const Held* held, int64_t layer, int32_t n_threads) {
  if (held && !held->use(layer, *layout, ids, top_k)) return 0;
  run_laid_out(matrices, *layout, n_experts, top_k, ids, x, weights, out, rows, n_threads);
  return 1;
}

// One token through all layers, every expert that it is routed to among them: what a decode step is where nothing has to
// be decided between router and experts. x[H] is the embedded token and becomes the last layer's output. keys[l] and
// values[l] are that layer's cache; ids and weights [layers, K] are what the routers chose. layouts[l] is what a layer
// computes for its choice; null where all are plain. rows [layers, E] are those that layers computed which are not.
// ends: null, or what the token `id` is embedded by first, and multiplied with in the end: logits, of which the largest is
// `most`, and the first such `best`.
// exchange: null, or how ranks that have some of the experts each add up what theirs give; layouts and held are null
// then. Returns -1 where not all came.
//
// guesses: null, or how each layer guesses the next router's choice from what it knows before its experts run, and whether
// that is what the next layer executes. ids and weights are the routers' own all the same; guessed and states: of Guessed.
//
// held: null where all experts lie at hand. Else the step stops before the experts of the first layer that calls one
// which does not, and returns that layer: x is then what they are added to, normed[H] what they read, and its guess is
// made. The caller computes them, and goes on with that layer as `first_layer` and what they gave as mixed[H]. Returns
// n_layers at the end; normed[H] is then the output as `norm` and `eps` norm it for the head.
int64_t joulebench_step(const DecoderLayer* layers, int64_t n_layers, int64_t hidden, float* x, const float* cos_P,
                        const float* sin_P, int64_t n_pairs, void* const* keys, void* const* values,
                        int64_t head_stride, int64_t position, const DecodeLayout* layouts, int64_t* ids,
                        float* weights, int64_t* rows, Exchange* exchange, const Held* held, const Guesses* guesses,
                        int64_t* guessed, float* states, float* normed, const float* norm, float eps,
                        const Ends* ends, int64_t id, float* logits, int64_t* best, float* most, int64_t first_layer,
                        const float* mixed, int32_t n_threads) {
  const Timed timed(kNorms);  // what all other parts leave
  thread_local Buffer buffer;
  float *const added = scratch(buffer, 2 * hidden), *const shared = added + hidden;
  int64_t n_before = 0;  // experts of the layers before
  const auto add = [&](const float* what) {
    for (int64_t h = 0; h < hidden; h++) x[h] += what[h];
  };
  const auto run_always = [&](const DecoderLayer& layer) {
    const int64_t first = 0;
    const float whole = 1.0f;
    run_experts(layer.always, 1, &first, normed, &whole, shared, n_threads);
    if (layer.always_gate.rows) gate_rows(layer.always_gate, normed, 1, shared, hidden, shared, n_threads);
  };
  const DecodeLayout plain = {};
  const Guessed told = guesses ? Guessed(*guesses, guessed, states) : Guessed();
  int64_t n_guessed = 0;
  if (ends && !mixed) scaled_row(ends->embedding, id, ends->scale, x);
  for (int64_t l = 0; l < first_layer; l++) {
    if (!layers[l].router.n_experts) continue;
    ids += layers[l].router.top_k, weights += layers[l].router.top_k;
    rows += rows ? layers[l].router.n_experts : 0;
    n_guessed += guesses && guesses->of_L[l].router.n_experts;
  }
  for (int64_t l = first_layer; l < n_layers; l++) {
    const DecoderLayer& layer = layers[l];
    const bool is_mixed = mixed && l == first_layer;
    const DecodeLayout& layout = layouts ? layouts[l] : plain;
    bool has_shared = false;
    if (!is_mixed) {
      rms_norm_row(x, hidden, layer.attention_norm, layer.eps, normed);
      const Chunk chunk = {keys[l], values[l], head_stride, position, 0, 1};
      const int64_t n_turned = layer.is_turned ? n_pairs : 0;
      {
        const Timed timed_block(kHeads);  // what the block's other parts leave
        if (!exchange || !exchange->splits_attention)
          attention_block(layer.attention, normed, 1, cos_P, sin_P, n_turned, &chunk, 1, added, n_threads);
        else if (!split_attention(layer.attention, normed, cos_P, sin_P, n_turned, chunk, added, *exchange, n_threads))
          return -1;
      }
      add(added);
      rms_norm_row(x, hidden, layer.mlp_norm, layer.eps, normed);
    }
    if (layer.router.n_experts) {
      const int64_t top_k = layer.router.top_k, n_experts = layer.router.n_experts;
      const Matrix* const experts = held && held->matrices_L ? held->matrices_L[l] : layer.experts;
      const Guess* const guess = guesses && guesses->of_L[l].router.n_experts ? guesses->of_L + l : nullptr;
      if (is_mixed) {
        std::copy_n(mixed, hidden, added);
      } else {
        route(layer.router, normed, 1, ids, weights, n_threads);
        const int64_t* run_ids = ids;
        const float* run_weights = weights;
        if (n_guessed) {
          std::copy_n(normed, hidden, told.read_PH + (n_guessed - 1) * hidden);
          if (guesses->executes) {
            run_ids = told.ids_PK + (n_guessed - 1) * top_k;
            run_weights = told.weights_PK + (n_guessed - 1) * top_k;
          }
        }
        if (guess) {
          if (guess->norm_H && layer.always) run_always(layer), has_shared = true;
          guess_row(*guess, x, normed, has_shared ? shared : nullptr, run_ids, run_weights, top_k, hidden,
                    told.shown_PH + n_guessed * hidden, told.ids_PK + n_guessed * top_k,
                    told.weights_PK + n_guessed * top_k, n_threads);
        }
        if (held && !held->use(l, layout, run_ids, top_k)) return l;
        if (exchange) {
          if (!run_own_experts(experts, n_before, top_k, run_ids, normed, run_weights, hidden, added, *exchange,
                               n_threads))
            return -1;
        } else if (layout.is_plain()) {
          run_experts(experts, top_k, run_ids, normed, run_weights, added, n_threads);
        } else {
          run_laid_out(experts, layout, n_experts, top_k, run_ids, normed, run_weights, added, rows, n_threads);
        }
      }
      if (layer.always) {
        if (!has_shared) run_always(layer);
        for (int64_t h = 0; h < hidden; h++) added[h] += shared[h];
      }
      add(added);
      ids += top_k, weights += top_k, rows += rows ? n_experts : 0, n_guessed += guess != nullptr;
      n_before += n_experts;
    } else if (layer.always) {
      run_always(layer);
      add(shared);
    }
  }
  rms_norm_row(x, hidden, norm, eps, normed);
  if (ends) {
    const Timed timed_head(kHead);
    const Product product = {&ends->head, ends->head_bias, logits};
    multiply_all(&product, 1, normed, 1, n_threads);
    *best = largest(logits, ends->head.rows, most);
  }
  return n_layers;
}

// See batch_step.
void joulebench_batch(const DecoderLayer* layers, int64_t n_layers, int64_t hidden, const int64_t* id_T, int64_t n_tokens,
                      const float* const* turns_2T, int64_t n_pairs, const Chunk* chunks_LT, int64_t* ids_LTK,
                      float* weights_LTK, const float* norm, float eps, const Ends* ends, float* logits,
                      int32_t n_threads) {
  batch_step(layers, n_layers, hidden, id_T, n_tokens, turns_2T, n_pairs, chunks_LT, ids_LTK, weights_LTK, norm, eps,
             *ends, logits, n_threads);
}

#ifdef JOULEBENCH_PARTS
// Seconds of each part since the last call.
void joulebench_parts(double* seconds) {
  std::copy_n(part_seconds(), int(kParts), seconds);
  std::fill_n(part_seconds(), int(kParts), 0.0);
}
#endif

// See Exchange::sum.
int32_t joulebench_sum(Exchange* exchange, float* values, int64_t n) { return exchange->sum(values, n); }

// See Exchange::lend.
void joulebench_lend(const Exchange* exchange) { exchange->lend(); }
void joulebench_take_back(const Exchange* exchange) { exchange->take_back(); }

// See Helpers; ended before the memory of the exchange goes.
Helpers* joulebench_helpers(const Exchange* exchange) { return new Helpers(*exchange); }
void joulebench_end_helpers(Helpers* helpers) { delete helpers; }

}  // extern "C"
