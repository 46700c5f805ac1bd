// F16 of simd.h in two AVX2 registers; needs FMA and F16C.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd_x86.h"

namespace loom {

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
inline F16 load_e4m3(const void* p) {
  __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  x = _mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}

using FloatTable = F16;
inline FloatTable load_table(const float* p) { return load(p); }
template <int i>
inline F16 look_up(const FloatTable& table, const void* line) {
  auto eight = [&](int half) {
    __m256i words = _mm256_loadu_si256((const __m256i*)line + half);
    __m256i codes = _mm256_srli_epi32(words, 4 * i);  // the lowest three bits count
    __m256 low = _mm256_permutevar8x32_ps(table.lo, codes);
    __m256 high = _mm256_permutevar8x32_ps(table.hi, codes);
    __m256i fourth = _mm256_slli_epi32(words, 28 - 4 * i);  // the fourth chooses, as a sign
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(fourth));
  };
  return {eight(0), eight(1)};
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

}  // namespace loom
