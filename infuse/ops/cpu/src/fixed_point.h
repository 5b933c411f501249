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
// The same with one word of b in all lanes. Read by the product itself: with fewer instructions a line, more lines are
// awaited from memory at once.
[[gnu::always_inline]] inline __m512i dot_quads(__m512i sum, __m512i a, const uint32_t& b) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(b));
  return sum;
}

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

// The bits of the largest magnitude in each lane: as integers, infinity and NaN are larger than all finite numbers.
template <class T>
[[gnu::always_inline]] inline __m512i peaks_of(const T* x, int64_t count) {
  __m512i largest = _mm512_setzero_si512();
  by_sixteen(count, [&](int64_t i, int n) {
    const __m512i bits = _mm512_castps_si512(load(x + i, n).v);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  });
  return largest;
}

[[gnu::always_inline]] inline __m512i peaks_of(const bf16* x, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  }
  if (i < count) {
    const __mmask32 rest = (__mmask32(1) << (count - i)) - 1;
    largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_maskz_loadu_epi16(rest, x + i), magnitude));
  }
  const __m512i odd = _mm512_and_si512(largest, _mm512_set1_epi32(int(0xffff0000)));
  return _mm512_max_epu32(_mm512_slli_epi32(largest, 16), odd);
}

// Numbers as integers up to `most`: x = scale * integer. If one is not finite, scale is NaN, and so is every sum.
struct FixedPoint {
  float scale, lift, steps;

  template <class T>
  static FixedPoint of(const T* x, int64_t count, float most) {
    const uint32_t bits = uint32_t(_mm512_reduce_max_epu32(peaks_of(x, count)));
    float peak;
    std::memcpy(&peak, &bits, 4);
    if (bits >= 0x7f800000) return {NAN, 1, 0};
    const float lift = peak < 0x1p-64f ? 0x1p64f : 1;  // for the smallest peaks, most / peak overflows float
    return {peak / most, lift, peak > 0 ? most / (peak * lift) : 0};
  }
  __m512i operator()(Vec x) const { return _mm512_cvtps_epi32((x * Vec(lift) * Vec(steps)).v); }
};

// Combines all lanes of each of four registers: four results, in order. One register takes as long.
template <class F>
[[gnu::always_inline]] inline __m128i lanes_of_four(const __m512i* v, const F& combine) {
  const __m512i low = combine(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1])),
      high = combine(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  __m512i all = combine(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  all = combine(all, _mm512_shuffle_i64x2(all, all, 0x4e));
  return _mm512_castsi512_si128(combine(all, _mm512_shuffle_i64x2(all, all, 0xb1)));
}

// FixedPoint of four groups of numbers.
struct FourFixedPoints {
  alignas(16) float scale[4], lift[4], steps[4];
  bool finite;

  // peaks: peaks_of each.
  FourFixedPoints(const __m512i* peaks, float most) {
    const __m128i bits = lanes_of_four(peaks, [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); });
    const __m128 peak = _mm_castsi128_ps(bits), mosts = _mm_set1_ps(most);
    const __mmask8 infinite = _mm_cmpge_epu32_mask(bits, _mm_set1_epi32(0x7f800000)),
        tiny = _mm_cmp_ps_mask(peak, _mm_set1_ps(0x1p-64f), _CMP_LT_OQ);
    finite = !infinite;
    const __m128 lifts = _mm_mask_mov_ps(_mm_set1_ps(1), tiny, _mm_set1_ps(0x1p64f));
    const __mmask8 there = _mm_cmp_ps_mask(peak, _mm_setzero_ps(), _CMP_GT_OQ) & ~infinite;
    _mm_store_ps(scale, _mm_mask_mov_ps(_mm_div_ps(peak, mosts), infinite, _mm_set1_ps(NAN)));
    _mm_store_ps(lift, lifts);
    _mm_store_ps(steps, _mm_maskz_mov_ps(there, _mm_div_ps(mosts, _mm_mul_ps(peak, lifts))));
  }
  FixedPoint operator[](int g) const { return {scale[g], lift[g], steps[g]}; }
};

// The order of sixteen bytes in which each four match one quad of codes.
template <Code C>
inline __m128i quad_order() {
  return C == Code::int8 ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
      : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
}

// Sixteen consecutive values as bytes in that order.
template <Code C>
inline __m128i in_quads(__m512i values) {
  return _mm_shuffle_epi8(_mm512_cvtepi32_epi8(values), quad_order<C>());
}

// Writes `count` numbers as bytes in that order; returns their sums in lanes.
template <Code C, class T>
[[gnu::always_inline]] inline __m512i put_bytes(const FixedPoint& fixed, const T* x, int64_t count, char* to) {
  __m512i sums = _mm512_setzero_si512();
  for (; count >= 64; count -= 64, x += 64, to += 64) {
    const __m512i low = _mm512_packs_epi32(fixed(load(x, 16)), fixed(load(x + 16, 16))),
        high = _mm512_packs_epi32(fixed(load(x + 32, 16)), fixed(load(x + 48, 16)));
    // Packing works in quarters of registers: word 4 i + j holds the values from 16 j + 4 i on.
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(turned, _mm512_packs_epi16(low, high));
    _mm512_storeu_si512(to, _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(quad_order<C>())));
    sums = dot_quads(sums, _mm512_set1_epi8(1), bytes);
  }
  by_sixteen(count, [&](int64_t i, int n) {
    const __m512i values = fixed(load(x + i, n));
    sums = _mm512_add_epi32(sums, values);
    const __m128i quads = in_quads<C>(values);
    is_whole(n) ? _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), quads)
        : _mm_mask_storeu_epi8(to + i, first(n), quads);
  });
  return sums;
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
