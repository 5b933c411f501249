// Quantized weights in panels: 16 rows of a weight are interleaved, so that a register holds the same position of all.
//
//   panel of 16 rows → [inputs / unit][words][16 rows] 32-bit words; a unit is one word of 4 codes of 8 bits or of
//                      8 codes of 4 bits, three words of 16 codes of 6 bits, or five of 32 codes of 5 bits
//   codes of a unit  → codes j (even) and j + 1 are at the same bits of the two halves of a word:
//                      8 and 4 bits   code j at bit  bits * (j / 2) + 16 * (j % 2)
//                      6 bits         pairs 0 and 1, 2 and 3, 4 and 5 at bits 0 and 6 of the halves of words 0, 1, 2;
//                                     the upper four bits of words 0 and 1 hold the lower bits of pairs 6 and 7, whose
//                                     upper two bits are at bits 12 and 14 of word 2
//                      5 bits         the lower four in words 0 to 3 as codes of 4 bits; the highest of pair p at bit p
//                                     of the halves of word 4
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
constexpr float kLeastCode = -8;  // of int4, which alone has offsets
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
    if (layout.factor == Factor::i8) return d * load_zeros(reinterpret_cast<const int8_t*>(sc));
    return layout.factor == Factor::e4m3 ? d * load_e4m3(sc) : d;
  }
  Vec shift(int group) const {
    if (layout.factor == Factor::none) return Vec() - low;
    return low * load_zeros(reinterpret_cast<const int8_t*>(at + (layout.mn_at() + group) * kPanelRows + lane));
  }
};

// Scale and shift of group g of a panel; `unit`: a step of a zero.
inline OfGroup group_of(const LinearArgs& a, const Scales& scales, int64_t panel, int64_t g, int lane, float unit) {
  OfGroup group;
  if (a.scaling != Scaling::blocks) {
    const int64_t at = (panel * a.groups + g) * kPanelRows + lane;
    group.scale = scales.load(at);
    if (a.zero) group.zero = load_zeros(a.zero + at) * Vec(unit);
    if (a.offset) group.zero = Vec(kLeastCode), group.shift = Vec() - load(a.offset + at, Vec::width);
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
