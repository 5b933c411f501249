// Matrix products with many rows of x: a tile of 32 outputs is written to a core's cache, as words in the order of
// multiplication, and multiplied with all rows of x. The products are in tile_products.h.
//
//   tile → [words][2 halves][16 outputs]
//
// A word holds one float, or two consecutive inputs in bf16, which needs bf16 instructions. A half holds 16 consecutive
// outputs; in a gated product the first half holds gates and the second their up values.
#pragma once

#include "panel_linear.h"
#include "tile_output.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512F__)

// Writes the values of two consecutive inputs of 16 outputs, rounded to T. Subnormal numbers in bf16 become zero, as
// they do in the products anyway.
template <class T>
void store_words(uint32_t* to, Vec even, Vec odd);
template <>
inline void store_words<float>(uint32_t* to, Vec even, Vec odd) {
  _mm512_store_ps(to, even.v), _mm512_store_ps(to + kTileOutputs, odd.v);
}
#if defined(__AVX512BF16__)
template <>
inline void store_words<bf16>(uint32_t* to, Vec even, Vec odd) {
  alignas(64) static constexpr uint16_t order[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}
#endif

// Writes inputs [begin, end) of one panel to half 0 or 1 of a tile that starts at input `begin`, rounded to T as the
// reference rounds. `begin` and `end` are at whole units.
template <class T, Code C, bool shifts>
void fill_tile(const LinearArgs& a, int64_t panel, int half, int64_t begin, int64_t end, uint32_t* tile) {
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups, last = end / kUnit<C>;
  const bool there = panel * kPanelRows < a.outputs;
  uint32_t* to = tile + half * kPanelRows;
  if (!there) {
    for (int64_t i = begin; i < end; i += kInWord<T>, to += kTileOutputs) {
      _mm512_store_si512(to, _mm512_setzero_si512());
    }
    return;
  }
  const Scales scales(a);
  const Coding<C> coding(a);
  for (int64_t u = begin / kUnit<C>; u < last;) {
    const int64_t g = u / in_group, stop = (g + 1) * in_group < last ? (g + 1) * in_group : last;
    const uint8_t* p = static_cast<const uint8_t*>(a.weight) + (panel * units + u) * kUnitBytes<C>;
    const OfGroup group = group_of(a, scales, panel, g, 0, Coding<C>::zero_unit);
    for (; u < stop; ++u, p += kUnitBytes<C>) {
      prefetch_unit<C>(p + kAhead);
      const Unit<C> d = load_unit<C>(coding, p);
#pragma GCC unroll 4
      for (int j = 0; j < kUnit<C>; j += 2, to += 2 / kInWord<T> * kTileOutputs) {
        const Vec even = coding.values(d.words, j), odd = coding.values(d.words, j + 1);
        if constexpr (shifts) {
          store_words<T>(to, group.value(even), group.value(odd));
        } else {
          store_words<T>(to, even * group.scale, odd * group.scale);
        }
      }
    }
  }
}

template <class T, Code C>
void fill_tile(const LinearArgs& a, int64_t panel, int half, int64_t begin, int64_t end, uint32_t* tile) {
  has_shifts(a) ? fill_tile<T, C, true>(a, panel, half, begin, end, tile)
                : fill_tile<T, C, false>(a, panel, half, begin, end, tile);
}

// Writes inputs [begin, end) of rows [o, o + 16) of a plain weight, of `rows`, to one half.
template <class T>
void fill_plain_tile(const LinearArgs& a, int64_t o, int64_t rows, int half, int64_t begin, int64_t end,
                     uint32_t* tile) {
  const T* from = static_cast<const T*>(a.weight) + o * a.inputs + begin;
  const int64_t words = (end - begin) / kInWord<T>;
  for (int64_t i = 0; i < words; i += 16) {
    const int count = int(words - i < 16 ? words - i : 16);
    Vec columns[16];
    load_columns(from + i * kInWord<T>, a.inputs, rows - o, count, columns);
    uint32_t* to = tile + i * kTileOutputs + half * kPanelRows;
    for (int c = 0; c < count; ++c) _mm512_store_ps(to + c * kTileOutputs, columns[c].v);
  }
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
