// The sums of integers.h with AVX-512, AVX2 and either kind of VNNI.
#pragma once

#include "forms.h"
#include "simd.h"

namespace loom {

// The sums of eight words and of eight more.
inline HalfSums half_sums(__m256i a, __m256i b) {
  __m256i quads = _mm256_hadd_epi32(a, b);
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  sums = _mm_hadd_epi32(sums, sums);
  return {_mm_cvtsi128_si32(sums), _mm_extract_epi32(sums, 1)};
}

#if defined(LOOM_ZMM)

inline uint32_t peak_bits(F16 a, F16 b) {
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_castps_si512(abs(a).v), _mm512_castps_si512(abs(b).v)));
}
inline HalfSums to_bytes(F16 a, F16 b, char* out) {
  __m512i x = _mm512_cvtps_epi32(a.v), y = _mm512_cvtps_epi32(b.v);
  _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(x));
  _mm_storeu_si128((__m128i*)out + 1, _mm512_cvtsepi32_epi8(y));
  auto folded = [](__m512i v) {
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  };
  return half_sums(folded(x), folded(y));
}
inline F16 from_halves(__m256i lo, __m256i hi) {
  return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1))};
}

#else

inline uint32_t peak_bits(F16 a, F16 b) {
  a = abs(a), b = abs(b);
  __m256i x = _mm256_max_epu32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
  __m256i y = _mm256_max_epu32(_mm256_castps_si256(b.lo), _mm256_castps_si256(b.hi));
  x = _mm256_max_epu32(x, y);
  __m128i z = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  z = _mm_max_epu32(z, _mm_shuffle_epi32(z, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(z, _mm_shuffle_epi32(z, 0xb1))));
}
inline HalfSums to_bytes(F16 a, F16 b, char* out) {
  __m256i i[] = {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi), _mm256_cvtps_epi32(b.lo),
                 _mm256_cvtps_epi32(b.hi)};
  // Packing works within 128-bit lanes: every fourth word of the result belongs together.
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)out, bytes);
  return half_sums(_mm256_add_epi32(i[0], i[1]), _mm256_add_epi32(i[2], i[3]));
}
inline F16 from_halves(__m256i lo, __m256i hi) {
  return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)};
}

#endif

#if defined(LOOM_ZMM) && defined(__AVX512VNNI__)
using Words = __m512i;
inline Words all_words(int word) { return _mm512_set1_epi32(word); }
#else
using Words = __m256i;
inline Words all_words(int word) { return _mm256_set1_epi32(word); }
#endif

struct Quad {
  Words v;
  explicit Quad(const char* x) {
    int quad;
    memcpy(&quad, x, 4);
    v = all_words(quad);
  }
};

#if defined(LOOM_ZMM) && defined(__AVX512VNNI__)

struct Bytes {
  __m512i v;
};
// Of codes with a sign: they are taken as unsigned bytes.
constexpr int kSignedOffset = 128;

inline Bytes load_bytes(const char* line) { return {_mm512_loadu_si512(line)}; }
// By so many bits to the right, or to the left; neighbours' bits come in.
template <int bits>
inline Bytes shifted(Bytes x) {
  if constexpr (bits > 0) x.v = _mm512_srli_epi32(x.v, bits);
  if constexpr (bits < 0) x.v = _mm512_slli_epi32(x.v, -bits);
  return x;
}
inline Bytes masked(Bytes x, int mask) {
  return {_mm512_and_si512(x.v, _mm512_set1_epi8(char(mask)))};
}
inline Bytes either(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// Bytes w + 128 as codes with a sign.
inline Bytes signed_bytes(Bytes x) { return x; }
inline Bytes looked_up(const int8_t* table, Bytes x) {
  __m128i codes = _mm_add_epi8(_mm_loadu_si128((const __m128i*)table), _mm_set1_epi8(-128));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(codes), x.v)};
}

template <int kind>
struct GroupSum {
  __m512i v;
  void start(int32_t sum) { v = _mm512_set1_epi32(sum); }
  void add(Bytes w, Quad x) { v = _mm512_dpbusd_epi32(v, w.v, x.v); }
  F16 value() const { return {_mm512_cvtepi32_ps(v)}; }
};

#else

struct Bytes {
  __m256i lo, hi;
};

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define LOOM_VNNI_YMM
#else
#define LOOM_INT8_WORDS  // see int8_words.h
#endif

#if defined(LOOM_VNNI_YMM)
constexpr int kSignedOffset = 128;
#else
constexpr int kSignedOffset = 0;
#endif

inline Bytes load_bytes(const char* line) {
  auto* words = (const __m256i*)line;
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
template <int bits>
inline Bytes shifted(Bytes x) {
  if constexpr (bits > 0) x = {_mm256_srli_epi32(x.lo, bits), _mm256_srli_epi32(x.hi, bits)};
  if constexpr (bits < 0) x = {_mm256_slli_epi32(x.lo, -bits), _mm256_slli_epi32(x.hi, -bits)};
  return x;
}
inline Bytes masked(Bytes x, int mask) {
  __m256i m = _mm256_set1_epi8(char(mask));
  return {_mm256_and_si256(x.lo, m), _mm256_and_si256(x.hi, m)};
}
inline Bytes either(Bytes a, Bytes b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
inline Bytes signed_bytes(Bytes x) {
  if (kSignedOffset) return x;
  __m256i sign = _mm256_set1_epi8(char(128));
  return {_mm256_xor_si256(x.lo, sign), _mm256_xor_si256(x.hi, sign)};
}
inline Bytes looked_up(const int8_t* table, Bytes x) {
  __m128i codes = _mm_loadu_si128((const __m128i*)table);
  __m256i both = _mm256_broadcastsi128_si256(_mm_add_epi8(codes, _mm_set1_epi8(-kSignedOffset)));
  return {_mm256_shuffle_epi8(both, x.lo), _mm256_shuffle_epi8(both, x.hi)};
}

template <int kind>
struct GroupSum {
  __m256i lo, hi;

#if defined(LOOM_VNNI_YMM)
  void start(int32_t sum) { lo = hi = _mm256_set1_epi32(sum); }
  void add(Bytes w, Quad x) { lo = dot(lo, w.lo, x.v), hi = dot(hi, w.hi, x.v); }
  F16 value() const { return from_halves(lo, hi); }

 private:
  static __m256i dot(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
    return _mm256_dpbusd_epi32(sum, w, x);
#endif
  }
#else
  void start(int32_t sum) {
    first = sum;
    lo = hi = kShort ? _mm256_setzero_si256() : _mm256_set1_epi32(sum);
  }
  void add(Bytes w, Quad x) {
    lo = dot(lo, w.lo, x.v), hi = dot(hi, w.hi, x.v);
    // Sums of integers may be taken in any order, and GCC would write all products to memory first.
    asm("" : "+x"(lo), "+x"(hi));
  }
  F16 value() const {
    if (!kShort) return from_halves(lo, hi);
    __m256i ones = _mm256_set1_epi16(1), sum = _mm256_set1_epi32(first);
    return from_halves(_mm256_add_epi32(_mm256_madd_epi16(lo, ones), sum),
                       _mm256_add_epi32(_mm256_madd_epi16(hi, ones), sum));
  }

 private:
  // Products of a whole group fit int16.
  static constexpr bool kShort = form_of(kind).bits <= 4 && form_of(kind).largest() <= 16;
  int32_t first;

  static __m256i dot(__m256i sum, __m256i w, __m256i x) {
    __m256i pairs = form_of(kind).is_signed()
                        ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                        : _mm256_maddubs_epi16(w, x);
    if (kShort) return _mm256_add_epi16(sum, pairs);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#endif
};

#endif

}  // namespace loom
