// Quantized weights in panels: 16 rows of a weight are interleaved, so that a register holds the same position of all.
//
//   panel of 16 rows → [inputs / unit][words][16 rows] 32-bit words; a unit is one word of 4 codes of 8 bits or of
//                      8 codes of 4 bits, or 16 of 2; three words of 16 codes of 6 bits, five of 32 codes of 5 bits,
//                      or a word and a half of 16 codes of 3 bits: [16 rows] words, then [16 rows] of two bytes
//   codes of a unit  → codes j (even) and j + 1 are at the same bits of the two halves of a word:
//                      8, 4, 2 bits   code j at bit  bits * (j / 2) + 16 * (j % 2)
//                      6 bits         pairs 0 and 1, 2 and 3, 4 and 5 at bits 0 and 6 of the halves of words 0, 1, 2;
//                                     the upper four bits of words 0 and 1 hold the lower bits of pairs 6 and 7, whose
//                                     upper two bits are at bits 12 and 14 of word 2
//                      5 bits         the lower four in words 0 to 3 as codes of 4 bits; the highest of pair p at bit p
//                                     of the halves of word 4
//                      3 bits         pairs 0 to 4 from bit 0 of the halves of the word, 5 and 6 from bit 0 of the two
//                                     bytes, whose bits 6 and 7 are the lower ones of pair 7; its highest is at bit 15
//                                     of the halves
//   scale, zero, offset → [panel][group][16 rows]; in blocks (formats.h): [panel][block][bytes of a field][16 rows]
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
constexpr int kUnitBytes = kPanelRows * Coding<C>::unit * Coding<C>::bits / 8;
// Whole words of a unit.
template <Code C>
constexpr int kWholeWords = kUnitBytes<C> / kWordBytes;

// Loads the words of `width` rows, or their halves: two bytes of a row become a word, with one in each half.
#if defined(__AVX512F__)

inline Words load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Words load_halves(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_zeros(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#elif defined(__AVX2__)

inline Words load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Words load_halves(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_zeros(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#else

inline Words load_words(const uint8_t* p) {
  Words d;
  std::memcpy(&d, p, sizeof d);
  return d;
}
inline Words load_halves(const uint8_t* p) {
  Words d;
  for (int i = 0; i < Vec::width; ++i) d.lane[i] = p[2 * i] | uint32_t(p[2 * i + 1]) << 16;
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
// p: the words of the first row of the coding's.
template <Code C>
[[gnu::always_inline]] inline Unit<C> load_unit(const Coding<C>& coding, const uint8_t* p) {
  Unit<C> d;
  for (int w = 0; w < kWholeWords<C>; ++w) d.words[w] = load_words(p + w * kWordBytes);
  if constexpr (kWholeWords<C> < Coding<C>::words) {
    d.words[kWholeWords<C>] = load_halves(p + kWholeWords<C> * kWordBytes - 2 * coding.lane);
  }
  return d;
}
template <Code C>
[[gnu::always_inline]] inline void prefetch_unit(const uint8_t* p, Into into = Into::outer) {
  for (int at = 0; at < kUnitBytes<C>; at += kWordBytes) prefetch(p + at, into);
}

// Scales as float that are not in blocks, of any type that they may have.
struct Scales {
  explicit Scales(const LinearArgs& a)
      : from(a.scale), wide(a.scaling == Scaling::f32), half(a.scaling == Scaling::f16 ? 0xffff : 0) {}
  // Of Vec::width rows, scale `i` and following ones.
  [[gnu::always_inline]] Vec load(int64_t i) const {
    return wide ? infuse::INFUSE_ISA::load(reinterpret_cast<const float*>(from) + i, Vec::width)
                : load(reinterpret_cast<const uint16_t*>(from) + i);
  }

 private:
  const uint8_t* from;
  bool wide;
#if defined(__AVX512F__)
  [[gnu::always_inline]] Vec load(const uint16_t* p) const {  // without a branch
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
    return half ? infuse::INFUSE_ISA::load(reinterpret_cast<const f16*>(p), Vec::width)
                : infuse::INFUSE_ISA::load(reinterpret_cast<const bf16*>(p), Vec::width);
  }
  int half;
#endif
};

// Keeps the compiler from computing on with more bits of a product.
template <class V>
[[gnu::always_inline]] inline void round_here(V& v) {
#if defined(__AVX512F__) || defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vec>) {
    asm("" : "+x"(v.v));
  } else {
    asm("" : "+x"(v));
  }
#endif
}

// Of a group: w = scale * (code - zero) - shift. Shifts are those of blocks, or offsets, whose codes begin with 0.
struct OfGroup {
  Vec scale, zero, shift;
  Vec value(Vec code) const { return (code - zero) * scale - shift; }
  // The same, rounded twice as the reference rounds: the compiler makes one instruction of the other.
  Vec value_of_reference(Vec code) const {
    Vec product = (code - zero) * scale;
    round_here(product);
    return product - shift;
  }
};

// Sixteen bytes of e4m3, or as many as a register holds, as float.
inline Vec load_e4m3(const uint8_t* p) {
#if defined(__AVX512F__)
  const Words words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return Coding<Code::fp8>::values(&words, 0);
#else
  float values[Vec::width];
  for (int i = 0; i < Vec::width; ++i) values[i] = kFp8[p[i]];
  return load(values, Vec::width);
#endif
}

// The numbers of groups, of Vec::width rows: bytes, or the low or the high nibbles of bytes.
inline Vec load_bytes(const uint8_t* p) { return load_zeros(reinterpret_cast<const int8_t*>(p)); }
template <int shift>
inline Vec load_nibbles(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, shift), values);  // reads only the lowest four bits
#elif defined(__AVX2__)
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtepi32_ps(shift ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15)));
#else
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float(p[i] >> shift & 15);
  return r;
#endif
}

// A block's numbers of Vec::width rows of a panel, from `lane` on.
struct OfBlock {
  const BlockLayout& layout;
  const uint8_t* at;
  int lane;
  Vec d, low;

  OfBlock(const LinearArgs& a, int64_t panel, int64_t block, int lane)
      : layout(*a.blocks), at(a.scale + panel * kPanelRows * a.scale_bytes + block * layout.bytes() * kPanelRows),
        lane(lane) {
    d = layout.wide ? load(reinterpret_cast<const float*>(at) + lane, Vec::width)
                    : load(reinterpret_cast<const f16*>(at) + lane, Vec::width);
    if (layout.shifts) low = load(reinterpret_cast<const f16*>(at + layout.d_bytes() * kPanelRows) + lane, Vec::width);
  }
  Vec scale(int group) const {
    const uint8_t* sc = at + (layout.sc_at() + group) * kPanelRows + lane;
    if (layout.factor == Factor::i8) return d * load_bytes(sc);
    if (layout.factor == Factor::nibbles) return d * load_nibbles<0>(sc);
    return layout.factor == Factor::e4m3 ? d * load_e4m3(sc) : d;
  }
  Vec shift(int group) const {
    if (layout.factor == Factor::none) return Vec() - low;
    const uint8_t* mn = at + (layout.mn_at() + group) * kPanelRows + lane;
    return low * (layout.factor == Factor::nibbles ? load_nibbles<4>(mn) : load_bytes(mn));
  }
};

// The lowest code of integers, which offsets count from. It is also the lowest zero point, -128 steps of it.
constexpr float least_code(float unit) { return -128 * unit; }

// Scale and shift of group g of a panel; `unit`: a step of a zero.
inline OfGroup group_of(const LinearArgs& a, const Scales& scales, int64_t panel, int64_t g, int lane, float unit) {
  OfGroup group;
  if (a.scaling != Scaling::blocks) {
    const int64_t at = (panel * a.groups + g) * kPanelRows + lane;
    group.scale = scales.load(at);
    if (a.zero) group.zero = load_zeros(a.zero + at) * Vec(unit);
    if (a.offset) group.zero = Vec(least_code(unit)), group.shift = Vec() - load(a.offset + at, Vec::width);
    return group;
  }
  const int in_block = a.blocks->groups();
  const OfBlock block(a, panel, g / in_block, lane);
  group.scale = block.scale(int(g % in_block));
  if (a.blocks->shifts) group.shift = block.shift(int(g % in_block));
  return group;
}

}  // namespace INFUSE_ISA
}  // namespace infuse
