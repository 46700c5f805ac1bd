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

// Eight k of sixteen outputs, two outputs in each element: the two quads of each side by side.
template <int kind>
inline void eight_k(const char* line, int8x16_t out[8]) {
  constexpr int quads = Group<kind>::quads;
  Bytes first = weights_of<kind>(line, 0);
  Bytes second = weights_of<kind>(line + (quads == 1 ? 64 : 0), quads - 1);
  for (int i = 0; i < 4; i++) {
    int32x4_t a = vreinterpretq_s32_s8(first.v[i]), b = vreinterpretq_s32_s8(second.v[i]);
    out[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    out[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}

// The sums of group g of one panel's lines; the lines of `next` are fetched meanwhile.
template <int kind, int R>
inline void sum_group(const Tile& t, int64_t g, const char* next, float32x4_t out[][8]) {
  using G = Group<kind>;
  constexpr int pairs = (R + 1) / 2;
  int32x4_t sums[pairs][8] = {};
  for (int64_t at = g * kGroup; at < (g + 1) * kGroup; at += 8) {
    int64_t line = at / G::k_per_line;
    prefetch(next + 64 * line);
    if (G::quads == 1) prefetch(next + 64 * line + 64);
    int8x16_t w[8];
    eight_k<kind>(t.panel0 + 64 * line, w);
#pragma GCC unroll 2
    for (int i = 0; i < pairs; i++) {
      auto row = [&](int which) {
        return vld1_s8((const int8_t*)t.x + row_in<R>(i, which) * t.x_stride + at);
      };
      int8x16_t x = vcombine_s8(row(0), row(1));
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) sums[i][j] = vmmlaq_s32(sums[i][j], x, w[j]);
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < pairs; i++) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) out[i][j] = vcvtq_f32_s32(sums[i][j]);
  }
}

// tile_quantized_panels of one panel, with its bits.
template <int kind, int R>
void tile_quantized_by_matrix(const Tile& t) {
  using G = Group<kind>;
  int64_t groups = t.steps / G::lines;
  const char* next = t.prefetch0 ? t.prefetch0 : t.panel0;
  Accumulators<R, 1> acc;
  acc.start(t);
  for (int64_t g = 0; g < groups; g++) {
    int64_t at = 64 * t.steps + g * G::scale_bytes;  // of the group's scales in a panel
    prefetch(next + at);
    float32x4_t sums[(R + 1) / 2][8];
    sum_group<kind, R>(t, g, next, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      auto* of_row = (const GroupOfRow*)(t.x + r * t.x_stride + groups * kGroup) + g;
      acc.a[r][0] = add_group<kind>(acc.a[r][0], sums_of_row(sums[r / 2], r % 2), t.panel0 + at,
                                    of_row->scale, of_row->scaled_sum);
    }
  }
  acc.finish(t);
}

#endif

}  // namespace loom
