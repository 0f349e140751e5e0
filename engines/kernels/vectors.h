// As many floats at a time as a register holds, and the types they are widened from: sixteen with AVX-512, else eight.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define JOULEBENCH_AVX2
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define JOULEBENCH_AVX512
#endif
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#define JOULEBENCH_NEON
typedef __fp16 half;  // C++ of GCC 12 knows _Float16 on x86 alone
#else
typedef _Float16 half;
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t w8 __attribute__((vector_size(32)));
typedef uint32_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef int8_t b8 __attribute__((vector_size(8)));
typedef uint8_t ub8 __attribute__((vector_size(8)));

// N: a whole register.
#ifdef JOULEBENCH_AVX512
constexpr int kLanes = 16;
typedef float fN __attribute__((vector_size(64)));
typedef int32_t wN __attribute__((vector_size(64)));
typedef uint32_t uN __attribute__((vector_size(64)));
constexpr __mmask16 kAll = 0xFFFF;  // without a mask GCC 12 warns of values that its own headers leave unset
#else
constexpr int kLanes = 8;
typedef f8 fN;
typedef w8 wN;
typedef u8x32 uN;
#endif

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The value, to be read from memory once however often it is used: GCC 12 takes whatever it loads from memory again at
// each use, so that four rows of weights and four of inputs were 32 reads and not 8.
template <class V>
__attribute__((always_inline)) inline V in_register(V value) {
#if defined(JOULEBENCH_AVX512)
  asm("" : "+v"(value));
#elif defined(JOULEBENCH_AVX2)
  asm("" : "+x"(value));
#endif
  return value;
}

// What several products take in turn. Tuned for a Zen 3, GCC 12 reads it anew for each, and the core cannot read as often as
// it multiplies. Loops with AVX-512 were not measured so, and are left as they are.
template <class V>
__attribute__((always_inline)) inline V for_several(V value) {
  return kLanes == 8 ? in_register(value) : value;
}

// A sum of whole numbers, as it stands: GCC 12 adds them in an order of its own, makes all products first for that, and
// keeps these in memory.
template <class V>
__attribute__((always_inline)) inline V in_turn(V sum) {
  return in_register(sum);
}

#ifdef JOULEBENCH_NEON
inline f8 both(float32x4_t low, float32x4_t high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

inline w8 widened(int16x8_t v) {
  return __builtin_shufflevector(vmovl_s16(vget_low_s16(v)), vmovl_s16(vget_high_s16(v)), 0, 1, 2, 3, 4, 5, 6, 7);
}

inline u8x32 widened(uint16x8_t v) {
  return __builtin_shufflevector(vmovl_u16(vget_low_u16(v)), vmovl_u16(vget_high_u16(v)), 0, 1, 2, 3, 4, 5, 6, 7);
}
#endif

// sum + a b, rounded once where the processor can. What the compiler does with most sums is said here where it does it with
// some: tuned for a Zen 3, GCC 12 did not do it alike in attention over floats and over halves.
inline f8 add_product(f8 sum, f8 a, f8 b) {
#if defined(JOULEBENCH_AVX2) && defined(__FMA__)
  return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(JOULEBENCH_NEON)
  float32x4_t sums[2], as[2], bs[2];
  std::memcpy(sums, &sum, sizeof sum), std::memcpy(as, &a, sizeof a), std::memcpy(bs, &b, sizeof b);
  return both(vfmaq_f32(sums[0], as[0], bs[0]), vfmaq_f32(sums[1], as[1], bs[1]));
#else
  return sum + a * b;
#endif
}

#ifdef JOULEBENCH_AVX512
inline fN add_product(fN sum, fN a, fN b) {
  return (fN)_mm512_maskz_fmadd_ps(kAll, (__m512)a, (__m512)b, (__m512)sum);
}
#endif

typedef float f4 __attribute__((vector_size(16)));

template <class V>
inline void store(float* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// Lanes are added in one order: i and i + 8, then i and i + 4, then 0 and 2, 1 and 3, then both.
inline f4 folded(f8 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7); }

inline float sum(f4 v) {
  const f4 pairs = v + __builtin_shufflevector(v, v, 2, 3, 2, 3);
  return pairs[0] + pairs[1];
}

inline float sum(f8 v) { return sum(folded(v)); }

inline f8 halved(f8 v) { return v; }

#ifdef JOULEBENCH_AVX512
inline f8 halved(fN v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline f4 folded(fN v) { return folded(halved(v)); }

inline float sum(fN v) { return sum(folded(v)); }
#endif

// The sum of what `of` makes of a row's numbers.
template <class F>
inline float sum_over(const float* x, int64_t n, const F& of) {
  f8 totals = {};
  float rest = 0;
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) totals += of(load<f8>(x + c));
  for (; c < n; c++) rest += of(x[c]);
  return sum(totals) + rest;
}

// out[i] = sum(at(i)), four at a time.
template <int N, class F>
inline void sum_each(const F& at, float* out) {
  f4 folds[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) folds[i] = folded(at(i));
  int i = 0;
#pragma GCC unroll 4
  for (; i + 4 <= N; i += 4) {
    const f4 a = folds[i], b = folds[i + 1], c = folds[i + 2], d = folds[i + 3];
    const f4 ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    const f4 cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    const f4 four = __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
    store(out + i, four);
  }
#pragma GCC unroll 4
  for (; i < N; i++) out[i] = sum(folds[i]);
}

// Of two numbers the larger; b where one is no number.
template <class F>
inline F larger(F a, F b) {
  return a > b ? a : b;
}
#if defined(JOULEBENCH_AVX512)  // GCC 12 compares and chooses, which takes three times as long
inline fN larger(fN a, fN b) { return (fN)_mm512_maskz_max_ps(kAll, (__m512)a, (__m512)b); }
#endif

// Which of n numbers is the largest, the first of several, and its value: NaN where one is no number. Each lane of each
// of some registers finds its own first; with one register each step would wait for the one before.
inline int64_t largest(const float* x, int64_t n, float* value) {
  constexpr int kAtOnce = 4;
  fN most[kAtOnce];
  wN at[kAtOnce] = {}, odd[kAtOnce] = {};
  std::fill_n(most, kAtOnce, fN{} - INFINITY);
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < kAtOnce; k++) {
      const fN some = load<fN>(x + i + k * kLanes);
      at[k] = some > most[k] ? wN{} + int32_t(i + k * kLanes) : at[k];
      most[k] = some > most[k] ? some : most[k];
      odd[k] |= some != some;
    }
  }
  int64_t best = 0;
  float found = -INFINITY;
  bool is_odd = false;
  for (int k = 0; k < kAtOnce; k++) {
    for (int lane = 0; lane < kLanes; lane++) {
      const int64_t place = at[k][lane] + lane;
      if (most[k][lane] > found || (most[k][lane] == found && place < best)) best = place, found = most[k][lane];
      is_odd |= odd[k][lane] != 0;
    }
  }
  for (; i < n; i++) {
    if (x[i] > found) best = i, found = x[i];
    is_odd |= x[i] != x[i];
  }
  *value = is_odd ? NAN : found;
  return best;
}

// e^x for x <= 0, to 2e-7: 2^k times a polynomial in the rest, |rest| <= ln 2 / 2 (Cephes' expf). Of N registers step by
// step, for each step waits for the one before it.
template <int N, class F>
inline void exp_below_one(F (&x)[N]) {
  typedef decltype(x[0] < x[0]) W;
  F shifted[N], p[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = x[i] < -87.0f ? F{} - 87.0f : x[i];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) shifted[i] = x[i] * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const F k = shifted[i] - 12582912.0f;
    x[i] = (x[i] - k * 0.693359375f) + k * 2.12194440e-4f;
    p[i] = F{} + 1.9875691500e-4f;
  }
#pragma GCC unroll 5
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + c;
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) p[i] = p[i] * x[i] * x[i] + x[i] + 1.0f;
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = p[i] * (F)(((W)shifted[i] + 127) << 23);  // k is what the low bits of shifted hold
}

#if defined(JOULEBENCH_AVX512)
// The same to 2^-18, in half of the steps, for what is rounded to 8 bits then: 2^k times the polynomial of this degree whose
// largest relative error over 0 .. 1 is least.
template <int N>
inline void roughly_exp_below_one(fN (&x)[N]) {
  constexpr int kBelow = 1;  // the whole number below, and none of the digits behind it
  fN rest[N], p[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    x[i] *= 1.44269504f;
    rest[i] = (fN)_mm512_maskz_reduce_ps(kAll, (__m512)x[i], kBelow);
    p[i] = fN{} + 1.353416778e-2f;
  }
#pragma GCC unroll 4
  for (float c : {5.201146007e-2f, 2.414427549e-1f, 6.930038333e-1f, 1.000002623f})
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) p[i] = p[i] * rest[i] + c;
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = (fN)_mm512_maskz_scalef_ps(kAll, (__m512)p[i], (__m512)x[i]);
}
#endif

template <class F>
inline F exp_below_one(F x) {
  F one[] = {x};
  exp_below_one(one);
  return one[0];
}

// x * sigmoid(x)
template <class F>
inline F silu(F x) {
  const F e = exp_below_one(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : F{} + 1.0f) / (e + 1.0f);
}

inline void silu_row(float* x, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(x + c, silu(load<fN>(x + c)));
  if (c == n) return;
  fN rest = {};  // by the same steps, so that a number's bits do not depend on where it stands
  std::memcpy(&rest, x + c, (n - c) * sizeof(float));
  rest = silu(rest);
  std::memcpy(x + c, &rest, (n - c) * sizeof(float));
}

// A core alone asks for too few lines at a time to keep the memory busy, however many rows it reads side by side. So each
// line is asked for some time before it is read: this many bytes, of four rows. It was seen to help a Zen 4 and a Zen 5, with
// AVX-512 and without, and an Intel Emerald Rapids with it, and to harm a Zen 3: not where the compiler names that or one before
// it, which have no AVX-512. GCC 12 takes later ones for a Zen 3.
constexpr int64_t kAhead = 1024, kLine = 64;
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__)
#define JOULEBENCH_EARLY_ZEN
#endif
#if defined(JOULEBENCH_AVX512) || (defined(JOULEBENCH_AVX2) && !defined(JOULEBENCH_EARLY_ZEN))
constexpr bool kAsksAhead = true;
#else
constexpr bool kAsksAhead = false;
#endif

// A Zen 5, which compilers that do not know it take for an older one with an instruction that only it has of AMD's.
#if defined(__znver5__) || (defined(__AVX512VP2INTERSECT__) && (defined(__znver3__) || defined(__znver4__)))
constexpr bool kIsZen5 = true;
#else
constexpr bool kIsZen5 = false;
#endif

// Of __builtin_prefetch. The second cache is asked, for the first one of a Zen 4 waits for 24 lines at most. That of a Zen 5
// waits for more, and is the faster way there.
constexpr int kFirstCache = 3, kSecondCache = 2, kAskedCache = kIsZen5 ? kFirstCache : kSecondCache;

// Where n_rows are read side by side: fewer rows are read sooner.
constexpr int64_t ahead_of(int n_rows) { return 4 * kAhead / n_rows; }

// When n_bytes at `from` are read: asks for those that lie `ahead`. There may be none, which does no harm. GCC 12 leaves out
// calls of functions that do nothing else, unless it must put them in line.
__attribute__((always_inline)) inline void ask_ahead(const void* from, int64_t n_bytes, int64_t ahead = kAhead) {
  const char* const there = (const char*)from + ahead;
  for (int64_t at = 0; kAsksAhead && at < n_bytes; at += kLine) __builtin_prefetch(there + at, 0, kAskedCache);
}

// As many as hold n, the last perhaps in part.
inline int64_t n_pieces(int64_t n, int64_t of_piece) { return (n + of_piece - 1) / of_piece; }
