// The weighted sum of SwiGLU experts, and of a dense layer as the only expert.
//
// Legend: T tokens, H hidden, I expert width, R rows of all calls, C calls, K experts of one token.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "matrix.h"
#include "narrow.h"
#include "parts.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"
#include "wide_by.h"

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
  // Of the calls, those that are made now: [first_made, end_made). The work is cut as if all were, for how it is cut
  // decides how results are rounded; out_TH is cleared before the first.
  int64_t first_made, end_made;

  bool is_made(int64_t call) const { return call >= first_made && call < end_made; }
  const Matrix& gate(int64_t call) const { return matrices[3 * expert_C[call]]; }
  const Matrix& up(int64_t call) const { return matrices[3 * expert_C[call] + 1]; }
  const Matrix& down(int64_t call) const { return matrices[3 * expert_C[call] + 2]; }
  int64_t n_rows(int64_t call) const { return first_C[call + 1] - first_C[call]; }
};

// Rows of token -1 are padding: computed as zeros, and their results discarded.
inline void copy_row(const Experts& e, int64_t row, int64_t hidden, float* to) {
  const int64_t token = e.token_R[row];
  token < 0 ? std::fill_n(to, hidden, 0.0f) : std::copy_n(e.hidden_TH + token * hidden, hidden, to);
}

// visit(first row, rows) for as many of a call's n rows as are multiplied at once: what they read of the matrices is
// still near for the next ones.
template <class F>
inline void in_pieces(int64_t n, const F& visit) {
  const int64_t n_pieces = (n + kMaxTokens - 1) / kMaxTokens;
  for (int64_t piece = 0; piece < n_pieces; piece++) {
    const int64_t begin = n * piece / n_pieces, end = n * (piece + 1) / n_pieces;
    visit(begin, int(end - begin));
  }
}

// What goes into `down` of a few rows, whose prepared inputs lie `stride` floats apart: columns from .. to - 1 of
// inner_RI, whose rows lie `inner_stride` apart. All gate rows are read and then all up rows: four places are read at a time
// and not eight.
inline void narrow_gate_up(const Matrix& gate, const Matrix& up, int64_t from, int64_t to, int64_t n_rows,
                           const float* input, int64_t stride, float* inner_RI, int64_t inner_stride) {
  const auto each_product = [&](const Matrix& m, const auto& take) {
    in_streams(m, from, to, [&](int64_t i, int64_t step, int n) {
      in_pieces(n_rows, [&](int64_t first, int rows) {
        each_dot(m, i, step, n, rows, input + first * stride, [&](int k, int r, float result) {
          take(inner_RI[(first + r) * inner_stride + i + k * step], result);
        });
      });
    });
  };
  each_product(gate, [](float& into, float result) { into = result; });
  for (int64_t r = 0; r < n_rows; r++) silu_row(inner_RI + r * inner_stride + from, to - from);
  each_product(up, [](float& into, float result) { into *= result; });
}

// give(row, output, result) for outputs begin .. end - 1 of a few rows.
template <class F>
inline void narrow_down(const Matrix& down, int64_t begin, int64_t end, int64_t n_rows, const float* prepared,
                        int64_t stride, const F& give) {
  in_streams(down, begin, end, [&](int64_t h, int64_t step, int n) {
    in_pieces(n_rows, [&](int64_t first, int rows) {
      each_dot(down, h, step, n, rows, prepared + first * stride,
               [&](int k, int r, float result) { give(first + r, h + k * step, result); });
    });
  });
}

// Inputs of n rows from `first` on, as the narrow kernels take them.
inline void prepare_input(const Experts& e, int64_t first, int64_t n, const Matrix& gate, float* prepared) {
  thread_local Buffer buffer;
  const int64_t hidden = gate.columns, stride = input_stride(gate);
  if (input_of(gate) == Input::kPlain) {
    for (int64_t r = 0; r < n; r++) copy_row(e, first + r, hidden, prepared + r * stride);
    return;
  }
  float* rows = scratch(buffer, n * hidden);
  for (int64_t r = 0; r < n; r++) copy_row(e, first + r, hidden, rows + r * hidden);
  prepare_rows(gate, rows, n, prepared);
}

// How far apart rows of what goes into `down` are made: as they are multiplied, where that is the plain way.
inline int64_t inner_stride_of(const Matrix& down) {
  return input_of(down) == Input::kPlain ? input_stride(down) : down.columns;
}

// All experts of a layer are stored alike: the first called speaks for them.
inline void narrow_experts(const Experts& e, int n_threads) {
  const Timed timed(kGateUp);
  thread_local Buffer input_buffer, inner_buffer, prepared_buffer;
  const int64_t n_rows = e.first_C[e.n_calls], hidden = e.gate(0).columns, width = e.gate(0).rows;
  const int64_t down_stride = input_stride(e.down(0)), inner_stride = inner_stride_of(e.down(0));
  const float* input;
  int64_t up_stride = 0;  // of one token without padding, each call's row is that token
  if (e.n_tokens > 1 || n_rows > e.n_calls || std::find(e.token_R, e.token_R + n_rows, -1) != e.token_R + n_rows) {
    up_stride = input_stride(e.gate(0));
    float* prepared = scratch(input_buffer, n_rows * up_stride);
    prepare_input(e, 0, n_rows, e.gate(0), prepared);
    input = prepared;
  } else {
    input = prepared_rows(e.gate(0), e.hidden_TH, 1, input_buffer);
  }
  float* inner_RI = scratch(inner_buffer, n_rows * inner_stride);
  in_row_chunks(e.n_calls * width, row_bytes(e.gate(0)), 2, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t call = begin / width; call * width < end; call++) {
      if (!e.is_made(call)) continue;
      const int64_t start = call * width, first = e.first_C[call];
      narrow_gate_up(e.gate(call), e.up(call), std::max(begin, start) - start, std::min(end - start, width),
                     e.n_rows(call), input + first * up_stride, up_stride, inner_RI + first * inner_stride, inner_stride);
    }
  });
  const Timed timed_down(kDown);
  const bool is_plain = input_of(e.down(0)) == Input::kPlain;
  const float* prepared = is_plain ? inner_RI : prepared_rows(e.down(0), inner_RI, n_rows, prepared_buffer);
  if (!e.first_made) std::memset(e.out_TH, 0, e.n_tokens * hidden * sizeof(float));
  // A chunk owns outputs, not calls, so that no two threads add to the same one.
  in_row_chunks(hidden, row_bytes(e.down(0)), e.n_calls, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t call = e.first_made; call < e.end_made; call++) {
      const int64_t first = e.first_C[call];
      narrow_down(e.down(call), begin, end, e.n_rows(call), prepared + first * down_stride, down_stride,
                  [&](int64_t r, int64_t h, float result) {
                    const int64_t token = e.token_R[first + r];
                    if (token >= 0) e.out_TH[token * hidden + h] += e.weight_R[first + r] * result;
                  });
    }
  });
}

// Calls of a few rows are made by the narrow kernels here too, each when its turn comes, so that a token's results are
// added up in the order of calls whoever made them.
inline void wide_experts(const Experts& e, int n_threads) {
  const Timed timed(kGateUp);
  struct Block : TokenBlock {  // of a few rows `packed` has their prepared inputs
    int64_t call;
    bool is_few;
    float *inner, *prepared;  // what goes into `down`: panels, or few rows, as they are made and as they are multiplied
  };
  struct Unit {
    const Block* block;
    int64_t first, n;  // of its gate rows
  };
  thread_local Buffer input_buffer, inner_buffer;
  const int64_t hidden = e.gate(0).columns, width = e.gate(0).rows;
  const int64_t up_stride = input_stride(e.gate(0)), down_stride = input_stride(e.down(0));
  const int64_t inner_stride = inner_stride_of(e.down(0));
  const bool is_plain = input_of(e.down(0)) == Input::kPlain;  // few rows are multiplied as they are made
  // Of a tile's twelve rows, six are gate rows and six the up rows that belong to them.
  constexpr int64_t half = kTileRows / 2, of_group = kGroupRows / 2;
  const int64_t n_groups = (width + of_group - 1) / of_group;
  const int64_t of_few = std::max<int64_t>(1, RowChunks::kLargest / row_bytes(e.gate(0)));
  std::vector<Block> blocks;
  for (int64_t call = e.first_made; call < e.end_made; call++) {
    const int64_t per_block = tokens_per_block(e.n_rows(call), n_groups * (e.end_made - e.first_made), n_threads);
    for (int64_t done = 0; done < e.n_rows(call); done += per_block) {
      Block block;
      block.first = e.first_C[call] + done;
      block.n = std::min(per_block, e.n_rows(call) - done);
      block.call = call;
      block.is_few = e.n_rows(call) <= kMaxTokens;
      blocks.push_back(block);
    }
  }
  const auto size = [](const Block& block, int64_t stride, int64_t columns) {  // few rows take whole lines of a cache
    return block.is_few ? (block.n * stride + 15) / 16 * 16 : packed_size(block.n, columns);
  };
  const auto input_size = [&](const Block& block) { return size(block, up_stride, hidden); };
  const auto inner_size = [&](const Block& block) { return size(block, inner_stride, width); };
  const auto prepared_size = [&](const Block& block) {
    return block.is_few && !is_plain ? size(block, down_stride, 0) : 0;
  };
  int64_t n_input = 0, n_inner = 0;
  for (const Block& block : blocks) n_input += input_size(block), n_inner += inner_size(block) + prepared_size(block);
  float *input = scratch(input_buffer, n_input), *inner = scratch(inner_buffer, n_inner);
  std::vector<std::pair<const Block*, int64_t>> panels;  // of all blocks
  std::vector<Unit> units;
  for (Block& block : blocks) {
    block.packed = input, block.inner = inner;
    input += input_size(block), inner += inner_size(block);
    block.prepared = is_plain ? block.inner : inner;
    inner += prepared_size(block);
    for (int64_t p = 0; p < n_panels(block.n); p++) panels.push_back({&block, p});
    const int64_t at_once = block.is_few ? of_few : of_group;
    for (int64_t first = 0; first < width; first += at_once)
      units.push_back({&block, first, std::min(at_once, width - first)});
  }
  const auto each_panel = [&](const auto& visit) {
    const Timed timed_packing(kPacking);
    in_chunks(int64_t(panels.size()), 1, n_threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) visit(*panels[i].first, panels[i].second);
    });
  };
  const int64_t n_blocks = int64_t(blocks.size()), n_units = int64_t(units.size());
  each_panel([&](const Block& block, int64_t panel) {
    const auto row_of = [&](int64_t i) {
      const int64_t token = e.token_R[block.first + i];
      return token < 0 ? nullptr : e.hidden_TH + token * hidden;
    };
    block.is_few ? prepare_input(e, block.first, block.n, e.gate(0), block.packed)
                 : pack_ready(panel, block.n, e.gate(0), row_of, block.packed);
  });
  in_chunks(n_units, 1, n_threads, [&](int64_t begin, int64_t end) {
    float* results = group_scratch();
    for (int64_t unit = begin; unit < end; unit++) {
      const Unit& then = units[std::min(unit + 1, n_units - 1)];
      const Block &block = *units[unit].block, &next = *then.block;
      const int64_t first = units[unit].first, n = units[unit].n;
      if (block.is_few) {
        narrow_gate_up(e.gate(block.call), e.up(block.call), first, first + n, block.n, block.packed, up_stride,
                       block.inner, inner_stride);
        continue;
      }
      const Matrix* const own[] = {&e.gate(block.call), &e.up(block.call)};
      const Matrix* const of_next[] = {&e.gate(next.call), &e.up(next.call)};
      const auto row_at = [&](int r) {
        const bool is_next = r >= kGroupRows;
        const int of_own = is_next ? r - kGroupRows : r, tile = of_own / kTileRows, of_tile = of_own - tile * kTileRows;
        const bool is_up = of_tile >= half;
        const int64_t from = (is_next ? then.first : first) + tile * half;
        return Row{(is_next ? of_next : own)[is_up], std::min(from + of_tile - is_up * half, width - 1)};
      };
      multiply_group_by(int((n + half - 1) / half * kTileRows), hidden, block, row_at, results);
      for (int64_t p = 0; p < n_panels(block.n); p++) {
        const int lanes = lanes_of(block.n, p);
        const float* from = results + p * kGroupRows * kPanel;
        float* to = block.inner + p * kPanel * width + first * lanes;
        for (int64_t i = 0; i < n; i++) {
          const float* gates = from + (i / half * kTileRows + i % half) * lanes;
          const auto join = [&](auto zero, int lane) {
            typedef decltype(zero) F;
            store(to + i * lanes + lane, silu(load<F>(gates + lane)) * load<F>(gates + half * lanes + lane));
          };
          if (lanes < kLanes) join(f8{}, 0);
          else
            for (int lane = 0; lane < lanes; lane += kLanes) join(fN{}, lane);
        }
      }
    }
  });
  if (!is_plain)
    each_panel([&](const Block& block, int64_t panel) {
      block.is_few ? prepare_rows(e.down(0), block.inner, block.n, block.prepared)
                   : ready_panel(panel, block.n, e.down(0), block.inner);
    });
  const Timed timed_down(kDown);
  // A chunk owns outputs, not blocks, so that no two threads add to the same one. They are summed side by side: of outputs
  // that lie 4 KB apart a cache holds few, and each expert adds to others. A chunk has as many groups of them as stay near
  // beside what goes into `down`, which is read once for them; and fewer as less is left, so that no thread waits long.
  const int64_t n_down = (hidden + kGroupRows - 1) / kGroupRows;
  const int64_t group_bytes = e.n_tokens * kGroupRows * int64_t(sizeof(float));
  const int64_t inner_bytes = n_inner * int64_t(sizeof(float)) / n_blocks;  // of a block, in the mean
  const int64_t most = std::max<int64_t>(1, (near_bytes() - inner_bytes) / group_bytes);
  std::vector<int64_t> starts(1, 0);
  while (starts.back() < n_down)
    starts.push_back(starts.back() + std::clamp<int64_t>((n_down - starts.back()) / (2 * n_threads), 1, most));
  in_chunks(int64_t(starts.size()) - 1, 1, n_threads, [&](int64_t begin, int64_t end) {
    thread_local Buffer sum_buffer;
    float* results = group_scratch();
    for (int64_t chunk = begin; chunk < end; chunk++) {
      const int64_t start = starts[chunk] * kGroupRows, stop = std::min(starts[chunk + 1] * kGroupRows, hidden);
      const int64_t n = stop - start;
      float* sums = scratch(sum_buffer, e.n_tokens * n);
      if (!e.first_made) std::memset(sums, 0, e.n_tokens * n * sizeof(float));
      for (int64_t t = 0; e.first_made && t < e.n_tokens; t++)
        std::copy_n(e.out_TH + t * hidden + start, n, sums + t * n);
      for (int64_t b = 0; b < n_blocks; b++) {
        const Block& block = blocks[b];
        const Matrix &down = e.down(block.call), &next = e.down(blocks[b + 1 < n_blocks ? b + 1 : 0].call);
        const int64_t* token = e.token_R + block.first;
        const float* weight = e.weight_R + block.first;
        if (block.is_few) {
          narrow_down(down, start, stop, block.n, block.prepared, down_stride, [&](int64_t r, int64_t h, float result) {
            if (token[r] >= 0) sums[token[r] * n + h - start] += weight[r] * result;
          });
          continue;
        }
        for (int64_t row = start; row < stop; row += kGroupRows) {
          const int n_rows = int(std::min<int64_t>(kGroupRows, hidden - row));
          // Behind a block's last group comes the next block, or the next chunk's first one.
          const bool is_last = row + kGroupRows >= stop;
          const int64_t then = is_last && b + 1 < n_blocks ? start : row + kGroupRows;
          const auto row_at = [&](int r) {
            if (r < kGroupRows) return Row{&down, std::min(row + r, hidden - 1)};
            return Row{is_last ? &next : &down, std::min(then + r - kGroupRows, hidden - 1)};
          };
          multiply_group_by(n_rows, width, {block.first, block.n, block.inner}, row_at, results);
          each_result(
              block, n_rows, results,
              [&](int64_t t, int r, f8 v) {
                if (token[t] < 0) return;
                float* to = sums + token[t] * n + row - start + r;
                store(to, load<f8>(to) + weight[t] * v);
              },
              [&](int64_t t, int r, float v) {
                if (token[t] >= 0) sums[token[t] * n + row - start + r] += weight[t] * v;
              });
        }
      }
      for (int64_t t = 0; t < e.n_tokens; t++) std::copy_n(sums + t * n, n, e.out_TH + t * hidden + start);
    }
  });
}

// By the narrow kernels experts take time for each row, by the wide ones for each call; so what decides is the rows of a
// call in the mean. Where these are more, the narrow ones make calls of up to kMaxTokens all the same. One of sixteen
// experts of 1024 x 1024 in us of one thread (Zen 5, AVX-512), narrow and wide, with a mean of 4 rows: f32 546 and 774,
// f16 293 and 886, bf16 by bf16 306 and 483, int8 by int8 170 and 451, int4 310 and 740; of 8 rows: 793 and 850, 400
// and 919, 354 and 506, 273 and 474, 623 and 741. With AVX2 alike: 1213 and 1179 for 8 rows of f32, and the narrow ones
// ahead in all others.
constexpr int64_t kMeanNarrowRows = 8;

inline void compute_experts(const Experts& e, int n_threads) {
  e.first_C[e.n_calls] <= kMeanNarrowRows * e.n_calls ? narrow_experts(e, n_threads) : wide_experts(e, n_threads);
}

// The weighted sum of some experts for one token, a row each.
inline void run_experts(const Matrix* matrices, int64_t n_chosen, const int64_t* ids_K, const float* x, const float* weights_K,
                 float* out, int n_threads) {
  constexpr int64_t kMaxChosen = 64;
  static const int64_t one_token[kMaxChosen] = {};
  int64_t first_C[kMaxChosen + 1];
  for (int64_t c = 0; c <= n_chosen; c++) first_C[c] = c;
  narrow_experts({matrices, n_chosen, ids_K, first_C, x, one_token, weights_K, 1, out, 0, n_chosen}, n_threads);
}
