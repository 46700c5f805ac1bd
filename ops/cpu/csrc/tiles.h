// Register tiles: R rows by P panels of accumulators, one line of each panel per step.
#pragma once

#include <algorithm>
#include <utility>

#include "linear.h"

namespace loom {

template <int R, int P>
struct Accumulators {
  F16 a[R][P];

  void start(const Tile& t) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) {
        a[r][p] = t.accumulate ? load(t.out + r * t.out_stride + p * kPanel) : splat(0.0f);
      }
    }
  }

  void finish(const Tile& t) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) store(t.out + r * t.out_stride + p * kPanel, a[r][p]);
    }
  }
};

// Calls body(0) to body(count - 1) with constants.
template <int count, class Body>
__attribute__((always_inline)) inline void unrolled(Body&& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, count>{});
}

// Where panel p of a tile is. The third and fourth panel follow at the distance of the second.
template <int P>
inline const char* panel_of(const Tile& t, int p) {
  if (P == 2) return p == 0 ? t.panel0 : t.panel1;
  return t.panel0 + p * (t.panel1 - t.panel0);
}

// Calls step(s) for every line s while the lines to prefetch are requested.
template <class Step>
inline void walk(const Tile& t, Step&& step) {
#if !defined(LOOM_ZMM)
  // A step of narrow registers is too short to hide requests for nothing.
  if (!t.prefetch0 && !t.prefetch1) {
#pragma GCC unroll 2
    for (int64_t s = 0; s < t.steps; s++) step(s);
    return;
  }
#endif
  // Without a panel to come the current one is named: a line in the cache costs nothing.
  const char* next0 = t.prefetch0 ? t.prefetch0 : t.panel0;
  const char* next1 = t.prefetch1 ? t.prefetch1 : t.panel1;
  for (int64_t s = 0; s < t.steps; s++) {
    prefetch(next0 + 64 * s);
    prefetch(next1 + 64 * s);
    step(s);
  }
}

// x float, panels float.
template <int R, int P>
void tile_f32(const Tile& t) {
  Accumulators<R, P> acc;
  acc.start(t);
  walk(t, [&](int64_t s) {
    F16 b[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) b[p] = load((const float*)(panel_of<P>(t, p) + 64 * s));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      F16 x = splat(((const float*)(t.x + r * t.x_stride))[s]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) acc.a[r][p] = fma(x, b[p], acc.a[r][p]);
    }
  });
  acc.finish(t);
}

// Sixteen numbers of one k, the first or the second of a line, as floats.
template <int kind>
inline F16 widened(const char* line, int k) {
  if constexpr (kind == LOOM_KIND_F16) return load_half((const half*)line + kPanel * k);
  return k ? pair_odd(line) : pair_even(line);
}

// x float, panels of two k a line, which are widened.
template <int kind, int R, int P>
void tile_narrow_by_fma(const Tile& t) {
  Accumulators<R, P> acc;
  acc.start(t);
  walk(t, [&](int64_t s) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      F16 b[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) b[p] = widened<kind>(panel_of<P>(t, p) + 64 * s, i);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        F16 x = splat(((const float*)(t.x + r * t.x_stride))[2 * s + i]);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) acc.a[r][p] = fma(x, b[p], acc.a[r][p]);
      }
    }
  });
  acc.finish(t);
}

#if defined(__AVX512BF16__)
// x bfloat16, panels bfloat16 pairs: one instruction adds two products per lane.
template <int R, int P>
void tile_bf16_by_dot(const Tile& t) {
  Accumulators<R, P> acc;
  acc.start(t);
  walk(t, [&](int64_t s) {
    __m512bh b[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      b[p] = (__m512bh)_mm512_loadu_si512(panel_of<P>(t, p) + 64 * s);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      int pair;
      memcpy(&pair, t.x + r * t.x_stride + 4 * s, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) acc.a[r][p].v = _mm512_dpbf16_ps(acc.a[r][p].v, x, b[p]);
    }
  });
  acc.finish(t);
}
#endif

using TileFunction = void (*)(const Tile&);

// A pair of panels one after the other, where the registers hold the sums of one.
inline void one_by_one(const Tile& t, TileFunction of_panel) {
  Tile one = t;
  one.panel1 = one.panel0;
  one.prefetch1 = nullptr;
  of_panel(one);
  one.panel0 = one.panel1 = t.panel1;
  one.prefetch0 = t.prefetch1;
  one.out += kPanel;
  of_panel(one);
}

}  // namespace loom
