// Tiles by the matrix products of 64-bit Arm: two rows by two outputs in one instruction, `bfmmla`
// over four k of bfloat16 and `smmla` over eight k of bytes.
//
// Where the number of rows is odd the last one is there twice, so that one row goes through the same
// instructions as many: a row's sums never depend on the rows beside it.
#pragma once

#include "quantized_tiles.h"

namespace loom {

// Row 2 pair + which of R rows.
template <int R>
constexpr int row_in(int pair, int which) {
  return 2 * pair + which < R ? 2 * pair + which : R - 1;
}

// The sixteen sums of one row of a pair; element j has outputs 2 j and 2 j + 1 of the first row, then
// of the second.
inline F16 sums_of_row(const float32x4_t sums[8], int which) {
  return each([=](int i) {
    float32x4_t a = sums[2 * i], b = sums[2 * i + 1];
    return which ? vcombine_f32(vget_high_f32(a), vget_high_f32(b))
                 : vcombine_f32(vget_low_f32(a), vget_low_f32(b));
  });
}

#if defined(LOOM_BFMMLA)

// x bfloat16, one panel of bfloat16 in blocks of four k.
template <int R>
void tile_bf16_by_matrix(const Tile& t) {
  constexpr int pairs = (R + 1) / 2;
  float32x4_t sums[pairs][8] = {};
  for (int64_t s = 0; s < t.steps; s += 2) {
    if (t.prefetch0) {
      prefetch(t.prefetch0 + 64 * s);
      prefetch(t.prefetch0 + 64 * s + 64);
    }
    bfloat16x8_t x[pairs];
#pragma GCC unroll 6
    for (int i = 0; i < pairs; i++) {
      auto four_k = [&](int which) {
        return vld1_u16((const bf16*)(t.x + row_in<R>(i, which) * t.x_stride) + 2 * s);
      };
      x[i] = vreinterpretq_bf16_u16(vcombine_u16(four_k(0), four_k(1)));
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      bfloat16x8_t w = vreinterpretq_bf16_u16(vld1q_u16((const bf16*)(t.panel0 + 64 * s) + 8 * j));
#pragma GCC unroll 6
      for (int i = 0; i < pairs; i++) sums[i][j] = vbfmmlaq_f32(sums[i][j], x[i], w);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) store(t.out + r * t.out_stride, sums_of_row(sums[r / 2], r % 2));
}

#endif

#if defined(LOOM_SMMLA)

// Quads `quad` and the one behind it of sixteen outputs: eight k of two outputs in each element.
template <int kind, int quad>
inline void eight_k(const char* group, int8x16_t out[8]) {
  Bytes first = codes_of<kind, quad>(group), second = codes_of<kind, quad + 1>(group);
  for (int i = 0; i < 4; i++) {
    int32x4_t a = vreinterpretq_s32_s8(first.v[i]), b = vreinterpretq_s32_s8(second.v[i]);
    out[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    out[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}

// The sums of stretch `part` of group g of one panel, without their start.
template <int kind, int part, int R>
inline void sum_stretch(const Tile& t, int64_t g, float32x4_t out[][8],
                        const GroupOfRow* const of_row[R]) {
  constexpr CodeForm form = form_of(kind);
  constexpr int pairs = (R + 1) / 2, eights = form.stretch / 8;
  int32x4_t sums[pairs][8] = {};
  unrolled<eights>([&](auto i) __attribute__((always_inline)) {
    constexpr int at = part * form.stretch + 8 * decltype(i)::value;
    int8x16_t w[8];
    eight_k<kind, at / 4>(t.panel0 + 64 * g * form.lines(), w);
#pragma GCC unroll 2
    for (int i = 0; i < pairs; i++) {
      auto row = [&](int which) {
        return vld1_s8((const int8_t*)t.x + row_in<R>(i, which) * t.x_stride + g * kGroup + at);
      };
      int8x16_t x = vcombine_s8(row(0), row(1));
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) sums[i][j] = vmmlaq_s32(sums[i][j], x, w[j]);
    }
  });
#pragma GCC unroll 2
  for (int i = 0; i < pairs; i++) {
    // An element has two outputs of the first row, then of the second.
    int32x2_t first = vdup_n_s32(start_of<kind>(*of_row[row_in<R>(i, 0)], part));
    int32x2_t second = vdup_n_s32(start_of<kind>(*of_row[row_in<R>(i, 1)], part));
    int32x4_t start = vcombine_s32(first, second);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) out[i][j] = vcvtq_f32_s32(vaddq_s32(sums[i][j], start));
  }
}

// tile_quantized_panels of one panel, with its bits.
template <int kind, int R>
void tile_quantized_by_matrix(const Tile& t) {
  constexpr CodeForm form = form_of(kind);
  constexpr int lines = form.lines();
  int64_t groups = t.steps / lines;
  const char* next = t.prefetch0 ? t.prefetch0 : t.panel0;
  Accumulators<R, 1> acc;
  acc.start(t);
  for (int64_t g = 0; g < groups; g++) {
    prefetch(next + 64 * t.steps + g * form.group_scale_bytes());
    for (int i = 0; i < lines; i++) prefetch(next + 64 * (g * lines + i));
    const GroupOfRow* of_row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      of_row[r] = (const GroupOfRow*)(t.x + r * t.x_stride + groups * kGroup) + g;
    }
    unrolled<kGroup / form.stretch>([&](auto part) __attribute__((always_inline)) {
      constexpr int stretch = decltype(part)::value;
      float32x4_t sums[(R + 1) / 2][8];
      sum_stretch<kind, stretch, R>(t, g, sums, of_row);
      Scales<kind> of_panel(t.panel0 + 64 * t.steps, g, stretch);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        F16 sum = sums_of_row(sums[r / 2], r % 2);
        acc.a[r][0] = add_stretch<kind>(acc.a[r][0], sum, of_panel, *of_row[r], stretch);
      }
    });
  }
  acc.finish(t);
}

#endif

}  // namespace loom
