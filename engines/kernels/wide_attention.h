// Attention of many query tokens over the cache.
//
// Legend: T query tokens, N query heads, D features of a head.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "pool.h"
#include "vectors.h"
#include "wide.h"
#include "wide_bf16.h"
#include "wide_rounded.h"

// Queries are lanes, two registers of them at a time, and keys, then values, are what is broadcast; the softmax is kept
// up to date from one block of keys to the next (Milakov and Gimelshein 2018). Blocks lie where they lie whoever asks, so
// that no bit depends on how a prompt is cut.
constexpr int64_t kKeys = 96;
constexpr int kRegisters = kPanel / kLanes;
constexpr int64_t kTogether = 16;  // panels of queries that meet a block while it is near
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

// A block of keys and values of one head, as they lie in the cache. What a block is to Queries: it makes ready what is
// multiplied with it, and multiplies.
class FloatBlock {
 public:
  static constexpr int64_t kAligned = 1;  // keys that are multiplied together

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
  void mix(int64_t begin, int64_t n_keys, const float* shares, float* mixed) const {
    multiply_rows<true>(dim_, values_ + begin * dim_, dim_, shares, n_keys, mixed);
  }

 private:
  int64_t dim_;
  const float *keys_, *values_;
};

// Of shares that are rounded to bf16.
struct RoughShares {
  template <int N>
  static void exponentials(fN (&scores)[N]) {
    roughly_exp_below_one(scores);
  }
};

#ifdef JOULEBENCH_BF16

// Values and shares rounded to bf16: two keys' values of a feature are a word.
class PairValues : public RoughShares {
 public:
  static constexpr int64_t kAligned = 2;

  // Two keys' shares become a word, where no score is looked for any more.
  template <int N>
  static void put_shares(const fN (&shares)[N], int64_t s, float* panel) {
    float* to = panel + s / 2 * kPanel;
    for (int i = 0; i < N; i += 2, to += kPanel) {
      const auto words = pair_columns(shares[i], i + 1 < N ? shares[i + 1] : fN{});
      std::memcpy(to, &words, sizeof words);
    }
  }
  void mix(int64_t begin, int64_t n_keys, float* shares, float* mixed) const {
    multiply_rows<true>(dim_, values_ + begin / 2 * dim_, dim_, shares, (n_keys + 1) / 2, mixed);
  }

 protected:
  PairValues(int64_t dim, float* room) : dim_(dim), values_((int32_t*)room) {}
  static int64_t size(int64_t dim) { return kKeys * dim / 2; }
  void take_values(const float* values, int64_t n_keys) {
    for (int64_t s = 0; s < n_keys; s += 2) {
      const float *first = values + s * dim_, *second = s + 1 < n_keys ? first + dim_ : nullptr;
      int32_t* to = values_ + s / 2 * dim_;
      int64_t d = 0;
      for (; d + kLanes <= dim_; d += kLanes) pair_at<fN>(first, second, d, to);
      for (; d < dim_; d += 8) pair_at<f8>(first, second, d, to);
    }
  }

  int64_t dim_;

 private:
  template <class F>
  static void pair_at(const float* first, const float* second, int64_t d, int32_t* to) {
    const auto words = pair_columns(load<F>(first + d), second ? load<F>(second + d) : F{});
    std::memcpy(to + d, &words, sizeof words);
  }

  int32_t* values_;
};

// Queries and keys are rounded to bf16 too: two features of a key are a word. room: of `size` floats.
class PairBlock : public PairValues {
 public:
  PairBlock(int64_t dim, float* room)
      : PairValues(dim, room), stride_(pairs_stride(dim)), keys_((int32_t*)(room + PairValues::size(dim))) {}
  static int64_t size(int64_t dim) { return PairValues::size(dim) + kKeys * pairs_stride(dim); }
  void take(const float* keys, const float* values, int64_t n_keys) {
    for (int64_t s = 0; s < n_keys; s++) prepare_pairs(keys + s * dim_, dim_, (float*)keys_ + s * stride_);
    take_values(values, n_keys);
  }

  static void ready_queries(int64_t dim, float* queries) { pair_panel(dim, kPanel, queries); }
  void score(int64_t begin, int64_t n_keys, const float* queries, float* score) const {
    std::memset(score, 0, n_keys * kPanel * sizeof(float));
    multiply_rows<false>(n_keys, keys_ + begin * stride_, stride_, queries, dim_ / 2, score);
  }

 private:
  int64_t stride_;
  int32_t* keys_;
};

#endif

#if defined(JOULEBENCH_AVX512) && defined(__AVX512VNNI__)
#define JOULEBENCH_BYTE_ATTENTION
constexpr bool kAttendsByBytes = true;

#ifdef JOULEBENCH_BF16
typedef PairValues ValuesOfBytes;
#else
// The same where no instruction multiplies bf16: floats that are rounded to it, which gives the same products.
class RoundedValues : public RoughShares {
 public:
  static constexpr int64_t kAligned = 1;

  template <int N>
  static void put_shares(const fN (&shares)[N], int64_t s, float* panel) {
    for (int i = 0; i < N; i++) store(panel + (s + i) * kPanel, (fN)bf16_bits(shares[i]));
  }
  void mix(int64_t begin, int64_t n_keys, const float* shares, float* mixed) const {
    multiply_rows<true>(dim_, values_ + begin * dim_, dim_, shares, n_keys, mixed);
  }

 protected:
  RoundedValues(int64_t dim, float* room) : dim_(dim), values_(room) {}
  static int64_t size(int64_t dim) { return kKeys * dim; }
  void take_values(const float* values, int64_t n_keys) {
    for (int64_t i = 0; i < n_keys * dim_; i += 8) store(values_ + i, (f8)bf16_bits(load<f8>(values + i)));
  }

  int64_t dim_;

 private:
  float* values_;
};

typedef RoundedValues ValuesOfBytes;
#endif

// Queries and keys are rounded to bytes, with a scale for each 32 features. room: of `size` floats.
class ByteBlock : public ValuesOfBytes {
  static constexpr int64_t kStride = stride_of(Weights::kKeys), kScaleStride = scale_stride_of(Weights::kKeys);

 public:
  ByteBlock(int64_t dim, float* room)
      : ValuesOfBytes(dim, room), scales_(room + ValuesOfBytes::size(dim)), keys_((uint8_t*)(scales_ + kKeys * kScaleStride)) {}
  static int64_t size(int64_t dim) { return ValuesOfBytes::size(dim) + kKeys * (kScaleStride + kStride / 4); }
  void take(const float* keys, const float* values, int64_t n_keys) {
    for (int64_t s = 0; s < n_keys; s++)
      for (int64_t d = 0; d < dim_; d += kRoundedColumns)
        scales_[s * kScaleStride + d / kRoundedColumns] = round_columns(
            keys + s * dim_ + d, std::min(kRoundedColumns, dim_ - d), (int8_t*)keys_ + s * kStride + d);
    for (int64_t s = 0; s < n_keys; s++)  // bytes that have just been stored would be waited for
      for (int64_t d = 0; d < dim_; d += kRoundedColumns) {
        uint8_t* const at = keys_ + s * kStride + d;
        const ub32 raised = load<ub32>(at) ^ 0x80;
        std::memcpy(at, &raised, sizeof raised);
      }
    take_values(values, n_keys);
  }

  static void ready_queries(int64_t dim, float* queries) { round_panel(dim, kPanel, RoundedTo::kBytes, queries); }
  void score(int64_t begin, int64_t n_keys, const float* queries, float* score) const {
    constexpr int kAtOnce = 6;
    int64_t s = 0;
    for (; s + kAtOnce <= n_keys; s += kAtOnce) score_some<kAtOnce>(begin + s, queries, score + s * kPanel);
    for (; s < n_keys; s++) score_some<1>(begin + s, queries, score + s * kPanel);
  }

 private:
  template <int R>
  void score_some(int64_t first, const float* queries, float* score) const {
    multiply_words<fN, R, kRegisters, Weights::kKeys>(keys_ + first * kStride, scales_ + first * kScaleStride, queries,
                                                      n_pieces(dim_, kRoundedColumns), score);
  }

  float* scales_;
  uint8_t* keys_;
};

#else
constexpr bool kAttendsByBytes = false;  // and nobody asks for it: engines.kernels.tables
#endif

// The queries of one head for up to kPanel tokens from `position` on, and what they have found so far.
struct Queries {
  int64_t head, position, n;
  float *packed, *mixed;  // [D][queries]
  fN largest[kRegisters], total[kRegisters];

  // Fewer than 16 features take as many words as 32 where they are rounded to bytes.
  static int64_t size(int64_t dim) { return (dim + std::max<int64_t>(dim, 16)) * kPanel; }

  // query: of the first token, `stride` floats between tokens; `out` of finish alike. room: of `size` floats.
  void begin(const Attention& a, const float* query, int64_t stride, float* room) {
    mixed = room, packed = room + a.dim * kPanel;
    pack(0, kPanel, a.dim, [&](int64_t i) { return i < n ? query + i * stride : nullptr; }, packed);
    for (int64_t d = 0; d < a.dim * kPanel; d += kLanes) store(packed + d, a.scale * load<fN>(packed + d));
    std::memset(mixed, 0, a.dim * kPanel * sizeof(float));
    for (int part = 0; part < kRegisters; part++) {
      largest[part] = fN{} + (a.sinks ? a.sinks[head] : -INFINITY);
      total[part] = fN{} + (a.sinks ? 1.0f : 0.0f);
    }
  }

  // Scores [keys][queries] of n_keys from `first` on, of which some queries may see only some.
  void hide(const Attention& a, int64_t first, int64_t n_keys, float* score) const {
    for (int part = 0; part < kRegisters; part++) {
      wN query;
      for (int i = 0; i < kLanes; i++) query[i] = int32_t(position) + kLanes * part + i;
      for (int64_t s = 0; s < n_keys; s++) {
        const wN seen = wN{} + int32_t(first + s);
        wN hidden = seen > query;
        if (a.window) hidden |= seen <= query - int32_t(a.window);
        float* at = score + s * kPanel + kLanes * part;
        store(at, hidden ? fN{} - INFINITY : load<fN>(at));
      }
    }
  }

  // Scores become shares of a total that more keys may add to.
  template <class Block, bool IsMasked>
  void share_out(int64_t dim, int64_t n_keys, float* score) {
    for (int part = 0; part < kRegisters; part++) {
      const auto at = [&](int64_t s) { return score + s * kPanel + kLanes * part; };
      fN each[4] = {largest[part], largest[part], largest[part], largest[part]};  // none waits for another
      int64_t s = 0;
      for (; s + 4 <= n_keys; s += 4)
        for (int i = 0; i < 4; i++) each[i] = larger(each[i], load<fN>(at(s + i)));
      for (; s < n_keys; s++) each[0] = larger(each[0], load<fN>(at(s)));
      const fN most = larger(larger(each[0], each[1]), larger(each[2], each[3]));
      const fN base_of = most == -INFINITY ? fN{} : most;  // no key seen yet: every share is e^-inf = 0
      const fN shrink = exp_below_one(largest[part] - base_of);
      fN sums = total[part] * (largest[part] == -INFINITY ? fN{} : shrink);
      const auto share = [&](auto& shares) {
        float* to = at(s);
        for (fN& one : shares) one = load<fN>(to) - base_of, to += kPanel;
        Block::exponentials(shares);
        to = at(s);
        for (fN& one : shares) {
          if (IsMasked) one = load<fN>(to) == -INFINITY ? fN{} : one;
          sums += one, to += kPanel;
        }
        Block::put_shares(shares, s, score + kLanes * part);
      };
      fN four[4], two[2], one[1];
      for (s = 0; s + 4 <= n_keys; s += 4) share(four);
      for (; s + 2 <= n_keys; s += 2) share(two);
      if (s < n_keys) share(one);
      const bool is_kept = !std::memcmp(&most, &largest[part], sizeof most);  // and what was found shrinks by 1
      for (int64_t d = 0; d < (is_kept ? 0 : dim); d++) {
        float* of = mixed + d * kPanel + kLanes * part;
        store(of, load<fN>(of) * shrink);
      }
      total[part] = sums, largest[part] = most;
    }
  }

  // The block begins at position `first` and has n_keys.
  template <class Block>
  void meet(const Attention& a, const Block& block, int64_t first, int64_t n_block, float* score) {
    const int64_t unseen = std::max<int64_t>(0, a.first_seen(position) - first) / Block::kAligned * Block::kAligned;
    const int64_t begin = first + unseen, n_keys = std::min(first + n_block, position + n) - begin;
    if (n_keys <= 0) return;
    block.score(unseen, n_keys, packed, score);
    // Only the first and the last blocks hold keys that some of the queries do not see.
    if (begin + n_keys > position + 1 || (a.window && begin < a.first_seen(position + n - 1))) {
      hide(a, begin, n_keys, score);
      share_out<Block, true>(a.dim, n_keys, score);
    } else {
      share_out<Block, false>(a.dim, n_keys, score);
    }
    block.mix(unseen, n_keys, score, mixed);
  }

  void finish(int64_t dim, float* out, int64_t stride) const {
    float shares[kPanel];
    for (int part = 0; part < kRegisters; part++) store(shares + kLanes * part, 1.0f / total[part]);
    for (int64_t first = 0; first < n; first += 8) {
      const f8 inverse = load<f8>(shares + first);
      for (int64_t d = 0; d < dim; d += 8) {
        f8 eight[8];
        for (int i = 0; i < 8; i++) eight[i] = load<f8>(mixed + (d + i) * kPanel + first) * inverse;
        transpose8(eight);
        for (int64_t i = first; i < std::min<int64_t>(n, first + 8); i++) store(out + i * stride + d, eight[i - first]);
      }
    }
  }
};

template <class Block>
inline void attend_by(const Attention& a, const float* query_TQ, int64_t position, int64_t n_tokens, float* out_TQ,
                      int n_threads) {
  const int64_t per_kv = a.n_heads / a.n_kv_heads, dim = a.dim, stride = a.n_heads * dim;
  const int64_t n_of_kv = per_kv * n_panels(n_tokens);  // panels that meet the same keys
  int64_t together = std::clamp<int64_t>(kNearBytes / int64_t(sizeof(float)) / Queries::size(dim), 1, kTogether);
  const auto n_groups = [&] { return (n_of_kv + together - 1) / together; };
  while (together > 1 && a.n_kv_heads * n_groups() < 4 * n_threads) together /= 2;
  // Late panels see more keys: chunks of one, the dearest first.
  in_chunks(a.n_kv_heads * n_groups(), 1, n_threads, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> buffer;
    const int64_t of_queries = Queries::size(dim);
    const int64_t of_floats = a.kept == kFp32 ? 0 : kKeys * dim;  // of keys, and of values, that are kept otherwise
    float* const score = scratch(buffer, kKeys * kPanel + together * of_queries + Block::size(dim) + 2 * of_floats);
    float *const room = score + kKeys * kPanel, *const room_of_block = room + together * of_queries;
    float* const room_of_floats = room_of_block + Block::size(dim);
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t kv_head = unit / n_groups(), last = n_of_kv - unit % n_groups() * together;
      const int64_t first = std::max<int64_t>(0, last - together), n = last - first;
      const auto token = [&](int64_t i) { return (first + i) / per_kv * kPanel; };
      const auto head = [&](int64_t i) { return kv_head * per_kv + (first + i) % per_kv; };
      const auto place = [&](int64_t i) { return token(i) * stride + head(i) * dim; };
      Queries group[kTogether];
      for (int64_t i = 0; i < n; i++) {
        group[i].head = head(i), group[i].position = position + token(i);
        group[i].n = std::min<int64_t>(kPanel, n_tokens - token(i));
        group[i].begin(a, query_TQ + place(i), stride, room + i * of_queries);
        Block::ready_queries(dim, group[i].packed);
      }
      Block block(dim, room_of_block);
      const int64_t end_seen = group[n - 1].position + group[n - 1].n;
      for (int64_t at = a.first_seen(group[0].position) / kKeys * kKeys; at < end_seen; at += kKeys) {
        const int64_t from = kv_head * a.head_stride + at * dim, n_keys = std::min(kKeys, end_seen - at);
        as_kept(a.kept, [&](auto element) {
          const auto floats_of = [&](const void* kept, float* to) {
            return as_floats((const decltype(element)*)kept + from, n_keys * dim, to);
          };
          block.take(floats_of(a.keys, room_of_floats), floats_of(a.values, room_of_floats + of_floats), n_keys);
        });
        for (int64_t i = 0; i < n; i++) group[i].meet(a, block, at, n_keys, score);
      }
      for (int64_t i = 0; i < n; i++) group[i].finish(dim, out_TQ + place(i), stride);
    }
  });
}

// out[T, N D] for n_tokens from `position` on, whose keys and values are in the cache already.
inline void attend_many(const Attention& a, const float* query_TQ, int64_t position, int64_t n_tokens, float* out_TQ,
                        int n_threads) {
#ifdef JOULEBENCH_BF16
  if (a.arithmetic == kByBf16) return attend_by<PairBlock>(a, query_TQ, position, n_tokens, out_TQ, n_threads);
#endif
#ifdef JOULEBENCH_BYTE_ATTENTION
  if (a.arithmetic == kByInt8) return attend_by<ByteBlock>(a, query_TQ, position, n_tokens, out_TQ, n_threads);
#endif
  attend_by<FloatBlock>(a, query_TQ, position, n_tokens, out_TQ, n_threads);
}
