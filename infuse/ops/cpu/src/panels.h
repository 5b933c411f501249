// Quantized weights in panels: 16 rows of a weight are interleaved, so that a register holds the same position of all.
//
//   panel of 16 rows → [inputs / unit][words][16 rows] 32-bit words; a unit is one word of 4 codes of 8 bits or of
//                      8 codes of 4 bits, or three words of 16 codes of 6 bits
//   codes of a unit  → codes j (even) and j + 1 are at the same bits of the two halves of a word:
//                      8 and 4 bits   code j at bit  bits * (j / 2) + 16 * (j % 2)
//                      6 bits         pairs 0 and 1, 2 and 3, 4 and 5 at bits 0 and 6 of the halves of words 0, 1, 2;
//                                     the upper four bits of words 0 and 1 hold the lower bits of pairs 6 and 7, whose
//                                     upper two bits are at bits 12 and 14 of word 2
//   scale, zero      → [panel][group][16 rows]
//
// Rows beyond the last one have scale 0. No sum crosses a register's lanes, and a thread reads one stream.
#pragma once

#include "coding.h"
#include "elements.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kPanelRows = 16;
constexpr int kWordBytes = 4 * kPanelRows;

template <Code C>
constexpr int kUnit = Coding<C>::unit;  // codes in a unit
template <Code C>
constexpr int kUnitBytes = kWordBytes * Coding<C>::words;

// Loads the words of `width` rows.
#if defined(__AVX512F__)

inline Words load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec load_zeros(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#elif defined(__AVX2__)

inline Words load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec load_zeros(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#else

inline Words load_words(const uint8_t* p) {
  Words d;
  std::memcpy(&d, p, sizeof d);
  return d;
}
inline Vec load_zeros(const int8_t* p) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float(p[i]);
  return r;
}

#endif

template <Code C>
struct Unit {
  Words words[Coding<C>::words];
};
template <Code C>
[[gnu::always_inline]] inline Unit<C> load_unit(const uint8_t* p) {
  Unit<C> d;
  for (int w = 0; w < Coding<C>::words; ++w) d.words[w] = load_words(p + w * kWordBytes);
  return d;
}
template <Code C>
[[gnu::always_inline]] inline void prefetch_unit(const uint8_t* p, Into into = Into::outer) {
  for (int w = 0; w < Coding<C>::words; ++w) prefetch(p + w * kWordBytes, into);
}

// Scales as float, of either type that they may have, without a branch.
struct Scales {
  explicit Scales(const LinearArgs& a) : half(a.half_scales ? 0xffff : 0) {}
  float at(const uint16_t* p) const {
    return half ? widen(*reinterpret_cast<const f16*>(p)) : widen(*reinterpret_cast<const bf16*>(p));
  }
#if defined(__AVX512F__)
  // Of Vec::width rows.
  [[gnu::always_inline]] Vec load(const uint16_t* p) const {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    return _mm512_mask_cvtph_ps(wide, half, bits);
  }
  __mmask16 half;
#elif defined(__AVX2__)
  [[gnu::always_inline]] Vec load(const uint16_t* p) const {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256 wide = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    return _mm256_blendv_ps(wide, _mm256_cvtph_ps(bits), _mm256_castsi256_ps(_mm256_set1_epi32(-(half & 1))));
  }
  int half;
#else
  Vec load(const uint16_t* p) const {
    Vec r;
    for (int i = 0; i < Vec::width; ++i) r.v[i] = at(p + i);
    return r;
  }
  int half;
#endif
};

}  // namespace INFUSE_ISA
}  // namespace infuse
