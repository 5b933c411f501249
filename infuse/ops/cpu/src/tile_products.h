// Products of many rows of x with tiles (tile.h) in AVX512-BF16 or AMX, and their table.
#pragma once

#include "amx_tile.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512BF16__)

#if !defined(__AMX_BF16__)

constexpr int64_t kPairsAFetch = 4;
constexpr int kTileRows = 12;  // rows of x in registers at once: 24 sums, 2 weights

inline size_t tile_x_bytes(const LinearArgs& a) { return size_t(a.rows * a.inputs) * sizeof(bf16); }
inline size_t tile_bytes(const LinearArgs& a) { return size_t(a.inputs / 2 * kTileOutputs) * sizeof(uint32_t); }
inline int64_t most_tiles(const LinearArgs&) { return 1; }

// Arranges blocks [begin, end) of x, each as [inputs / 2][rows] pairs.
inline void arrange_tile_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const auto [first_row, count] = row_block(a.rows, kTileRows, b);
    const bf16* x = static_cast<const bf16*>(a.x) + first_row * a.inputs;
    uint32_t* to = static_cast<uint32_t*>(a.scratch) + first_row * (a.inputs / 2);
    for (int64_t i = 0; i < a.inputs / 2; i += 16) {
      const int pairs = int(a.inputs / 2 - i < 16 ? a.inputs / 2 - i : 16);
      Vec words[16];
      load_pairs(x + 2 * i, a.inputs, count, pairs, words);
      for (int p = 0; p < pairs; ++p) _mm512_mask_storeu_ps(to + (i + p) * count, first(int(count)), words[p].v);
    }
  }
}

template <int R>
void multiply_tile(const LinearArgs& a, const uint32_t* tile, int64_t o, int64_t first_row, Ahead ahead) {
  const uint32_t* x = static_cast<const uint32_t*>(a.scratch) + first_row * (a.inputs / 2);
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const int64_t pairs = a.inputs / 2;
  for (int64_t i = 0; i < pairs;) {
    ahead.fetch();
    for (const int64_t stop = pairs - i < kPairsAFetch ? pairs : i + kPairsAFetch; i < stop;
         ++i, tile += kTileOutputs, x += R) {
      const __m512bh w0 = pairs_at(tile), w1 = pairs_at(tile + kPanelRows);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512bh pair = repeated(x[r]);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, pair);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, pair);
      }
    }
  }
  alignas(64) float rows[R][kTileOutputs];
  for (int r = 0; r < R; ++r) _mm512_store_ps(rows[r], sums[r][0]), _mm512_store_ps(rows[r] + kPanelRows, sums[r][1]);
  write_sums<bf16>(a, rows[0], R, o, first_row);
}

// Rows of x that fit a core's cache of 1 MiB together with a tile of weights. At least kLeastRows, since filling the
// tiles would take too long for fewer.
inline int64_t chunk_rows(const LinearArgs& a) {
  constexpr int64_t kChunkBytes = 1 << 19, kLeastRows = 320;
  const int64_t rows = kChunkBytes / (2 * a.inputs);
  return rows < kLeastRows ? kLeastRows : rows;
}

// Computes outputs (or gates) [begin, end) tile by tile; fill(o, tile) loads the weights from output o on. Meanwhile it
// prefetches the weights of the next tile.
template <class Fill>
void multiply_tiles(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile, const Fill& fill) {
  const int64_t blocks = row_blocks(a.rows, kTileRows), columns = a.gated ? a.outputs / 2 : a.outputs;
  for (int64_t o = begin; o < end; o += tile_columns(a)) {
    fill(o, tile);
    const int64_t next = o + a.ahead + tile_columns(a) <= columns ? o + a.ahead : o;
    for (int64_t b = 0; b < blocks; ++b) {
      const Ahead ahead = next == o ? Ahead() : Ahead(a, next, b, blocks, a.inputs / 2 / kPairsAFetch);
      const auto [first_row, count] = row_block(a.rows, kTileRows, b);
      with_rows<kTileRows>(count, [&, first_row = first_row](auto R) {
        multiply_tile<decltype(R)::value>(a, tile, o, first_row, ahead);
      });
    }
  }
}

#endif

template <Code C>
void panel_tile_rows(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile) {
  const int64_t beyond = a.gated ? a.outputs / 2 / kPanelRows : 1;  // panels from the first half to the second
  multiply_tiles(a, begin, end, tile, [&](int64_t o, uint32_t* to) {
    for (int half = 0; half < 2; ++half) fill_tile<C>(a, o / kPanelRows + half * beyond, half, to);
  });
}

// Computes outputs [begin, end), or gates if gated, with a plain weight.
inline void plain_tile_rows(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile) {
  const int64_t gates = a.outputs / 2;
  multiply_tiles(a, begin, end, tile, [&](int64_t o, uint32_t* to) {
    fill_plain_tile(a, o, a.gated ? gates : a.outputs, 0, to);
    fill_plain_tile(a, a.gated ? gates + o : o + kPanelRows, a.outputs, 1, to);
  });
}

inline TileKernels plain_tile_kernels() {
  return {kTileRows, tile_x_bytes, arrange_tile_rows, tile_bytes, tile_columns, most_tiles, chunk_rows,
      plain_tile_rows};
}
inline TileKernels panel_tile_kernels() {
  TileKernels made = plain_tile_kernels();
  made.multiply = [](const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile) {
    with_code(a.code, [&](auto code) { panel_tile_rows<code>(a, begin, end, tile); });
  };
  return made;
}

#else

inline TileKernels plain_tile_kernels() { return {}; }
inline TileKernels panel_tile_kernels() { return {}; }

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
