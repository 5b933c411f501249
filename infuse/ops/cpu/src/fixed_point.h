// x as integers times a scale, for products with integer codes (panels.h): the rounding, and the byte order that
// matches the four codes of a word.
#pragma once

#include <cmath>

#include "panels.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512VNNI__)

// sum + a * b over groups of four bytes, unsigned in a. In assembly, since g++ 12 copies each sum before and after.
[[gnu::always_inline]] inline __m512i dot_quads(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// Codes are multiplied as unsigned: this offset is added to them, and offset * sum of x is subtracted from the result.
template <Code C>
constexpr int kMoved = C == Code::int8 ? 128 : 8;
// The unsigned codes of quad `quad` of a word.
template <Code C>
[[gnu::always_inline]] inline __m512i moved_codes(__m512i word, int quad) {
  if (C == Code::int8) return _mm512_xor_si512(word, _mm512_set1_epi8(char(0x80)));
  return _mm512_and_si512(_mm512_srli_epi16(word, unsigned(4 * quad)), _mm512_set1_epi8(15));
}

// Calls run(i, n) for each n <= 16 of `count` values; inlined, so that full sixteens need no mask.
template <class F>
[[gnu::always_inline]] inline void by_sixteen(int64_t count, const F& run) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) run(i, 16);
  if (i < count) run(i, int(count - i));
}

// Numbers as integers up to `most`: x = scale * integer. If one is not finite, scale is NaN, and so is every sum.
struct FixedPoint {
  float scale, lift, steps;

  template <class T>
  static FixedPoint of(const T* x, int64_t count, float most) {
    // Compares the bits of the magnitudes: as integers, infinity and NaN are larger than all finite numbers.
    __m512i largest = _mm512_setzero_si512();
    by_sixteen(count, [&](int64_t i, int n) {
      const __m512i bits = _mm512_castps_si512(load(x + i, n).v);
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    });
    const uint32_t bits = uint32_t(_mm512_reduce_max_epu32(largest));
    float peak;
    std::memcpy(&peak, &bits, 4);
    if (bits >= 0x7f800000) return {NAN, 1, 0};
    const float lift = peak < 0x1p-64f ? 0x1p64f : 1;  // for the smallest peaks, most / peak overflows float
    return {peak / most, lift, peak > 0 ? most / (peak * lift) : 0};
  }
  __m512i operator()(Vec x) const { return _mm512_cvtps_epi32((x * Vec(lift) * Vec(steps)).v); }
};

// Sixteen consecutive values as bytes, reordered so that each four match one quad of codes.
template <Code C>
inline __m128i in_quads(__m512i values) {
  const __m128i order = C == Code::int8 ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                                        : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  return _mm_shuffle_epi8(_mm512_cvtepi32_epi8(values), order);
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
