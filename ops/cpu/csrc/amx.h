// The tile registers of AMX, as each thread sets them up and lets go of them.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace loom {

constexpr int kAmxRows = 16;   // of a tile
constexpr int kAmxLines = 16;  // of a panel, in a tile

// What `ldtilecfg` reads: how many rows, and bytes of a row, each of eight tiles has.
struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count) {
    row_bytes[tile] = count ? 64 : 0;
    rows[tile] = uint8_t(count);
  }
};

// The rows that this thread's tiles are set up for; 0: none, and they are not in use.
inline thread_local int amx_rows = 0;

inline void use_amx_tiles(int rows) {
  if (rows == amx_rows) return;
  int first = rows < kAmxRows ? rows : kAmxRows;
  AmxConfig config;
  for (int tile : {0, 1, 4}) config.set(tile, first);
  for (int tile : {2, 3, 5}) config.set(tile, rows - first);
  for (int tile : {6, 7}) config.set(tile, kAmxLines);
  // The instruction's operand is known to GCC as a part of what it reads.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  amx_rows = rows;
}

// Lets go of the tiles: of a thread that uses them the system saves 8 KiB more whenever it is put to
// sleep.
inline void release_amx_tiles() {
  if (amx_rows) _tile_release();
  amx_rows = 0;
}

}  // namespace loom
