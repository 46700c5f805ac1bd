// Sixteen float lanes, whatever the machine: one AVX-512 register or two AVX2 registers.
//
// Everything above this file is written once over F16. Each function does the same operations in
// the same order on every call, so a value depends on its inputs alone and never on how many rows
// are computed beside it.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace loom {

using bf16 = uint16_t;  // the upper half of a float
using half = uint16_t;  // IEEE binary16

constexpr int kLanes = 16;

// LOOM_YMM asks for two 256-bit registers on a machine that has 512-bit ones: so the instructions
// of narrower machines can be tested there.
#if defined(__AVX512F__) && !defined(LOOM_YMM)
#define LOOM_ZMM
#endif

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline float to_float(float x) { return x; }

// Rounds to nearest even; a NaN stays one.
inline bf16 to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline half to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
inline float to_float_half(half h) { return _cvtsh_ss(h); }

inline void narrow(float f, float* out) { *out = f; }
inline void narrow(float f, bf16* out) { *out = to_bf16(f); }

#if defined(LOOM_ZMM)

struct F16 {
  __m512 v;
};

// The first n lanes; none for n <= 0.
inline __mmask16 first(int n) {
  return n >= 16 ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1);
}

inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
// The first n lanes, zeros in the others. Whole rows are far more frequent than their ends, and an
// access without a mask is cheaper.
inline F16 load_n(const float* p, int n) {
  return n >= kLanes ? load(p) : F16{_mm512_maskz_loadu_ps(first(n), p)};
}
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float* p, F16 a, int n) {
  if (n >= kLanes) return store(p, a);
  _mm512_mask_storeu_ps(p, first(n), a.v);
}

inline F16 widen(__m256i x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline __m256i narrow(F16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i x = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(_mm512_srli_epi32(r, 16), nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
#endif
}
inline F16 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline F16 load_n(const bf16* p, int n) {
  return n >= kLanes ? load(p) : widen(_mm256_maskz_loadu_epi16(first(n), p));
}
inline void store(bf16* p, F16 a) { _mm256_storeu_si256((__m256i*)p, narrow(a)); }
inline void store_n(bf16* p, F16 a, int n) {
  if (n >= kLanes) return store(p, a);
  _mm256_mask_storeu_epi16(p, first(n), narrow(a));
}
inline F16 load_half(const half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline F16 load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
inline float sum(F16 a) { return _mm512_reduce_add_ps(a.v); }
inline float hmax(F16 a) { return _mm512_reduce_max_ps(a.v); }
// a * 2^n for a whole n.
inline F16 scale_by_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// x > 0, normal, as mantissa * 2^exponent with 1 <= mantissa < 2.
inline F16 mantissa(F16 x) {
  return {_mm512_getmant_ps(x.v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero)};
}
inline F16 exponent(F16 x) { return {_mm512_getexp_ps(x.v)}; }
// a where x > limit, b elsewhere.
inline F16 where_above(F16 x, float limit, F16 a, F16 b) {
  __mmask16 above = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GT_OQ);
  return {_mm512_mask_blend_ps(above, b.v, a.v)};
}
inline bool any_above(F16 x, float limit) {
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}
// Lanes lo <= i < hi of a, `other` elsewhere.
inline F16 keep_between(F16 a, int lo, int hi, F16 other) {
  __mmask16 in = first(hi) & __mmask16(~first(lo));
  return {_mm512_mask_blend_ps(in, other.v, a.v)};
}

// The two numbers of sixteen bfloat16 pairs, as floats.
inline F16 pair_even(const void* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline F16 pair_odd(const void* p) {
  __m512i high = _mm512_set1_epi32(int(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}

// Transposes sixteen rows of sixteen 32-bit words in place.
inline void transpose(F16 rows[16]) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_castps_si512(rows[i].v);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    rows[i].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    rows[i + 8].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
  }
}

#else  // AVX2 with FMA and F16C

struct F16 {
  __m256 lo, hi;
};

inline __m256i first8(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load_n(const float* p, int n) {
  if (n >= kLanes) return load(p);
  return {_mm256_maskload_ps(p, first8(n)), _mm256_maskload_ps(p + 8, first8(n - 8))};
}
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_n(float* p, F16 a, int n) {
  if (n >= kLanes) return store(p, a);
  _mm256_maskstore_ps(p, first8(n), a.lo);
  _mm256_maskstore_ps(p + 8, first8(n - 8), a.hi);
}

inline __m256 widen8(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __m256i narrow8(__m256 a) {
  __m256i x = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(r, 16), _mm256_set1_epi32(0x7fc0), nan);
}
inline F16 load(const bf16* p) {
  return {widen8(_mm_loadu_si128((const __m128i*)p)),
          widen8(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store(bf16* p, F16 a) {
  __m256i packed = _mm256_packus_epi32(narrow8(a.lo), narrow8(a.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
inline F16 load_n(const bf16* p, int n) {
  if (n >= kLanes) return load(p);
  bf16 t[16] = {};
  if (n > 0) memcpy(t, p, size_t(n) * 2);
  return load(t);
}
inline void store_n(bf16* p, F16 a, int n) {
  if (n >= kLanes) return store(p, a);
  bf16 t[16];
  store(t, a);
  if (n > 0) memcpy(p, t, size_t(n) * 2);
}
inline F16 load_half(const half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F16 load_int8(const int8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}

inline F16 operator+(F16 a, F16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F16 operator-(F16 a, F16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F16 operator*(F16 a, F16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F16 operator/(F16 a, F16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 abs(F16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F16 round(F16 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline float sum(F16 a) {
  __m256 x = _mm256_add_ps(a.lo, a.hi);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float hmax(F16 a) {
  __m256 x = _mm256_max_ps(a.lo, a.hi);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline __m256 scale_by_power8(__m256 a, __m256 n) {
  // In two halves, so that 2^n may lie below the smallest normal number.
  n = _mm256_max_ps(n, _mm256_set1_ps(-250.0f));
  __m256i whole = _mm256_cvtps_epi32(n), part = _mm256_srai_epi32(whole, 1);
  __m256i rest = _mm256_sub_epi32(whole, part), bias = _mm256_set1_epi32(127);
  __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(part, bias), 23));
  __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, f), g);
}
inline F16 scale_by_power(F16 a, F16 n) {
  return {scale_by_power8(a.lo, n.lo), scale_by_power8(a.hi, n.hi)};
}
// x > 0, normal, as mantissa * 2^exponent with 1 <= mantissa < 2.
inline __m256 mantissa8(__m256 x) {
  __m256 bits = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x007fffff)));
  return _mm256_or_ps(bits, _mm256_set1_ps(1.0f));
}
inline __m256 exponent8(__m256 x) {
  __m256i e = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(e, _mm256_set1_epi32(127)));
}
inline F16 mantissa(F16 x) { return {mantissa8(x.lo), mantissa8(x.hi)}; }
inline F16 exponent(F16 x) { return {exponent8(x.lo), exponent8(x.hi)}; }
inline F16 where_above(F16 x, float limit, F16 a, F16 b) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, l, _CMP_GT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, l, _CMP_GT_OQ))};
}
inline bool any_above(F16 x, float limit) {
  __m256 l = _mm256_set1_ps(limit);
  __m256 lo = _mm256_cmp_ps(x.lo, l, _CMP_GT_OQ), hi = _mm256_cmp_ps(x.hi, l, _CMP_GT_OQ);
  return _mm256_movemask_ps(_mm256_or_ps(lo, hi)) != 0;
}
inline __m256 keep_between8(__m256 a, int lo, int hi, __m256 other) {
  __m256i in = _mm256_andnot_si256(first8(lo), first8(hi));
  return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(in));
}
inline F16 keep_between(F16 a, int lo, int hi, F16 other) {
  return {keep_between8(a.lo, lo, hi, other.lo), keep_between8(a.hi, lo - 8, hi - 8, other.hi)};
}

inline __m256i load_words(const void* p, int i) {
  return _mm256_loadu_si256((const __m256i*)p + i);
}
inline F16 pair_even(const void* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(p, 0), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load_words(p, 1), 16))};
}
inline F16 pair_odd(const void* p) {
  __m256i high = _mm256_set1_epi32(int(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(load_words(p, 0), high)),
          _mm256_castsi256_ps(_mm256_and_si256(load_words(p, 1), high))};
}

// Eight rows of eight 32-bit words, transposed in place.
inline void transpose8(__m256 r[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

inline void transpose(F16 rows[16]) {
  __m256 upper_left[8], upper_right[8], lower_left[8], lower_right[8];
  for (int i = 0; i < 8; i++) {
    upper_left[i] = rows[i].lo;
    upper_right[i] = rows[i].hi;
    lower_left[i] = rows[i + 8].lo;
    lower_right[i] = rows[i + 8].hi;
  }
  transpose8(upper_left);
  transpose8(upper_right);
  transpose8(lower_left);
  transpose8(lower_right);
  for (int i = 0; i < 8; i++) {
    rows[i] = {upper_left[i], lower_left[i]};
    rows[i + 8] = {upper_right[i], lower_right[i]};
  }
}

#endif

// 2^x with a relative error below 2e-7; x above 127 gives inf or a wrong number, so callers pass
// x <= 0 or clamp. -inf gives 0.
inline F16 exp2(F16 x) {
  x = max(splat(-200.0f), x);  // in this order a NaN stays one
  F16 n = round(x);
  F16 f = x - n;
  // Taylor coefficients of 2^f: ln(2)^i / i!; |f| <= 1/2, so the first term left out is below 1.2e-7.
  F16 p = splat(1.5403530e-4f);
  p = fma(p, f, splat(1.3333558e-3f));
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, n);
}

constexpr float kLog2e = 1.44269504f;

inline F16 exp(F16 x) { return exp2(min(splat(87.0f), x) * splat(kLog2e)); }

// The natural logarithm of x > 0, x normal, to about one unit in the last place (the polynomial of
// Cephes' logf, Moshier 1992).
inline F16 log(F16 x) {
  F16 m = mantissa(x), e = exponent(x);
  e = where_above(m, 1.41421356f, e + splat(1.0f), e);
  m = where_above(m, 1.41421356f, m * splat(0.5f), m) - splat(1.0f);
  F16 p = splat(7.0376836292e-2f), square = m * m;
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  F16 y = m * square * p;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(square, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), m + y);
}

inline F16 sigmoid(F16 x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

inline F16 tanh(F16 x) {
  // 1 - 2 / (e^2x + 1) loses digits near 0 only in the absolute sense, which scores and
  // activations do not feel: the error stays below 1.2e-7.
  return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
}

}  // namespace loom
