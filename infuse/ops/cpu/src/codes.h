// Codes of 8 and 4 bits: how they become numbers, and how a unit of them is multiplied with x.
#pragma once

#include "elements.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int64_t kMostGroups = 2048;  // of 32 inputs in one weight row, so that their scales lie on the stack (ops/cpu/linear.py)

// One code as a number.
template <int Bits>
float decode_one(const uint8_t* row, int64_t i) {
  if constexpr (Bits == 8) return float(int8_t(row[i]));
  return float(((row[i / 2] >> (i % 2 * 4)) & 15) - 8);
}

// `width` codes as numbers: neighbours of 8 bits, or the low nibbles of 32-bit lanes.
#if defined(__AVX512F__)
inline Vec decode_bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
using Lanes = __m512i;
inline Lanes bytes_in_lanes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Lanes pairs_in_lanes(const uint8_t* p) {  // each byte twice, the second one shifted to its high nibble
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes)), _mm512_set1_epi64(int64_t(4) << 32));
}
inline Lanes high_nibbles(Lanes x) { return _mm512_srli_epi32(x, 4); }
inline Vec decode_nibbles(Lanes x) {  // a look-up reads only the lowest four bits of its index
  return _mm512_permutexvar_ps(x, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}
#elif defined(__AVX2__)
inline Vec decode_bytes(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
using Lanes = __m256i;
inline Lanes bytes_in_lanes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Lanes pairs_in_lanes(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  const __m128i bytes = _mm_cvtsi32_si128(four);
  return _mm256_srlv_epi32(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes)), _mm256_set1_epi64x(int64_t(4) << 32));
}
inline Lanes high_nibbles(Lanes x) { return _mm256_srli_epi32(x, 4); }
inline Vec decode_nibbles(Lanes x) {
  const __m256i code = _mm256_sub_epi32(_mm256_and_si256(x, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
  return _mm256_cvtepi32_ps(code);
}
#else
inline Vec decode_bytes(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float(int8_t(p[i]));
  return r;
}
struct Lanes {
  uint8_t lane[Vec::width];
};
inline Lanes bytes_in_lanes(const uint8_t* p) {
  Lanes r;
  for (int i = 0; i < Vec::width; ++i) r.lane[i] = p[i];
  return r;
}
inline Lanes pairs_in_lanes(const uint8_t* p) {
  Lanes r;
  for (int i = 0; i < Vec::width; ++i) r.lane[i] = uint8_t(p[i / 2] >> (i % 2 * 4));
  return r;
}
inline Lanes high_nibbles(Lanes x) {
  for (int i = 0; i < Vec::width; ++i) x.lane[i] >>= 4;
  return x;
}
inline Vec decode_nibbles(Lanes x) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float((x.lane[i] & 15) - 8);
  return r;
}
#endif

// How a unit of codes is multiplied with x; the inputs of a unit share a scale, or its halves have one each.
// Any type: codes and x as float.
template <class T, int Bits>
struct Codes {
  using X = float;
  static constexpr int unit = 32;
  static void arrange(const T* x, int, X* to) {
    for (int i = 0; i < unit; i += 2 * Vec::width) {
      const Vec a = load(x + i, Vec::width), b = load(x + i + Vec::width, Vec::width);
      if (Bits == 4) {
        deinterleave(a, b, to + i);
      } else {
        store(to + i, a, Vec::width), store(to + i + Vec::width, b, Vec::width);
      }
    }
  }
  // partial[r] += the unit at p with that of row r of x, which lie behind each other.
  template <int R>
  [[gnu::always_inline]] static void dot(const uint8_t* p, int, const X* x, Vec (&partial)[R]) {
    for (int i = 0; i < unit; i += 2 * Vec::width) {
      Vec a, b;
      if constexpr (Bits == 4) {
        const Lanes both = bytes_in_lanes(p + i / 2);
        a = decode_nibbles(both), b = decode_nibbles(high_nibbles(both));
      } else {
        a = decode_bytes(p + i), b = decode_bytes(p + i + Vec::width);
      }
      for (int r = 0; r < R; ++r) {
        partial[r] = fma(a, load(x + r * unit + i, Vec::width), partial[r]);
        partial[r] = fma(b, load(x + r * unit + i + Vec::width, Vec::width), partial[r]);
      }
    }
  }
  static Vec scale(const float* halves) { return Vec(halves[0]); }
};

#if defined(__AVX512BF16__)

// Codes are exact in bf16, so 64 of them are two registers of pairs. The low half of the float lanes belongs to the first
// 32 inputs, the high half to the others.
template <int Bits>
struct Codes<bf16, Bits> {
  using X = bf16;
  static constexpr int unit = 64;
  static __m512bh pairs(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }
  static void arrange(const bf16* x, int n, X* to) {
    const __m512i a = _mm512_loadu_si512(x), b = n > 32 ? _mm512_loadu_si512(x + 32) : _mm512_setzero_si512();
    if (Bits == 8) {
      _mm512_store_si512(to, _mm512_shuffle_i64x2(a, b, 0x44));
      _mm512_store_si512(to + 32, _mm512_shuffle_i64x2(a, b, 0xee));
    } else {
      alignas(64) uint16_t even[32];
      for (int i = 0; i < 32; ++i) even[i] = uint16_t(2 * i);
      const __m512i index = _mm512_load_si512(even);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, index, b));
      _mm512_store_si512(to + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(index, _mm512_set1_epi16(1)), b));
    }
  }
  [[gnu::always_inline]] static void decode(const uint8_t* p, __m512bh& first, __m512bh& second) {
    if constexpr (Bits == 8) {
      first = _mm512_cvtne2ps_pbh(decode_bytes(p + 32).v, decode_bytes(p).v);
      second = _mm512_cvtne2ps_pbh(decode_bytes(p + 48).v, decode_bytes(p + 16).v);
    } else {
      // -8 ... 7 twice: a look-up reads five bits of its index, of which the highest belongs to the next nibble.
      const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
          short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000), short(0xbf80),
          0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
      const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      first = pairs(_mm512_permutexvar_epi16(both, table));
      second = pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
    }
  }
  template <int R>
  [[gnu::always_inline]] static void dot(const uint8_t* p, int n, const X* x, Vec (&partial)[R]) {
    __m512bh first, second;
    uint8_t padded[unit * Bits / 8];
    if (n < unit) {  // the row ends after the first half; the arranged x is zero beyond it
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, p, size_t(n) * Bits / 8);
      p = padded;
    }
    decode(p, first, second);
    for (int r = 0; r < R; ++r) {
      partial[r] = _mm512_dpbf16_ps(partial[r].v, first, pairs(_mm512_load_si512(x + r * unit)));
      partial[r] = _mm512_dpbf16_ps(partial[r].v, second, pairs(_mm512_load_si512(x + r * unit + 32)));
    }
  }
  static Vec scale(const float* halves) {
    return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(halves[0]), _mm512_set1_ps(halves[1]));
  }
};

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
