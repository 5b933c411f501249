// Matrix products with many rows of x: a tile of 32 outputs is brought into a core's cache, as pairs of bf16 in the order in which
// they are multiplied, and all rows of x go over it. Only where there are bf16 instructions; the products
// are in tile_products.h.
//
//   tile → [inputs / 2][2 halves][16 outputs] pairs of neighbouring inputs
//
// A half holds 16 neighbouring outputs; of a gated product the first half holds gates and the second the outputs that they gate.
#pragma once

#include "activation.h"
#include "panel_linear.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kTileOutputs = 2 * kPanelRows;

#if defined(__AVX512BF16__)

// In the low half of each lane. Subnormal numbers become zero, as the products take them anyway.
inline __m512i rounded(Vec x) { return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v))); }

// One panel into [inputs / 2][2][16 pairs], half 0 or 1; rounded to bf16 as the reference rounds.
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
        const __m512i even = rounded((codes<C>(d, j) - shift) * scale), odd = rounded((codes<C>(d, j + 1) - shift) * scale);
        _mm512_store_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
    }
  }
}

// Words p of up to 16 rows, `step` elements apart: pairs of bf16, moved as they are.
inline void load_pairs(const bf16* rows, int64_t step, int64_t there, int pairs, Vec (&words)[16]) {
  for (int r = 0; r < 16 && r < there; ++r) words[r] = _mm512_maskz_loadu_ps(first(pairs), rows + r * step);
  transpose(words);
}

// Rows [o, o + 16) of a plain weight, as far as there are, into one half.
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

// Asks for part b of `parts` of the weights of 16 outputs from o on, which lie in one piece.
inline void fetch_half(const LinearArgs& a, int64_t o, int64_t b, int64_t parts) {
  const int64_t bytes = kPanelRows * a.row_bytes;
  const char* from = static_cast<const char*>(a.weight) + o * a.row_bytes;
  for (int64_t at = bytes * b / parts; at < bytes * (b + 1) / parts; at += 64) prefetch(from + at);
}

// Rows of sums of one tile: outputs from o on, or act(gate) * up for gates from o on and the outputs as far beyond as there are gates.
template <class Activate>
void write_rows(const LinearArgs& a, const float* sums, int64_t rows, int64_t o, int64_t first_row, const Activate& act) {
  const int64_t columns = a.gated ? a.outputs / 2 : a.outputs;
  const bf16* bias = static_cast<const bf16*>(a.bias);
  bf16* to = static_cast<bf16*>(a.y) + first_row * columns + o;
  const int left = int(columns - o < kTileOutputs ? columns - o : kTileOutputs), beyond = a.gated ? left : left - kPanelRows;
  const Vec low_bias = bias ? load(bias + o, left) : Vec();
  const Vec high_bias = bias && beyond > 0 ? load(bias + (a.gated ? columns : kPanelRows) + o, beyond) : Vec();
  for (int64_t r = 0; r < rows; ++r, sums += kTileOutputs, to += columns) {
    const Vec low = act(load(sums, Vec::width) + low_bias), high = load(sums + kPanelRows, Vec::width) + high_bias;
    if (a.gated) {
      store(to, low * high, left);
    } else {
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(act(high).v, low.v));
      _mm512_mask_storeu_epi16(to, Elements<bf16>::first_words(left), both);
    }
  }
}
inline void write_sums(const LinearArgs& a, const float* sums, int64_t rows, int64_t o, int64_t first_row) {
  const auto write = [&](const auto& act) { write_rows(a, sums, rows, o, first_row, act); };
  if (!a.activates) return write([](Vec x) { return x; });
  with_activation(a.act, [&](auto act) { write([](Vec x) { return activated<decltype(act)::value, bf16>(x); }); });
}

// How many outputs, or gates, a tile holds.
inline int64_t tile_columns(const LinearArgs& a) { return a.gated ? kPanelRows : kTileOutputs; }

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
