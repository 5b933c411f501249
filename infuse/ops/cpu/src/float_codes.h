// The exact values of fp8 (e4m3) and fp6 (e3m2) codes, as infuse/quant defines them. The NaN of e4m3 is
// not supported: weights that contain it are not converted to panels.
#pragma once

#include <array>
#include <bit>

#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

// From the highest bit: sign, `exponent` bits, `mantissa` bits. The smallest normal value is 2^lowest.
template <int exponent, int mantissa, int lowest>
constexpr auto float_values() {
  std::array<float, 1 << (1 + exponent + mantissa)> values{};
  for (unsigned code = 0; code < values.size(); ++code) {
    const unsigned e = code >> mantissa & ((1 << exponent) - 1), m = code & ((1 << mantissa) - 1);
    float value = float(e ? m + (1 << mantissa) : m);
    const int power = (e ? int(e) - 1 : 0) + lowest - mantissa;
    for (int i = 0; i < power; ++i) value *= 2;
    for (int i = 0; i > power; --i) value /= 2;
    values[code] = code >> (exponent + mantissa) ? -value : value;
  }
  return values;
}
inline constexpr auto kFp8 = float_values<4, 3, -6>();
inline constexpr auto kFp6 = float_values<3, 2, -2>();

constexpr uint16_t bf16_bits(float exact) { return uint16_t(std::bit_cast<uint32_t>(exact) >> 16); }

#if defined(__AVX512BW__)

// Two codes of each row as a pair of bf16.
//
// fp8, from the lower or the upper byte of each half. A shift by 4 puts exponent and mantissa at their bits in bf16,
// and 120 is added to the exponent. If the exponent is 0, a table value for the mantissa is added instead, which gives
// the subnormal's value.
inline __m512i fp8_pair(__m512i d, bool upper) {
  struct alignas(64) Added {
    uint16_t to[32] = {};
    constexpr Added() {
      for (int m = 0; m < 8; ++m) to[m] = uint16_t(bf16_bits(kFp8[m]) - (m << 4));
    }
  };
  static constexpr Added added;
  const __m512i shifted = _mm512_srai_epi16(upper ? d : _mm512_slli_epi16(d, 8), 4);
  const __mmask32 subnormal = _mm512_testn_epi16_mask(d, _mm512_set1_epi16(upper ? 0x7800 : 0x0078));
  // the permutation reads five bits of its index; those of the exponent are 0
  const __m512i missing = _mm512_mask_permutexvar_epi16(
      _mm512_set1_epi16(120 << 7), subnormal, upper ? _mm512_srli_epi16(d, 8) : d, _mm512_load_si512(added.to));
  return _mm512_add_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(short(0x87f0))), missing);
}

// fp6, from the lowest six bits of each half, the only ones that the permutation reads.
inline __m512i fp6_pair(__m512i d) {
  struct alignas(64) Values {
    uint16_t of[64] = {};
    constexpr Values() {
      for (int code = 0; code < 64; ++code) of[code] = bf16_bits(kFp6[code]);
    }
  };
  static constexpr Values values;
  return _mm512_permutex2var_epi16(_mm512_load_si512(values.of), d, _mm512_load_si512(values.of + 32));
}

#elif defined(__AVX2__)

// Codes at the top of 32 bits → values, through fp16 and the factor `lacking` for the difference of the exponents'
// bias. The conversion from fp16 keeps subnormals, whatever the processor does with those of float32.
template <int exponent, int mantissa>
inline Vec half_values(__m256i d, float lacking) {
  constexpr int kept = ((1 << (exponent + mantissa)) - 1) << (10 - mantissa) | 0x8000;
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi32(d, 21 - exponent), _mm256_set1_epi32(kept));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  return Vec(_mm256_cvtph_ps(packed)) * Vec(lacking);
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
