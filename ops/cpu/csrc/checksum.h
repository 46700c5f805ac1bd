// A checksum of bytes that come from a file: against what disks and crashes do, not against forgers.
#pragma once

#include <cstdint>
#include <cstring>

namespace loom {

// Pieces of data have checksums of their own, so that threads can share them.
constexpr int64_t kChecksumPiece = 1 << 20;

// Eight chains over words of 64 bits, so that none waits for its last product (FNV-1a's prime; the
// shift takes high bits to low ones, where products go on with them).
inline uint64_t checksum(const char* data, int64_t bytes) {
  constexpr uint64_t prime = 0x100000001b3u;
  uint64_t chain[8];
  for (uint64_t i = 0; i < 8; i++) chain[i] = 0xcbf29ce484222325u + i;
  auto add = [&](const char* line) {
    for (int i = 0; i < 8; i++) {
      uint64_t word;
      memcpy(&word, line + 8 * i, 8);
      uint64_t product = (chain[i] ^ word) * prime;
      chain[i] = product ^ product >> 32;
    }
  };
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) add(data + at);
  char last[64] = {};
  memcpy(last, data + at, size_t(bytes - at));
  add(last);
  uint64_t sum = uint64_t(bytes);
  for (uint64_t one : chain) {
    uint64_t product = (sum ^ one) * prime;
    sum = product ^ product >> 32;
  }
  return sum;
}

}  // namespace loom
