// Products of one to eight rows with a matrix, as decoding needs them: every weight is read once, in the width it is
// stored in, and widened in registers. Such a product is bound by memory, so its time is bytes read / bandwidth, and
// halving the bytes of a weight halves the time.
//
// Legend: T tokens (1..8).

#pragma once

#include <algorithm>
#include <vector>

#include "matrix.h"

constexpr int kMaxTokens = 8;
constexpr int64_t kPrefetch = 1024;  // bytes ahead: past a 4 KB page the hardware does not look

// One matrix row times T input rows. Sums of U column groups run side by side, so that additions do not wait for each
// other.
template <class S, int T>
inline void dot_in_order(const typename S::element* row, int64_t columns, const float* x, float* out) {
  constexpr int U = T == 1 ? 4 : T == 2 ? 2 : 1;
  f8 sums[U][T] = {};
  int64_t c = 0;
  for (; c + 8 * U <= columns; c += 8 * U) {
    __builtin_prefetch((const char*)(row + c) + kPrefetch);
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
      const f8 weight = S::widen(row + c + 8 * u);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) sums[u][t] += weight * load<f8>(x + t * columns + c + 8 * u);
    }
  }
  for (int t = 0; t < T; t++) {
    f8 total = sums[0][t];
    for (int u = 1; u < U; u++) total += sums[u][t];
    out[t] = sum(total);
    for (int64_t rest = c; rest < columns; rest++) out[t] += S::widen_one(row[rest]) * x[t * columns + rest];
  }
}

// A nibble masked where it stands and converted is n * 16^j, exactly; the input carries 16^-j, exactly, so no shift is
// needed. What the + 8 of int4's nibbles 0..6 adds is taken off by where each sum starts.

// Input of one token as int4 rows want it: columns scaled floats, then columns / 4 floats to start the sums from.
inline int64_t int4_stride(int64_t columns) { return columns + columns / 4; }

inline void prepare_int4(const float* x, int64_t columns, float* prepared) {
  float* start = prepared + columns;
  for (int64_t block = 0; block < columns; block += kNibbleBlock) {
    float scale = 1.0f;
    for (int j = 0; j < 8; j++, scale /= 16.0f) {
      const f8 value = load<f8>(x + block + 8 * j);
      const f8 scaled = value * scale;
      std::memcpy(prepared + block + 8 * j, &scaled, sizeof scaled);
      float* half = start + block / 4 + 8 * (j / 4);
      const f8 before = j % 4 == 0 ? f8{} : load<f8>(half);
      const f8 offset = j == 7 ? before : before - 8.0f * value;
      std::memcpy(half, &offset, sizeof offset);
    }
  }
}

template <int T>
inline void dot_int4(const uint32_t* row, const float* scales, int group_bits, int64_t columns, const float* x,
                     float* out) {
  const int64_t stride = int4_stride(columns);
  f8 totals[2][T] = {};
  for (int64_t block = 0; block < columns; block += kNibbleBlock) {
    const u8x32 words = load<u8x32>(row + block / 8);
    __builtin_prefetch((const char*)(row + block / 8) + kPrefetch);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      f8 parts[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) parts[t] = load<f8>(x + t * stride + columns + block / 4 + 8 * half);
#pragma GCC unroll 4
      for (int j = 4 * half; j < 4 * half + 4; j++) {
        const f8 weight = __builtin_convertvector((w8)(words & (0xFu << (4 * j))), f8);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) parts[t] += weight * load<f8>(x + t * stride + block + 8 * j);
      }
      const float scale = scales[(block + 32 * half) >> group_bits];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) totals[half][t] += parts[t] * scale;
    }
  }
  for (int t = 0; t < T; t++) out[t] = sum(totals[0][t] + totals[1][t]);
}

template <int T>
inline void dot_mxfp4(const uint32_t* row, const uint8_t* exponents, int group_bits, int64_t columns, const float* x,
                      float* out) {
  f8 totals[2][T] = {};
  for (int64_t block = 0; block < columns; block += kNibbleBlock) {
    const u8x32 words = load<u8x32>(row + block / 8);
    __builtin_prefetch((const char*)(row + block / 8) + kPrefetch);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      f8 parts[T] = {};
#pragma GCC unroll 4
      for (int j = 4 * half; j < 4 * half + 4; j++) {
        const f8 weight = mxfp4_values(words, j);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) parts[t] += weight * load<f8>(x + t * columns + block + 8 * j);
      }
      const float scale = mxfp4_scale(exponents[(block + 32 * half) >> group_bits]);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) totals[half][t] += parts[t] * scale;
    }
  }
  for (int t = 0; t < T; t++) out[t] = sum(totals[0][t] + totals[1][t]);
}

template <int T>
inline void dot_row(const Matrix& m, int64_t row, const float* x, float* out) {
  const int64_t first = row * m.columns;
  switch (m.format) {
    case kFp32: return dot_in_order<Fp32, T>((const float*)m.values + first, m.columns, x, out);
    case kBf16: return dot_in_order<Bf16, T>((const uint16_t*)m.values + first, m.columns, x, out);
    case kFp16: return dot_in_order<Fp16, T>((const _Float16*)m.values + first, m.columns, x, out);
    case kInt8:
      dot_in_order<Int8, T>((const int8_t*)m.values + first, m.columns, x, out);
      for (int t = 0; t < T; t++) out[t] *= ((const float*)m.scales)[row];
      return;
    case kFp8:
      dot_in_order<Fp8, T>((const uint8_t*)m.values + first, m.columns, x, out);
      for (int t = 0; t < T; t++) out[t] *= ((const float*)m.scales)[row];
      return;
    case kInt4:
      return dot_int4<T>((const uint32_t*)m.values + first / 8, (const float*)m.scales + (first >> m.group_bits),
                         m.group_bits, m.columns, x, out);
    case kMxfp4:
      return dot_mxfp4<T>((const uint32_t*)m.values + first / 8, (const uint8_t*)m.scales + (first >> m.group_bits),
                          m.group_bits, m.columns, x, out);
  }
}

// out[t] = dot of row `row` with input row t, for n_tokens in 1..8.
inline void dot(const Matrix& m, int64_t row, int n_tokens, const float* x, float* out) {
  switch (n_tokens) {
    case 1: return dot_row<1>(m, row, x, out);
    case 2: return dot_row<2>(m, row, x, out);
    case 3: return dot_row<3>(m, row, x, out);
    case 4: return dot_row<4>(m, row, x, out);
    case 5: return dot_row<5>(m, row, x, out);
    case 6: return dot_row<6>(m, row, x, out);
    case 7: return dot_row<7>(m, row, x, out);
    case 8: return dot_row<8>(m, row, x, out);
  }
}

inline int64_t input_stride(const Matrix& m) { return m.format == kInt4 ? int4_stride(m.columns) : m.columns; }

// Rows of one chunk of work: about 128 KB, a few microseconds of reading.
inline int64_t rows_per_chunk(const Matrix& m) {
  const int64_t row_bytes = m.columns * kBits[m.format] / 8 + 1;
  return std::max<int64_t>(1, (128 << 10) / row_bytes);
}

// Input rows in the layout that rows of `m` want; x itself where that is the plain one.
inline const float* prepared_rows(const Matrix& m, const float* x, int64_t n_rows, std::vector<float>& buffer) {
  if (m.format != kInt4) return x;
  const int64_t stride = int4_stride(m.columns);
  float* prepared = scratch(buffer, n_rows * stride);
  for (int64_t r = 0; r < n_rows; r++) prepare_int4(x + r * m.columns, m.columns, prepared + r * stride);
  return prepared;
}
