// Sixteen sums of products of bytes, exact in int32, whatever the machine has for them.
//
// A product is a weight's byte times a signed input byte of magnitude 127 at most. `Bytes` are the
// weights of one quad (k .. k + 3) of sixteen outputs, `Quad` four input bytes for all of them, and
// `GroupSum` adds up one group of 32 k:
//   VNNI       one instruction multiplies unsigned by signed bytes and adds to int32; int8 weights
//              are stored as w + 128, so the sum starts at -128 times the sum of the inputs
//   AVX2       |x| times w with x's sign: two such products fit int16 (2 * 127 * 127), which
//              (w + 128) x would not; of int4, whose products are at most 15 * 127, a whole group
//              fits
//   Arm        signed by signed bytes: four products to int32 in one instruction, or by way of
//              int16, which holds one
#pragma once

#include "api.h"
#include "simd.h"

namespace loom {

// The largest magnitude of 32 floats, by its bits: a NaN or an infinity has larger bits than any
// number. And the floats as bytes, rounded to nearest even; `total` is the bytes' sum.
uint32_t peak_bits(F16 a, F16 b);
int32_t to_bytes(F16 a, F16 b, char* out);

}  // namespace loom

#if defined(__aarch64__)
#include "integers_neon.h"
#else
#include "integers_x86.h"
#endif
