// The two ways in which attention computes its products.
#pragma once

#include <algorithm>

#include "linear.h"

namespace loom {

// How the products are computed: what a query and a softmax weight are stored as, and how a tile's
// rows become panels. Two value panels hold 32 dimensions in an order of their own, which
// `restore` undoes in the output.
struct FloatMath {
  using X = float;
  static constexpr int k_per_line = 1;
  static void tile(int rows, const Tile& t) { tile_float(rows, t); }
  static void wide_tile(int rows, const Tile& t) { tile_float_wide(rows, t); }

  template <class T>
  static void transposed(const T* const* keys, int64_t d, F16 block[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) block[i] = load(keys[i] + d);
    transpose(block);
  }
  template <class T>
  static F16 words(const T* row, int n) {
    return load_n(row, n);
  }
  template <class T>
  static void value_lines(const T* const* values, int line, int64_t d, int n, char* panel0,
                          char* panel1) {
    const T* from = values[line] + d;
    store((float*)panel0, load_n(from, n));
    store((float*)panel1, n > kLanes ? load_n(from + kLanes, n - kLanes) : splat(0.0f));
  }
  static void restore(float*) {}
};

#if defined(__AVX512BF16__)
struct DotMath {
  using X = bf16;
  static constexpr int k_per_line = 2;
  static void tile(int rows, const Tile& t) { tile_bf16(rows, t); }
  static void wide_tile(int rows, const Tile& t) { tile_bf16_wide(rows, t); }

  // Sixteen pairs of dimensions of sixteen keys, transposed. Gathering 16-byte pieces while loading
  // does half of the shuffling on the load ports.
  static void transposed(const bf16* const* keys, int64_t d, F16 block[16]) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      __m512i z[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        auto piece = [&](int key) { return _mm_loadu_si128((const __m128i*)(keys[key] + d) + c); };
        z[i] = _mm512_castsi128_si512(piece(i));
        z[i] = _mm512_inserti32x4(z[i], piece(i + 4), 1);
        z[i] = _mm512_inserti32x4(z[i], piece(i + 8), 2);
        z[i] = _mm512_inserti32x4(z[i], piece(i + 12), 3);
      }
      __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
      __m512i e = _mm512_unpackhi_epi32(z[0], z[1]), f = _mm512_unpackhi_epi32(z[2], z[3]);
      block[4 * c].v = _mm512_castsi512_ps(_mm512_unpacklo_epi64(a, b));
      block[4 * c + 1].v = _mm512_castsi512_ps(_mm512_unpackhi_epi64(a, b));
      block[4 * c + 2].v = _mm512_castsi512_ps(_mm512_unpacklo_epi64(e, f));
      block[4 * c + 3].v = _mm512_castsi512_ps(_mm512_unpackhi_epi64(e, f));
    }
  }

  // Up to sixteen pairs of a key's dimensions.
  static F16 words(const bf16* row, int n) {
    return n >= 2 * kLanes ? load((const float*)row) : load_n((const float*)row, n / 2);
  }
  // 32 dimensions of two successive keys' values, paired. Unpacking within 128-bit lanes leaves
  // dimensions 8 i .. 8 i + 3 in the first panel and 8 i + 4 .. 8 i + 7 in the second.
  static void value_lines(const bf16* const* values, int line, int64_t d, int n, char* panel0,
                          char* panel1) {
    const bf16 *even = values[2 * line] + d, *odd = values[2 * line + 1] + d;
    __m512i a, b;
    if (n >= 32) {
      a = _mm512_loadu_si512(even);
      b = _mm512_loadu_si512(odd);
    } else {
      a = _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, even);
      b = _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, odd);
    }
    _mm512_storeu_si512(panel0, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(panel1, _mm512_unpackhi_epi16(a, b));
  }
  static void restore(float* out) {
    __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512 a = _mm512_loadu_ps(out), b = _mm512_loadu_ps(out + kPanel);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(out + kPanel, _mm512_permutex2var_ps(a, high, b));
  }
};
#endif

}  // namespace loom
