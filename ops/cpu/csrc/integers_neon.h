// The sums of integers.h on 64-bit Arm.
#pragma once

#include "forms.h"
#include "simd.h"

namespace loom {

inline uint32_t peak_bits(F16 a, F16 b) {
  uint32x4_t most = vdupq_n_u32(0);
  for (const F16& x : {abs(a), abs(b)}) {
    for (float32x4_t v : x.v) most = vmaxq_u32(most, vreinterpretq_u32_f32(v));
  }
  return vmaxvq_u32(most);
}
inline HalfSums to_bytes(F16 a, F16 b, char* out) {
  auto narrowed = [](const F16& x, char* bytes) {
    int32x4_t i[4];
    for (int j = 0; j < 4; j++) i[j] = vcvtnq_s32_f32(x.v[j]);
    int16x8_t low = vcombine_s16(vqmovn_s32(i[0]), vqmovn_s32(i[1]));
    int16x8_t high = vcombine_s16(vqmovn_s32(i[2]), vqmovn_s32(i[3]));
    vst1q_s8((int8_t*)bytes, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
    return vaddvq_s32(vaddq_s32(vaddq_s32(i[0], i[1]), vaddq_s32(i[2], i[3])));
  };
  return {narrowed(a, out), narrowed(b, out + kLanes)};
}

struct Bytes {
  int8x16_t v[4];
};
// Of codes with a sign; these are signed bytes here.
constexpr int kSignedOffset = 0;

template <class Body>
inline Bytes each_register(Body&& body) {
  return {{body(0), body(1), body(2), body(3)}};
}
inline Bytes load_bytes(const char* line) {
  return each_register([&](int i) { return vld1q_s8((const int8_t*)line + 16 * i); });
}
// By so many bits to the right, or to the left; bits that leave a byte are lost.
template <int bits>
inline Bytes shifted(const Bytes& x) {
  return each_register([&](int i) {
    uint8x16_t v = vreinterpretq_u8_s8(x.v[i]);
    if constexpr (bits > 0) v = vshrq_n_u8(v, bits);
    if constexpr (bits < 0) v = vshlq_n_u8(v, -bits);
    return vreinterpretq_s8_u8(v);
  });
}
inline Bytes masked(const Bytes& x, int mask) {
  return each_register([&](int i) { return vandq_s8(x.v[i], vdupq_n_s8(int8_t(mask))); });
}
inline Bytes either(const Bytes& a, const Bytes& b) {
  return each_register([&](int i) { return vorrq_s8(a.v[i], b.v[i]); });
}
// Bytes w + 128 as codes with a sign.
inline Bytes signed_bytes(const Bytes& x) {
  return each_register([&](int i) { return veorq_s8(x.v[i], vdupq_n_s8(-128)); });
}
inline Bytes looked_up(const int8_t* table, const Bytes& x) {
  return each_register(
      [&](int i) { return vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(x.v[i])); });
}

struct Quad {
  int8x16_t v;
  explicit Quad(const char* x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    v = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  }
};

#if defined(__ARM_FEATURE_DOTPROD)

template <int kind>
struct GroupSum {
  int32x4_t v[4];
  void start(int32_t sum) {
    for (int32x4_t& x : v) x = vdupq_n_s32(sum);
  }
  void add(const Bytes& w, const Quad& x) {
    for (int i = 0; i < 4; i++) v[i] = vdotq_s32(v[i], w.v[i], x.v);
  }
  F16 value() const {
    return each([&](int i) { return vcvtq_f32_s32(v[i]); });
  }
};

#else

template <int kind>
struct GroupSum {
  int32x4_t v[8];  // two halves of the sum of two outputs each
  void start(int32_t sum) {
    for (int32x4_t& x : v) x = vsetq_lane_s32(sum, vdupq_n_s32(0), 0);
    for (int32x4_t& x : v) x = vsetq_lane_s32(sum, x, 2);
  }
  void add(const Bytes& w, const Quad& x) {
    for (int i = 0; i < 4; i++) {
      v[2 * i] = vpadalq_s16(v[2 * i], vmull_s8(vget_low_s8(w.v[i]), vget_low_s8(x.v)));
      v[2 * i + 1] = vpadalq_s16(v[2 * i + 1], vmull_high_s8(w.v[i], x.v));
    }
  }
  F16 value() const {
    return each([&](int i) { return vcvtq_f32_s32(vpaddq_s32(v[2 * i], v[2 * i + 1])); });
  }
};

#endif

}  // namespace loom
