// Products of one to eight rows with a matrix, as decoding needs them: every weight is read once, in the width it is
// stored in, and widened in registers. Such a product is bound by memory, so its time is bytes read / bandwidth, and
// halving the bytes of a weight halves the time.
//
// Legend: T tokens (1..8).

#pragma once

#include <algorithm>

#include "bf16.h"
#include "matrix.h"
#include "narrow_in_order.h"
#include "narrow_rounded.h"
#include "pool.h"
#include "scratch.h"

constexpr int kMaxTokens = 8;
constexpr int kStreams = 4;  // rows read side by side: the hardware fetches ahead in each, and one alone is not enough

// Of bytes. Where signs are taken from weights, four rows in halves of two tokens are faster than one or two rows of all.
constexpr int kMostOfBytes = kMultipliesBytes || kLanes == 16 ? kStreams * kMaxTokens : 12;
// Of int4, whose parts have a total each beside them: more are made in halves.
constexpr int kMostParts = kLanes == 16 ? 24 : 8;

// Small floats read as large ones with the same bits are the value times 2^-120 or so. The input carries this factor so
// that products lie in the middle of the range, and the rest is put right once for each sum. All powers of two: exact.
constexpr float kRaise = 0x1p90f;

struct RaisedFp8 {
  typedef int8_t element;
  static fN widen(const element* p) {
#if defined(JOULEBENCH_AVX512)
    const wN bits = (wN)_mm512_maskz_cvtepi8_epi32(kAll, _mm_loadu_si128((const __m128i*)p));
#elif defined(JOULEBENCH_AVX2)
    const wN bits = (wN)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(JOULEBENCH_NEON)
    const wN bits = widened(vmovl_s8(vld1_s8(p)));
#else
    const wN bits = __builtin_convertvector(load<b8>(p), w8);
#endif
    return (fN)(bits << 20 & (wN{} + int32_t(0x87F00000)));
  }
};

// Where bytes are not multiplied (see kDigits), a nibble masked where it stands and converted is n * 16^j,
// exactly; the input carries 16^-j, exactly, so no shift is needed. What the + 8 of int4's nibbles 0..6 adds is taken off by
// where each sum starts.

// Registers of nibbles that half a block of 64 columns is.
constexpr int kOfHalf = 4 / kNibbles;

// Input of one token as int4 rows want it: columns scaled floats, then a register for each half block to start sums from.
inline int64_t int4_stride(int64_t columns) { return columns + columns / 32 * kLanes; }

// The bits of nibbles j and on where they stand, of a register that holds the words as often as it has nibbles at once.
inline uN nibble_mask(int j) { return (uN{} + 0xFu) << nibble_shift(j); }

inline void prepare_int4(const float* x, int64_t columns, float* prepared) {
  float* start = prepared + columns;
  for (int64_t block = 0; block < columns; block += kNibbleBlock) {
    float scale = 1.0f;
    for (int j = 0; j < 8; j++, scale /= 16.0f) {
      const f8 value = load<f8>(x + block + 8 * j);
      store(prepared + block + 8 * j, value * scale);
      float* half = start + (block / 32 + j / 4) * kLanes + 8 * (j % kNibbles);
      const f8 before = j % 4 < kNibbles ? f8{} : load<f8>(half);
      store(half, j == 7 ? before : before - 8.0f * value);
    }
  }
}

// Each input is read once for all rows, and so is each mask.
template <int R, int T>
inline void dot_int4_at_once(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  const NibbleRows<R, float> rows(m, row, step);
  const int64_t stride = int4_stride(m.columns);
  fN totals[R][T] = {};
  for (int64_t block = 0; block < m.columns; block += kNibbleBlock) {
    const float* start = x + m.columns + block / 32 * kLanes;
    uN words[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      rows.ask(r, block);
      words[r] = load_words(rows.words[r] + block / 8);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      fN parts[R][T];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const fN from = load<fN>(start + t * stride + kLanes * half);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) parts[r][t] = from;
      }
#pragma GCC unroll 4
      for (int j = 4 * half; j < 4 * half + 4; j += kNibbles) {
        fN weights[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) weights[r] = __builtin_convertvector((wN)(words[r] & nibble_mask(j)), fN);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const fN input = in_register(load<fN>(x + t * stride + block + 8 * j));
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) parts[r][t] += weights[r] * input;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const float scale = *rows.scale(r, block + 32 * half);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) totals[r][t] += parts[r][t] * scale;
      }
    }
  }
  sum_each<R * T>([&](int i) { return totals[i / T][i % T]; }, out);
}

template <int R, int T>
inline void dot_int4(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  in_halves<R, T, kMostParts>(x, int4_stride(m.columns), out, [&](auto n, const float* some, float* to) {
    dot_int4_at_once<R, n>(m, row, step, some, to);
  });
}

// Sign, exponent and mantissa, moved to where a float has them, are the value times 2^-126; see kRaise.
template <int R, int T>
inline void dot_mxfp4(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  const int64_t stride = plain_stride(m.columns);
  const NibbleRows<R, uint8_t> rows(m, row, step);
  fN totals[R][T] = {};
  for (int64_t block = 0; block < m.columns; block += kNibbleBlock) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      rows.ask(r, block);
      const uN words = load_words(rows.words[r] + block / 8);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        fN parts[T] = {};
#pragma GCC unroll 4
        for (int j = 4 * half; j < 4 * half + 4; j += kNibbles) {
          const fN weight = (fN)((wN)(words << (28 - nibble_shift(j))) >> 6 & (wN{} + int32_t(0x81C00000)));
#pragma GCC unroll 8
          for (int t = 0; t < T; t++) parts[t] += weight * load<fN>(x + t * stride + block + 8 * j);
        }
        const float scale = mxfp4_scale(*rows.scale(r, block + 32 * half));
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) totals[r][t] += parts[t] * scale;
      }
    }
  }
  sum_each<R * T>([&](int i) { return totals[i / T][i % T]; }, out);
  for (int i = 0; i < R * T; i++) out[i] *= 0x1p126f / kRaise;
}

// How rows of a format want their input: as it is, raised, as prepare_int4 leaves it, in bytes, in three digits, or in bf16.
enum class Input { kPlain, kRaised, kForInt4, kBytesForInt8, kBytesForInt4, kDigitsForInt4, kPairs };
constexpr int kInputs = 7;

inline Input input_of(const Matrix& m) {
  if (m.arithmetic == kByInt8) return m.format == kInt4 ? Input::kBytesForInt4 : Input::kBytesForInt8;
  if (is_by_pairs(m)) return Input::kPairs;
  if (m.format == kInt4) return kMultipliesBytes ? Input::kDigitsForInt4 : Input::kForInt4;
  return m.format == kFp8 || m.format == kMxfp4 ? Input::kRaised : Input::kPlain;
}

inline int64_t input_stride(const Matrix& m) {
  switch (input_of(m)) {
    case Input::kForInt4: return int4_stride(m.columns);
    case Input::kPairs: return pairs_stride(m.columns);
    case Input::kBytesForInt8:
    case Input::kBytesForInt4:
    case Input::kDigitsForInt4: return rounded_stride(m);
    default: return plain_stride(m.columns);
  }
}

inline bool is_in_order(const Matrix& m) { return m.arithmetic != kByInt8 && !is_by_pairs(m) && !has_nibbles(m); }

template <bool InOrder, int R, int T>
inline void dot_rows(const Matrix& m, int64_t row, int64_t step, const float* x, float* out) {
  if constexpr (!InOrder) {
    if (is_by_pairs(m)) return dot_pairs<R, T>(m, row, step, x, out);
    if (m.format == kMxfp4) return dot_mxfp4<R, T>(m, row, step, x, out);
    if (m.format == kInt8)
      return in_halves<R, T, kMostOfBytes>(x, rounded_stride(m), out, [&](auto n, const float* some, float* to) {
        dot_int8_bytes<R, n>(m, row, step, some, to);
      });
    if (m.arithmetic == kByInt8) return dot_int4_bytes<1, R, T>(m, row, step, x, out);
    if constexpr (kMultipliesBytes) return dot_int4_bytes<kDigits, R, T>(m, row, step, x, out);
    return dot_int4<R, T>(m, row, step, x, out);
  } else {
    const int64_t first = row * m.columns;
    switch (m.format) {
      case kFp32: return dot_in_order<Fp32, R, T>((const float*)m.values + first, step, m.columns, x, out);
      case kBf16: return dot_in_order<Bf16, R, T>((const uint16_t*)m.values + first, step, m.columns, x, out);
      case kFp16: return dot_in_order<Fp16, R, T>((const half*)m.values + first, step, m.columns, x, out);
      case kInt8: dot_in_order<Int8, R, T>((const int8_t*)m.values + first, step, m.columns, x, out); break;
      case kFp8: dot_in_order<RaisedFp8, R, T>((const int8_t*)m.values + first, step, m.columns, x, out); break;
    }
    const float factor = m.format == kFp8 ? 0x1p120f / kRaise : 1.0f;
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++) out[r * T + t] *= ((const float*)m.scales)[row + r * step] * factor;
  }
}

// R rows at once.
template <bool InOrder, int R, int T>
inline void dot_rows_of(const Matrix& m, int64_t row, int64_t step, int n_rows, const float* x, float* out) {
  int r = 0;
  for (; r + R <= n_rows; r += R) dot_rows<InOrder, R, T>(m, row + r * step, step, x, out + r * T);
  for (; r < n_rows; r++) dot_rows<InOrder, 1, T>(m, row + r * step, step, x, out + r * T);
}

// As many rows at once as registers hold sums for, and what else a product of their format needs.
template <int T>
inline void dot_tokens(const Matrix& m, int64_t row, int64_t step, int n_rows, const float* x, float* out) {
  constexpr int kFew = T <= 3 ? kStreams : kLanes == 16 || T <= 6 ? 2 : 1, kOfFloats = std::max(2, kFew);
  const bool is_of_bytes = kMostOfBytes < kStreams * kMaxTokens && input_of(m) == Input::kBytesForInt8;
  if (is_in_order(m)) dot_rows_of<true, kStreams, T>(m, row, step, n_rows, x, out);
  else if (is_of_bytes) dot_rows_of<false, kStreams, T>(m, row, step, n_rows, x, out);
  else if (input_of(m) == Input::kForInt4) dot_rows_of<false, kOfFloats, T>(m, row, step, n_rows, x, out);
  else dot_rows_of<false, kFew, T>(m, row, step, n_rows, x, out);
}

// out[r][t] = dot of row `row` + r step with input row t, for up to four rows and n_tokens in 1..8. In dots.cpp.
void dot(const Matrix& m, int64_t row, int64_t step, int n_rows, int n_tokens, const float* x, float* out);

// take(r, t, dot of row `row` + r step with input row t), for up to four rows and n_tokens in 1..8. Where the compiler does
// not know how many are taken, it loads sixteen of them, which were stored four at a time. Such a load waits until the
// stores have left the core, after all weights that were read before them. Of one token, whose weights are waited for
// most, it knows.
template <class F>
__attribute__((always_inline)) inline void each_dot(const Matrix& m, int64_t row, int64_t step, int n_rows, int n_tokens,
                                                    const float* x, const F& take) {
  if (n_tokens == 1 && n_rows == kStreams) {
    float results[kStreams] = {};
    dot_tokens<1>(m, row, step, kStreams, x, results);
#pragma GCC unroll 4
    for (int r = 0; r < kStreams; r++) take(r, 0, results[r]);
    return;
  }
  float results[kStreams * kMaxTokens] = {};
  dot(m, row, step, n_rows, n_tokens, x, results);
  for (int r = 0; r < n_rows; r++)
    for (int t = 0; t < n_tokens; t++) take(r, t, results[r * n_tokens + t]);
}

inline int64_t row_bytes(const Matrix& m) { return std::max<int64_t>(1, m.columns * kBits[m.format] / 8); }

// Asks for the beginnings of four places: no row before them did.
__attribute__((always_inline)) inline void ask_first(const Matrix& m, int64_t row, int64_t step) {
  const int64_t at_once = std::min(kAhead, step * row_bytes(m));
  for (int r = 0; r < kStreams; r++) ask_ahead((const char*)m.values + (row + r * step) * row_bytes(m), at_once, 0);
  if (m.format != kInt4) return;
  const int64_t n_scales = at_once * 2 >> m.group_bits;
  for (int r = 0; r < kStreams; r++)
    ask_ahead((const float*)m.scales + ((row + r * step) * m.columns >> m.group_bits), n_scales * sizeof(float), 0);
}

// visit(row, step, n) for all rows from begin to end, four at a time from four places: each place is then read in order,
// which rows next to each other, short as narrow formats make them, would not be.
template <class F>
inline void in_streams(const Matrix& m, int64_t begin, int64_t end, const F& visit) {
  const int64_t step = (end - begin) / kStreams;
  if (step > 0) ask_first(m, begin, step);
  for (int64_t row = begin; row < begin + step; row++) visit(row, step, kStreams);
  for (int64_t row = begin + kStreams * step; row < end; row++) visit(row, 1, 1);
}

// How rows are cut into chunks. Each is read from four places on, and every place costs a wait for the memory, so chunks
// begin large. They shrink as less is left, so that threads end together.
struct RowChunks {
  int64_t n_rows, largest, smallest, shares, n_largest;

  // n_matrices: that a chunk reads as many rows of, one after the other.
  RowChunks(int64_t n_rows, int64_t row_bytes, int64_t n_matrices, int n_threads)
      : n_rows(n_rows), shares(2 * std::max(n_threads, 2)) {
    const auto rows_of = [&](int64_t bytes) { return std::max<int64_t>(1, bytes / row_bytes / kStreams) * kStreams; };
    largest = rows_of(kLargest);
    smallest = std::min(largest, rows_of(kSmallest / n_matrices));
    n_largest = std::max<int64_t>(0, n_rows / largest - shares + 1);
  }

  int64_t after(int64_t row) const {
    const int64_t share = (n_rows - row) / shares / kStreams * kStreams;
    return std::min(n_rows, row + std::clamp(share, smallest, largest));
  }

  int64_t begin(int64_t chunk) const {
    int64_t row = std::min(n_rows, std::min(chunk, n_largest) * largest);
    for (int64_t c = n_largest; c < chunk; c++) row = after(row);
    return row;
  }

  int64_t n() const {
    int64_t chunks = n_largest;
    for (int64_t row = begin(chunks); row < n_rows; row = after(row)) chunks++;
    return chunks;
  }

  static constexpr int64_t kLargest = 256 << 10, kSmallest = 64 << 10;  // bytes of one matrix, and of all of them
};

// body(begin, end) over rows 0..n_rows-1.
template <class F>
inline void in_row_chunks(int64_t n_rows, int64_t row_bytes, int64_t n_matrices, int n_threads, const F& body) {
  struct Job {
    RowChunks chunks;
    const F* body;
  };
  const Job job = {{n_rows, row_bytes, n_matrices, n_threads}, &body};
  pool().run(job.chunks.n(), n_threads, [](const void* context, int64_t chunk) {
    const Job& j = *static_cast<const Job*>(context);
    const int64_t begin = j.chunks.begin(chunk);
    (*j.body)(begin, j.chunks.after(begin));
  }, &job);
}

// Input rows as rows of `m` want them, input_stride apart.
inline void prepare_rows(const Matrix& m, const float* x, int64_t n_rows, float* prepared) {
  const Input input = input_of(m);
  const auto copy = [](const float* from, int64_t columns, float* to) { std::copy_n(from, columns, to); };
  const auto raise = [](const float* from, int64_t columns, float* to) {
    for (int64_t c = 0; c < columns; c++) to[c] = from[c] * kRaise;
  };
  void (*const prepare)(const float*, int64_t, float*) =
                         input == Input::kPlain         ? +copy
                       : input == Input::kRaised        ? +raise
                       : input == Input::kForInt4       ? prepare_int4
                       : input == Input::kPairs         ? prepare_pairs
                       : input == Input::kBytesForInt4  ? prepare_int4_bytes<1>
                       : input == Input::kDigitsForInt4 ? prepare_int4_bytes<kDigits>
                                                        : prepare_int8_bytes;
  const int64_t stride = input_stride(m);
  for (int64_t r = 0; r < n_rows; r++) prepare(x + r * m.columns, m.columns, prepared + r * stride);
}

// The same in room of its own; x itself where that is the plain way and rows lie so.
inline const float* prepared_rows(const Matrix& m, const float* x, int64_t n_rows, Buffer& buffer) {
  if (input_of(m) == Input::kPlain && (n_rows == 1 || input_stride(m) == m.columns)) return x;
  float* prepared = scratch(buffer, n_rows * input_stride(m));
  prepare_rows(m, x, n_rows, prepared);
  return prepared;
}
