// Random numbers that depend on (seed, position, token) alone: Philox4x32-10 (Salmon et al.,
// SC 2011), as fixed in ops/reference.py: philox_uniform.
#pragma once

#include <cstdint>

#include "simd.h"

namespace loom {

class Philox {
 public:
  Philox(int64_t seed, int64_t position)
      : key_{uint32_t(seed), uint32_t(uint64_t(seed) >> 32)},
        position_{uint32_t(position), uint32_t(uint64_t(position) >> 32)} {}

  // The uniform numbers of tokens 64 block .. 64 block + 63.
  void fill(int64_t block, float out[64]) const {
    uint32_t c0[16], c1[16], c2[16], c3[16];
    for (int i = 0; i < 16; i++) {
      c0[i] = uint32_t(block * 16 + i);
      c1[i] = position_[0];
      c2[i] = position_[1];
      c3[i] = 0;
    }
    uint32_t k0 = key_[0], k1 = key_[1];
    for (int round = 0; round < 10; round++) {
      for (int i = 0; i < 16; i++) {
        uint64_t a = uint64_t(c0[i]) * 0xD2511F53u, b = uint64_t(c2[i]) * 0xCD9E8D57u;
        c0[i] = uint32_t(b >> 32) ^ c1[i] ^ k0;
        c2[i] = uint32_t(a >> 32) ^ c3[i] ^ k1;
        c1[i] = uint32_t(b);
        c3[i] = uint32_t(a);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < 16; i++) {
      out[4 * i] = uniform(c0[i]);
      out[4 * i + 1] = uniform(c1[i]);
      out[4 * i + 2] = uniform(c2[i]);
      out[4 * i + 3] = uniform(c3[i]);
    }
  }

 private:
  static float uniform(uint32_t bits) {
    return (float(int32_t(bits >> 9)) + 0.5f) * (1.0f / 8388608.0f);
  }

  uint32_t key_[2], position_[2];
};

}  // namespace loom
