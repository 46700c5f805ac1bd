// Register tiles of the int8 and int4 kinds.
//
// With VNNI the input rows are int8 with one float scale per group: a group's products add up
// exactly in int32 (unsigned weight byte times signed input byte), then join the float sum with
// both scales. The weight's offset needs no work per element: sum((w + 128) x) - 128 sum(x), and
// sum(scale q x + minimum x) = scale sum(q x) + minimum sum(x), where sum(x) belongs to the row.
// Without VNNI the rows are float and the weight bytes are widened.
#pragma once

#include "tiles.h"

namespace loom {

// An encoded int8 row: K bytes, then one GroupOfRow per group.
struct GroupOfRow {
  float scale;
  float scaled_sum;  // scale * sum of the group's bytes
  int32_t offset;    // -128 * that sum: what the weights' offset of 128 adds too much
  int32_t reserved;
};

template <int kind>
struct Group {
  static constexpr int k_per_line = kind == LOOM_KIND_INT8 ? 4 : 8;
  static constexpr int lines = kGroup / k_per_line;
  static constexpr int scale_bytes = kind == LOOM_KIND_INT8 ? 32 : 64;
};

// sum += (int32 sum of a group) scaled; `scales` is the group's entry of the panel.
template <int kind>
inline F16 add_group(F16 sum, F16 group, const char* scales, float row_scale, float row_sum) {
  F16 scale = load_half((const half*)scales);
  sum = fma(group, scale * splat(row_scale), sum);
  if (kind == LOOM_KIND_INT4) {
    sum = fma(load_half((const half*)scales + kPanel), splat(row_sum), sum);
  }
  return sum;
}

#if defined(__AVX512VNNI__)

constexpr int kQuantizedRowTile = 6;

template <int kind, int R>
inline void dot_line(__m512i sums[R][2], const Tile& t, int64_t s, int64_t byte) {
  __m512i b0 = _mm512_loadu_si512(t.panel0 + 64 * s), b1 = _mm512_loadu_si512(t.panel1 + 64 * s);
  constexpr int quads = kind == LOOM_KIND_INT8 ? 1 : 2;
  __m512i nibble = _mm512_set1_epi8(15);
  for (int q = 0; q < quads; q++) {
    __m512i w0 = b0, w1 = b1;
    if (kind == LOOM_KIND_INT4) {
      w0 = _mm512_and_si512(q ? _mm512_srli_epi32(b0, 4) : b0, nibble);
      w1 = _mm512_and_si512(q ? _mm512_srli_epi32(b1, 4) : b1, nibble);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      int quad;
      memcpy(&quad, t.x + r * t.x_stride + byte + 4 * q, 4);
      __m512i x = _mm512_set1_epi32(quad);
      sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w0, x);
      sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w1, x);
    }
  }
}

template <int kind, int R>
void tile_quantized(const Tile& t) {
  using G = Group<kind>;
  int64_t groups = t.steps / G::lines;
  const char *scales0 = t.panel0 + 64 * t.steps, *scales1 = t.panel1 + 64 * t.steps;
  const char* next0 = t.prefetch0 ? t.prefetch0 : t.panel0;
  const char* next1 = t.prefetch1 ? t.prefetch1 : t.panel1;
  Accumulators<R, 2> acc;
  acc.start(t);
  for (int64_t g = 0; g < groups; g++) {
    const GroupOfRow* of_row[R];
    __m512i sums[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      of_row[r] = (const GroupOfRow*)(t.x + r * t.x_stride + groups * kGroup) + g;
      int start = kind == LOOM_KIND_INT8 ? of_row[r]->offset : 0;
      sums[r][0] = sums[r][1] = _mm512_set1_epi32(start);
    }
    prefetch(next0 + 64 * t.steps + g * G::scale_bytes);
    prefetch(next1 + 64 * t.steps + g * G::scale_bytes);
    // Unrolled: in a loop GCC copies every sum twice around its product.
#pragma GCC unroll 8
    for (int i = 0; i < G::lines; i++) {
      int64_t s = g * G::lines + i;
      prefetch(next0 + 64 * s);
      prefetch(next1 + 64 * s);
      dot_line<kind, R>(sums, t, s, s * G::k_per_line);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      float scale = of_row[r]->scale, row_sum = of_row[r]->scaled_sum;
      F16 s0 = {_mm512_cvtepi32_ps(sums[r][0])}, s1 = {_mm512_cvtepi32_ps(sums[r][1])};
      acc.a[r][0] = add_group<kind>(acc.a[r][0], s0, scales0 + g * G::scale_bytes, scale, row_sum);
      acc.a[r][1] = add_group<kind>(acc.a[r][1], s1, scales1 + g * G::scale_bytes, scale, row_sum);
    }
  }
  acc.finish(t);
}

#else

constexpr int kQuantizedRowTile = kRowTile / 3;

// Weight k of a line as floats, without its offset or minimum.
template <int kind>
inline F16 line_weight(const char* line, int k) {
  F16 byte = byte_of(line, k & 3);
  if (kind == LOOM_KIND_INT8) return byte - splat(128.0f);
  F16 high = floor(byte * splat(1.0f / 16.0f));
  return k >= 4 ? high : fma(high, splat(-16.0f), byte);
}

template <int kind, int R>
void tile_quantized(const Tile& t) {
  using G = Group<kind>;
  int64_t groups = t.steps / G::lines;
  const char *scales0 = t.panel0 + 64 * t.steps, *scales1 = t.panel1 + 64 * t.steps;
  Accumulators<R, 2> acc;
  acc.start(t);
  for (int64_t g = 0; g < groups; g++) {
    F16 sums[R][2];
    float row_sums[R];
    for (int r = 0; r < R; r++) {
      sums[r][0] = sums[r][1] = splat(0.0f);
      row_sums[r] = 0.0f;
    }
    for (int i = 0; i < kGroup; i++) {
      int64_t s = g * G::lines + i / G::k_per_line;
      F16 w0 = line_weight<kind>(t.panel0 + 64 * s, i % G::k_per_line);
      F16 w1 = line_weight<kind>(t.panel1 + 64 * s, i % G::k_per_line);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        float x = ((const float*)(t.x + r * t.x_stride))[g * kGroup + i];
        sums[r][0] = fma(splat(x), w0, sums[r][0]);
        sums[r][1] = fma(splat(x), w1, sums[r][1]);
        row_sums[r] += x;
      }
    }
    for (int r = 0; r < R; r++) {
      acc.a[r][0] = add_group<kind>(acc.a[r][0], sums[r][0], scales0 + g * G::scale_bytes, 1.0f,
                                    row_sums[r]);
      acc.a[r][1] = add_group<kind>(acc.a[r][1], sums[r][1], scales1 + g * G::scale_bytes, 1.0f,
                                    row_sums[r]);
    }
  }
  acc.finish(t);
}

#endif

}  // namespace loom
