// The tile registers of AMX, as each thread sets them up and lets go of them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace loom {

constexpr int kAmxRows = 16;  // of a tile

// What `ldtilecfg` reads: how many rows, and bytes of a row, each of eight tiles has.
struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count, int bytes) {
    row_bytes[tile] = uint16_t(count ? bytes : 0);
    rows[tile] = uint8_t(count);
  }
};

// What this thread's tiles are set up for, see `use_amx_tiles`; no lines: they are not in use.
struct AmxShape {
  int above, below, lines;
  bool operator==(const AmxShape&) const = default;
};
inline thread_local AmxShape amx_shape = {};

// Sets up tiles 0 and 1 for sums of some rows, 4 for these rows; 2 and 3 for sums of others, 5 for
// those; 6 and 7 for panels.
//
// above, below: numbers of rows, up to 16. lines: of 64 bytes that a step takes from a panel; from a
// row it takes 4 bytes each.
inline void use_amx_tiles(int above, int below, int lines) {
  AmxShape shape = {above, below, lines};
  if (shape == amx_shape) return;
  AmxConfig config;
  for (int tile : {0, 1}) config.set(tile, above, 64);
  for (int tile : {2, 3}) config.set(tile, below, 64);
  config.set(4, above, 4 * lines);
  config.set(5, below, 4 * lines);
  for (int tile : {6, 7}) config.set(tile, lines, 64);
  // The instruction's operand is known to GCC as a part of what it reads.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  amx_shape = shape;
}

// Lets go of the tiles: of a thread that uses them the system saves 8 KiB more whenever it is put to
// sleep.
inline void release_amx_tiles() {
  if (amx_shape.lines) _tile_release();
  amx_shape = {};
}

}  // namespace loom
