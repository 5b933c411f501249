// Products of many rows of x with tiles (tile.h) in AMX: 32 rows by 32 outputs at once.
//
//   x    → [block of 16 rows][step][16 rows][16 pairs]: the contents of a register are contiguous
//   tile → [padded inputs / 2][2 halves][16 outputs]
//
// Both are padded with zeros to whole steps of 32 inputs, x also to whole blocks of rows. A register could be loaded
// from x directly, but rows whose size is a power of two would all map to one set of the L1 cache. The copy costs 2 * I
// bytes per row, against 2 * I * O operations.
//
// A step of the depth takes four products of 16 cycles each and 4 KiB of operands: 64 bytes a cycle, the full bandwidth
// of the L2 cache. A loop of only these instructions reached 7.1 TFLOP/s on two cores from registers, 4.4 from 256 KiB.
// So reused data must stay in the L2 cache, 2 MiB on these processors: tiles of at most 1 MiB and 32 rows of x. Several
// tiles are filled at once, since each filling reads all of x from farther away.
//
// Not measured: these products, kTilesBytes, kMostTiles, and the number of rows from which tiles are used (limits.h has
// that of AVX512-BF16). To measure them on a machine with AMX, run
// `python bench/ops.py --op linear quantized_linear attention --set llama`.
#pragma once

#include "amx.h"
#include "tile.h"

#if defined(__AMX_BF16__)

namespace infuse {
namespace INFUSE_ISA {

constexpr size_t kTilesBytes = 1 << 20;
constexpr int64_t kMostTiles = 4;

inline int64_t amx_steps(const LinearArgs& a) { return (a.inputs + 2 * kAmxPairs - 1) / (2 * kAmxPairs); }
inline int64_t amx_block_words(const LinearArgs& a) { return amx_steps(a) * kAmxPairs * kAmxRows; }

inline size_t amx_x_bytes(const LinearArgs& a) {
  return size_t((a.rows + kAmxRows - 1) / kAmxRows * amx_block_words(a)) * sizeof(uint32_t);
}
inline int64_t amx_tile_words(const LinearArgs& a) { return amx_steps(a) * kAmxPairs * kTileOutputs; }
inline size_t amx_tile_bytes(const LinearArgs& a) { return size_t(amx_tile_words(a)) * sizeof(uint32_t); }
inline int64_t most_amx_tiles(const LinearArgs& a) {
  const int64_t fit = int64_t(kTilesBytes / amx_tile_bytes(a));
  return fit < 1 ? 1 : fit < kMostTiles ? fit : kMostTiles;
}

// Arranges blocks [begin, end) of 16 rows.
inline void arrange_amx_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const bf16* x = static_cast<const bf16*>(a.x);
  for (int64_t b = begin; b < end; ++b) {
    uint32_t* block = static_cast<uint32_t*>(a.scratch) + b * amx_block_words(a);
    for (int64_t r = 0; r < kAmxRows; ++r) {
      const int64_t row = b * kAmxRows + r;
      for (int64_t step = 0; step < amx_steps(a); ++step) {
        const int64_t i = step * 2 * kAmxPairs, left = row < a.rows ? a.inputs - i : 0;
        uint32_t* to = block + (step * kAmxRows + r) * kAmxPairs;
        _mm512_store_si512(to,
            _mm512_maskz_loadu_epi16(Elements<bf16>::first_words(int(left < 32 ? left : 32)), x + row * a.inputs + i));
      }
    }
  }
}

// Multiplies rows [first, first + rows), at most 32, by one tile.
inline void multiply_amx_tile(const LinearArgs& a, const uint32_t* tile, int64_t o, int64_t first, int64_t rows) {
  alignas(64) float sums[2 * kAmxRows][kTileOutputs];
  const uint32_t* x = static_cast<const uint32_t*>(a.scratch) + first / kAmxRows * amx_block_words(a);
  amx_multiply(rows, {x, kAmxPairs, kAmxPairs * kAmxRows, amx_block_words(a)}, tile, kTileOutputs, amx_steps(a),
      sums[0], kTileOutputs);
  write_sums<bf16>(a, sums[0], rows, o, first);
}

// Computes outputs (or gates) [begin, end) of up to most_amx_tiles tiles; fill(o, tile) loads the weights from output o
// on.
template <class Fill>
void multiply_amx_tiles(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tiles, const Fill& fill) {
  const AmxRegisters configured;
  uint32_t* tile = tiles;
  for (int64_t o = begin; o < end; o += tile_columns(a), tile += amx_tile_words(a)) {
    fill(o, tile);
    uint32_t* padding = tile + a.inputs / 2 * kTileOutputs;
    std::memset(padding, 0, size_t(tile + amx_tile_words(a) - padding) * sizeof(uint32_t));
  }
  for (int64_t first = 0; first < a.rows; first += 2 * kAmxRows) {
    const int64_t rows = a.rows - first < 2 * kAmxRows ? a.rows - first : 2 * kAmxRows;
    tile = tiles;
    for (int64_t o = begin; o < end; o += tile_columns(a), tile += amx_tile_words(a)) {
      multiply_amx_tile(a, tile, o, first, rows);
    }
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse

#endif
