// Products of a few rows with a large matrix, as decoding needs them: every weight is read once, in the width it is
// stored in, and widened in registers. Such a product is bound by memory, so its time is bytes read / bandwidth, and
// halving the bytes of a weight halves the time. From nine rows on a GEMM library is faster; this file is not used.
//
// All sums are fp32. Vectors are GCC/Clang vector extensions of eight floats: AVX2 registers on x86, register pairs on
// Arm. A matrix is [rows, columns] = [outputs, inputs], row-major.
//
// Legend: T tokens (1..8), H hidden, I expert width, J = 2I gate and up rows, E experts, R rows of all expert calls.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "pool.h"
#include "vectors.h"


namespace {

constexpr int kMaxTokens = 8;
constexpr int64_t kInt4Block = 64;   // columns whose nibbles share eight 32-bit words
constexpr int64_t kPrefetch = 1024;  // bytes ahead: past a 4 KB page the hardware does not look

// The order of this enumeration is that of engines.kernels.native.
enum Format : int32_t { kFp32, kBf16, kFp16, kInt8, kInt4 };

struct Matrix {
  const void* values;
  const float* scales;  // int8: one a row; int4: one a group of columns; else unused
  int64_t columns;
  int32_t format;
  int32_t group_bits;  // int4: 2^group_bits columns share a scale, at least 32
};

// --- formats whose elements stand in column order ---------------------------------------------------------------------

struct Fp32 {
  typedef float element;
  static f8 widen(const element* p) { return load<f8>(p); }
  static float widen_one(element e) { return e; }
};

struct Bf16 {
  typedef uint16_t element;
  static f8 widen(const element* p) {
    u8x32 bits = __builtin_convertvector(load<h8>(p), u8x32) << 16;
    return (f8)bits;
  }
  static float widen_one(element e) {
    uint32_t bits = uint32_t(e) << 16;
    return load<float>(&bits);
  }
};

struct Fp16 {
  typedef _Float16 element;
  static f8 widen(const element* p) {
#ifdef JOULEBENCH_AVX2  // GCC 12 converts a vector of halves one by one
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return __builtin_convertvector(load<half8>(p), f8);
#endif
  }
  static float widen_one(element e) { return float(e); }
};

struct Int8 {
  typedef int8_t element;
  static f8 widen(const element* p) {
#ifdef JOULEBENCH_AVX2  // GCC 12 converts a vector of bytes one by one
    return __builtin_convertvector((w8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), f8);
#else
    return __builtin_convertvector(__builtin_convertvector(load<b8>(p), w8), f8);
#endif
  }
  static float widen_one(element e) { return float(e); }
};

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

// --- int4 -------------------------------------------------------------------------------------------------------------
// A block of 64 columns is eight 32-bit words; nibble j of word i is column 8j + i. A nibble masked where it stands and
// converted is n * 16^j, exactly; the input carries 16^-j, exactly, so no shift is needed. Nibbles 0..6 hold n + 8 and
// the top one two's complement, because the conversion reads the word as signed. What the + 8 adds is taken off by where
// each sum starts.

// Input of one token as int4 rows want it: columns scaled floats, then columns / 4 floats to start the sums from.
inline int64_t int4_stride(int64_t columns) { return columns + columns / 4; }

void prepare_int4(const float* x, int64_t columns, float* prepared) {
  float* start = prepared + columns;
  for (int64_t block = 0; block < columns; block += kInt4Block) {
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
  for (int64_t block = 0; block < columns; block += kInt4Block) {
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

// --- any format -------------------------------------------------------------------------------------------------------

template <int T>
inline void dot_row(const Matrix& m, int64_t row, const float* x, float* out) {
  const int64_t first = row * m.columns;
  switch (m.format) {
    case kFp32: return dot_in_order<Fp32, T>((const float*)m.values + first, m.columns, x, out);
    case kBf16: return dot_in_order<Bf16, T>((const uint16_t*)m.values + first, m.columns, x, out);
    case kFp16: return dot_in_order<Fp16, T>((const _Float16*)m.values + first, m.columns, x, out);
    case kInt8:
      dot_in_order<Int8, T>((const int8_t*)m.values + first, m.columns, x, out);
      for (int t = 0; t < T; t++) out[t] *= m.scales[row];
      return;
    case kInt4:
      return dot_int4<T>((const uint32_t*)m.values + first / 8, m.scales + (first >> m.group_bits), m.group_bits,
                         m.columns, x, out);
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
  const int64_t bits_per_column[] = {32, 16, 16, 8, 5};
  const int64_t row_bytes = m.columns * bits_per_column[m.format] / 8 + 1;
  return std::max<int64_t>(1, (128 << 10) / row_bytes);
}

float* scratch(std::vector<float>& buffer, int64_t n) {
  if ((int64_t)buffer.size() < n) buffer.resize(n);
  return buffer.data();
}

thread_local std::vector<float> gather_scratch, input_scratch, inner_scratch, prepared_scratch;

// Input rows in the layout that rows of `m` want; x itself where that is the plain one.
const float* prepared_rows(const Matrix& m, const float* x, int64_t n_rows, std::vector<float>& buffer) {
  if (m.format != kInt4) return x;
  const int64_t stride = int4_stride(m.columns);
  float* prepared = scratch(buffer, n_rows * stride);
  for (int64_t r = 0; r < n_rows; r++) prepare_int4(x + r * m.columns, m.columns, prepared + r * stride);
  return prepared;
}

}  // namespace

extern "C" {

// out[T, rows] = x[T, columns] m^T + bias; bias may be null.
void joulebench_linear(const void* values, const float* scales, int32_t format, int32_t group_bits, int64_t rows,
                       int64_t columns, const float* x, int32_t n_tokens, const float* bias, float* out,
                       int32_t n_threads) {
  const Matrix m = {values, scales, columns, format, group_bits};
  const float* input = prepared_rows(m, x, n_tokens, input_scratch);
  in_chunks(rows, rows_per_chunk(m), n_threads, [&](int64_t begin, int64_t end) {
    float results[kMaxTokens];
    for (int64_t row = begin; row < end; row++) {
      dot(m, row, n_tokens, input, results);
      for (int t = 0; t < n_tokens; t++) out[t * rows + row] = results[t] + (bias ? bias[row] : 0.0f);
    }
  });
}

// out[T, H] = the weighted sum of SwiGLU experts. Call c computes expert_C[c] for rows first_C[c] .. first_C[c+1]-1 (at
// most eight); row r is token token_R[r], and its result, times weight_R[r], is added to that token. Only the experts
// named are read.
void joulebench_experts(const void* gate_up, const float* gate_up_scales, const void* down, const float* down_scales,
                        int32_t format, int32_t group_bits, int64_t hidden, int64_t width, int64_t n_calls,
                        const int64_t* expert_C, const int64_t* first_C, const float* hidden_TH, const int64_t* token_R,
                        const float* weight_R, int64_t n_tokens, float* out, int32_t n_threads) {
  const Matrix up = {gate_up, gate_up_scales, hidden, format, group_bits};
  const Matrix dn = {down, down_scales, width, format, group_bits};
  const int64_t n_rows = first_C[n_calls], down_stride = input_stride(dn);
  const float* rows_RH = hidden_TH;
  int64_t up_stride = 0;  // of one token, every row is that token
  if (n_tokens > 1) {
    float* gathered = scratch(gather_scratch, n_rows * hidden);
    for (int64_t r = 0; r < n_rows; r++)
      std::memcpy(gathered + r * hidden, hidden_TH + token_R[r] * hidden, hidden * sizeof(float));
    rows_RH = gathered;
    up_stride = input_stride(up);
  }
  const float* input = prepared_rows(up, rows_RH, n_tokens > 1 ? n_rows : 1, input_scratch);
  float* inner_RI = scratch(inner_scratch, n_rows * width);
  in_chunks(n_calls * width, rows_per_chunk(up) / 2 + 1, n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t call = unit / width, i = unit % width, first = first_C[call];
      const int rows = int(first_C[call + 1] - first);
      const int64_t gate_row = expert_C[call] * 2 * width + i;
      float gates[kMaxTokens], ups[kMaxTokens];
      dot(up, gate_row, rows, input + first * up_stride, gates);
      dot(up, gate_row + width, rows, input + first * up_stride, ups);
      for (int r = 0; r < rows; r++) inner_RI[(first + r) * width + i] = gates[r] / (1 + std::exp(-gates[r])) * ups[r];
    }
  });
  const float* prepared = prepared_rows(dn, inner_RI, n_rows, prepared_scratch);
  std::memset(out, 0, n_tokens * hidden * sizeof(float));
  // A chunk owns outputs, not calls, so that no two threads add to the same one.
  in_chunks(hidden, std::max<int64_t>(8, rows_per_chunk(dn) / n_calls), n_threads, [&](int64_t begin, int64_t end) {
    for (int64_t call = 0; call < n_calls; call++) {
      const int64_t first = first_C[call];
      const int rows = int(first_C[call + 1] - first);
      for (int64_t h = begin; h < end; h++) {
        float results[kMaxTokens];
        dot(dn, expert_C[call] * hidden + h, rows, prepared + first * down_stride, results);
        for (int r = 0; r < rows; r++) out[token_R[first + r] * hidden + h] += weight_R[first + r] * results[r];
      }
    }
  });
}

void joulebench_rms_norm(const float* x, int64_t n_rows, int64_t width, const float* weight, float eps, float* out) {
  rms_norm(x, n_rows, width, weight, eps, out);
}

void joulebench_attend(const float* query_ND, const float* keys, const float* values, int64_t head_stride,
                       int64_t n_heads, int64_t n_kv_heads, int64_t n_seen, int64_t dim, float scale, float* out_ND,
                       int32_t n_threads) {
  attend(query_ND, keys, values, head_stride, n_heads, n_kv_heads, n_seen, dim, scale, out_ND, n_threads);
}

}  // extern "C"
