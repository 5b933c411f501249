// Quantized weights in panels: 16 rows of a weight lie interleaved, so that a register holds one place of all of them.
//
//   panel of 16 rows → [inputs / unit][16 rows] words of 32 bits; a unit is 4 codes of 8 bits or 8 codes of 4 bits
//   a word           → code j at bit  bits * (j / 2) + 16 * (j % 2): neighbours j, j + 1 lie alike in its two halves
//   scale, zero      → [panel][group][16 rows]
//
// Rows beyond the last one have scale 0. Nothing is added across a register's lanes, and a thread reads one stream.
#pragma once

#include "elements.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kPanelRows = 16;
constexpr int kUnitBytes = 4 * kPanelRows;

template <int Bits>
constexpr int kUnit = 32 / Bits;  // codes in a word

template <int Bits>
constexpr int bit_of(int j) {
  return Bits * (j / 2) + 16 * (j % 2);
}

template <int Bits>
int code_in(uint32_t word, int j) {
  const uint32_t shifted = word >> bit_of<Bits>(j);
  return Bits == 8 ? int(int8_t(shifted)) : int(shifted & 15) - 8;
}

// Words of `width` rows, and code j of each as a number.
#if defined(__AVX512F__)
using Words = __m512i;
inline Words load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
template <int Bits>
Vec codes(Words d, int j) {
  if constexpr (Bits == 8) return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(d, unsigned(24 - bit_of<8>(j))), 24));
  // A look-up reads only the lowest four bits of its index.
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(d, unsigned(bit_of<4>(j))), table);
}
inline Vec load_zeros(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
#elif defined(__AVX2__)
using Words = __m256i;
inline Words load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
template <int Bits>
Vec codes(Words d, int j) {
  if constexpr (Bits == 8) return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(d, 24 - bit_of<8>(j)), 24));
  const __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(d, bit_of<4>(j)), _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibble, _mm256_set1_epi32(8)));
}
inline Vec load_zeros(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
#else
struct Words {
  uint32_t lane[Vec::width];
};
inline Words load_words(const uint8_t* p) {
  Words d;
  std::memcpy(&d, p, sizeof d);
  return d;
}
template <int Bits>
Vec codes(const Words& d, int j) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float(code_in<Bits>(d.lane[i], j));
  return r;
}
inline Vec load_zeros(const int8_t* p) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float(p[i]);
  return r;
}
#endif

template <int Bits>
constexpr float kZeroUnit = Bits == 8 ? 1.0f : 1.0f / 16;  // what 1 in `zero` is worth, in steps of the scale

// How a unit of codes is multiplied with R rows of x, which lie as [inputs][R] in order. Any type: codes and x as float.
template <class T, int Bits>
struct UnitDot {
  using X = float;
  static constexpr int per_x = 1;  // inputs in one X
  static void arrange(const T* x, int64_t row, int64_t inputs, int R, int r, X* to) {
    for (int64_t i = 0; i < inputs; ++i) to[i * R + r] = widen(x[row * inputs + i]);
  }
  // partial[.][r] += the unit at p with that of row r, for the rows of a weight in one register.
  template <int chains, int R>
  [[gnu::always_inline]] static void add(const uint8_t* p, const X* x, Vec (&partial)[chains][R]) {
    const Words d = load_words(p);
#pragma GCC unroll 8
    for (int j = 0; j < kUnit<Bits>; ++j) {
      const Vec w = codes<Bits>(d, j);
      for (int r = 0; r < R; ++r) partial[j % chains][r] = fma(w, Vec(x[j * R + r]), partial[j % chains][r]);
    }
  }
};

#if defined(__AVX512BF16__)

template <int Bits>
struct UnitDot<bf16, Bits> {
  using X = uint32_t;
  static constexpr int per_x = 2;
  static void arrange(const bf16* x, int64_t row, int64_t inputs, int R, int r, X* to) {
    const bf16* from = x + row * inputs;
    for (int64_t i = 0; i < inputs / 2; ++i) std::memcpy(to + i * R + r, from + 2 * i, 4);
  }
  static __m512bh looked_up(Words d, __m512i table) { return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(d, table)); }
  template <int chains, int R>
  [[gnu::always_inline]] static void add(const uint8_t* p, const X* x, Vec (&partial)[chains][R]) {
    const Words d = load_words(p);
    const auto dot = [&](__m512bh w, int pair, int chain) __attribute__((always_inline)) {
      for (int r = 0; r < R; ++r) partial[chain][r] = _mm512_dpbf16_ps(partial[chain][r].v, w, repeated(x[pair * R + r]));
    };
    // Tables of 16 entries stand twice: a look-up reads five bits of its index, of which the highest belongs to the next code.
    const __m512i positive = _mm512_broadcast_i64x4(_mm256_setr_epi16(  // 0 ... 15
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
    if constexpr (Bits == 4) {
      const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(  // -8 ... 7
          short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000), short(0xbf80),
          0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) dot(looked_up(_mm512_srli_epi16(d, unsigned(4 * pair)), table), pair, pair % chains);
    } else if constexpr (R <= 3) {  // a code is 16 * its high nibble + its low one: two look-ups and two products
      const __m512i sixteens = _mm512_broadcast_i64x4(_mm256_setr_epi16(  // 16 * (0 ... 7, -8 ... -1)
          0, 0x4180, 0x4200, 0x4240, 0x4280, 0x42a0, 0x42c0, 0x42e0,
          short(0xc300), short(0xc2e0), short(0xc2c0), short(0xc2a0), short(0xc280), short(0xc240), short(0xc200), short(0xc180)));
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        dot(looked_up(_mm512_srli_epi16(d, unsigned(8 * pair)), positive), pair, 2 * pair % chains);
        dot(looked_up(_mm512_srli_epi16(d, unsigned(8 * pair + 4)), sixteens), pair, (2 * pair + 1) % chains);
      }
    } else {  // through float, in which a code has at most eight bits: the upper half is its bf16
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m512i even = _mm512_castps_si512(codes<8>(d, 2 * pair).v), odd = _mm512_castps_si512(codes<8>(d, 2 * pair + 1).v);
        const __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
        dot(reinterpret_cast<__m512bh>(words), pair, pair % chains);
      }
    }
  }
};

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
