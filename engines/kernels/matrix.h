// A weight matrix as it is stored, [rows, columns] = [outputs, inputs], row-major, and how its elements become floats.

#pragma once

#include <cstdint>

#include "vectors.h"

// The order of this enumeration is that of engines.kernels.tables.
enum Format : int32_t { kFp32, kBf16, kFp16, kInt8, kFp8, kInt4, kMxfp4 };

// What inputs are rounded to before they are multiplied; the order is that of engines.kernels.tables too. Rounding to
// int8 (rounded.h) is for matrices of int8 and int4, to bf16 (bf16.h) for those of bf16.
enum Arithmetic : int32_t { kByFp32, kByInt8, kByBf16 };

struct Matrix {
  const void* values;
  const void* scales;  // int8, fp8: a float for each row; int4: a float for each group; mxfp4: a byte for each group
  int64_t rows, columns;
  int32_t format;
  int32_t group_bits;  // int4, mxfp4: 2^group_bits columns share a scale, at least 32
  int32_t arithmetic;
};

constexpr int64_t kBits[] = {32, 16, 16, 8, 8, 4, 4};  // of an element, without its share of a scale

constexpr int64_t kNibbleBlock = 64;  // columns whose nibbles share eight 32-bit words

inline bool has_nibbles(const Matrix& m) { return m.format == kInt4 || m.format == kMxfp4; }

// --- formats whose elements stand in column order ---------------------------------------------------------------------

struct Fp32 {
  typedef float element;
  static fN widen(const element* p) { return load<fN>(p); }
  static float widen_one(element e) { return e; }
};

struct Bf16 {
  typedef uint16_t element;
  static fN widen(const element* p) {
#if defined(JOULEBENCH_AVX512)
    return (fN)((uN)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(JOULEBENCH_AVX2)  // GCC 12 converts a vector of shorts in two halves
    return (f8)((u8x32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#elif defined(JOULEBENCH_NEON)
    return (f8)(widened(vld1q_u16(p)) << 16);
#else
    return (f8)(__builtin_convertvector(load<h8>(p), u8x32) << 16);
#endif
  }
  static float widen_one(element e) {
    uint32_t bits = uint32_t(e) << 16;
    return load<float>(&bits);
  }
};

struct Fp16 {
  typedef half element;
  static fN widen(const element* p) {
#if defined(JOULEBENCH_AVX512)
    return (fN)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256((const __m256i*)p));
#elif defined(JOULEBENCH_AVX2)  // GCC 12 converts a vector of halves one by one
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(JOULEBENCH_NEON)
    const float16x8_t halves = vld1q_f16(p);
    return both(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves));
#else
    f8 floats;
    for (int i = 0; i < 8; i++) floats[i] = float(p[i]);
    return floats;
#endif
  }
  static float widen_one(element e) { return float(e); }
};

struct Int8 {
  typedef int8_t element;
  static fN widen(const element* p) {
#if defined(JOULEBENCH_AVX512)
    return __builtin_convertvector((wN)_mm512_maskz_cvtepi8_epi32(kAll, _mm_loadu_si128((const __m128i*)p)), fN);
#elif defined(JOULEBENCH_AVX2)  // GCC 12 converts a vector of bytes one by one
    return __builtin_convertvector((w8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), f8);
#elif defined(JOULEBENCH_NEON)
    return __builtin_convertvector(widened(vmovl_s8(vld1_s8(p))), f8);
#else
    return __builtin_convertvector(__builtin_convertvector(load<b8>(p), w8), f8);
#endif
  }
  static float widen_one(element e) { return float(e); }
};

// e4m3: the bits of exponent and mantissa, moved to where a float has them, are the value times 2^-120; subnormal ones
// become subnormal floats, so that the product is exact for these too. The byte of NaN would be 480: no loaded file has it.
struct Fp8 {
  typedef uint8_t element;
  static fN widen(const element* p) {
#if defined(JOULEBENCH_AVX512)
    const uN bits = (uN)_mm512_maskz_cvtepu8_epi32(kAll, _mm_loadu_si128((const __m128i*)p));
#elif defined(JOULEBENCH_AVX2)
    const uN bits = (uN)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(JOULEBENCH_NEON)
    const uN bits = widened(vmovl_u8(vld1_u8(p)));
#else
    const uN bits = __builtin_convertvector(load<ub8>(p), u8x32);
#endif
    return (fN)((bits & 0x80) << 24 | (bits & 0x7F) << 20) * 0x1p120f;
  }
  static float widen_one(element e) {
    const uint32_t bits = uint32_t(e & 0x80) << 24 | uint32_t(e & 0x7F) << 20;
    return load<float>(&bits) * 0x1p120f;
  }
};

// --- four-bit formats -------------------------------------------------------------------------------------------------
// A block of 64 columns is eight 32-bit words; nibble j of word i is column 8j + i, so that eight lanes masked at one
// nibble are eight neighbouring columns. int4: nibbles 0..6 hold level + 8, the top one two's complement. mxfp4: sign and
// index into eight magnitudes. A register of sixteen holds the words twice, and is masked at nibble j in its lower half,
// at j + 1 in its upper one: again neighbouring columns.

constexpr int kNibbles = kLanes / 8;  // of a word that are taken at once

inline uN load_words(const uint32_t* from) {
#ifdef JOULEBENCH_AVX512
  const u8x32 words = load<u8x32>(from);
  return __builtin_shufflevector(words, words, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return load<uN>(from);
#endif
}

// What nibbles j and on are shifted by to where nibble 0 stands.
inline uN nibble_shift(int j) {
  const uN shift = uN{} + uint32_t(4 * j);
#ifdef JOULEBENCH_AVX512
  return shift + uN{0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
#else
  return shift;
#endif
}

#ifdef JOULEBENCH_AVX512

// Of a half block, 32 columns with one scale: all that a nibble may stand for lies in one register, scaled once.
inline void widen_half(bool is_int4, uN words, int half, float scale, float* out) {
  const fN levels = {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f,
                     0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  5.0f,  6.0f,  7.0f};
  const fN values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const fN scaled = (is_int4 ? levels : values) * scale;
  const uN codes = is_int4 ? words ^ 0x80000000u : words;  // the top nibble of int4 is level + 8 then, too
#pragma GCC unroll 2
  for (int j = 4 * half; j < 4 * half + 4; j += kNibbles, out += kLanes) {
    const __m512i code = (__m512i)(codes >> nibble_shift(j));  // the lowest four bits count
    store(out, (fN)_mm512_maskz_permutexvar_ps(kAll, code, (__m512)scaled));
  }
}

#else

inline fN int4_levels(uN words, int j) {
  const uN level = (words ^ 0x80000000u) >> nibble_shift(j) & 0xF;  // + 8, the top one too
  return __builtin_convertvector((wN)level, fN) - 8.0f;
}

inline fN mxfp4_values(uN words, int j) {
  const uN code = words >> nibble_shift(j);
  const f8 magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
#ifdef JOULEBENCH_AVX2
  const f8 chosen = (f8)_mm256_permutevar8x32_ps((__m256)magnitudes, (__m256i)(code & 7));
#else
  f8 chosen;
  for (int i = 0; i < 8; i++) chosen[i] = magnitudes[code[i] & 7];
#endif
  return (f8)((u8x32)chosen | (code << 28 & 0x80000000u));
}

inline void widen_half(bool is_int4, uN words, int half, float scale, float* out) {
#pragma GCC unroll 4
  for (int j = 4 * half; j < 4 * half + 4; j += kNibbles, out += kLanes)
    store(out, (is_int4 ? int4_levels(words, j) : mxfp4_values(words, j)) * scale);
}

#endif

// 2^(byte - 127); the smallest is a subnormal float.
inline float mxfp4_scale(uint8_t exponent) {
  const uint32_t bits = exponent ? uint32_t(exponent) << 23 : 0x400000u;
  return load<float>(&bits);
}

// Where each of R rows of nibbles begins, `step` rows apart, and its scales.
template <int R, class Scale>
struct NibbleRows {
  const uint32_t* words[R];
  const Scale* scales[R];
  int64_t group_bits;

  NibbleRows(const Matrix& m, int64_t row, int64_t step) : group_bits(m.group_bits) {
    for (int r = 0; r < R; r++) {
      words[r] = (const uint32_t*)m.values + (row + r * step) * m.columns / 8;
      scales[r] = (const Scale*)m.scales + ((row + r * step) * m.columns >> m.group_bits);
    }
  }

  const Scale* scale(int r, int64_t column) const { return scales[r] + (column >> group_bits); }

  // Asks ahead, with their scales; to be called at each block.
  __attribute__((always_inline)) void ask(int r, int64_t column) const {
    constexpr int64_t kAtOnce = 4 * kLine;  // columns: two lines
    if (column % kAtOnce) return;
    ask_ahead(words[r] + column / 8, kAtOnce / 2);
    ask_ahead(scale(r, column), 1, (2 * kAhead >> group_bits) * int64_t(sizeof(Scale)));
  }
};

// Sums of one row and token that run side by side, so that additions do not wait for each other: as many as there are
// registers for where four rows are read together. However many are, a row's sum is added in the same order.
constexpr int sums_of_row(int n_tokens) { return n_tokens * 8 <= kLanes ? 2 : 1; }

// --- any format -------------------------------------------------------------------------------------------------------

template <class S>
inline void widen_in_order(const Matrix& m, int64_t row, int64_t first, int64_t n, float scale, float* out) {
  const typename S::element* from = (const typename S::element*)m.values + row * m.columns + first;
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(out + c, S::widen(from + c) * scale);
  for (; c < n; c++) out[c] = S::widen_one(from[c]) * scale;
}

// Columns first .. first + n - 1 of a row as floats. In four-bit formats both are multiples of 64.
inline void widen_row(const Matrix& m, int64_t row, int64_t first, int64_t n, float* out) {
  switch (m.format) {
    case kFp32: std::memcpy(out, (const float*)m.values + row * m.columns + first, n * sizeof(float)); return;
    case kBf16: return widen_in_order<Bf16>(m, row, first, n, 1.0f, out);
    case kFp16: return widen_in_order<Fp16>(m, row, first, n, 1.0f, out);
    case kInt8: return widen_in_order<Int8>(m, row, first, n, ((const float*)m.scales)[row], out);
    case kFp8: return widen_in_order<Fp8>(m, row, first, n, ((const float*)m.scales)[row], out);
  }
  const int64_t start = row * m.columns + first;
  const bool is_int4 = m.format == kInt4;
  for (int64_t block = 0; block < n; block += kNibbleBlock) {
    const uN words = load_words((const uint32_t*)m.values + (start + block) / 8);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const int64_t group = (start + block + 32 * half) >> m.group_bits;
      const float scale = is_int4 ? ((const float*)m.scales)[group] : mxfp4_scale(((const uint8_t*)m.scales)[group]);
      widen_half(is_int4, words, half, scale, out + block + 32 * half);
    }
  }
}
