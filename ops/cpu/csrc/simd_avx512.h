// F16 of simd.h in one AVX-512 register.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd_x86.h"

namespace loom {

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
// Sixteen e4m3 numbers divided by 256: moved into a half a code keeps exponent and mantissa, under a
// bias of 15 instead of 7. Codes of NaN become numbers.
inline F16 load_e4m3(const void* p) {
  __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff))))};
}

// Sixteen floats that codes of four bits stand for; a line has a word of eight codes for each lane.
using FloatTable = F16;
inline FloatTable load_table(const float* p) { return load(p); }
template <int i>
inline F16 look_up(const FloatTable& table, const void* line) {
  __m512i codes = _mm512_srli_epi32(_mm512_loadu_si512(line), 4 * i);
  return {_mm512_permutexvar_ps(codes, table.v)};  // which takes the lowest four bits
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

}  // namespace loom
