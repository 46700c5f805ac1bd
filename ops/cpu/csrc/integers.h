// Sixteen sums of products of bytes, exact in int32, whatever the machine has for them.
//
// A product is a weight's byte times a signed input byte of magnitude 127 at most. `Bytes` are the
// weights of one quad (k .. k + 3) of sixteen outputs, `Quad` four input bytes for all of them, and
// `GroupSum` adds up a stretch of up to 32 k, from `start` on:
//   VNNI       one instruction multiplies unsigned by signed bytes and adds to int32; signed weights
//              are taken as w + 128, so the sum starts at -128 times the sum of the inputs
//   AVX2       |w| times x with w's sign: two such products fit int16 (2 * 128 * 127), which
//              (w + 128) x would not; where w is at most 16, the products of a whole group fit
//   Arm        signed by signed bytes: four products to int32 in one instruction, or by way of
//              int16, which holds one
#pragma once

#include "api.h"
#include "forms.h"
#include "simd.h"

namespace loom {

// The largest magnitude of 32 floats, by its bits: a NaN or an infinity has larger bits than any
// number. And the floats as bytes, rounded to nearest even, and their sums.
struct HalfSums {
  int32_t first, second;
};
uint32_t peak_bits(F16 a, F16 b);
HalfSums to_bytes(F16 a, F16 b, char* out);

}  // namespace loom

#if defined(__aarch64__)
#include "integers_neon.h"
#else
#include "integers_x86.h"
#endif

namespace loom {

// What codes_of gives is more than the code that is meant by so much.
template <int kind>
constexpr int stored_offset = form_of(kind).is_signed() ? kSignedOffset : form_of(kind).offset;

// Quad i's part of a plane of `width` bits, whose lines begin at `lines`, at bit `to` of each byte.
template <int width, int to, int i>
inline Bytes part_of(const char* lines) {
  constexpr int quads = 8 / width, from = width * (i % quads);
  Bytes x = load_bytes(lines + 64 * (i / quads));
  return masked(shifted<from - to>(x), ((1 << width) - 1) << to);
}

// The codes of quad i of a group, whose lines begin at `group`.
template <int kind, int i>
inline Bytes codes_of(const char* group) {
  constexpr CodeForm form = form_of(kind);
  if constexpr (form.in_bytes()) return signed_bytes(load_bytes(group + 64 * i));
  constexpr int above4 = form.bits & 4, above2 = form.bits & 6;
  Bytes codes;
  if constexpr (above4) codes = part_of<4, 0, i>(group);
  if constexpr (form.bits & 2) {
    Bytes two = part_of<2, above4, i>(group + 64 * above4);
    if constexpr (above4) two = either(codes, two);
    codes = two;
  }
  if constexpr (form.bits & 1) codes = either(codes, part_of<1, above2, i>(group + 64 * above2));
  if constexpr (form.of_table()) codes = looked_up(numbers_of(form.table), codes);
  return codes;
}

}  // namespace loom
