// Matrix products with many rows over quantized weights: two panels at a time become bf16 in a core's cache (a tile), with
// which all rows of x are multiplied. Only where there are bf16 instructions; elsewhere the weight is dequantized whole.
#pragma once

#include "panel_linear.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kTileRows = 12;  // rows of x in registers at once: 24 sums, 2 weights
constexpr int kTileOutputs = 2 * kPanelRows;

#if defined(__AVX512BF16__)

// In the low half of each lane. Subnormal numbers become zero, as the products take them anyway.
inline __m512i rounded(Vec x) { return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v))); }

// One panel into [inputs / 2][2][16 pairs], half 0 or 1; rounded to bf16 as the reference rounds.
template <int Bits>
void fill_tile(const LinearArgs& a, int64_t panel, int half, uint32_t* tile) {
  const int64_t units = a.inputs / kUnit<Bits>, in_group = units / a.groups;
  const bool there = panel * kPanelRows < a.outputs;
  uint32_t* to = tile + half * kPanelRows;
  if (!there) {
    for (int64_t i = 0; i < a.inputs / 2; ++i) _mm512_store_si512(to + i * kTileOutputs, _mm512_setzero_si512());
    return;
  }
  const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes;
  const bf16* scales = reinterpret_cast<const bf16*>(a.scale) + panel * a.groups * kPanelRows;
  for (int64_t g = 0; g < a.groups; ++g) {
    const Vec scale = load(scales + g * kPanelRows, kPanelRows);
    const Vec shift = a.zero ? load_zeros(a.zero + (panel * a.groups + g) * kPanelRows) * Vec(kZeroUnit<Bits>) : Vec();
    for (int64_t u = 0; u < in_group; ++u, p += kUnitBytes) {
      prefetch(p + kAhead);
      const Words d = load_words(p);
#pragma GCC unroll 4
      for (int j = 0; j < kUnit<Bits>; j += 2, to += kTileOutputs) {
        const __m512i even = rounded((codes<Bits>(d, j) - shift) * scale), odd = rounded((codes<Bits>(d, j + 1) - shift) * scale);
        _mm512_store_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
    }
  }
}

template <int R>
void tile_block(const LinearArgs& a, const uint32_t* tile, int64_t o, int64_t first) {
  const uint32_t* x = static_cast<const uint32_t*>(a.scratch) + first * (a.inputs / 2);
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < a.inputs / 2; ++i, tile += kTileOutputs, x += R) {
    const __m512bh w0 = reinterpret_cast<__m512bh>(_mm512_load_si512(tile));
    const __m512bh w1 = reinterpret_cast<__m512bh>(_mm512_load_si512(tile + kPanelRows));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = both(x[r]);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, pair);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, pair);
    }
  }
  const bf16* bias = static_cast<const bf16*>(a.bias);
  for (int half = 0; half < 2; ++half) {
    const int64_t at = o + half * kPanelRows;
    const int count = int(a.outputs - at < kPanelRows ? a.outputs - at : kPanelRows);
    if (count <= 0) return;
    for (int r = 0; r < R; ++r) {
      const Vec sum = bias ? Vec(acc[r][half]) + load(bias + at, count) : Vec(acc[r][half]);
      store(static_cast<bf16*>(a.y) + (first + r) * a.outputs + at, sum, count);
    }
  }
}

template <int Bits>
void tile_rows(const LinearArgs& a, int64_t begin, int64_t end, void* tile) {
  for (int64_t o = begin; o < end; o += kTileOutputs) {
    for (int half = 0; half < 2; ++half) fill_tile<Bits>(a, o / kPanelRows + half, half, static_cast<uint32_t*>(tile));
    for (int64_t b = 0; b < row_blocks(a.rows, kTileRows); ++b) {
      const auto [first, count] = row_block(a.rows, kTileRows, b);
      with_rows<kTileRows>(count, [&, first = first](auto rows) {
        tile_block<decltype(rows)::value>(a, static_cast<const uint32_t*>(tile), o, first);
      });
    }
  }
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
