// Products of many rows in bytes: panels of tokens as in wide.h, of rounded rows, or rounded where they lie. With VNNI a
// panel holds, for 32 columns, [8][lanes] of four bytes, then each lane's scale, then eight times the sum of its bytes,
// negative: what sums start with, for weights are unsigned here. So it does for nibbles where pairs are added in 16 bits.
// For bytes it holds [16][lanes] of two halves of a word there, then each lane's scale: weights keep their signs. Elsewhere
// it holds the rounded values as floats, and the products are those of wide.h.

#pragma once

#include "rounded.h"
#include "wide.h"

// What a lane holds of rounded columns.
enum class RoundedTo { kFloats, kBytes, kHalves };

// Of few columns they stay floats: whole numbers, and what belongs to them, would need more room than they have.
inline RoundedTo rounded_to(const Matrix& m) {
  const bool are_pairs = kAddsPairs && m.format == kInt8;
  if (m.arithmetic != kByInt8 || m.columns < (are_pairs ? 2 : 1) * kRoundedColumns) return RoundedTo::kFloats;
  if (are_pairs) return RoundedTo::kHalves;
  return kMultipliesBytes || kAddsPairs ? RoundedTo::kBytes : RoundedTo::kFloats;
}

// Floats of a lane for 32 columns, in whole numbers: words, their scale and, of bytes, what sums start with.
constexpr int64_t words_of(RoundedTo to) { return to == RoundedTo::kBytes ? 8 : 16; }
constexpr int64_t floats_of(RoundedTo to) { return to == RoundedTo::kBytes ? 10 : 17; }

// A row as its lane of a panel of bytes holds it.
inline void round_row_to_bytes(const float* x, int64_t columns, float* out) {
  constexpr int64_t kFloats = floats_of(RoundedTo::kBytes);
  float* to = out;
  for (int64_t first = 0; first < columns; first += kRoundedColumns, to += kFloats)
    to[8] = round_columns(x + first, std::min(kRoundedColumns, columns - first), (int8_t*)to);
  for (; out < to; out += kFloats) {  // bytes that have just been stored would be waited for
    const w8 totals = add_products(w8{}, ub32{} + 1, load<b32>(out));
    const int32_t start = int32_t(sum(__builtin_convertvector(totals, f8))) * -8;
    std::memcpy(out + 9, &start, sizeof start);
  }
}

// Eight of them.
inline void widen_bytes(const int8_t* from, int16_t* to) {
#if defined(JOULEBENCH_AVX2)  // GCC 12 converts a vector of bytes one by one
  _mm_storeu_si128((__m128i*)to, _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)));
#else
  for (int i = 0; i < 8; i++) to[i] = from[i];
#endif
}

// As its lane of a panel of halves holds it.
inline void round_row_to_halves(const float* x, int64_t columns, float* out) {
  for (int64_t first = 0; first < columns; first += kRoundedColumns, out += floats_of(RoundedTo::kHalves)) {
    int8_t bytes[kRoundedColumns];
    out[16] = round_columns(x + first, std::min(kRoundedColumns, columns - first), bytes);
    for (int64_t c = 0; c < kRoundedColumns; c += 8) widen_bytes(bytes + c, (int16_t*)out + c);
  }
}

// 32 columns as whole numbers, PerWord of them in a word. Returns the sum of each lane.
template <int PerWord, class F>
inline auto round_to_words(const float* from, int lanes, F inverse, float* words) {
  constexpr int kBits = 32 / PerWord;
  typedef decltype(nearest(inverse)) W;
  W total = {};
#pragma GCC unroll 16
  for (int64_t c = 0; c < kRoundedColumns; c += PerWord) {
    W word = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < PerWord; k++) {
      const W whole = nearest(load<F>(from + (c + k) * lanes) * inverse);
      total += whole;
      word |= (whole & ((1 << kBits) - 1)) << int(kBits * k);
    }
    std::memcpy(words + c / PerWord * lanes, &word, sizeof word);
  }
  return total;
}

// 32 columns of one register of lanes, `lanes` floats apart from each other. n: of them those that floats are written of.
template <class F>
inline void round_lanes(const float* from, int64_t n, int lanes, RoundedTo kind, float* words, float* floats) {
  F most = {}, odd = {}, scale, inverse;
#pragma GCC unroll 32
  for (int64_t c = 0; c < kRoundedColumns; c++) {
    const F value = load<F>(from + c * lanes);
    most = larger(magnitude(value), most);
    odd += value - value;
  }
  scales_of(most, odd, scale, inverse);
  if (kind == RoundedTo::kFloats) {
    for (int64_t c = 0; c < n; c++)
      store(floats + c * lanes, __builtin_convertvector(nearest(load<F>(from + c * lanes) * inverse), F) * scale);
    return;
  }
  store(words + words_of(kind) * lanes, scale);
  if (kind == RoundedTo::kHalves) {
    round_to_words<2>(from, lanes, inverse, words);
    return;
  }
  const auto start = round_to_words<4>(from, lanes, inverse, words) * -8;
  std::memcpy(words + 9 * lanes, &start, sizeof start);
}

inline void round_panel(int64_t columns, int lanes, RoundedTo kind, float* panel) {
  alignas(64) float block[kRoundedColumns * kPanel];
  float* to = panel;
  for (int64_t first = 0; first < columns; first += kRoundedColumns, to += floats_of(kind) * lanes) {
    const int64_t n = std::min(kRoundedColumns, columns - first);
    float* from = panel + first * lanes;
    std::memcpy(block, from, n * lanes * sizeof(float));
    std::fill(block + n * lanes, block + kRoundedColumns * lanes, 0.0f);
    if (lanes == 8) round_lanes<f8>(block, n, lanes, kind, to, from);
    else
      for (int lane = 0; lane < lanes; lane += kLanes)
        round_lanes<fN>(block + lane, n, lanes, kind, to + lane, from + lane);
  }
}

// Columns first .. first + n - 1 of a row, raised by 128 or, nibbles, by 8. scales: the row's of bytes, of nibbles that of
// each 32 columns.
inline void raise_row(const Matrix& m, int64_t row, int64_t first, int64_t n, uint8_t* out, float* scales) {
  if (m.format == kInt8) {
    const uint8_t* from = (const uint8_t*)m.values + row * m.columns + first;
    int64_t c = 0;
    for (; c + int64_t(sizeof(ubN)) <= n; c += sizeof(ubN)) {
      const ubN raised = load<ubN>(from + c) ^ 0x80;
      std::memcpy(out + c, &raised, sizeof raised);
    }
    for (; c < n; c++) out[c] = from[c] ^ 0x80;
    *scales = ((const float*)m.scales)[row];
    return;
  }
  const int64_t start = row * m.columns + first;
  for (int64_t block = 0; block < n; block += kNibbleBlock, out += kNibbleBlock) {
    const uint8_t* words = (const uint8_t*)m.values + (start + block) / 2;
#if defined(JOULEBENCH_AVX2)
    // Byte b of word i holds columns 16 b + i and 16 b + 8 + i.
    const __m256i by_byte = _mm256_shuffle_epi8(
        _mm256_loadu_si256((const __m256i*)words),
        _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3,
                         7, 11, 15));
    const __m256i eights = _mm256_permutevar8x32_epi32(by_byte, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i mask = _mm256_set1_epi8(0xF), low = _mm256_and_si256(eights, mask);
    const __m256i top = _mm256_setr_epi64x(0, 0, 0, 0x0808080808080808);
    const __m256i high = _mm256_xor_si256(_mm256_and_si256(_mm256_srli_epi16(eights, 4), mask), top);
    const __m256i first_16s = _mm256_unpacklo_epi64(low, high), second_16s = _mm256_unpackhi_epi64(low, high);
    _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(first_16s, second_16s, 0x20));
    _mm256_storeu_si256((__m256i*)(out + 32), _mm256_permute2x128_si256(first_16s, second_16s, 0x31));
#else
    for (int c = 0; c < kNibbleBlock; c++) {
      const int nibble = words[4 * (c % 8) + c / 16] >> (c % 16 < 8 ? 0 : 4) & 0xF;
      out[c] = c >= 56 ? nibble ^ 8 : nibble;
    }
#endif
    for (int half = 0; half < 2; half++)
      scales[block / 32 + half] = ((const float*)m.scales)[(start + block + 32 * half) >> m.group_bits];
  }
}

// The same of int8 as halves of words, with their signs.
inline void widen_row_to_halves(const Matrix& m, int64_t row, int64_t first, int64_t n, int16_t* out, float* scale) {
  const int8_t* from = (const int8_t*)m.values + row * m.columns + first;
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) widen_bytes(from + c, out + c);
  for (; c < n; c++) out[c] = from[c];
  *scale = ((const float*)m.scales)[row];
}

// How weights meet a panel: bytes raised by 128 and nibbles raised by 8 meet bytes, signed bytes as halves meet halves.
// Keys are bytes raised by 128 with a scale for each 32 columns, as nibbles have, where bytes have one for the row; behind
// a key's scales is what its sum starts with.
enum class Weights { kBytes, kNibbles, kHalves, kKeys };
constexpr int64_t kKeyColumns = 512;  // of the widest head: engines.kernels.tables

constexpr RoundedTo panel_of(Weights kind) { return kind == Weights::kHalves ? RoundedTo::kHalves : RoundedTo::kBytes; }
// Of a tile's rows, in bytes; see kRowStride.
constexpr int64_t stride_of(Weights kind) {
  return kind == Weights::kKeys ? kKeyColumns + 64 : kDepth * (kind == Weights::kHalves ? 2 : 1) + 64;
}
constexpr int64_t scale_stride_of(Weights kind) {
  return kind == Weights::kKeys ? kKeyColumns / kRoundedColumns + 1 : kDepth / kRoundedColumns;
}

template <Weights Kind, class W>
inline W add_word(W start, W weight, W x) {
  if constexpr (Kind == Weights::kHalves) return add_half_products(start, weight, x);
  else if constexpr (Kind == Weights::kNibbles && kAddsPairs) return add_word_pairs(start, weight, x);
  else return add_word_products(start, weight, x);
}

// tile[r][v] += weight(r, k) * panel(k, v) over 32-column blocks.
template <class F, int R, int V, Weights Kind, class A = NothingAhead>
__attribute__((noinline)) void multiply_words(const uint8_t* weights, const float* scales, const float* panel,
                                              int64_t n_blocks, float* tile, A&& ahead = {}) {
  constexpr int kEach = sizeof(F) / sizeof(float), kWords = words_of(panel_of(Kind));
  constexpr bool is_nibbles = Kind == Weights::kNibbles, is_in_pairs = is_nibbles && kAddsPairs;
  constexpr bool has_start = Kind != Weights::kHalves, scales_blocks = is_nibbles || Kind == Weights::kKeys;
  constexpr int64_t kScaleStride = scale_stride_of(Kind);
  typedef decltype(F{} < F{}) W;
  F sums[R][V] = {};
  if constexpr (Kind == Weights::kKeys)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] += scales[r * kScaleStride + n_blocks];
  for (int64_t block = 0; block < n_blocks; block++) {
    ahead.ask();
    W parts[R][V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const W start = !has_start || is_in_pairs ? W{} : load<W>(panel + (9 * V + v) * kEach) << (is_nibbles ? 0 : 4);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) parts[r][v] = start;
    }
#pragma GCC unroll 16
    for (int k = 0; k < kWords; k++) {
      W x[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) x[v] = for_several(load<W>(panel + (k * V + v) * kEach));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const W weight = W{} + load<int32_t>(weights + r * stride_of(Kind) + 4 * k);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) parts[r][v] = in_turn(add_word<Kind>(parts[r][v], weight, x[v]));
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const F scale = load<F>(panel + (kWords * V + v) * kEach);
      if constexpr (is_in_pairs) {
        const W start = load<W>(panel + (9 * V + v) * kEach);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) parts[r][v] = with_pairs(start, parts[r][v]);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
        sums[r][v] += __builtin_convertvector(parts[r][v], F) *
                      (scales_blocks ? scale * scales[r * kScaleStride + block] : scale);
    }
    panel += floats_of(panel_of(Kind)) * kEach * V, weights += 4 * kWords;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      float* to = tile + (r * V + v) * kEach;
      if constexpr (Kind == Weights::kKeys) store(to, sums[r][v]);
      else store(to, load<F>(to) + (scales_blocks ? sums[r][v] : sums[r][v] * scales[r * kScaleStride]));
    }
}

// A tile's rows in whole numbers: see FloatTile of wide.h.
template <Weights Kind>
struct WordTile {
  static constexpr int64_t kStride = stride_of(Kind), kScaleStride = scale_stride_of(Kind);
  static constexpr int64_t kFloats = floats_of(panel_of(Kind));
  alignas(64) uint8_t weights[kTileRows * kStride] = {};
  alignas(64) float scales[kTileRows * kScaleStride];

  void take(int r, const Row& row, int64_t first, int64_t depth) {
    uint8_t* to = weights + r * kStride;
    float* scale = scales + r * kScaleStride;
    if constexpr (Kind == Weights::kHalves) widen_row_to_halves(*row.matrix, row.row, first, depth, (int16_t*)to, scale);
    else raise_row(*row.matrix, row.row, first, depth, to, scale);
  }
  static const float* part(const float* panel, int64_t first, int lanes) {
    return panel + first / kRoundedColumns * kFloats * lanes;
  }
  static int64_t n_strips(int64_t depth) { return 2 * n_pieces(depth, kRoundedColumns); }
  void multiply_with(const float* panel, int64_t depth, int lanes, float* tile, Ahead& ahead) const {
#ifdef JOULEBENCH_AVX512
    if (lanes == 32) return multiply_rows_of<fN, 6, 2>(panel, depth, tile, ahead);
    if (lanes == 16) return multiply_rows_of<fN, 12, 1>(panel, depth, tile, ahead);
    multiply_rows_of<f8, 12, 1>(panel, depth, tile, ahead);
#else
    if (lanes == 16) return multiply_rows_of<f8, 3, 2>(panel, depth, tile, ahead);
    multiply_rows_of<f8, 6, 1>(panel, depth, tile, ahead);
#endif
  }

 private:
  // R of twelve rows at once.
  template <class F, int R, int V>
  void multiply_rows_of(const float* panel, int64_t depth, float* tile, Ahead& ahead) const {
    for (int r = 0; r < kTileRows; r += R) {
      multiply_words<F, R, V, Kind>(weights + r * kStride, scales + r * kScaleStride, panel,
                                    n_pieces(depth, kRoundedColumns), tile + r * V * int(sizeof(F) / sizeof(float)), ahead);
    }
  }
};
