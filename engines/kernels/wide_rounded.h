// Products of many rows in bytes: panels of tokens as in wide.h, of rounded rows, or rounded where they lie. With VNNI a
// panel holds, for 32 columns, [8][lanes] of four bytes, then each lane's scale, then eight times the sum of its bytes,
// negative: what sums start with, for weights are unsigned here. So it does for nibbles where pairs are added in 16 bits.
// Elsewhere it holds the rounded values as floats, and the products are those of wide.h: a multiplication of bytes would be
// no faster.

#pragma once

#include "rounded.h"
#include "wide.h"

constexpr int64_t kRoundedFloats = 10;  // of a lane, for 32 columns

// Narrower ones stay floats: their bytes, and what belongs to them, would need more room than they have.
inline bool is_by_bytes(const Matrix& m) {
  const bool is_faster = kMultipliesBytes || (kAddsPairs && m.format != kInt8);
  return is_faster && m.arithmetic == kByInt8 && m.columns >= kRoundedColumns;
}

// A row as its lane of a panel of bytes holds it.
inline void round_row(const float* x, int64_t columns, float* out) {
  float* to = out;
  for (int64_t first = 0; first < columns; first += kRoundedColumns, to += kRoundedFloats)
    to[8] = round_columns(x + first, std::min(kRoundedColumns, columns - first), (int8_t*)to);
  for (; out < to; out += kRoundedFloats) {  // bytes that have just been stored would be waited for
    const w8 totals = add_products(w8{}, ub32{} + 1, load<b32>(out));
    const int32_t start = int32_t(sum(__builtin_convertvector(totals, f8))) * -8;
    std::memcpy(out + 9, &start, sizeof start);
  }
}

// 32 columns of one register of lanes, `lanes` floats apart from each other. n: of them those that floats are written of.
template <class F>
inline void round_lanes(const float* from, int64_t n, int lanes, bool by_bytes, float* bytes, float* floats) {
  F most = {}, odd = {}, scale, inverse;
#pragma GCC unroll 32
  for (int64_t c = 0; c < kRoundedColumns; c++) {
    const F value = load<F>(from + c * lanes);
    most = larger(magnitude(value), most);
    odd += value - value;
  }
  scales_of(most, odd, scale, inverse);
  typedef decltype(nearest(most)) W;
  if (!by_bytes) {
    for (int64_t c = 0; c < n; c++)
      store(floats + c * lanes, __builtin_convertvector(nearest(load<F>(from + c * lanes) * inverse), F) * scale);
    return;
  }
  W total = {};
#pragma GCC unroll 8
  for (int64_t c = 0; c < kRoundedColumns; c += 4) {
    W word = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < 4; k++) {
      const W whole = nearest(load<F>(from + (c + k) * lanes) * inverse);
      total += whole;
      word |= (whole & 0xFF) << int(8 * k);
    }
    std::memcpy(bytes + c / 4 * lanes, &word, sizeof word);
  }
  store(bytes + 8 * lanes, scale);
  const W start = total * -8;
  std::memcpy(bytes + 9 * lanes, &start, sizeof start);
}

inline void round_panel(int64_t columns, int lanes, bool by_bytes, float* panel) {
  alignas(64) float block[kRoundedColumns * kPanel];
  float* to = panel;
  for (int64_t first = 0; first < columns; first += kRoundedColumns, to += kRoundedFloats * lanes) {
    const int64_t n = std::min(kRoundedColumns, columns - first);
    float* from = panel + first * lanes;
    std::memcpy(block, from, n * lanes * sizeof(float));
    std::fill(block + n * lanes, block + kRoundedColumns * lanes, 0.0f);
    if (lanes == 8) round_lanes<f8>(block, n, lanes, by_bytes, to, from);
    else
      for (int lane = 0; lane < lanes; lane += kLanes)
        round_lanes<fN>(block + lane, n, lanes, by_bytes, to + lane, from + lane);
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

constexpr int64_t kByteStride = kDepth + 64;                      // as kRowStride is for floats
constexpr int64_t kScaleStride = kDepth / kRoundedColumns;

// tile[r][v] += weight(r, k) * panel(k, v) over 32-column blocks. Nibbles, raised by 8, have a scale in each block; bytes,
// raised by 128, have one for the row.
template <class F, int R, int V, bool Nibbles>
__attribute__((noinline)) void multiply_bytes(const uint8_t* weights, const float* scales, const float* panel, int64_t n_blocks,
                           float* tile) {
  constexpr int kEach = sizeof(F) / sizeof(float);
  constexpr bool kInPairs = Nibbles && kAddsPairs;
  typedef decltype(F{} < F{}) W;
  F sums[R][V] = {};
  for (int64_t block = 0; block < n_blocks; block++, panel += kRoundedFloats * kEach * V, weights += kRoundedColumns) {
    W parts[R][V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const W start = load<W>(panel + (9 * V + v) * kEach) << (Nibbles ? 0 : 4);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) parts[r][v] = kInPairs ? W{} : start;
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
      W x[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) x[v] = load<W>(panel + (k * V + v) * kEach);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const W weight = W{} + load<int32_t>(weights + r * kByteStride + 4 * k);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++)
          if constexpr (kInPairs) parts[r][v] = add_word_pairs(parts[r][v], weight, x[v]);
          else parts[r][v] = add_word_products(parts[r][v], weight, x[v]);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const F scale = load<F>(panel + (8 * V + v) * kEach);
      if constexpr (kInPairs) {
        const W start = load<W>(panel + (9 * V + v) * kEach);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) parts[r][v] = with_pairs(start, parts[r][v]);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
        sums[r][v] += __builtin_convertvector(parts[r][v], F) *
                      (Nibbles ? scale * scales[r * kScaleStride + block] : scale);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      float* to = tile + (r * V + v) * kEach;
      store(to, load<F>(to) + (Nibbles ? sums[r][v] : sums[r][v] * scales[r * kScaleStride]));
    }
}

// Of a tile of twelve rows, R at once.
template <bool Nibbles, class F, int R, int V>
inline void multiply_byte_rows(const uint8_t* weights, const float* scales, const float* panel, int64_t n_blocks,
                               float* tile, Ahead& ahead) {
  for (int r = 0; r < kTileRows; r += R) {
    ahead.ask();
    multiply_bytes<F, R, V, Nibbles>(weights + r * kByteStride, scales + r * kScaleStride, panel, n_blocks,
                                     tile + r * V * int(sizeof(F) / sizeof(float)));
  }
}

template <bool Nibbles>
inline void multiply_byte_tile(const uint8_t* weights, const float* scales, const float* panel, int64_t n_blocks,
                               int lanes, float* tile, Ahead& ahead) {
#ifdef JOULEBENCH_AVX512
  if (lanes == 32) return multiply_byte_rows<Nibbles, fN, 6, 2>(weights, scales, panel, n_blocks, tile, ahead);
  if (lanes == 16) return multiply_byte_rows<Nibbles, fN, 12, 1>(weights, scales, panel, n_blocks, tile, ahead);
  multiply_byte_rows<Nibbles, f8, 12, 1>(weights, scales, panel, n_blocks, tile, ahead);
#else
  if (lanes == 16) return multiply_byte_rows<Nibbles, f8, 3, 2>(weights, scales, panel, n_blocks, tile, ahead);
  multiply_byte_rows<Nibbles, f8, 6, 1>(weights, scales, panel, n_blocks, tile, ahead);
#endif
}

// A tile's rows as bytes: see FloatTile of wide.h.
struct ByteTile {
  alignas(64) uint8_t weights[kTileRows * kByteStride] = {};
  alignas(64) float scales[kTileRows * kScaleStride];
  bool nibbles = false;

  void take(int r, const Row& row, int64_t first, int64_t depth) {
    nibbles = row.matrix->format != kInt8;
    raise_row(*row.matrix, row.row, first, depth, weights + r * kByteStride, scales + r * kScaleStride);
  }
  static const float* part(const float* panel, int64_t first, int lanes) {
    return panel + first / kRoundedColumns * kRoundedFloats * lanes;
  }
  static int64_t n_strips(int64_t) { return 2; }
  void multiply_with(const float* panel, int64_t depth, int lanes, float* tile, Ahead& ahead) const {
    const int64_t n_blocks = n_pieces(depth, kRoundedColumns);
    if (nibbles) multiply_byte_tile<true>(weights, scales, panel, n_blocks, lanes, tile, ahead);
    else multiply_byte_tile<false>(weights, scales, panel, n_blocks, lanes, tile, ahead);
  }
};
