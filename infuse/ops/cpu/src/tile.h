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

// x as bf16 in the low half of each lane. Subnormal numbers become zero, as they do in the products anyway.
inline __m512i rounded(Vec x) { return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v))); }

// Writes one panel to half 0 or 1 of [inputs / 2][2][16 pairs], rounded to bf16 as the reference rounds.
template <Code C>
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
    const Vec shift = a.zero ? load_zeros(a.zero + (panel * a.groups + g) * kPanelRows) * Vec(kZeroUnit<C>) : Vec();
    for (int64_t u = 0; u < in_group; ++u, p += kUnitBytes<C>) {
      prefetch_unit<C>(p + kAhead);
      const Unit<C> d = load_unit<C>(p);
#pragma GCC unroll 4
      for (int j = 0; j < kUnit<C>; j += 2, to += kTileOutputs) {
        const __m512i even = rounded((codes<C>(d, j) - shift) * scale),
            odd = rounded((codes<C>(d, j + 1) - shift) * scale);
        _mm512_store_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
    }
  }
}

// words[p] = the pairs p of up to 16 rows that are `step` elements apart, copied as bits.
inline void load_pairs(const bf16* rows, int64_t step, int64_t there, int pairs, Vec (&words)[16]) {
  for (int r = 0; r < 16 && r < there; ++r) words[r] = _mm512_maskz_loadu_ps(first(pairs), rows + r * step);
  transpose(words);
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
