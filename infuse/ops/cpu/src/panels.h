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

#include "elements.h"
#include "float_codes.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kPanelRows = 16;
constexpr int kWordBytes = 4 * kPanelRows;

template <Code C>
constexpr int kUnitWords = C == Code::fp6 ? 3 : 1;
template <Code C>
constexpr int kUnitBytes = kWordBytes * kUnitWords<C>;
template <Code C>
constexpr int kUnit = 32 * kUnitWords<C> / bits_of(C);  // codes in a unit

constexpr int bit_of(int bits, int j) { return bits * (j / 2) + 16 * (j % 2); }

// The value of code j of a row, from the words of its unit.
template <Code C>
float value_in(const uint32_t* words, int j) {
  if constexpr (C == Code::int8) return float(int8_t(words[0] >> bit_of(8, j)));
  if constexpr (C == Code::int4) return float(int(words[0] >> bit_of(4, j) & 15) - 8);
  if constexpr (C == Code::mxfp4) return kMxfp4[words[0] >> bit_of(4, j) & 15];
  if constexpr (C == Code::fp8) return kFp8[words[0] >> bit_of(8, j) & 255];
  if constexpr (C == Code::fp6) {
    const int pair = j / 2, half = 16 * (j % 2);
    if (pair < 6) return kFp6[words[pair / 2] >> (6 * (pair % 2) + half) & 63];
    return kFp6[(words[pair - 6] >> (12 + half) & 15) | (words[2] >> (2 * pair + half) & 3) << 4];
  }
}

// Loads the words of `width` rows; codes() below gives the values of code j of each.
#if defined(__AVX512F__)

using Words = __m512i;
inline Words load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec load_zeros(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#elif defined(__AVX2__)

using Words = __m256i;
inline Words load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec load_zeros(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#else

struct Words {
  uint32_t lane[Vec::width];
};
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
  Words words[kUnitWords<C>];
};
template <Code C>
[[gnu::always_inline]] inline Unit<C> load_unit(const uint8_t* p) {
  Unit<C> d;
  for (int w = 0; w < kUnitWords<C>; ++w) d.words[w] = load_words(p + w * kWordBytes);
  return d;
}
template <Code C>
[[gnu::always_inline]] inline void prefetch_unit(const uint8_t* p, Into into = Into::outer) {
  for (int w = 0; w < kUnitWords<C>; ++w) prefetch(p + w * kWordBytes, into);
}

#if defined(__AVX512F__)

// Pair `pair` of each row as exact bf16; not for int8.
template <Code C>
[[gnu::always_inline]] inline __m512i float_pair(const Unit<C>& d, int pair) {
  // -8 ... 7, twice: the permutation reads five bits of its index, and the highest belongs to the next code
  if constexpr (C == Code::int4) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000),
        short(0xbf80), 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(d.words[0], unsigned(4 * pair)), table);
  }
  if constexpr (C == Code::mxfp4) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, short(0x8000), short(0xbf00), short(0xbf80),
        short(0xbfc0), short(0xc000), short(0xc040), short(0xc080), short(0xc0c0)));
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(d.words[0], unsigned(4 * pair)), table);
  }
  if constexpr (C == Code::fp8) return fp8_pair(d.words[0], pair != 0);
  if constexpr (C == Code::fp6) {
    if (pair < 6) return fp6_pair(pair % 2 ? _mm512_srli_epi16(d.words[pair / 2], 6) : d.words[pair / 2]);
    const __m512i lower = _mm512_srli_epi16(d.words[pair - 6], 12),
        upper = _mm512_srli_epi16(d.words[2], unsigned(2 * pair - 4));
    return fp6_pair(_mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(0x30), 0xf8));  // lower | upper & 0x30
  }
}
template <Code C>
[[gnu::always_inline]] inline Vec codes(const Unit<C>& d, int j) {
  if constexpr (C == Code::int8) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(d.words[0], unsigned(24 - bit_of(8, j))), 24));
  } else if constexpr (C == Code::int4) {  // the permutation reads only the lowest four bits of its index
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(d.words[0], unsigned(bit_of(4, j))), table);
  } else if constexpr (C == Code::mxfp4) {
    const __m512 table = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(d.words[0], unsigned(bit_of(4, j))), table);
  } else {
    const __m512i pair = float_pair<C>(d, j / 2);
    return _mm512_castsi512_ps(j % 2 ? _mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000)))
        : _mm512_slli_epi32(pair, 16));
  }
}

#elif defined(__AVX2__)

template <Code C>
[[gnu::always_inline]] inline Vec codes(const Unit<C>& d, int j) {
  if constexpr (C == Code::int8) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(d.words[0], 24 - bit_of(8, j)), 24));
  } else if constexpr (C == Code::int4) {
    const __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(d.words[0], bit_of(4, j)), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibble, _mm256_set1_epi32(8)));
  } else if constexpr (C == Code::mxfp4) {  // the permutation reads only the lowest three bits of its index
    const __m256i nibble = _mm256_srli_epi32(d.words[0], bit_of(4, j));
    const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6), nibble);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(nibble, _mm256_set1_epi32(8)), 28);
    return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
  } else if constexpr (C == Code::fp8) {
    return half_values<4, 3>(_mm256_slli_epi32(d.words[0], 24 - bit_of(8, j)), 256.0f);
  } else {
    const int pair = j / 2, half = 16 * (j % 2);
    if (pair < 6) return half_values<3, 2>(_mm256_slli_epi32(d.words[pair / 2], 26 - 6 * (pair % 2) - half), 4096.0f);
    const __m256i lower = half ? _mm256_srli_epi32(d.words[pair - 6], 2) : _mm256_slli_epi32(d.words[pair - 6], 14);
    const __m256i upper = _mm256_slli_epi32(d.words[2], 30 - 2 * pair - half),
        lower_bits = _mm256_set1_epi32(0x3c000000);
    return half_values<3, 2>(_mm256_or_si256(_mm256_and_si256(lower_bits, lower),
        _mm256_andnot_si256(lower_bits, upper)), 4096.0f);
  }
}

#else

template <Code C>
Vec codes(const Unit<C>& d, int j) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) {
    uint32_t words[kUnitWords<C>];
    for (int w = 0; w < kUnitWords<C>; ++w) words[w] = d.words[w].lane[i];
    r.v[i] = value_in<C>(words, j);
  }
  return r;
}

#endif

// The scale at `p`, and those of Vec::width rows. A scale is read once for a group, so that its type is asked here.
inline float scale_at(const LinearArgs& a, const uint16_t* p) {
  return a.half_scales ? widen(*reinterpret_cast<const f16*>(p)) : widen(*reinterpret_cast<const bf16*>(p));
}
[[gnu::always_inline]] inline Vec load_scales(const LinearArgs& a, const uint16_t* p) {
  if (a.half_scales) [[unlikely]] return load(reinterpret_cast<const f16*>(p), Vec::width);
  return load(reinterpret_cast<const bf16*>(p), Vec::width);
}

template <Code C>
constexpr float kZeroUnit = C == Code::int4 ? 1.0f / 16 : 1.0f;  // one unit of `zero`, in steps of the scale

template <class F>
auto with_type(Type type, const F& run) {
  switch (type) {
    case Type::bf16: return run(bf16());
    case Type::f16: return run(f16());
    default: return run(float());
  }
}

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
