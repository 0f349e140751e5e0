// Attention of many query tokens over the cache.
//
// Legend: T query tokens, N query heads, D features of a head.

#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "attention_blocks.h"
#include "pool.h"
#include "scratch.h"
#include "vectors.h"
#include "wide.h"

// Queries are lanes, two registers of them at a time, and keys, then values, are what is broadcast; the softmax is kept
// up to date from one block of keys to the next (Milakov and Gimelshein 2018).
constexpr int64_t kTogether = 16;  // panels of queries that meet a block while it is near

// The queries of one head for up to kPanel tokens from `position` on, and what they have found so far.
struct Queries {
  int64_t head, position, n;
  float *packed, *mixed;  // [D][queries]
  fN largest[kRegisters], total[kRegisters];
  fN units[kRegisters];  // what a share of 1 stands for, where shares are of a block's own largest score

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

  // Scores [keys][queries] become shares of a total that more keys may add to. begin: of the block's keys, the first.
  template <bool IsMasked, class Block>
  void share_out(const Block& block, int64_t begin, int64_t dim, int64_t n_keys, float* score) {
    constexpr bool kIsOwn = Block::kBitsOfShare > 0;
    for (int part = 0; part < kRegisters; part++) {
      const auto at = [&](int64_t s) { return score + s * kPanel + kLanes * part; };
      const fN least = kIsOwn ? fN{} - INFINITY : largest[part];
      fN each[4] = {least, least, least, least};  // none waits for another
      int64_t s = 0;
      for (; s + 4 <= n_keys; s += 4)
        for (int i = 0; i < 4; i++) each[i] = larger(each[i], load<fN>(at(s + i)));
      for (; s < n_keys; s++) each[0] = larger(each[0], load<fN>(at(s)));
      const fN found = larger(larger(each[0], each[1]), larger(each[2], each[3]));
      const fN most = kIsOwn ? larger(largest[part], found) : found;
      const auto base_of = [](fN score) { return score == -INFINITY ? fN{} : score; };  // none seen: all are e^-inf = 0
      const fN shrink = exp_below_one(largest[part] - base_of(most));
      const fN base = base_of(found) - Block::kBitsOfShare * kLogOfTwo;
      fN sums = total[part] * (largest[part] == -INFINITY ? fN{} : shrink), own = {};
      const auto share = [&](auto& shares) {
        float* to = at(s);
        for (fN& one : shares) one = load<fN>(to) - base, to += kPanel;
        Block::exponentials(shares);
        to = at(s);
        int64_t key = begin + s;
        for (fN& one : shares) {
          if (IsMasked) one = load<fN>(to) == -INFINITY ? fN{} : one;
          if constexpr (kIsOwn) own += one * block.counted(key++);
          else sums += one;
          to += kPanel;
        }
        Block::put_shares(shares, s, score + kLanes * part);
      };
      fN four[4], two[2], one[1];
      for (s = 0; s + 4 <= n_keys; s += 4) share(four);
      for (; s + 2 <= n_keys; s += 2) share(two);
      if (s < n_keys) share(one);
      if constexpr (kIsOwn) {
        // Of a block that a query sees nothing of, no number above 0 may go there: it has no exponential.
        units[part] = found == -INFINITY ? fN{} : exp_below_one(found - most) / (1 << Block::kBitsOfShare);
        sums += own * units[part];
      }
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
      share_out<true>(block, unseen, a.dim, n_keys, score);
    } else {
      share_out<false>(block, unseen, a.dim, n_keys, score);
    }
    block.mix(unseen, n_keys, score, units, mixed);
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
    thread_local Buffer buffer;
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
