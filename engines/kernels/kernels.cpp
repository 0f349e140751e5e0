// What a layer computes on a CPU, for any number of tokens and any storage format: narrow.h for a few tokens, which are
// bound by reading the weights, wide.h for many, which are bound by arithmetic.
//
// All sums are fp32. Vectors are GCC/Clang vector extensions of eight floats: AVX2 registers on x86, register pairs on
// Arm.
//
// Legend: T tokens, H hidden, I expert width, E experts, R rows of all expert calls, C calls, N query heads,
// M key/value heads, D features of a head, P pairs of turned features.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "narrow.h"
#include "pool.h"
#include "vectors.h"
#include "wide.h"

namespace {

// Chunks of one stage: enough for threads to even out what they do, few enough to cost nothing.
int64_t fair_chunk(int64_t n_units, int n_threads) { return std::max<int64_t>(1, n_units / (8 * n_threads)); }

// --- products that share their input ----------------------------------------------------------------------------------

struct Product {
  const Matrix* matrix;
  const float* bias;  // or null
  float* out;         // [T, rows]
};

void narrow_products(const Product* products, int n_products, const float* x, int64_t n_tokens, int n_threads) {
  thread_local std::vector<float> prepared;
  int64_t n_rows = 0, chunk = INT64_MAX;
  const float* for_int4 = nullptr;
  for (int i = 0; i < n_products; i++) {
    const Matrix& m = *products[i].matrix;
    if (m.format == kInt4 && !for_int4) for_int4 = prepared_rows(m, x, n_tokens, prepared);
    n_rows += m.rows;
    chunk = std::min(chunk, rows_per_chunk(m));
  }
  in_chunks(n_rows, chunk, n_threads, [&](int64_t begin, int64_t end) {
    int64_t start = 0;
    for (int i = 0; i < n_products; i++) {
      const Product& p = products[i];
      const int64_t rows = p.matrix->rows;
      const float* input = p.matrix->format == kInt4 ? for_int4 : x;
      for (int64_t row = std::max(begin, start) - start; row < std::min(end - start, rows); row++) {
        float results[kMaxTokens] = {};
        dot(*p.matrix, row, int(n_tokens), input, results);
        for (int t = 0; t < n_tokens; t++) p.out[t * rows + row] = results[t] + (p.bias ? p.bias[row] : 0.0f);
      }
      start += rows;
    }
  });
}

void wide_products(const Product* products, int n_products, const float* x, int64_t n_tokens, int n_threads) {
  thread_local std::vector<float> buffer;
  const int64_t columns = products[0].matrix->columns, per_block = tokens_per_block(n_tokens, columns);
  float* packed = scratch(buffer, packed_size(n_tokens, columns));
  const int64_t n_blocks = (n_tokens + per_block - 1) / per_block;
  const auto block_of = [&](int64_t b) {
    return TokenBlock{b * per_block, std::min(per_block, n_tokens - b * per_block), packed + b * per_block * columns};
  };
  in_chunks(n_blocks, 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const TokenBlock block = block_of(b);
      pack(block.n, columns, [&](int64_t i) { return x + (block.first + i) * columns; }, block.packed);
    }
  });
  const auto n_groups_of = [](const Product& p) { return (p.matrix->rows + kGroupRows - 1) / kGroupRows; };
  int64_t n_groups = 0;
  for (int i = 0; i < n_products; i++) n_groups += n_groups_of(products[i]);
  const int64_t n_units = n_blocks * n_groups;
  in_chunks(n_units, fair_chunk(n_units, n_threads), n_threads, [&](int64_t begin, int64_t end) {
    float* results = group_scratch();
    for (int64_t unit = begin; unit < end; unit++) {
      const TokenBlock block = block_of(unit / n_groups);
      int64_t group = unit % n_groups;
      const Product* p = products;
      for (; group >= n_groups_of(*p); p++) group -= n_groups_of(*p);
      const Matrix& m = *p->matrix;
      const int64_t row = group * kGroupRows;
      const int n_rows = int(std::min<int64_t>(kGroupRows, m.rows - row));
      multiply_group(n_rows, columns, block, [&](int r) { return Row{&m, std::min(row + r, m.rows - 1)}; }, results);
      float* out = p->out + block.first * m.rows + row;
      const float* bias = p->bias ? p->bias + row : nullptr;
      each_result(
          block, n_rows, results,
          [&](int64_t t, int r, f8 v) { store(out + t * m.rows + r, bias ? v + load<f8>(bias + r) : v); },
          [&](int64_t t, int r, float v) { out[t * m.rows + r] = bias ? v + bias[r] : v; });
    }
  });
}

void multiply_all(const Product* products, int n_products, const float* x, int64_t n_tokens, int n_threads) {
  if (n_tokens <= kMaxTokens) return narrow_products(products, n_products, x, n_tokens, n_threads);
  wide_products(products, n_products, x, n_tokens, n_threads);
}

// --- experts ----------------------------------------------------------------------------------------------------------

// The rows of an expert call, and its three matrices: gate and up [I, H], down [H, I].
struct Experts {
  const Matrix* matrices;  // of expert e at 3 e
  int64_t n_calls;
  const int64_t *expert_C, *first_C;
  const float* hidden_TH;
  const int64_t* token_R;
  const float* weight_R;
  int64_t n_tokens;
  float* out_TH;

  const Matrix& gate(int64_t call) const { return matrices[3 * expert_C[call]]; }
  const Matrix& up(int64_t call) const { return matrices[3 * expert_C[call] + 1]; }
  const Matrix& down(int64_t call) const { return matrices[3 * expert_C[call] + 2]; }
  int64_t n_rows(int64_t call) const { return first_C[call + 1] - first_C[call]; }
};

// All experts of a layer are stored alike: the first called speaks for them.
void narrow_experts(const Experts& e, int n_threads) {
  thread_local std::vector<float> gathered, input_buffer, inner_buffer, prepared_buffer;
  const int64_t n_rows = e.first_C[e.n_calls], hidden = e.gate(0).columns, width = e.gate(0).rows;
  const int64_t down_stride = input_stride(e.down(0));
  const float* rows_RH = e.hidden_TH;
  int64_t up_stride = 0;  // of one token, every row is that token
  if (e.n_tokens > 1) {
    float* to = scratch(gathered, n_rows * hidden);
    for (int64_t r = 0; r < n_rows; r++)
      std::memcpy(to + r * hidden, e.hidden_TH + e.token_R[r] * hidden, hidden * sizeof(float));
    rows_RH = to;
    up_stride = input_stride(e.gate(0));
  }
  const float* input = prepared_rows(e.gate(0), rows_RH, e.n_tokens > 1 ? n_rows : 1, input_buffer);
  float* inner_RI = scratch(inner_buffer, n_rows * width);
  in_chunks(e.n_calls * width, rows_per_chunk(e.gate(0)) / 2 + 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t call = unit / width, i = unit % width, first = e.first_C[call];
      const int rows = int(e.n_rows(call));
      float gates[kMaxTokens] = {}, ups[kMaxTokens] = {};
      dot(e.gate(call), i, rows, input + first * up_stride, gates);
      dot(e.up(call), i, rows, input + first * up_stride, ups);
      for (int r = 0; r < rows; r++) inner_RI[(first + r) * width + i] = gates[r] / (1 + std::exp(-gates[r])) * ups[r];
    }
  });
  const float* prepared = prepared_rows(e.down(0), inner_RI, n_rows, prepared_buffer);
  std::memset(e.out_TH, 0, e.n_tokens * hidden * sizeof(float));
  // A chunk owns outputs, not calls, so that no two threads add to the same one.
  const int64_t chunk = std::max<int64_t>(8, rows_per_chunk(e.down(0)) / e.n_calls);
  in_chunks(hidden, chunk, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t call = 0; call < e.n_calls; call++) {
      const int64_t first = e.first_C[call];
      const int rows = int(e.n_rows(call));
      for (int64_t h = begin; h < end; h++) {
        float results[kMaxTokens] = {};
        dot(e.down(call), h, rows, prepared + first * down_stride, results);
        for (int r = 0; r < rows; r++) e.out_TH[e.token_R[first + r] * hidden + h] += e.weight_R[first + r] * results[r];
      }
    }
  });
}

// Rows of token -1 are padding: computed as zeros, and their results discarded.
void wide_experts(const Experts& e, int n_threads) {
  struct Block : TokenBlock {
    int64_t call;
    float* inner;  // panels of what goes into `down`
  };
  thread_local std::vector<float> input_buffer, inner_buffer;
  const int64_t hidden = e.gate(0).columns, width = e.gate(0).rows;
  std::vector<Block> blocks;
  int64_t n_packed = 0;  // in lanes
  for (int64_t call = 0; call < e.n_calls; call++) {
    const int64_t per_block = tokens_per_block(e.n_rows(call), std::max(hidden, width));
    for (int64_t done = 0; done < e.n_rows(call); done += per_block) {
      Block block;
      block.first = e.first_C[call] + done;
      block.n = std::min(per_block, e.n_rows(call) - done);
      block.call = call;
      blocks.push_back(block);
      n_packed += packed_size(block.n, 1);
    }
  }
  float *input = scratch(input_buffer, n_packed * hidden), *inner = scratch(inner_buffer, n_packed * width);
  for (Block& block : blocks) {
    block.packed = input;
    block.inner = inner;
    input += packed_size(block.n, hidden);
    inner += packed_size(block.n, width);
  }
  const int64_t n_blocks = int64_t(blocks.size());
  in_chunks(n_blocks, 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const Block& block = blocks[b];
      const auto row_of = [&](int64_t i) {
        const int64_t token = e.token_R[block.first + i];
        return token < 0 ? nullptr : e.hidden_TH + token * hidden;
      };
      pack(block.n, hidden, row_of, block.packed);
    }
  });
  // Of a tile's twelve rows, six are gate rows and six the up rows that belong to them.
  constexpr int64_t half = kTileRows / 2, of_group = kGroupRows / 2;
  const int64_t n_groups = (width + of_group - 1) / of_group, n_units = n_blocks * n_groups;
  in_chunks(n_units, fair_chunk(n_units, n_threads), n_threads, [&](int64_t begin, int64_t end) {
    float* results = group_scratch();
    for (int64_t unit = begin; unit < end; unit++) {
      const Block& block = blocks[unit / n_groups];
      const int64_t first = unit % n_groups * of_group, n = std::min(of_group, width - first);
      const Matrix &gate = e.gate(block.call), &up = e.up(block.call);
      const auto row_at = [&](int r) {
        const int64_t row = std::min(first + r / kTileRows * half + r % half, width - 1);
        return Row{r % kTileRows < half ? &gate : &up, row};
      };
      multiply_group(int((n + half - 1) / half * kTileRows), hidden, block, row_at, results);
      for (int64_t p = 0; p < n_panels(block.n); p++) {
        const int lanes = lanes_of(block.n, p);
        const float* from = results + p * kGroupRows * kPanel;
        float* to = block.inner + p * kPanel * width + first * lanes;
        for (int64_t i = 0; i < n; i++) {
          const float* gates = from + (i / half * kTileRows + i % half) * lanes;
          for (int lane = 0; lane < lanes; lane += 8)
            store(to + i * lanes + lane, silu(load<f8>(gates + lane)) * load<f8>(gates + half * lanes + lane));
        }
      }
    }
  });
  std::memset(e.out_TH, 0, e.n_tokens * hidden * sizeof(float));
  // A chunk owns outputs, not blocks, so that no two threads add to the same one.
  const int64_t n_down = (hidden + kGroupRows - 1) / kGroupRows;
  in_chunks(n_down, std::max<int64_t>(1, n_down / (4 * n_threads)), n_threads, [&](int64_t begin, int64_t end) {
    float* results = group_scratch();
    for (const Block& block : blocks) {
      const Matrix& down = e.down(block.call);
      const TokenBlock inner_block = {block.first, block.n, block.inner};
      const int64_t* token = e.token_R + block.first;
      const float* weight = e.weight_R + block.first;
      for (int64_t group = begin; group < end; group++) {
        const int64_t row = group * kGroupRows;
        const int n_rows = int(std::min<int64_t>(kGroupRows, hidden - row));
        const auto row_at = [&](int r) { return Row{&down, std::min(row + r, hidden - 1)}; };
        multiply_group(n_rows, width, inner_block, row_at, results);
        each_result(
            inner_block, n_rows, results,
            [&](int64_t t, int r, f8 v) {
              if (token[t] < 0) return;
              float* to = e.out_TH + token[t] * hidden + row + r;
              store(to, load<f8>(to) + weight[t] * v);
            },
            [&](int64_t t, int r, float v) {
              if (token[t] >= 0) e.out_TH[token[t] * hidden + row + r] += weight[t] * v;
            });
      }
    }
  });
}

// --- what lies between products ---------------------------------------------------------------------------------------

// x / sqrt(mean(x^2) + eps) * weight of one row; out may be x.
void rms_norm_row(const float* x, int64_t width, const float* weight, float eps, float* out) {
  f8 squares = {};
  float rest = 0;
  int64_t c = 0;
  for (; c + 8 <= width; c += 8) squares += load<f8>(x + c) * load<f8>(x + c);
  for (int64_t k = c; k < width; k++) rest += x[k] * x[k];
  const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
  for (int64_t k = 0; k < width; k++) out[k] = x[k] * scale * weight[k];
}

// Turns the first 2P features in place. Neighbouring pairs come out first members before second ones, as the torch code
// of engines.rope leaves them.
void turn_row(float* x, const float* cos_P, const float* sin_P, int64_t n_pairs, bool neighbours) {
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
};

// Which experts a token goes to. Of equal scores the lower index wins.
void route_row(const float* score_E, int64_t n_experts, int64_t top_k, int64_t* ids_K) {
  for (int64_t k = 0; k < top_k; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < n_experts; e++) {
      const bool taken = std::find(ids_K, ids_K + k, e) != ids_K + k;
      if (!taken && (best < 0 || score_E[e] > score_E[best])) best = e;
    }
    ids_K[k] = best;
  }
}

void softmax_row(float* x, int64_t n) {
  const float largest = *std::max_element(x, x + n);
  float total = 0;
  for (int64_t i = 0; i < n; i++) total += x[i] = std::exp(x[i] - largest);
  for (int64_t i = 0; i < n; i++) x[i] /= total;
}

}  // namespace

extern "C" {

// out[T, rows] = x[T, columns] m^T + bias; bias may be null.
void joulebench_linear(const Matrix* m, const float* x, int64_t n_tokens, const float* bias, float* out,
                       int32_t n_threads) {
  const Product product = {m, bias, out};
  multiply_all(&product, 1, x, n_tokens, n_threads);
}

// out[T, H] = the weighted sum of SwiGLU experts. Call c computes expert_C[c] for rows first_C[c] .. first_C[c+1]-1; row
// r is token token_R[r] (-1: padding), and its result, times weight_R[r], is added to that token. Only the experts named
// are read.
void joulebench_experts(const Matrix* matrices, int64_t n_calls, const int64_t* expert_C, const int64_t* first_C,
                        const float* hidden_TH, const int64_t* token_R, const float* weight_R, int64_t n_tokens,
                        float* out, int32_t n_threads) {
  const Experts e = {matrices, n_calls, expert_C, first_C, hidden_TH, token_R, weight_R, n_tokens, out};
  bool is_narrow = true;
  for (int64_t call = 0; call < n_calls; call++) is_narrow &= e.n_rows(call) <= kMaxTokens;
  for (int64_t r = 0; r < first_C[n_calls]; r++) is_narrow &= token_R[r] >= 0;
  is_narrow ? narrow_experts(e, n_threads) : wide_experts(e, n_threads);
}

void joulebench_rms_norm(const float* x, int64_t n_rows, int64_t width, const float* weight, float eps, float* out,
                         int32_t n_threads) {
  in_chunks(n_rows, std::max<int64_t>(1, (1 << 15) / width), n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) rms_norm_row(x + r * width, width, weight, eps, out + r * width);
  });
}

// An attention block: projects x[T, H], norms and turns queries and keys, writes keys and values [M, S, D] to the cache
// (`head_stride` floats between heads) at `position` and on, attends, and projects back. cos, sin [T, P]; P = 0 turns
// nothing.
void joulebench_attention(const AttentionLayer* layer, const float* x, int64_t n_tokens, const float* cos_TP,
                          const float* sin_TP, int64_t n_pairs, float* keys, float* values, int64_t head_stride,
                          int64_t position, float* out, int32_t n_threads) {
  thread_local std::vector<float> buffer;
  const int64_t dim = layer->dim, q_width = layer->n_heads * dim, kv_width = layer->n_kv_heads * dim;
  float* query = scratch(buffer, n_tokens * 2 * (q_width + kv_width));
  float *key = query + n_tokens * q_width, *value = key + n_tokens * kv_width, *mixed = value + n_tokens * kv_width;
  const Product into[] = {
      {&layer->q, layer->q_bias, query}, {&layer->k, layer->k_bias, key}, {&layer->v, layer->v_bias, value}};
  multiply_all(into, 3, x, n_tokens, n_threads);
  in_chunks(n_tokens, kFewRows, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float *cos_P = cos_TP + t * n_pairs, *sin_P = sin_TP + t * n_pairs;
      for (int64_t head = 0; head < layer->n_heads + layer->n_kv_heads; head++) {
        const bool is_key = head >= layer->n_heads;
        float* one = is_key ? key + t * kv_width + (head - layer->n_heads) * dim : query + t * q_width + head * dim;
        if (layer->q_norm) rms_norm_row(one, dim, is_key ? layer->k_norm : layer->q_norm, layer->eps, one);
        turn_row(one, cos_P, sin_P, n_pairs, layer->neighbours);
      }
      for (int64_t head = 0; head < layer->n_kv_heads; head++) {
        const int64_t from = t * kv_width + head * dim, to = head * head_stride + (position + t) * dim;
        std::memcpy(keys + to, key + from, dim * sizeof(float));
        std::memcpy(values + to, value + from, dim * sizeof(float));
      }
    }
  });
  const Attention a = {keys, values, head_stride, layer->n_heads, layer->n_kv_heads, dim, layer->window, layer->scale,
                       layer->sinks};
  if (n_tokens == 1) attend_one(a, query, position, mixed, n_threads);
  else attend_many(a, query, position, n_tokens, mixed, n_threads);
  const Product back = {&layer->out, layer->out_bias, out};
  multiply_all(&back, 1, mixed, n_tokens, n_threads);
}

// The experts ids[T, K] and their weights. Scores are softmax over all experts, or over the chosen ones where
// `of_chosen`; bias may be null.
void joulebench_route(const float* x, int64_t n_tokens, int64_t hidden, const float* weight_EH, const float* bias_E,
                      int64_t n_experts, int64_t top_k, int32_t of_chosen, int32_t normalise, float scale,
                      int64_t* ids_TK, float* weights_TK) {
  thread_local std::vector<float> buffer;
  float* score_E = scratch(buffer, n_experts);
  for (int64_t t = 0; t < n_tokens; t++, ids_TK += top_k, weights_TK += top_k) {
    for (int64_t e = 0; e < n_experts; e++) {
      dot_in_order<Fp32, 1>(weight_EH + e * hidden, hidden, x + t * hidden, score_E + e);
      if (bias_E) score_E[e] += bias_E[e];
    }
    if (!of_chosen) softmax_row(score_E, n_experts);
    route_row(score_E, n_experts, top_k, ids_TK);
    for (int64_t k = 0; k < top_k; k++) weights_TK[k] = score_E[ids_TK[k]];
    if (of_chosen) softmax_row(weights_TK, top_k);
    float total = 0;
    for (int64_t k = 0; k < top_k; k++) total += weights_TK[k];
    for (int64_t k = 0; k < top_k; k++) weights_TK[k] *= (normalise ? 1.0f / total : 1.0f) * scale;
  }
}

}  // extern "C"
