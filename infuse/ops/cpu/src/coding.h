// What kernels know of a code of quantized weights: one struct for each. panels.h has the order of codes in a word.
//
//   bits             of a code
//   unit, words      codes of a unit, and its 32-bit words; three has a word and a half
//   zero_unit        one unit of `zero`, in steps of the scale
//   moved            integer codes are multiplied as unsigned: this is added to them, and `moved` times the sum of x is
//                    subtracted from the result
//   value(words, j)  the value of code j of a row, from the words of its unit
//   values(words, j) the values of code j of Vec::width rows
//   pair(words, p)   pair `p` of each row as exact bf16 (with AVX-512; not for int8 and real4)
//
// Codings with a table hold it: they are made from the arguments of a product, for Vec::width rows from `lane` on.
#pragma once

#include <type_traits>

#include "float_codes.h"
#include "linear_kernels.h"

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

template <int width, int codes>
struct Units {
  static constexpr int bits = width, unit = codes, words = (width * codes + 31) / 32;
  static constexpr float zero_unit = 1;
};

// A coding without a table.
struct Fixed {
  Fixed() = default;
  explicit Fixed(const LinearArgs&, int = 0) {}
};

// One code after the other, without vector instructions.
template <class Coding>
Vec values_by_row(const Coding& coding, const Words* words, int j) {
  Vec r;
#if !defined(__AVX512F__) && !defined(__AVX2__)
  for (int i = 0; i < Vec::width; ++i) {
    uint32_t of_row[Coding::words];
    for (int w = 0; w < Coding::words; ++w) of_row[w] = words[w].lane[i];
    r.v[i] = coding.value(of_row, j);
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

// Pair `p` of codes of six bits of each row, in the lowest bits of each half.
#if defined(__AVX512F__)
[[gnu::always_inline]] inline __m512i six_bits(const __m512i* words, int p) {
  if (p < 6) return p % 2 ? _mm512_srli_epi16(words[p / 2], 6) : words[p / 2];
  const __m512i lower = _mm512_srli_epi16(words[p - 6], 12), upper = _mm512_srli_epi16(words[2], unsigned(2 * p - 4));
  return _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(0x30), 0xf8);  // lower | upper & 0x30
}
#endif

template <Code C>
struct Coding;

template <>
struct Coding<Code::int8> : Units<8, 4>, Fixed {
  using Fixed::Fixed;
  static constexpr int moved = 128;
  static float value(const uint32_t* words, int j) { return float(int8_t(words[0] >> bit_of(8, j))); }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words[0], unsigned(24 - bit_of(8, j))), 24));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words[0], 24 - bit_of(8, j)), 24));
#else
    return values_by_row(Coding(), words, j);
#endif
  }
};

template <>
struct Coding<Code::int4> : Units<4, 8>, Fixed {
  using Fixed::Fixed;
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
    return values_by_row(Coding(), words, j);
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

// Codes of four bits with a table of values.
template <>
struct Coding<Code::real4> : Units<4, 8> {
  explicit Coding(const LinearArgs& a, int = 0) : table(a.values) {
#if defined(__AVX512F__)
    in_lanes = _mm512_loadu_ps(table);
#elif defined(__AVX2__)
    lower = _mm256_loadu_ps(table), upper = _mm256_loadu_ps(table + 8);
#endif
  }
  float value(const uint32_t* words, int j) const { return table[words[0] >> bit_of(4, j) & 15]; }
  [[gnu::always_inline]] Vec values(const Words* words, int j) const {
#if defined(__AVX512F__)  // the permutation reads only the lowest four bits of its index
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words[0], unsigned(bit_of(4, j))), in_lanes);
#elif defined(__AVX2__)  // the permutations read only the lowest three bits of their index
    const __m256i nibble = _mm256_srli_epi32(words[0], bit_of(4, j));
    const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(nibble, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, nibble), _mm256_permutevar8x32_ps(upper, nibble), is_upper);
#else
    return values_by_row(*this, words, j);
#endif
  }

  const float* table;
#if defined(__AVX512F__)
  __m512 in_lanes;
#elif defined(__AVX2__)
  __m256 lower, upper;
#endif
};

// The same, with values that bf16 holds.
template <>
struct Coding<Code::nibble> : Coding<Code::real4> {
  explicit Coding(const LinearArgs& a, int = 0) : Coding<Code::real4>(a) {
#if defined(__AVX512F__)  // twice: the permutation reads five bits of its index, and the highest belongs to the next code
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(in_lanes), 16));
    pairs = _mm512_broadcast_i64x4(halves);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] __m512i pair(const Words* words, int p) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words[0], unsigned(4 * p)), pairs);
  }

  __m512i pairs;
#endif
};

template <>
struct Coding<Code::fp8> : Units<8, 4>, Fixed {
  using Fixed::Fixed;
  static float value(const uint32_t* words, int j) { return kFp8[words[0] >> bit_of(8, j) & 255]; }
  [[gnu::always_inline]] static Vec values(const Words* words, int j) {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    return half_values<4, 3>(_mm256_slli_epi32(words[0], 24 - bit_of(8, j)), 256.0f);
#else
    return values_by_row(Coding(), words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] static __m512i pair(const Words* words, int p) { return fp8_pair(words[0], p != 0); }
#endif
};

template <>
struct Coding<Code::fp6> : Units<6, 16>, Fixed {
  using Fixed::Fixed;
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
    return values_by_row(Coding(), words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] static __m512i pair(const Words* words, int p) { return fp6_pair(six_bits(words, p)); }
#endif
};

// Integers less an offset. Tables of short codes repeat, since permutations read more bits of their index.
template <int bits, int codes>
struct Offset : Units<bits, codes> {
  static constexpr float zero_unit = float(1 << bits) / 256;
  explicit Offset(const LinearArgs& a, int lane = 0) : offset(a.values[0]), lane(lane) {
#if defined(__AVX512F__)
    alignas(64) uint16_t of[32 * registers];
    for (int i = 0; i < 32 * registers; ++i) of[i] = bf16_bits(float(i % (1 << bits)) + offset);
    for (int half = 0; half < registers; ++half) pairs[half] = _mm512_load_si512(of + 32 * half);
#elif defined(__AVX2__)
    alignas(32) float of[8];
    for (int i = 0; i < 8; ++i) of[i] = float(i % (1 << bits)) + offset;
    shorts = _mm256_load_ps(of);
#endif
  }

  float offset;
  int lane;
#if defined(__AVX512F__)
  static constexpr int registers = bits > 5 ? 2 : 1;
  __m512i pairs[registers];
#elif defined(__AVX2__)
  __m256 shorts;  // of codes of up to three bits
#endif
};

template <>
struct Coding<Code::two> : Offset<2, 16> {
  using Offset::Offset;
  float value(const uint32_t* words, int j) const { return float(words[0] >> bit_of(2, j) & 3) + offset; }
  [[gnu::always_inline]] Vec values(const Words* words, int j) const {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    return _mm256_permutevar8x32_ps(shorts, _mm256_srli_epi32(words[0], bit_of(2, j)));
#else
    return values_by_row(*this, words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] __m512i pair(const Words* words, int p) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words[0], unsigned(2 * p)), pairs[0]);
  }
#endif
};

template <>
struct Coding<Code::three> : Offset<3, 16> {
  using Offset::Offset;
  float value(const uint32_t* words, int j) const {
    const int p = j / 2, half = 16 * (j % 2);
    if (p == 7) return float((words[1] >> (6 + half) & 3) | (words[0] >> (13 + half) & 4)) + offset;
    return float((p < 5 ? words[0] >> (3 * p + half) : words[1] >> (3 * (p - 5) + half)) & 7) + offset;
  }
  [[gnu::always_inline]] Vec values(const Words* words, int j) const {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    const int p = j / 2, half = 16 * (j % 2);
    __m256i code;
    if (p < 7) {
      code = p < 5 ? _mm256_srli_epi32(words[0], 3 * p + half) : _mm256_srli_epi32(words[1], 3 * (p - 5) + half);
    } else {
      const __m256i lower = _mm256_and_si256(_mm256_srli_epi32(words[1], 6 + half), _mm256_set1_epi32(3));
      code = _mm256_or_si256(lower, _mm256_and_si256(_mm256_srli_epi32(words[0], 13 + half), _mm256_set1_epi32(4)));
    }
    return _mm256_permutevar8x32_ps(shorts, code);
#else
    return values_by_row(*this, words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] __m512i pair(const Words* words, int p) const {
    __m512i code;
    if (p < 7) {
      code = p < 5 ? _mm512_srli_epi16(words[0], unsigned(3 * p)) : _mm512_srli_epi16(words[1], unsigned(3 * (p - 5)));
    } else {
      const __m512i lower = _mm512_srli_epi16(words[1], 6), highest = _mm512_srli_epi16(words[0], 13);
      code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), lower, highest, 0xca);
    }
    return _mm512_permutexvar_epi16(code, pairs[0]);
  }
#endif
};

template <>
struct Coding<Code::five> : Offset<5, 32> {
  using Offset::Offset;
  float value(const uint32_t* words, int j) const {
    const uint32_t lower = words[j / 8] >> bit_of(4, j % 8) & 15, highest = words[4] >> (j / 2 + 16 * (j % 2)) & 1;
    return float(lower | highest << 4) + offset;
  }
  [[gnu::always_inline]] Vec values(const Words* words, int j) const {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    const __m256i lower = _mm256_and_si256(_mm256_srli_epi32(words[j / 8], bit_of(4, j % 8)), _mm256_set1_epi32(15));
    const __m256i highest = _mm256_and_si256(_mm256_srli_epi32(words[4], j / 2 + 16 * (j % 2)), _mm256_set1_epi32(1));
    return Vec(_mm256_cvtepi32_ps(_mm256_or_si256(lower, _mm256_slli_epi32(highest, 4)))) + Vec(offset);
#else
    return values_by_row(*this, words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] __m512i pair(const Words* words, int p) const {
    const __m512i lower = p % 4 ? _mm512_srli_epi16(words[p / 4], unsigned(4 * (p % 4))) : words[p / 4];
    const __m512i highest =
        p < 4 ? _mm512_slli_epi16(words[4], unsigned(4 - p)) : _mm512_srli_epi16(words[4], unsigned(p - 4));
    // the permutation reads five bits of its index: the lower four and the highest
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), lower, highest, 0xca);
    return _mm512_permutexvar_epi16(code, pairs[0]);
  }
#endif
};

template <>
struct Coding<Code::six> : Offset<6, 16> {
  using Offset::Offset;
  float value(const uint32_t* words, int j) const {
    const int p = j / 2, half = 16 * (j % 2);
    if (p < 6) return float(words[p / 2] >> (6 * (p % 2) + half) & 63) + offset;
    return float((words[p - 6] >> (12 + half) & 15) | (words[2] >> (2 * p + half) & 3) << 4) + offset;
  }
  [[gnu::always_inline]] Vec values(const Words* words, int j) const {
#if defined(__AVX512F__)
    return half_of(pair(words, j / 2), j);
#elif defined(__AVX2__)
    const int p = j / 2, half = 16 * (j % 2);
    __m256i code;
    if (p < 6) {
      code = _mm256_and_si256(_mm256_srli_epi32(words[p / 2], 6 * (p % 2) + half), _mm256_set1_epi32(63));
    } else {
      const __m256i lower = _mm256_and_si256(_mm256_srli_epi32(words[p - 6], 12 + half), _mm256_set1_epi32(15));
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi32(words[2], 2 * p + half), _mm256_set1_epi32(3));
      code = _mm256_or_si256(lower, _mm256_slli_epi32(upper, 4));
    }
    return Vec(_mm256_cvtepi32_ps(code)) + Vec(offset);
#else
    return values_by_row(*this, words, j);
#endif
  }
#if defined(__AVX512F__)
  [[gnu::always_inline]] __m512i pair(const Words* words, int p) const {
    return _mm512_permutex2var_epi16(pairs[0], six_bits(words, p), pairs[1]);
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
    case Code::fp6: return run(CodeOf<Code::fp6>());
    case Code::nibble: return run(CodeOf<Code::nibble>());
    case Code::real4: return run(CodeOf<Code::real4>());
    case Code::two: return run(CodeOf<Code::two>());
    case Code::three: return run(CodeOf<Code::three>());
    case Code::five: return run(CodeOf<Code::five>());
    default: return run(CodeOf<Code::six>());
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
