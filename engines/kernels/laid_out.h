// What one token computes where a technique makes more of its choice than a row for each expert.
//
// Legend: H hidden, I expert width, E experts, K experts of one token, R rows of all calls, C calls.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "experts.h"
#include "matrix.h"
#include "products.h"
#include "scratch.h"

// What one token's choice leads to, as engines.decode_layout says it: the chosen experts and the other members of their
// groups are called, each with its number of rows; then the last expert so often with rows of padding alone. Null: one
// row each; each expert alone. Slices: every call is made once for each, on the same rows, with the slice's part of
// gate, up and down; their results add up. Slices of the model width (`of_hidden`) add up before the activation, and each
// then makes its columns of the result. Null: whole experts.
struct DecodeLayout {
  const int64_t *rows_E, *group_E;
  int64_t n_padding_calls;
  const Matrix* const* slices;
  int64_t n_slices, of_hidden;

  bool is_plain() const { return !rows_E && !group_E && !n_padding_calls && !slices; }
  int64_t rows(int64_t expert) const { return rows_E ? rows_E[expert] : 1; }

  // Whether the choice has this expert called with its rows.
  bool calls(int64_t expert, const int64_t* ids_K, int64_t n_chosen) const {
    const int64_t* const end_K = ids_K + n_chosen;
    return std::any_of(ids_K, end_K, [&](int64_t other) {
      return other == expert || (group_E && group_E[other] == group_E[expert]);
    });
  }
};

// Which experts lie where they are computed, [layers, E], and what was used when: by how many plans, by which last, and
// how many there were. A plan is what one layer of one step calls. matrices_L: of each layer's experts, where they lie
// elsewhere than the layer says; or null.
struct Held {
  const uint8_t* at_hand_LE;
  int64_t *uses_LE, *last_use_LE, *n_plans;
  int64_t n_experts;
  const Matrix* const* matrices_L;

  // Counts what a layer's choice calls as used, where all of that lies at hand; else nothing, and returns false.
  bool use(int64_t layer, const DecodeLayout& layout, const int64_t* ids_K, int64_t n_chosen) const {
    const int64_t first = layer * n_experts;
    const auto each_called = [&](const auto& visit) {
      if (!layout.group_E && !layout.n_padding_calls) return std::all_of(ids_K, ids_K + n_chosen, visit);
      for (int64_t e = 0; e < n_experts; e++) {
        const bool is_padding = layout.n_padding_calls && e == n_experts - 1;
        if ((is_padding || layout.calls(e, ids_K, n_chosen)) && !visit(e)) return false;
      }
      return true;
    };
    if (!each_called([&](int64_t e) { return at_hand_LE[first + e] != 0; })) return false;
    ++*n_plans;
    return each_called([&](int64_t e) {
      uses_LE[first + e]++;
      last_use_LE[first + e] = *n_plans;
      return true;
    });
  }
};

// The calls of one token by ascending expert, the token's row first.
struct LaidCalls {
  std::vector<int64_t> expert_C, first_C, token_R;
  std::vector<float> weight_R;

  int64_t n() const { return int64_t(expert_C.size()); }
  int64_t n_rows(int64_t call) const { return first_C[size_t(call) + 1] - first_C[size_t(call)]; }
  bool has_token(int64_t call) const { return token_R[size_t(first_C[size_t(call)])] == 0; }

  void start() { expert_C.clear(), first_C.assign(1, 0), token_R.clear(), weight_R.clear(); }

  void add(int64_t expert, int64_t n, const float* weight) {  // null: only padding
    const size_t first = token_R.size();
    expert_C.push_back(expert);
    first_C.push_back(first_C.back() + n);
    token_R.resize(first + size_t(n), -1);
    weight_R.resize(first + size_t(n), 0.0f);
    if (weight) token_R[first] = 0, weight_R[first] = *weight;
  }
};

// Slices of the model width: gate and up of every slice on its columns of the input, sums over slices, and then of every
// slice its rows of `down`.
inline void run_hidden_slices(const LaidCalls& calls, const DecodeLayout& layout, const float* x, float* out,
                              int n_threads) {
  thread_local Buffer sum_buffer, part_buffer, input_buffer, result_buffer;
  thread_local std::vector<Product> products;
  const Matrix* const first = layout.slices[0] + 3 * calls.expert_C[0];
  const int64_t n_calls = calls.n(), n_rows = calls.first_C.back(), width = first->rows;
  int64_t hidden = 0, most = 0;
  for (int64_t p = 0; p < layout.n_slices; p++) hidden += layout.slices[p][0].columns;
  for (int64_t call = 0; call < n_calls; call++) most = std::max(most, calls.n_rows(call));
  float *gate_RI = scratch(sum_buffer, 2 * n_rows * width), *up_RI = gate_RI + n_rows * width;
  float *gates = scratch(part_buffer, 2 * n_rows * width), *ups = gates + n_rows * width;
  std::fill_n(gate_RI, 2 * n_rows * width, 0.0f);
  for (int64_t p = 0, column = 0; p < layout.n_slices; column += layout.slices[p++][0].columns) {
    const int64_t columns = layout.slices[p][0].columns;
    // The token's row and then rows of zeros: as many as a call has, from the start or from behind it.
    float* input = scratch(input_buffer, (most + 1) * columns);
    std::copy_n(x + column, columns, input);
    std::fill_n(input + columns, most * columns, 0.0f);
    for (int64_t call = 0; call < n_calls;) {
      const int64_t rows = calls.n_rows(call);
      const bool has_token = calls.has_token(call);
      products.clear();
      for (; call < n_calls && calls.n_rows(call) == rows && calls.has_token(call) == has_token; call++) {
        const Matrix* const own = layout.slices[p] + 3 * calls.expert_C[size_t(call)];
        const int64_t at = calls.first_C[size_t(call)] * width;
        products.push_back({own, nullptr, gates + at});
        products.push_back({own + 1, nullptr, ups + at});
      }
      multiply_all(products.data(), int(products.size()), has_token ? input : input + columns, rows, n_threads);
    }
    for (int64_t i = 0; i < 2 * n_rows * width; i++) gate_RI[i] += gates[i];
  }
  silu_row(gate_RI, n_rows * width);
  for (int64_t i = 0; i < n_rows * width; i++) gate_RI[i] *= up_RI[i];
  std::fill_n(out, hidden, 0.0f);
  for (int64_t p = 0, column = 0; p < layout.n_slices; column += layout.slices[p++][0].columns) {
    const int64_t columns = layout.slices[p][0].columns;
    float* results = scratch(result_buffer, most * columns);
    for (int64_t call = 0; call < n_calls; call++) {
      const size_t row = size_t(calls.first_C[size_t(call)]);
      const Product down = {layout.slices[p] + 3 * calls.expert_C[size_t(call)] + 2, nullptr, results};
      multiply_all(&down, 1, gate_RI + int64_t(row) * width, calls.n_rows(call), n_threads);
      if (!calls.has_token(call)) continue;
      for (int64_t h = 0; h < columns; h++) out[column + h] += calls.weight_R[row] * results[h];
    }
  }
}

// The weighted sum of some experts for one token, its calls laid out; rows_E becomes the rows of each expert's calls, 0
// of those not called.
inline void run_laid_out(const Matrix* matrices, const DecodeLayout& layout, int64_t n_experts, int64_t n_chosen,
                         const int64_t* ids_K, const float* x, const float* weights_K, float* out, int64_t* rows_E,
                         int n_threads) {
  thread_local LaidCalls calls;
  thread_local Buffer part_buffer;
  calls.start();
  for (int64_t e = 0; e < n_experts; e++) {
    const bool is_called = layout.calls(e, ids_K, n_chosen);
    rows_E[e] = is_called ? layout.rows(e) : 0;
    if (!is_called) continue;
    const int64_t* const chosen = std::find(ids_K, ids_K + n_chosen, e);
    calls.add(e, rows_E[e], chosen == ids_K + n_chosen ? nullptr : weights_K + (chosen - ids_K));
  }
  for (int64_t i = 0; i < layout.n_padding_calls; i++) calls.add(n_experts - 1, layout.rows(n_experts - 1), nullptr);
  rows_E[n_experts - 1] += layout.n_padding_calls * layout.rows(n_experts - 1);
  if (layout.of_hidden) return run_hidden_slices(calls, layout, x, out, n_threads);
  const auto run = [&](const Matrix* of, float* to) {
    const Experts all = {of, calls.n(), calls.expert_C.data(), calls.first_C.data(), x, calls.token_R.data(),
                         calls.weight_R.data(), 1, to, 0, calls.n()};
    compute_experts(all, n_threads);
  };
  if (!layout.slices) return run(matrices, out);
  run(layout.slices[0], out);
  const int64_t hidden = layout.slices[0][0].columns;
  float* part = scratch(part_buffer, hidden);
  for (int64_t p = 1; p < layout.n_slices; p++) {
    run(layout.slices[p], part);
    for (int64_t h = 0; h < hidden; h++) out[h] += part[h];
  }
}
