// Sixteen float lanes, whatever the machine: one AVX-512 register, two of AVX2 or four of NEON.
//
// Everything above this file is written once over F16. Each function does the same operations in
// the same order on every call, so a value depends on its inputs alone and never on how many rows
// are computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace loom {

using bf16 = uint16_t;  // the upper half of a float
using half = uint16_t;  // IEEE binary16

constexpr int kLanes = 16;

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

inline void narrow(float f, float* out) { *out = f; }
inline void narrow(float f, bf16* out) { *out = to_bf16(f); }

// To the second cache. Inlined first of all: GCC takes a function that does no more than this for one
// without an effect, and drops calls of it.
__attribute__((always_inline)) inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace loom

// LOOM_YMM asks for two 256-bit registers on a machine that has 512-bit ones: so the instructions
// of narrower machines can be tested there. LOOM_ZMM stands for 32 registers of all sixteen lanes,
// LOOM_AMX for tile registers beside them.
#if defined(__aarch64__)
#include "simd_neon.h"
#elif defined(__AVX512F__) && !defined(LOOM_YMM)
#define LOOM_ZMM
#if defined(__AMX_BF16__)
#define LOOM_AMX
#endif
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace loom {

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
