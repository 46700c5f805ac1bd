// F16 of simd.h in four NEON registers, of any 64-bit Arm.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Products of small matrices, of bfloat16 and of bytes; Arm has both since 8.6.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LOOM_BFMMLA
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define LOOM_SMMLA
#endif

namespace loom {

inline half to_half(float f) {
  __fp16 h = __fp16(f);
  half bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float to_float_half(half bits) {
  __fp16 h;
  memcpy(&h, &bits, 2);
  return float(h);
}
inline void pause() { asm volatile("yield"); }

struct F16 {
  float32x4_t v[4];
};

// f(i) for each register.
template <class F>
inline F16 each(F&& f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline F16 splat(float x) {
  return each([=](int) { return vdupq_n_f32(x); });
}
inline F16 load(const float* p) {
  return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F16 a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}

inline float32x4_t widen4(uint16x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 16)); }
inline F16 load(const bf16* p) {
  return each([=](int i) { return widen4(vld1_u16(p + 4 * i)); });
}
// Rounds to nearest even; a NaN stays one.
inline uint16x4_t narrow4(float32x4_t a) {
  uint32x4_t x = vreinterpretq_u32_f32(a);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
  uint32x4_t r = vshrq_n_u32(vaddq_u32(vaddq_u32(x, vdupq_n_u32(0x7fff)), odd), 16);
  return vmovn_u32(vbslq_u32(vceqq_f32(a, a), r, vdupq_n_u32(0x7fc0)));
}
inline void store(bf16* p, F16 a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, narrow4(a.v[i]));
}

// The first n lanes, zeros in the others; none for n <= 0.
template <class T>
inline F16 load_n(const T* p, int n) {
  if (n >= kLanes) return load(p);
  T t[kLanes] = {};
  if (n > 0) memcpy(t, p, size_t(n) * sizeof(T));
  return load(t);
}
template <class T>
inline void store_n(T* p, F16 a, int n) {
  if (n >= kLanes) return store(p, a);
  T t[kLanes];
  store(t, a);
  if (n > 0) memcpy(p, t, size_t(n) * sizeof(T));
}

inline F16 load_half(const half* p) {
  return each([=](int i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  });
}
inline F16 load_e4m3(const void* p) {
  int8x16_t x = vld1q_s8((const int8_t*)p);
  auto as_halves = [](int8x8_t eight) {
    uint16x8_t wide = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(eight), 7));
    return vreinterpretq_f16_u16(vandq_u16(wide, vdupq_n_u16(0xbfff)));
  };
  float16x8_t low = as_halves(vget_low_s8(x)), high = as_halves(vget_high_s8(x));
  return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_f32_f16(vget_high_f16(low)),
           vcvt_f32_f16(vget_low_f16(high)), vcvt_f32_f16(vget_high_f16(high))}};
}

using FloatTable = uint8x16x4_t;
inline FloatTable load_table(const float* p) {
  auto* bytes = (const uint8_t*)p;
  return {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
}
template <int at>
inline F16 look_up(const FloatTable& table, const void* line) {
  return each([&](int i) {
    uint32x4_t words = vld1q_u32((const uint32_t*)line + 4 * i);
    if constexpr (at > 0) words = vshrq_n_u32(words, 4 * at);
    // The four bytes of a float stand at four times its code.
    uint32x4_t bytes = vmulq_n_u32(vandq_u32(words, vdupq_n_u32(15)), 0x04040404);
    bytes = vaddq_u32(bytes, vdupq_n_u32(0x03020100));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
  });
}
inline F16 load_int8(const int8_t* p) {
  int8x16_t x = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
           vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}

inline F16 operator+(F16 a, F16 b) {
  return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F16 operator-(F16 a, F16 b) {
  return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F16 operator*(F16 a, F16 b) {
  return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F16 operator/(F16 a, F16 b) {
  return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// As x86 has them: where one is a NaN, the second.
inline F16 max(F16 a, F16 b) {
  return each([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline F16 min(F16 a, F16 b) {
  return each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline F16 abs(F16 a) {
  return each([&](int i) { return vabsq_f32(a.v[i]); });
}
inline F16 round(F16 a) {
  return each([&](int i) { return vrndnq_f32(a.v[i]); });
}
// Sums and maxima fold the lanes in the order of the AVX2 ones, so that both give the same bits.
inline float sum(F16 a) {
  float32x4_t x = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t y = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
}
inline float hmax(F16 a) {
  return std::fmax(std::fmax(vmaxnmvq_f32(a.v[0]), vmaxnmvq_f32(a.v[1])),
                   std::fmax(vmaxnmvq_f32(a.v[2]), vmaxnmvq_f32(a.v[3])));
}
// a * 2^n for a whole n; in two halves, so that 2^n may lie below the smallest normal number.
inline F16 scale_by_power(F16 a, F16 n) {
  return each([&](int i) {
    int32x4_t whole = vcvtnq_s32_f32(vmaxq_f32(n.v[i], vdupq_n_f32(-250.0f)));
    int32x4_t part = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, part), bias = vdupq_n_s32(127);
    float32x4_t f = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(part, bias), 23));
    float32x4_t g = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
    return vmulq_f32(vmulq_f32(a.v[i], f), g);
  });
}
// x > 0, normal, as mantissa * 2^exponent with 1 <= mantissa < 2.
inline F16 mantissa(F16 x) {
  return each([&](int i) {
    uint32x4_t bits = vandq_u32(vreinterpretq_u32_f32(x.v[i]), vdupq_n_u32(0x007fffff));
    return vreinterpretq_f32_u32(vorrq_u32(bits, vdupq_n_u32(0x3f800000)));
  });
}
inline F16 exponent(F16 x) {
  return each([&](int i) {
    int32x4_t e = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_f32(x.v[i]), 23));
    return vcvtq_f32_s32(vsubq_s32(e, vdupq_n_s32(127)));
  });
}
// a where x > limit, b elsewhere.
inline F16 where_above(F16 x, float limit, F16 a, F16 b) {
  return each([&](int i) {
    return vbslq_f32(vcgtq_f32(x.v[i], vdupq_n_f32(limit)), a.v[i], b.v[i]);
  });
}
inline bool any_above(F16 x, float limit) {
  uint32x4_t above = vdupq_n_u32(0);
  for (int i = 0; i < 4; i++) above = vorrq_u32(above, vcgtq_f32(x.v[i], vdupq_n_f32(limit)));
  return vmaxvq_u32(above) != 0;
}
// Lanes lo <= i < hi of a, `other` elsewhere.
inline F16 keep_between(F16 a, int lo, int hi, F16 other) {
  static const int32_t kIndex[4] = {0, 1, 2, 3};
  int32x4_t index = vld1q_s32(kIndex);
  return each([&](int i) {
    int32x4_t at = vaddq_s32(index, vdupq_n_s32(4 * i));
    uint32x4_t in = vandq_u32(vcgeq_s32(at, vdupq_n_s32(lo)), vcltq_s32(at, vdupq_n_s32(hi)));
    return vbslq_f32(in, a.v[i], other.v[i]);
  });
}

// The two numbers of sixteen bfloat16 pairs, as floats.
inline F16 pair_even(const void* p) {
  return each([=](int i) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32((const uint32_t*)p + 4 * i), 16));
  });
}
inline F16 pair_odd(const void* p) {
  return each([=](int i) {
    uint32x4_t x = vld1q_u32((const uint32_t*)p + 4 * i);
    return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000)));
  });
}

// Transposes sixteen rows of sixteen 32-bit words in place, by tiles of four by four.
inline void transpose(F16 rows[16]) {
  float32x4_t to[16][4];
  for (int r = 0; r < 4; r++) {
    for (int c = 0; c < 4; c++) {
      float32x4_t a = rows[4 * r].v[c], b = rows[4 * r + 1].v[c];
      float32x4_t d = rows[4 * r + 2].v[c], e = rows[4 * r + 3].v[c];
      float32x4_t ab0 = vtrn1q_f32(a, b), ab1 = vtrn2q_f32(a, b);
      float32x4_t de0 = vtrn1q_f32(d, e), de1 = vtrn2q_f32(d, e);
      auto low = [](float32x4_t x, float32x4_t y) {
        return vcombine_f32(vget_low_f32(x), vget_low_f32(y));
      };
      auto high = [](float32x4_t x, float32x4_t y) {
        return vcombine_f32(vget_high_f32(x), vget_high_f32(y));
      };
      to[4 * c][r] = low(ab0, de0);
      to[4 * c + 1][r] = low(ab1, de1);
      to[4 * c + 2][r] = high(ab0, de0);
      to[4 * c + 3][r] = high(ab1, de1);
    }
  }
  memcpy(rows, to, sizeof(to));
}

}  // namespace loom
