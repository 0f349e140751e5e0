// What decoding does between its products, for one query token: norms and attention over the cache. torch spends 20 to
// 100 microseconds on each of these, most of it on getting there.
//
// Legend: N query heads, M key/value heads, G = N / M, S positions seen, D features of a head.

#pragma once

#include <cmath>
#include <vector>

#include "pool.h"
#include "vectors.h"

// x / sqrt(mean(x^2) + eps) * weight, row by row.
inline void rms_norm(const float* x, int64_t n_rows, int64_t width, const float* weight, float eps, float* out) {
  for (int64_t r = 0; r < n_rows; r++, x += width, out += width) {
    f8 squares = {};
    float rest = 0;
    int64_t c = 0;
    for (; c + 8 <= width; c += 8) squares += load<f8>(x + c) * load<f8>(x + c);
    for (int64_t k = c; k < width; k++) rest += x[k] * x[k];
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
    for (int64_t k = 0; k < width; k++) out[k] = x[k] * scale * weight[k];
  }
}

// e^x for x <= 0, to 2e-7: 2^k times a polynomial in the rest, |rest| <= ln 2 / 2 (Cephes' expf).
inline f8 exp_below_one(f8 x) {
  x = x < -87.0f ? f8{} - 87.0f : x;
  const f8 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
  const f8 k = shifted - 12582912.0f;
  const f8 r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  f8 p = f8{} + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  const f8 value = p * r * r + r + 1.0f;
  return value * (f8)((__builtin_convertvector(k, w8) + 127) << 23);
}

// out[N, D] = softmax(scale * q k^T) v; keys and values are [M, S, D] with `head_stride` floats between heads. D is a
// multiple of 8.
inline void attend(const float* query_ND, const float* keys, const float* values, int64_t head_stride, int64_t n_heads,
                   int64_t n_kv_heads, int64_t n_seen, int64_t dim, float scale, float* out_ND, int n_threads) {
  const int64_t per_kv = n_heads / n_kv_heads;
  in_chunks(n_heads, per_kv, n_threads, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> buffer;
    if ((int64_t)buffer.size() < n_seen + 8) buffer.resize(n_seen + 8);
    float* score_S = buffer.data();
    for (int64_t head = begin; head < end; head++) {
      const float* query = query_ND + head * dim;
      const float* key = keys + head / per_kv * head_stride;
      float largest = -INFINITY;
      for (int64_t s = 0; s < n_seen; s++, key += dim) {
        f8 total = {};
        for (int64_t d = 0; d < dim; d += 8) total += load<f8>(query + d) * load<f8>(key + d);
        score_S[s] = scale * sum(total);
        largest = std::max(largest, score_S[s]);
      }
      for (int64_t s = n_seen; s < n_seen + 8; s++) score_S[s] = -INFINITY;
      f8 totals = {};
      for (int64_t s = 0; s < n_seen; s += 8) {
        f8 share = exp_below_one(load<f8>(score_S + s) - largest);
        for (int64_t i = n_seen - s; i < 8; i++) share[i] = 0;
        std::memcpy(score_S + s, &share, sizeof share);
        totals += share;
      }
      const float inverse = 1.0f / sum(totals);
      float* out = out_ND + head * dim;
      for (int64_t d = 0; d < dim; d += 8) {
        const float* value = values + head / per_kv * head_stride + d;
        f8 sums[4] = {};
        int64_t s = 0;
        for (; s + 4 <= n_seen; s += 4)
          for (int u = 0; u < 4; u++) sums[u] += load<f8>(value + (s + u) * dim) * score_S[s + u];
        for (; s < n_seen; s++) sums[0] += load<f8>(value + s * dim) * score_S[s];
        const f8 mixed = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * inverse;
        std::memcpy(out + d, &mixed, sizeof mixed);
      }
    }
  });
}
