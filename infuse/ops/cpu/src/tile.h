// Matrix products with many rows of x: a tile of 32 outputs is brought into a core's cache, as pairs of bf16 in the order in which
// they are multiplied, and all rows of x go over it. Only where there are bf16 instructions.
//
//   tile → [inputs / 2][2 halves][16 outputs] pairs of neighbouring inputs
//
// A half holds 16 neighbouring outputs; of a gated product the first half holds gates and the second the outputs that they gate.
#pragma once

#include "activation.h"
#include "panel_linear.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kTileRows = 12;  // rows of x in registers at once: 24 sums, 2 weights
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

// Rows [o, o + 16) of a plain weight, as far as there are, into one half.
inline void fill_plain_tile(const LinearArgs& a, int64_t o, int64_t end, int half, uint32_t* tile) {
  const bf16* rows = static_cast<const bf16*>(a.weight) + o * a.inputs;
  const int64_t pairs = a.inputs / 2;
  for (int64_t i = 0; i < pairs; i += 16) {
    const int count = int(pairs - i < 16 ? pairs - i : 16);
    Vec words[16];  // pairs of bf16, moved as they are
    for (int r = 0; r < 16 && o + r < end; ++r) words[r] = _mm512_maskz_loadu_ps(first(count), rows + r * a.inputs + 2 * i);
    transpose(words);
    uint32_t* to = tile + i * kTileOutputs + half * kPanelRows;
    for (int c = 0; c < count; ++c) _mm512_store_ps(to + c * kTileOutputs, words[c].v);
  }
}

template <int R>
[[gnu::always_inline]] inline void multiply_tile(const LinearArgs& a, const uint32_t* tile, int64_t first_row, __m512 (&acc)[R][2]) {
  const uint32_t* x = static_cast<const uint32_t*>(a.scratch) + first_row * (a.inputs / 2);
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < a.inputs / 2; ++i, tile += kTileOutputs, x += R) {
    const __m512bh w0 = pairs_at(tile), w1 = pairs_at(tile + kPanelRows);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = repeated(x[r]);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, pair);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, pair);
    }
  }
}

// The outputs of one block of rows, from o on.
template <int R>
void tile_block(const LinearArgs& a, const uint32_t* tile, int64_t o, int64_t first_row) {
  __m512 acc[R][2];
  multiply_tile(a, tile, first_row, acc);
  const bf16* bias = static_cast<const bf16*>(a.bias);
  for (int half = 0; half < 2; ++half) {
    const int64_t at = o + half * kPanelRows;
    const int count = int(a.outputs - at < kPanelRows ? a.outputs - at : kPanelRows);
    if (count <= 0) return;
    for (int r = 0; r < R; ++r) {
      Vec sum = bias ? Vec(acc[r][half]) + load(bias + at, count) : Vec(acc[r][half]);
      if (a.activates) sum = activated(a.act, sum);
      store(static_cast<bf16*>(a.y) + (first_row + r) * a.outputs + at, sum, count);
    }
  }
}

// act(gate) * up for gates [o, o + 16) and the outputs as far beyond as there are gates.
template <int R>
void gated_block(const LinearArgs& a, const uint32_t* tile, int64_t o, int64_t first_row) {
  __m512 acc[R][2];
  multiply_tile(a, tile, first_row, acc);
  const bf16* bias = static_cast<const bf16*>(a.bias);
  const int64_t gates = a.outputs / 2;
  const int count = int(gates - o < kPanelRows ? gates - o : kPanelRows);
  for (int r = 0; r < R; ++r) {
    Vec gate(acc[r][0]), up(acc[r][1]);
    if (bias) gate = gate + load(bias + o, count), up = up + load(bias + gates + o, count);
    store(static_cast<bf16*>(a.y) + (first_row + r) * gates + o, activated(a.act, gate) * up, count);
  }
}

template <class F>
void over_tile_rows(const LinearArgs& a, const F& block) {
  for (int64_t b = 0; b < row_blocks(a.rows, kTileRows); ++b) {
    const auto [first_row, count] = row_block(a.rows, kTileRows, b);
    with_rows<kTileRows>(count, [&, first_row = first_row](auto R) { block(R, first_row); });
  }
}

template <Code C>
void tile_rows(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile) {
  for (int64_t o = begin; o < end; o += kTileOutputs) {
    for (int half = 0; half < 2; ++half) fill_tile<C>(a, o / kPanelRows + half, half, tile);
    over_tile_rows(a, [&](auto R, int64_t first_row) { tile_block<decltype(R)::value>(a, tile, o, first_row); });
  }
}

// Outputs [begin, end), or gates where gated, over a plain weight.
inline void plain_tile_rows(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile) {
  const int64_t gates = a.outputs / 2;
  for (int64_t o = begin; o < end; o += a.gated ? kPanelRows : kTileOutputs) {
    fill_plain_tile(a, o, a.gated ? gates : a.outputs, 0, tile);
    fill_plain_tile(a, a.gated ? gates + o : o + kPanelRows, a.outputs, 1, tile);
    over_tile_rows(a, [&](auto R, int64_t first_row) {
      a.gated ? gated_block<decltype(R)::value>(a, tile, o, first_row) : tile_block<decltype(R)::value>(a, tile, o, first_row);
    });
  }
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
