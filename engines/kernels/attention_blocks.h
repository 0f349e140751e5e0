// Blocks of keys and values that attention of many tokens meets: as floats, or rounded. They lie where they lie whoever
// asks, so that no bit depends on how a prompt is cut.
//
// Legend: S keys, D features of a head.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vectors.h"
#include "wide.h"
#include "wide_bf16.h"
#include "wide_rounded.h"

constexpr int64_t kKeys = 96;
constexpr int kRegisters = kPanel / kLanes;  // of queries, which are lanes
constexpr float kLogOfTwo = 0.693147181f;
#ifdef JOULEBENCH_AVX512
constexpr int kRowsAtOnce = 12;
#else
constexpr int kRowsAtOnce = 6;
#endif

// Weights are floats, or words of two that are multiplied at once.
template <int R, bool ByColumn>
inline void multiply_some(const float* weights, int64_t stride, const float* panel, int64_t depth, float* tile) {
  multiply<fN, R, kRegisters, ByColumn>(weights, stride, panel, depth, tile, kPanel);
}
#ifdef JOULEBENCH_BF16
template <int R, bool ByColumn>
inline void multiply_some(const int32_t* weights, int64_t stride, const float* panel, int64_t depth, float* tile) {
  multiply_pairs<fN, R, kRegisters, ByColumn>(weights, stride, panel, depth, tile);
}
#endif

// tile[r][queries] += rows of weights times a panel of queries, for any number of rows.
template <bool ByColumn, class W>
inline void multiply_rows(int64_t n_rows, const W* weights, int64_t stride, const float* panel, int64_t depth, float* tile) {
  const auto row_at = [&](int64_t r) { return ByColumn ? weights + r : weights + r * stride; };
  int64_t r = 0;
  for (; r + kRowsAtOnce <= n_rows; r += kRowsAtOnce)
    multiply_some<kRowsAtOnce, ByColumn>(row_at(r), stride, panel, depth, tile + r * kPanel);
  for (; r + 4 <= n_rows; r += 4) multiply_some<4, ByColumn>(row_at(r), stride, panel, depth, tile + r * kPanel);
  for (; r < n_rows; r++) multiply_some<1, ByColumn>(row_at(r), stride, panel, depth, tile + r * kPanel);
}

// Two keys' values of a feature become a word of `to` [keys / 2][D]: word_of(first, second, first key).
template <class F>
inline void pair_keys(const float* values, int64_t n_keys, int64_t dim, int32_t* to, const F& word_of) {
  for (int64_t s = 0; s < n_keys; s += 2, to += dim) {
    const float *first = values + s * dim, *second = s + 1 < n_keys ? first + dim : nullptr;
    const auto pair_at = [&](auto none, int64_t d) {
      typedef decltype(none) V;
      const auto words = word_of(load<V>(first + d), second ? load<V>(second + d) : none, s);
      std::memcpy(to + d, &words, sizeof words);
    };
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) pair_at(fN{}, d);
    for (; d < dim; d += 8) pair_at(f8{}, d);
  }
}

// Two keys' shares become a word of a panel, where no score is looked for any more.
template <int N, class F>
inline void put_pairs(const fN (&shares)[N], int64_t s, float* panel, const F& word_of) {
  float* to = panel + s / 2 * kPanel;
  for (int i = 0; i < N; i += 2, to += kPanel) {
    const auto words = word_of(shares[i], i + 1 < N ? shares[i + 1] : fN{});
    std::memcpy(to, &words, sizeof words);
  }
}

// A block of keys and values of one head, as they lie in the cache. What a block is to Queries: it makes ready what is
// multiplied with it, and multiplies.
class FloatBlock {
 public:
  static constexpr int64_t kAligned = 1;  // keys that are multiplied together
  static constexpr int kBitsOfShare = 0;  // shares are floats, of the largest score so far: see ByteBlock

  FloatBlock(int64_t dim, float*) : dim_(dim) {}
  static int64_t size(int64_t) { return 0; }
  void take(const float* keys, const float* values, int64_t) { keys_ = keys, values_ = values; }

  static void ready_queries(int64_t, float*) {}
  template <int N>
  static void exponentials(fN (&scores)[N]) {
    exp_below_one(scores);
  }
  template <int N>
  static void put_shares(const fN (&shares)[N], int64_t s, float* panel) {
    for (int i = 0; i < N; i++) store(panel + (s + i) * kPanel, shares[i]);
  }
  void score(int64_t begin, int64_t n_keys, const float* queries, float* score) const {
    std::memset(score, 0, n_keys * kPanel * sizeof(float));
    multiply_rows<false>(n_keys, keys_ + begin * dim_, dim_, queries, dim_, score);
  }
  void mix(int64_t begin, int64_t n_keys, const float* shares, const fN*, float* mixed) const {
    multiply_rows<true>(dim_, values_ + begin * dim_, dim_, shares, n_keys, mixed);
  }

 private:
  int64_t dim_;
  const float *keys_, *values_;
};

#ifdef JOULEBENCH_BF16

// Queries, keys, values and shares are rounded to bf16: two features of a key, and two keys' values of a feature, are a
// word. room: of `size` floats.
class PairBlock {
 public:
  static constexpr int64_t kAligned = 2;
  static constexpr int kBitsOfShare = 0;

  PairBlock(int64_t dim, float* room)
      : dim_(dim), stride_(pairs_stride(dim)), values_((int32_t*)room), keys_(values_ + kKeys * dim / 2) {}
  static int64_t size(int64_t dim) { return kKeys * dim / 2 + kKeys * pairs_stride(dim); }
  void take(const float* keys, const float* values, int64_t n_keys) {
    for (int64_t s = 0; s < n_keys; s++) prepare_pairs(keys + s * dim_, dim_, (float*)keys_ + s * stride_);
    pair_keys(values, n_keys, dim_, values_, [](auto first, auto second, int64_t) { return pair_columns(first, second); });
  }

  static void ready_queries(int64_t dim, float* queries) { pair_panel(dim, kPanel, queries); }
  template <int N>
  static void exponentials(fN (&scores)[N]) {
    roughly_exp_below_one(scores);
  }
  template <int N>
  static void put_shares(const fN (&shares)[N], int64_t s, float* panel) {
    put_pairs(shares, s, panel, [](fN first, fN second) { return pair_columns(first, second); });
  }
  void score(int64_t begin, int64_t n_keys, const float* queries, float* score) const {
    std::memset(score, 0, n_keys * kPanel * sizeof(float));
    multiply_rows<false>(n_keys, keys_ + begin * stride_, stride_, queries, dim_ / 2, score);
  }
  void mix(int64_t begin, int64_t n_keys, const float* shares, const fN*, float* mixed) const {
    multiply_rows<true>(dim_, values_ + begin / 2 * dim_, dim_, shares, (n_keys + 1) / 2, mixed);
  }

 private:
  int64_t dim_, stride_;
  int32_t *values_, *keys_;
};

#endif

#if defined(JOULEBENCH_AVX512) && defined(__AVX512VNNI__)
#define JOULEBENCH_BYTE_ATTENTION
constexpr bool kAttendsByBytes = true;

// Queries and keys are rounded to bytes, with a scale for each 32 features. Shares and values are rounded to whole numbers
// of 16 bits, so small that their products, for all keys of a block, fit 32. A key's values have one scale, a power of two,
// which its share takes on: scores begin with its logarithm. Shares are of the block's own largest, so that those of a block
// that matters little are not zeros. room: of `size` floats.
class ByteBlock {
  static constexpr int64_t kStride = stride_of(Weights::kKeys), kScaleStride = scale_stride_of(Weights::kKeys);
  static constexpr int kBitsOfValue = 11;
  static constexpr float kLeastValue = 1e-17f;  // where a key has none above it, all are zeros

 public:
  static constexpr int64_t kAligned = 2;
  static constexpr int kBitsOfShare = 13;
  static_assert(kKeys << (kBitsOfShare + kBitsOfValue) <= INT32_MAX);

  ByteBlock(int64_t dim, float* room)
      : dim_(dim),
        scales_(room),
        inverses_(scales_ + kKeys * kScaleStride),
        keys_((uint8_t*)(inverses_ + kKeys)),
        values_((int32_t*)(keys_ + kKeys * kStride)) {}
  static int64_t size(int64_t dim) { return kKeys * (kScaleStride + 1 + kStride / 4) + kKeys * dim / 2; }
  void take(const float* keys, const float* values, int64_t n_keys) {
    const int64_t n_of_scales = n_pieces(dim_, kRoundedColumns);
    for (int64_t s = 0; s < n_keys; s++) {
      float* const scales = scales_ + s * kScaleStride;
      for (int64_t d = 0; d < dim_; d += kRoundedColumns)
        scales[d / kRoundedColumns] = round_columns(keys + s * dim_ + d, std::min(kRoundedColumns, dim_ - d),
                                                    (int8_t*)keys_ + s * kStride + d);
      scales[n_of_scales] = scale_of_values(values + s * dim_, inverses_[s]);
    }
    for (int64_t s = 0; s < n_keys; s++)  // bytes that have just been stored would be waited for
      for (int64_t d = 0; d < dim_; d += kRoundedColumns) {
        uint8_t* const at = keys_ + s * kStride + d;
        const ub32 raised = load<ub32>(at) ^ 0x80;
        std::memcpy(at, &raised, sizeof raised);
      }
    pair_keys(values, n_keys, dim_, values_, [&](auto first, auto second, int64_t s) {
      return halves_of(first * inverses_[s], second * inverses_[std::min(s + 1, n_keys - 1)]);
    });
  }

  static void ready_queries(int64_t dim, float* queries) { round_panel(dim, kPanel, RoundedTo::kBytes, queries); }
  template <int N>
  static void exponentials(fN (&scores)[N]) {
    roughly_exp_below_one(scores);
  }
  template <int N>
  static void put_shares(const fN (&shares)[N], int64_t s, float* panel) {
    put_pairs(shares, s, panel, [](fN first, fN second) { return halves_of(first, second); });
  }
  // What a share of the s-th key adds to the total: its values' scale goes into products alone.
  float counted(int64_t s) const { return inverses_[s]; }
  void score(int64_t begin, int64_t n_keys, const float* queries, float* score) const {
    constexpr int kAtOnce = 6;
    int64_t s = 0;
    for (; s + kAtOnce <= n_keys; s += kAtOnce) score_some<kAtOnce>(begin + s, queries, score + s * kPanel);
    for (; s < n_keys; s++) score_some<1>(begin + s, queries, score + s * kPanel);
  }
  // units: what a share of 1 stands for.
  void mix(int64_t begin, int64_t n_keys, const float* shares, const fN* units, float* mixed) const {
    const int32_t* const values = values_ + begin / 2 * dim_;
    const int64_t n_words = (n_keys + 1) / 2;
    int64_t d = 0;
    const auto mix_at = [&](auto rows) {
      mix_some<rows()>(values + d, n_words, shares, units, mixed + d * kPanel);
      d += rows();
    };
    while (d + kRowsAtOnce <= dim_) mix_at(std::integral_constant<int, kRowsAtOnce>());
    while (d < dim_) mix_at(std::integral_constant<int, 4>());
  }

 private:
  template <int R>
  void score_some(int64_t first, const float* queries, float* score) const {
    multiply_words<fN, R, kRegisters, Weights::kKeys>(keys_ + first * kStride, scales_ + first * kScaleStride, queries,
                                                      n_pieces(dim_, kRoundedColumns), score);
  }
  template <int R>
  __attribute__((noinline)) void mix_some(const int32_t* values, int64_t n_words, const float* shares, const fN* units,
                                          float* mixed) const {
    wN sums[R][kRegisters] = {};
    for (int64_t k = 0; k < n_words; k++) {
      wN x[kRegisters];
#pragma GCC unroll 2
      for (int v = 0; v < kRegisters; v++) x[v] = load<wN>(shares + (k * kRegisters + v) * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const wN value = wN{} + values[k * dim_ + r];
#pragma GCC unroll 2
        for (int v = 0; v < kRegisters; v++)
          sums[r][v] = (wN)_mm512_dpwssd_epi32((__m512i)sums[r][v], (__m512i)value, (__m512i)x[v]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kRegisters; v++) {
        float* to = mixed + r * kPanel + v * kLanes;
        store(to, load<fN>(to) + __builtin_convertvector(sums[r][v], fN) * units[v]);
      }
  }
  // The logarithm of what one key's values are multiples of; no number where one of them is none.
  float scale_of_values(const float* values, float& inverse) const {
    f8 most = f8{} + kLeastValue, odd = {};
    for (int64_t d = 0; d < dim_; d += 8) {
      const f8 some = load<f8>(values + d);
      most = larger(magnitude(some), most);
      odd += some - some;
    }
    const float largest = largest_of(most);
    const int32_t exponent = (load<int32_t>(&largest) >> 23) - 126 - kBitsOfValue, of_inverse = (127 - exponent) << 23;
    inverse = load<float>(&of_inverse);
    return exponent * kLogOfTwo + sum(odd);
  }
  template <class F>
  static decltype(nearest(F{})) halves_of(F first, F second) {
    return (nearest(first) & 0xFFFF) | nearest(second) << 16;
  }

  int64_t dim_;
  float *scales_, *inverses_;
  uint8_t* keys_;
  int32_t* values_;
};

#else
constexpr bool kAttendsByBytes = false;  // and nobody asks for it: engines.kernels.tables
#endif
