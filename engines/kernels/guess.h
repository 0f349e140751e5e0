// What a layer guesses of the next router's choice before its own experts run: engines.prediction inside of a step.
//
// Legend: H hidden, E experts, K experts of one token, W width of the estimator, V its inner width, P layers that are
// guessed for.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "layer.h"
#include "matrix.h"
#include "pool.h"
#include "scratch.h"
#include "vectors.h"

// A matrix whose rows lie in panels of so many: of each panel its first column, then the next. The last one is filled with
// zeros. Rows of a small matrix are short, and adding up a register's lanes would take longer than their products.
constexpr int64_t kPanelRows = 32;

// Bytes that are asked for before they are read. A network's matrices lie one behind the other, so that the end of one asks
// for the start of the next.
constexpr int64_t kPanelsAhead = 2 * kAhead;

struct Panels {
  const void* values;
  int64_t rows, columns;
  int32_t is_fp16;  // else fp32
};

template <class S>
inline void multiply_panels(const Panels& m, const float* x, const float* bias, float* out, int n_threads) {
  typedef typename S::element element;
  constexpr int V = kPanelRows / kLanes, U = 8 / V;  // registers of a column, and columns whose sums run side by side
  constexpr int64_t kBytes = kPanelRows * sizeof(element);
  const int64_t n_panels = (m.rows + kPanelRows - 1) / kPanelRows;
  in_chunks(n_panels, (128 << 10) / (m.columns * kBytes) + 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      const element* const from = (const element*)m.values + p * m.columns * kPanelRows;
      fN sums[U][V] = {};
      const auto add = [&](int64_t c, int u) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[u][v] += S::widen(from + c * kPanelRows + v * kLanes) * x[c];
      };
      int64_t c = 0;
      for (; c + U <= m.columns; c += U) {
        ask_ahead(from + c * kPanelRows, U * kBytes, kPanelsAhead);
#pragma GCC unroll 4
        for (int u = 0; u < U; u++) add(c + u, u);
      }
      for (; c < m.columns; c++) add(c, 0);
      float totals[kPanelRows];
      for (int v = 0; v < V; v++) {
        fN total = sums[0][v];
        for (int u = 1; u < U; u++) total += sums[u][v];
        store(totals + v * kLanes, total);
      }
      const int64_t first = p * kPanelRows, n = std::min(kPanelRows, m.rows - first);
      for (int64_t r = 0; r < n; r++) out[first + r] = totals[r] + (bias ? bias[first + r] : 0.0f);
    }
  });
}

// A small network in a router's place: engines.estimator. z = A q + position; z += C SiLU(B z); D LayerNorm(z).
struct Estimator {
  Panels reduce, widen, narrow, head;  // A [W, H], B [V, W], C [W, V], D [E, W]
  const float *position_W, *norm_W, *norm_bias_W;
  float eps;
};

struct Guess {
  Router router;            // of the layer that is guessed for; n_experts = 0: here nothing is guessed
  const float* norm_H;      // before that router; null: it is shown what this layer's own router reads
  const float* vectors_EH;  // what each of this layer's experts gives on average, where there is a norm
  const Estimator* estimator;  // gives the logits in the router's place; or null
  float eps;
};

// How all layers guess.
struct Guesses {
  const Guess* of_L;
  int64_t executes;              // whether a layer executes what was guessed for it
  int64_t n_chosen, n_states;  // P K, P H
};

// Where one step writes what was guessed, what its router was shown, and what the layer's own router then read. Rows are
// of the layers that are guessed for, in their order.
struct Guessed {
  int64_t* ids_PK = nullptr;
  float *weights_PK = nullptr, *shown_PH = nullptr, *read_PH = nullptr;

  Guessed() {}

  // guessed: ids, then weights. states: what was shown, then what was read.
  Guessed(const Guesses& guesses, int64_t* guessed, float* states)
      : ids_PK(guessed), weights_PK((float*)(guessed + guesses.n_chosen)), shown_PH(states),
        read_PH(states + guesses.n_states) {}
};

inline void layer_norm_row(float* x, int64_t width, const float* weight, const float* bias, float eps) {
  const float mean = sum_over(x, width, [](auto v) { return v; }) / float(width);
  const float squares = sum_over(x, width, [mean](auto v) { return (v - mean) * (v - mean); });
  const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
  for (int64_t c = 0; c < width; c++) x[c] = (x[c] - mean) * scale * weight[c] + bias[c];
}

inline void estimate(const Estimator& own, const float* q_H, float* logits_E, int n_threads) {
  thread_local Buffer buffer;
  const int64_t width = own.reduce.rows, inner = own.widen.rows;
  float *z_W = scratch(buffer, 2 * width + inner), *added_W = z_W + width, *inner_V = added_W + width;
  const auto multiply = [&](const Panels& m, const float* x, const float* bias, float* out) {
    m.is_fp16 ? multiply_panels<Fp16>(m, x, bias, out, n_threads) : multiply_panels<Fp32>(m, x, bias, out, n_threads);
  };
  multiply(own.reduce, q_H, own.position_W, z_W);
  multiply(own.widen, z_W, nullptr, inner_V);
  silu_row(inner_V, inner);
  multiply(own.narrow, inner_V, nullptr, added_W);
  for (int64_t w = 0; w < width; w++) z_W[w] += added_W[w];
  layer_norm_row(z_W, width, own.norm_W, own.norm_bias_W, own.eps);
  multiply(own.head, z_W, nullptr, logits_E);
}

// residual: what this layer's experts are added to. normed: what they and their router read. shared: what experts that
// every token takes gave; or null. ids, weights: of the experts that the layer executes.
inline void guess_row(const Guess& guess, const float* residual, const float* normed, const float* shared,
                      const int64_t* ids_K, const float* weights_K, int64_t n_chosen, int64_t hidden, float* shown,
                      int64_t* guessed_K, float* guessed_weights_K, int n_threads) {
  thread_local Buffer part_buffer, score_buffer;
  if (guess.estimator) ask_ahead(guess.estimator->reduce.values, kPanelsAhead, 0);
  if (!guess.norm_H) {
    std::copy_n(normed, hidden, shown);
  } else {
    float* part = scratch(part_buffer, hidden);
    std::fill_n(shown, hidden, 0.0f);
    for (int64_t k = 0; k < n_chosen; k++) {
      const float* vector = guess.vectors_EH + ids_K[k] * hidden;
      // Apart, so that products are rounded before they are added up, as they are where torch guesses.
      for (int64_t h = 0; h < hidden; h++) part[h] = weights_K[k] * vector[h];
      for (int64_t h = 0; h < hidden; h++) shown[h] += part[h];
    }
    for (int64_t h = 0; h < hidden; h++) shown[h] = residual[h] + shown[h];
    for (int64_t h = 0; shared && h < hidden; h++) shown[h] += shared[h];
    rms_norm_row(shown, hidden, guess.norm_H, guess.eps, shown);
  }
  if (!guess.estimator) return route(guess.router, shown, 1, guessed_K, guessed_weights_K, n_threads);
  float* score_E = scratch(score_buffer, guess.router.n_experts);
  estimate(*guess.estimator, shown, score_E, n_threads);
  choose_row(guess.router, score_E, guessed_K, guessed_weights_K);
}
