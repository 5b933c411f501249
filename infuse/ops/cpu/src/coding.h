// What kernels know of a code of quantized weights: one struct for each. panels.h has the order of codes in a word.
//
//   bits             of a code
//   words, unit      32-bit words of a unit, and codes in it
//   zero_unit        one unit of `zero`, in steps of the scale
//   moved            integer codes are multiplied as unsigned: this is added to them, and `moved` times the sum of x is
//                    subtracted from the result
//   value(words, j)  the value of code j of a row, from the words of its unit
//   values(words, j) the values of code j of Vec::width rows
//   pair(words, p)   pair `p` of each row as exact bf16 (with AVX-512; not for int8)
#pragma once

#include <type_traits>

#include "float_codes.h"
#include "types.h"

namespace infuse {
namespace INFUSE_ISA {

// The words of `width` rows.
#if defined(__AVX512F__)
using Words = __m512i;
#elif defined(__AVX2__)
using Words = __m256i;
#else
struct Words {
  uint32_t lane[Vec::width];
};
#endif

constexpr int bit_of(int bits, int j) { return bits * (j / 2) + 16 * (j % 2); }

template <int width, int count>
struct Units {
  static constexpr int bits = width, words = count, unit = 32 * count / width;
  static constexpr float zero_unit = 1;
};

// One code after the other, without vector instructions.
template <class Coding>
Vec values_by_row(const Words* words, int j) {
  Vec r;
#if !defined(__AVX512F__) && !defined(__AVX2__)
  for (int i = 0; i < Vec::width; ++i) {
    uint32_t of_row[Coding::words];
    for (int w = 0; w < Coding::words; ++w) of_row[w] = words[w].lane[i];
    r.v[i] = Coding::value(of_row, j);
  }
#endif
  return r;
}

// Both halves of a word → the values of code j.
#if defined(__AVX512F__)
[[gnu::always_inline]] inline Vec half_of(__m512i pair, int j) {
  return _mm512_castsi512_ps(j % 2 ? _mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000)))
                                   : _mm512_slli_epi32(pair, 16));
}
#endif

template <Code C>
struct Coding;

template <>
struct Coding<Code::int8> : Units<8, 1> {
  static constexpr int moved = 128;
  static float value(const uint32_t* words, int j) { return float(int8_t(words[0] >> bit_of(8, j))); }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words[0], unsigned(24 - bit_of(8, j))), 24));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words[0], 24 - bit_of(8, j)), 24));
#else
    return values_by_row<Coding>(words, j);
#endif
  }
};

template <>
struct Coding<Code::int4> : Units<4, 1> {
  static constexpr float zero_unit = 1.0f / 16;
  static constexpr int moved = 8;
  static float value(const uint32_t* words, int j) { return float(int(words[0] >> bit_of(4, j) & 15) - 8); }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)  // the permutation reads only the lowest four bits of its index
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words[0], unsigned(bit_of(4, j))), table);
#elif defined(__AVX2__)
    const __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(words[0], bit_of(4, j)), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibble, _mm256_set1_epi32(8)));
#else
    return values_by_row<Coding>(words, j);
#endif
  }
#if defined(__AVX512F__)
  // -8 ... 7, twice: the permutation reads five bits of its index, and the highest belongs to the next code
  [[gnu::always_inline]] static __m512i pair(const Words* words, int p) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000),
        short(0xbf80), 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words[0], unsigned(4 * p)), table);
  }
#endif
};

template <>
struct Coding<Code::mxfp4> : Units<4, 1> {
  static float value(const uint32_t* words, int j) { return kMxfp4[words[0] >> bit_of(4, j) & 15]; }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words[0], unsigned(bit_of(4, j))), table);
#elif defined(__AVX2__)  // the permutation reads only the lowest three bits of its index
    const __m256i nibble = _mm256_srli_epi32(words[0], bit_of(4, j));
    const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6), nibble);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(nibble, _mm256_set1_epi32(8)), 28);
    return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
#else
    return values_by_row<Coding>(words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] static __m512i pair(const Words* words, int p) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, short(0x8000), short(0xbf00), short(0xbf80),
        short(0xbfc0), short(0xc000), short(0xc040), short(0xc080), short(0xc0c0)));
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words[0], unsigned(4 * p)), table);
  }
#endif
};

template <>
struct Coding<Code::fp8> : Units<8, 1> {
  static float value(const uint32_t* words, int j) { return kFp8[words[0] >> bit_of(8, j) & 255]; }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    return half_values<4, 3>(_mm256_slli_epi32(words[0], 24 - bit_of(8, j)), 256.0f);
#else
    return values_by_row<Coding>(words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] static __m512i pair(const Words* words, int p) { return fp8_pair(words[0], p != 0); }
#endif
};

template <>
struct Coding<Code::fp6> : Units<6, 3> {
  static float value(const uint32_t* words, int j) {
    const int p = j / 2, half = 16 * (j % 2);
    if (p < 6) return kFp6[words[p / 2] >> (6 * (p % 2) + half) & 63];
    return kFp6[(words[p - 6] >> (12 + half) & 15) | (words[2] >> (2 * p + half) & 3) << 4];
  }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    const int p = j / 2, half = 16 * (j % 2);
    if (p < 6) return half_values<3, 2>(_mm256_slli_epi32(words[p / 2], 26 - 6 * (p % 2) - half), 4096.0f);
    const __m256i lower = half ? _mm256_srli_epi32(words[p - 6], 2) : _mm256_slli_epi32(words[p - 6], 14);
    const __m256i upper = _mm256_slli_epi32(words[2], 30 - 2 * p - half), lower_bits = _mm256_set1_epi32(0x3c000000);
    return half_values<3, 2>(_mm256_or_si256(_mm256_and_si256(lower_bits, lower),
                                             _mm256_andnot_si256(lower_bits, upper)), 4096.0f);
#else
    return values_by_row<Coding>(words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] static __m512i pair(const Words* words, int p) {
    if (p < 6) return fp6_pair(p % 2 ? _mm512_srli_epi16(words[p / 2], 6) : words[p / 2]);
    const __m512i lower = _mm512_srli_epi16(words[p - 6], 12), upper = _mm512_srli_epi16(words[2], unsigned(2 * p - 4));
    return fp6_pair(_mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(0x30), 0xf8));  // lower | upper & 0x30
  }
#endif
};

template <Code C>
using CodeOf = std::integral_constant<Code, C>;

template <class F>
auto with_code(Code code, const F& run) {
  switch (code) {
    case Code::int8: return run(CodeOf<Code::int8>());
    case Code::int4: return run(CodeOf<Code::int4>());
    case Code::fp8: return run(CodeOf<Code::fp8>());
    case Code::mxfp4: return run(CodeOf<Code::mxfp4>());
    default: return run(CodeOf<Code::fp6>());
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
