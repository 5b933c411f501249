// Matrix products with many rows of x: a tile of 32 outputs is written to a core's cache, as pairs of bf16 in the order
// of multiplication, and multiplied with all rows of x. Needs bf16 instructions; the products are in tile_products.h.
//
//   tile → [inputs / 2][2 halves][16 outputs] pairs of consecutive inputs
//
// A half holds 16 consecutive outputs; in a gated product the first half holds gates and the second their up values.
#pragma once

#include "panel_linear.h"
#include "tile_output.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512BF16__)

// Pairs of bf16, even values in the low halves. Subnormal numbers become zero, as they do in the products anyway.
inline __m512i rounded_pairs(Vec even, Vec odd) {
  alignas(64) static constexpr uint16_t order[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order),
                                  reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v)));
}

// Writes one panel to half 0 or 1 of [inputs / 2][2][16 pairs], rounded to bf16 as the reference rounds.
template <Code C, bool zeros>
void fill_tile(const LinearArgs& a, int64_t panel, int half, uint32_t* tile) {
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups;
  const bool there = panel * kPanelRows < a.outputs;
  uint32_t* to = tile + half * kPanelRows;
  if (!there) {
    for (int64_t i = 0; i < a.inputs / 2; ++i) _mm512_store_si512(to + i * kTileOutputs, _mm512_setzero_si512());
    return;
  }
  const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C>;
  const bf16* scales = reinterpret_cast<const bf16*>(a.scale) + panel * a.groups * kPanelRows;
  for (int64_t g = 0; g < a.groups; ++g) {
    const Vec scale = load(scales + g * kPanelRows, kPanelRows);
    const Vec shift = zeros ? load_zeros(a.zero + (panel * a.groups + g) * kPanelRows) * Vec(kZeroUnit<C>) : Vec();
    for (int64_t u = 0; u < in_group; ++u, p += kUnitBytes<C>) {
      prefetch_unit<C>(p + kAhead);
      const Unit<C> d = load_unit<C>(p);
#pragma GCC unroll 4
      for (int j = 0; j < kUnit<C>; j += 2, to += kTileOutputs) {
        Vec even = codes<C>(d, j), odd = codes<C>(d, j + 1);
        if constexpr (zeros) even = even - shift, odd = odd - shift;
        _mm512_store_si512(to, rounded_pairs(even * scale, odd * scale));
      }
    }
  }
}

template <Code C>
void fill_tile(const LinearArgs& a, int64_t panel, int half, uint32_t* tile) {
  a.zero ? fill_tile<C, true>(a, panel, half, tile) : fill_tile<C, false>(a, panel, half, tile);
}

// Writes rows [o, o + 16) of a plain weight, up to `end`, to one half.
inline void fill_plain_tile(const LinearArgs& a, int64_t o, int64_t end, int half, uint32_t* tile) {
  const bf16* rows = static_cast<const bf16*>(a.weight) + o * a.inputs;
  const int64_t pairs = a.inputs / 2;
  for (int64_t i = 0; i < pairs; i += 16) {
    const int count = int(pairs - i < 16 ? pairs - i : 16);
    Vec words[16];
    load_pairs(rows + 2 * i, a.inputs, end - o, count, words);
    uint32_t* to = tile + i * kTileOutputs + half * kPanelRows;
    for (int c = 0; c < count; ++c) _mm512_store_ps(to + c * kTileOutputs, words[c].v);
  }
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
