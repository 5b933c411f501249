// The products of many rows of x with tiles (tile.h) in AMX: 32 rows by 32 outputs at once.
//
//   x    → [block of 16 rows][step][16 rows][16 pairs]: what a register takes lies in one piece
//   tile → [padded inputs / 2][2 halves][16 outputs]
//
// Both are padded with zeros to whole steps of 32 inputs, x to whole blocks of rows. x is copied, though a register
// could be loaded from it as it lies: rows of a power of two bytes would all fall into one set of the L1 cache, and the
// copy is 2 * I bytes against 2 * I * O operations a row.
//
// A step of the depth is four products of 16 cycles each and 4 KiB of operands: 64 bytes a cycle, all that the L2 cache
// can give. A loop of these instructions alone reached 7.1 TFLOP/s on two cores from registers, 4.4 from 256 KiB. So
// what is read again must lie in the L2 cache, 2 MiB on these processors: tiles of at most 1 MiB and 32 rows of x.
// Several tiles at once, since all of x comes from further away once for each time that tiles are filled.
//
// Not measured: these products themselves, kTilesBytes and kMostTiles, and from how many rows on tiles are taken
// (binding_panels.cpp has it from AVX512-BF16). `python bench/ops.py --op linear quantized_linear attention --set
// llama` shows them on a machine with AMX.
#pragma once

#include "amx.h"
#include "tile.h"

#if defined(__AMX_BF16__)

namespace infuse {
namespace INFUSE_ISA {

constexpr int kTileRows = kAmxRows;
constexpr size_t kTilesBytes = 1 << 20;
constexpr int64_t kMostTiles = 4;

inline int64_t amx_steps(const LinearArgs& a) { return (a.inputs + 2 * kAmxPairs - 1) / (2 * kAmxPairs); }
inline int64_t block_words(const LinearArgs& a) { return amx_steps(a) * kAmxPairs * kAmxRows; }

inline size_t tile_x_bytes(const LinearArgs& a) {
  return size_t((a.rows + kAmxRows - 1) / kAmxRows * block_words(a)) * sizeof(uint32_t);
}
inline int64_t tile_words(const LinearArgs& a) { return amx_steps(a) * kAmxPairs * kTileOutputs; }
inline size_t tile_bytes(const LinearArgs& a) { return size_t(tile_words(a)) * sizeof(uint32_t); }
inline int64_t most_tiles(const LinearArgs& a) {
  const int64_t fit = int64_t(kTilesBytes / tile_bytes(a));
  return fit < 1 ? 1 : fit < kMostTiles ? fit : kMostTiles;
}

inline int64_t chunk_rows(const LinearArgs& a) { return a.rows; }

// Blocks [begin, end) of 16 rows.
inline void arrange_tile_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const bf16* x = static_cast<const bf16*>(a.x);
  for (int64_t b = begin; b < end; ++b) {
    uint32_t* block = static_cast<uint32_t*>(a.scratch) + b * block_words(a);
    for (int64_t r = 0; r < kAmxRows; ++r) {
      const int64_t row = b * kAmxRows + r;
      for (int64_t step = 0; step < amx_steps(a); ++step) {
        const int64_t i = step * 2 * kAmxPairs, left = row < a.rows ? a.inputs - i : 0;
        uint32_t* to = block + (step * kAmxRows + r) * kAmxPairs;
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(Elements<bf16>::first_words(int(left < 32 ? left : 32)), x + row * a.inputs + i));
      }
    }
  }
}

// Rows [first, first + rows), at most 32, with one tile.
inline void multiply_tile(const LinearArgs& a, const uint32_t* tile, int64_t o, int64_t first, int64_t rows) {
  alignas(64) float sums[2 * kAmxRows][kTileOutputs];
  const uint32_t* x = static_cast<const uint32_t*>(a.scratch) + first / kAmxRows * block_words(a);
  amx_multiply(rows, {x, kAmxPairs, kAmxPairs * kAmxRows, block_words(a)}, tile, kTileOutputs, amx_steps(a), sums[0], kTileOutputs);
  write_sums<bf16>(a, sums[0], rows, o, first);
}

// Outputs [begin, end), or gates, of up to most_tiles tiles: fill(o, tile) brings the weights of those from o on.
template <class Fill>
void multiply_tiles(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tiles, const Fill& fill) {
  const AmxRegisters configured;
  uint32_t* tile = tiles;
  for (int64_t o = begin; o < end; o += tile_columns(a), tile += tile_words(a)) {
    fill(o, tile);
    uint32_t* padding = tile + a.inputs / 2 * kTileOutputs;
    std::memset(padding, 0, size_t(tile + tile_words(a) - padding) * sizeof(uint32_t));
  }
  for (int64_t first = 0; first < a.rows; first += 2 * kAmxRows) {
    const int64_t rows = a.rows - first < 2 * kAmxRows ? a.rows - first : 2 * kAmxRows;
    tile = tiles;
    for (int64_t o = begin; o < end; o += tile_columns(a), tile += tile_words(a)) multiply_tile(a, tile, o, first, rows);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse

#endif
