// x as integers times a scale, for products with integer codes (panels.h): how it is rounded, and the order in which
// four of its bytes meet the four codes of a word.
#pragma once

#include <cmath>

#include "panels.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512VNNI__)

// sum + a * b over fours of bytes, those of a without sign; written out, since g++ 12 copies each sum before and after.
[[gnu::always_inline]] inline __m512i dot_quads(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// Codes are multiplied without sign: moved up by this, which is taken off as so many times the sum of x.
template <Code C>
constexpr int kMoved = C == Code::int8 ? 128 : 8;
// Such codes of quad `quad` of a word.
template <Code C>
[[gnu::always_inline]] inline __m512i moved_codes(__m512i word, int quad) {
  if (C == Code::int8) return _mm512_xor_si512(word, _mm512_set1_epi8(char(0x80)));
  return _mm512_and_si512(_mm512_srli_epi16(word, unsigned(4 * quad)), _mm512_set1_epi8(15));
}

// Calls run(i, how many from i on) for sixteen after sixteen of `count`; inlined, so that whole ones need no mask.
template <class F>
[[gnu::always_inline]] inline void by_sixteen(int64_t count, const F& run) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) run(i, 16);
  if (i < count) run(i, int(count - i));
}

// Numbers as integers up to `most`: x = scale * integer. Where one is not finite, scale is NaN, and so is every sum.
struct FixedPoint {
  float scale, lift, steps;

  template <class T>
  static FixedPoint of(const T* x, int64_t count, float most) {
    // of the magnitudes' bits, in whose order what is not finite is larger than all numbers
    __m512i largest = _mm512_setzero_si512();
    by_sixteen(count, [&](int64_t i, int n) {
      const __m512i bits = _mm512_castps_si512(load(x + i, n).v);
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    });
    const uint32_t bits = uint32_t(_mm512_reduce_max_epu32(largest));
    float peak;
    std::memcpy(&peak, &bits, 4);
    if (bits >= 0x7f800000) return {NAN, 1, 0};
    const float lift = peak < 0x1p-64f ? 0x1p64f : 1;  // most / peak of the smallest numbers is none of a float
    return {peak / most, lift, peak > 0 ? most / (peak * lift) : 0};
  }
  __m512i operator()(Vec x) const { return _mm512_cvtps_epi32((x * Vec(lift) * Vec(steps)).v); }
};

// Sixteen neighbours as bytes, four for each quad of codes in turn.
template <Code C>
inline __m128i in_quads(__m512i values) {
  const __m128i order = C == Code::int8 ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                                        : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  return _mm_shuffle_epi8(_mm512_cvtepi32_epi8(values), order);
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
