// Many rows of int8 on AVX2 without VNNI.
//
// A product of bytes takes four instructions there (integers.h), one of 16-bit words two: so the
// weights of a block of K and the rows are widened to words once, and each is used by all the others.
// The sums of a group are integers, so their bits are those of every other way.
#pragma once

#include <algorithm>

#include "quantized_tiles.h"

namespace loom {

constexpr int kWordRows = 6;  // by sixteen outputs: what sixteen registers hold
// A block's words of two panels and of so many rows stay in the first cache.
constexpr int64_t kWordBlockK = 128, kWordBlockRows = 48;

// Lines first .. last - 1 of an int8 panel as words: two k a line, sixteen pairs.
inline void widen_lines(const char* panel, int64_t first, int64_t last, int16_t* out) {
  __m256i sign = _mm256_set1_epi8(char(128));  // w + 128 as a signed w
  // To the upper halves of words go bytes 0 and 1 of each quad, then bytes 2 and 3.
  __m256i first_pair = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
  __m256i bytes[] = {first_pair, _mm256_add_epi8(first_pair, _mm256_set1_epi16(0x0200))};
  for (int64_t s = first; s < last; s++, out += 64) {
    for (int half = 0; half < 2; half++) {
      auto* from = (const __m256i*)(panel + 64 * s) + half;
      __m256i w = _mm256_xor_si256(_mm256_loadu_si256(from), sign);
      for (int pair = 0; pair < 2; pair++) {
        __m256i words = _mm256_srai_epi16(_mm256_shuffle_epi8(w, bytes[pair]), 8);
        _mm256_store_si256((__m256i*)(out + 32 * pair) + half, words);
      }
    }
  }
}

// `count` bytes of a row, a multiple of 16, as words.
inline void widen_row(const char* x, int64_t count, int16_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(x + i)));
    _mm256_store_si256((__m256i*)(out + i), words);
  }
}

// R rows by one panel over some groups.
struct WordTile {
  const int16_t* x;  // rows of kWordBlockK words
  const int16_t* panel;
  const char* scales;      // of the panel's first group
  const GroupOfRow* of_x;  // of the first row's first group
  int64_t row_bytes;       // from one row's to the next row's
  int64_t groups;
  float* out;
  int64_t out_stride;  // elements
  bool accumulate;
};

template <int R>
void tile_words(WordTile t) {
  for (int64_t g = 0; g < t.groups; g++) {
    __m256i lo[R], hi[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) lo[r] = hi[r] = _mm256_setzero_si256();
    const int16_t *w = t.panel + g * kGroup * kPanel, *x = t.x + g * kGroup;
    // Unrolled: in a loop GCC copies every sum around its product.
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; i += 2) {
      __m256i w_lo = _mm256_load_si256((const __m256i*)(w + i * kPanel));
      __m256i w_hi = _mm256_load_si256((const __m256i*)(w + i * kPanel) + 1);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        int pair;
        memcpy(&pair, x + r * kWordBlockK + i, 4);
        __m256i all = _mm256_set1_epi32(pair);
        lo[r] = _mm256_add_epi32(lo[r], _mm256_madd_epi16(w_lo, all));
        hi[r] = _mm256_add_epi32(hi[r], _mm256_madd_epi16(w_hi, all));
        asm volatile("" : "+x"(lo[r]), "+x"(hi[r]));
      }
    }
    F16 scale = load_half((const half*)(t.scales + g * form_of(LOOM_KIND_INT8).span_bytes()));
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      float* out = t.out + r * t.out_stride;
      F16 sum = t.accumulate || g > 0 ? load(out) : splat(0.0f);
      auto* of_row = (const GroupOfRow*)((const char*)t.of_x + r * t.row_bytes) + g;
      store(out, fma(from_halves(lo[r], hi[r]), scale * splat(of_row->scale), sum));
    }
  }
}

inline void tile_words(int rows, const WordTile& t) {
  switch (rows) {
    case 1: return tile_words<1>(t);
    case 2: return tile_words<2>(t);
    case 3: return tile_words<3>(t);
    case 4: return tile_words<4>(t);
    case 5: return tile_words<5>(t);
    default: return tile_words<6>(t);
  }
}

}  // namespace loom
