// Multiplies units of codes (panels.h) with few rows of x, which were arranged in the order in which they are read.
//
// UnitDot<T, C>::Sums<R> holds the sums of R rows of x over a chunk of a group: constructed at a position in the
// arranged x, extended unit by unit by add(), and returned by total(), still without the group's scale. `X` is the
// element of the arranged x; a row has `words` of them.
#pragma once

#include <type_traits>

#include "fixed_point.h"
#include "int8_rows.h"
#include "linear_kernels.h"
#include "tile_words.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int64_t kChunkUnits = 32;  // units after which a long group starts a new sum: short sums round less

// Calls run(first unit, units) for the chunks of groups [begin, end) of a row.
template <Code C, class F>
void over_chunks(const LinearArgs& a, int64_t begin, int64_t end, const F& run) {
  const int64_t in_group = a.inputs / kUnit<C> / a.groups;
  for (int64_t g = begin * in_group; g < end * in_group; g += in_group) {
    for (int64_t u = 0; u < in_group; u += kChunkUnits) run(g + u,
        in_group - u < kChunkUnits ? in_group - u : kChunkUnits);
  }
}

// x as integers times a scale for each chunk: [R] of {start of the sums, scale}, then [units][R] of two bytes an input.
template <Code C>
int64_t chunked_words(const LinearArgs& a) {
  const int64_t in_group = a.inputs / kUnit<C> / a.groups;
  return a.inputs / 2 + 2 * a.groups * ((in_group + kChunkUnits - 1) / kChunkUnits);
}

// Arranges groups [begin, end) of rows [row, row + R); arrange_chunk(x, count, header, to, step) one chunk of one row,
// whose units are `step` apart.
template <class T, Code C, class F>
void arrange_chunks(const LinearArgs& a, int64_t row, int R, int64_t begin, int64_t end, uint32_t* to,
                    const F& arrange_chunk) {
  constexpr int64_t unit_words = kUnit<C> / 2;
  to += begin * (chunked_words<C>(a) / a.groups) * R;
  over_chunks<C>(a, begin, end, [&](int64_t first_unit, int64_t units) {
    for (int r = 0; r < R; ++r) {
      const T* x = static_cast<const T*>(a.x) + (row + r) * a.inputs + first_unit * kUnit<C>;
      arrange_chunk(x, units * kUnit<C>, to + 2 * r, to + 2 * R + unit_words * r, unit_words * R);
    }
    to += 2 * R + unit_words * R * units;
  });
}

// Parallel sums per row, so that no product waits for the previous one: 8 to 20 in total, as registers allow. `most`:
// fewer for groups so short that the next one's products fill the waiting time, and adding up the sums costs more.
constexpr int sum_chains(int R, int most) {
#if defined(__AVX512F__)
  const int chains = R <= 4 ? 4 : R <= 10 ? 2 : 1;
#else
  const int chains = R >= 4 ? 1 : 4 / R;
#endif
  return chains < most ? chains : most;
}

template <int R, int most>
struct FloatSums {
  static constexpr int chains = sum_chains(R, most);
  Vec partial[chains][R];

  Vec total(int r) const {
    Vec sum = partial[0][r];
    for (int c = 1; c < chains; ++c) sum = sum + partial[c][r];
    return sum;
  }
};

// Any type: codes and x as float, x as [inputs][R].
template <class T, Code C>
struct RealDot {
  using X = float;
  static int64_t words(const LinearArgs& a) { return a.inputs; }
  // Arranges groups [begin, end) of rows [row, row + R).
  static void arrange(const LinearArgs& a, int64_t row, int R, int64_t begin, int64_t end, X* to) {
    const int64_t length = a.inputs / a.groups;
    for (int r = 0; r < R; ++r) {
      const T* x = static_cast<const T*>(a.x) + (row + r) * a.inputs;
      for (int64_t i = begin * length; i < end * length; ++i) to[i * R + r] = widen(x[i]);
    }
  }
  template <int R, int most = 4>
  struct Sums : FloatSums<R, most> {
    static constexpr int units = 1;  // best number of units to add at once
    explicit Sums(const X*&) {}
    template <int U>
    [[gnu::always_inline]] void add(const Coding<C>& coding, const uint8_t* p, const X*& x) {
      const Unit<C> d = load_unit<C>(coding, p);
#pragma GCC unroll 32
      for (int j = 0; j < kUnit<C>; ++j) {
        const Vec w = coding.values(d.words, j);
        for (int r = 0; r < R; ++r) this->partial[j % this->chains][r] =
            fma(w, Vec(x[j * R + r]), this->partial[j % this->chains][r]);
      }
      x += kUnit<C> * R;
    }
  };
};

template <class T, Code C>
struct UnitDot : RealDot<T, C> {};

#if defined(__AVX512BF16__)

// bf16: codes and x as pairs of bf16, x as [inputs / 2][R].
template <Code C>
struct UnitDot<bf16, C> {
  using X = uint32_t;
  static int64_t words(const LinearArgs& a) { return a.inputs / 2; }
  static void arrange(const LinearArgs& a, int64_t row, int R, int64_t begin, int64_t end, X* to) {
    const int64_t length = a.inputs / a.groups / 2;
    const bf16* x = static_cast<const bf16*>(a.x) + row * a.inputs;
    if (R == 1) {
      std::memcpy(to + begin * length, x + 2 * begin * length, size_t((end - begin) * length) * sizeof(X));
      return;
    }
    for (int64_t i = begin * length; i < end * length; i += 16) {
      const int pairs = int(end * length - i < 16 ? end * length - i : 16);
      Vec words[16];
      load_columns(x + 2 * i, a.inputs, R, pairs, words);
      for (int p = 0; p < pairs; ++p) _mm512_mask_storeu_ps(to + (i + p) * R, first(R), words[p].v);
    }
  }
  template <int R, int most = 4>
  struct Sums : FloatSums<R, most> {
    static constexpr int units = 1;
    explicit Sums(const X*&) {}
    template <int U>
    [[gnu::always_inline]] void add(const Coding<C>& coding, const uint8_t* p, const X*& x) {
      const Unit<C> d = load_unit<C>(coding, p);
#pragma GCC unroll 16
      for (int pair = 0; pair < kUnit<C> / 2; ++pair) {
        const __m512bh w = reinterpret_cast<__m512bh>(coding.pair(d.words, pair));
        Vec(&sums)[R] = this->partial[pair % this->chains];
        for (int r = 0; r < R; ++r) sums[r] = _mm512_dpbf16_ps(sums[r].v, w, repeated(x[pair * R + r]));
      }
      x += kUnit<C> / 2 * R;
    }
  };
};

template <>
struct UnitDot<bf16, Code::real4> : RealDot<bf16, Code::real4> {};

#endif

#if defined(__AVX512VNNI__)

// Integer codes with x as 16-bit integers times a scale per chunk, in steps of 1/32639 of the chunk's largest value.
// The rounding error is a hundredth of that of rounding the chunk's weights to 8 bits. Each integer has two digits,
// 256 * high + low; one instruction multiplies four codes of a row with four digits and adds them, exactly.
//
//   chunk → [R] of {start of the low sums, scale},
//           then [units][R][quads of a unit] of {four high digits, four low digits}
template <class T, Code C>
struct IntegerDot {
  using X = uint32_t;
  static constexpr int quads = kUnit<C> / 4;
  static constexpr float kMost = 32639;  // 127 * 256 + 127

  static int64_t words(const LinearArgs& a) { return chunked_words<C>(a); }

  static void arrange(const LinearArgs& a, int64_t row, int R, int64_t begin, int64_t end, X* to) {
    arrange_chunks<T, C>(a, row, R, begin, end, to, arrange_chunk);
  }

  // Arranges a chunk of one row; units are `step` apart.
  static void arrange_chunk(const T* x, int64_t count, X* header, X* to, int64_t step) {
    // if x is not finite, the sum is NaN and is computed again exactly
    const FixedPoint fixed = FixedPoint::of(x, count, kMost);
    __m512i sum = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      // [4 quads][values of the first 16, values of the second 16], as 16-bit integers
      const __m512i values = _mm512_packs_epi32(fixed(load(x + i, 16)), fixed(load(x + i + 16, 16)));
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(values, _mm512_set1_epi16(1)));
      // rounded digits without overflow: the largest value plus 128 is the largest 16-bit integer
      const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(values, _mm512_set1_epi16(128)), 8);
      const __m512i low = _mm512_sub_epi16(values, _mm512_slli_epi16(high, 8));
      X* at = to + i / kUnit<C> * step;
      store_digits(_mm512_packs_epi16(high, low), at, at + 16 / kUnit<C> * step, step);
    }
    for (; i < count; i += 16) {
      const int n = int(count - i < 16 ? count - i : 16);
      const __m512i value = fixed(load(x + i, n));
      sum = _mm512_add_epi32(sum, value);
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
      const __m128i highs = in_quads<C>(high), lows = in_quads<C>(_mm512_sub_epi32(value, _mm512_slli_epi32(high, 8)));
      alignas(16) X digits[2][4];
      _mm_store_si128(reinterpret_cast<__m128i*>(digits[0]), highs);
      _mm_store_si128(reinterpret_cast<__m128i*>(digits[1]), lows);
      for (int q = 0; q < n / 4; ++q) {
        X* at = to + (i / 4 + q) / quads * step + q % quads * 2;
        at[0] = digits[0][q], at[1] = digits[1][q];
      }
    }
    header[0] = -uint32_t(Coding<C>::moved) * uint32_t(_mm512_reduce_add_epi32(sum));
    std::memcpy(header + 1, &fixed.scale, 4);
  }

  // digits: [4 lanes][8 high digits, 8 low ones], in each four of the first and four of the second 16 values.
  static void store_digits(__m512i digits, X* first, X* second, int64_t step) {
    const __m128i order = C == Code::int8 ? _mm_setr_epi8(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15)
                                          : _mm_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    const __m512i ordered = _mm512_shuffle_epi8(digits, _mm512_broadcast_i32x4(order));
    const __m128i lanes[] = {_mm512_castsi512_si128(ordered), _mm512_extracti32x4_epi32(ordered, 1),
                             _mm512_extracti32x4_epi32(ordered, 2), _mm512_extracti32x4_epi32(ordered, 3)};
    if (quads == 2) {  // the first quad of eight values has values 0, 4, 1, 5
      const __m128i mixed = _mm_setr_epi8(0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15);
      for (int u = 0; u < 2; ++u) {
        const __m128i even = lanes[2 * u], odd = lanes[2 * u + 1];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(first + u * step),
            _mm_shuffle_epi8(_mm_unpacklo_epi64(even, odd), mixed));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(second + u * step),
            _mm_shuffle_epi8(_mm_unpackhi_epi64(even, odd), mixed));
      }
      return;
    }
    for (int q = 0; q < 4; ++q) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(first + q * step), lanes[q]);
      _mm_storeh_pd(reinterpret_cast<double*>(second + q * step), _mm_castsi128_pd(lanes[q]));
    }
  }

  template <int R>
  struct Sums {
    static constexpr int chains = R <= 3 ? 2 : 1, units = R > 3 ? 1 : (R == 1 ? 4 : 2) / quads;
    static constexpr bool unshifted = quads == 2 && chains == 2;  // upper nibbles: sums of their own, 16 times as large
    const X* header;
    __m512i high[chains][R], low[chains][R];

    explicit Sums(const X*& x) : header(x) {
#pragma GCC unroll 2
      for (int c = 0; c < chains; ++c) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) high[c][r] = low[c][r] = _mm512_setzero_si512();
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) low[0][r] = _mm512_set1_epi32(int(x[2 * r]));
      x += 2 * R;
    }
    template <int U>
    [[gnu::always_inline]] void add(const Coding<C>&, const uint8_t* p, const X*& x) {
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        const __m512i d = load_words(p + u * kUnitBytes<C>);
#pragma GCC unroll 2
        for (int quad = 0; quad < quads; ++quad) {
          const int c = (u * quads + quad) % chains;
          const __m512i lower = _mm512_set1_epi8(15);
          __m512i w = !unshifted ? moved_codes<C>(d, quad)
                      : quad     ? _mm512_andnot_si512(lower, d)
                                 : _mm512_and_si512(lower, d);
          asm("" : "+v"(w));  // g++ 12 otherwise keeps it in memory
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const X* digits = x + ((u * R + r) * quads + quad) * 2;
            high[c][r] = dot_quads(high[c][r], w, digits[0]);
            low[c][r] = dot_quads(low[c][r], w, digits[1]);
          }
        }
      }
      x += U * R * quads * 2;
    }
    [[gnu::always_inline]] Vec total(int r) const {
      __m512i highs = high[0][r], lows = low[0][r];
#pragma GCC unroll 2
      for (int c = 1; c < chains; ++c) {
        highs = _mm512_add_epi32(highs, unshifted ? _mm512_srai_epi32(high[c][r], 4) : high[c][r]);
        lows = _mm512_add_epi32(lows, unshifted ? _mm512_srai_epi32(low[c][r], 4) : low[c][r]);
      }
      float scale;
      std::memcpy(&scale, header + 2 * r + 1, 4);
      return Vec(_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(highs, 8), lows))) * Vec(scale);
    }
  };
};

template <>
struct UnitDot<bf16, Code::int8> : IntegerDot<bf16, Code::int8> {};
template <>
struct UnitDot<f16, Code::int8> : IntegerDot<f16, Code::int8> {};
template <>
struct UnitDot<f16, Code::int4> : IntegerDot<f16, Code::int4> {};
// Also with AVX512_BF16, where a line of codes takes four lookups and three shifts for pairs, and three operations here.
template <>
struct UnitDot<bf16, Code::int4> : IntegerDot<bf16, Code::int4> {};

#endif

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))

// Integers of 16 and 32 bits in the words of Vec::width rows.
#if defined(__AVX512F__)
inline Words repeated_word(uint32_t word) { return _mm512_set1_epi32(int(word)); }
inline Words shifted_halves(Words w, int by) { return _mm512_srli_epi16(w, unsigned(by)); }
inline Words masked_halves(Words w, int mask) { return _mm512_and_si512(w, _mm512_set1_epi16(short(mask))); }
inline Words joined_bits(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words sum_of(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words rounded_words(Vec x) { return _mm512_cvtps_epi32(x.v); }
inline Vec numbers_of(Words w) { return _mm512_cvtepi32_ps(w); }
inline void store_halves(uint32_t* to, Words values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(values));
}
// sum + the products of both halves; in assembly as dot_quads.
[[gnu::always_inline]] inline Words dot_pairs(Words sum, Words a, Words b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#else
inline Words repeated_word(uint32_t word) { return _mm256_set1_epi32(int(word)); }
inline Words shifted_halves(Words w, int by) { return _mm256_srli_epi16(w, by); }
inline Words masked_halves(Words w, int mask) { return _mm256_and_si256(w, _mm256_set1_epi16(short(mask))); }
inline Words joined_bits(Words a, Words b) { return _mm256_or_si256(a, b); }
inline Words sum_of(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words rounded_words(Vec x) { return _mm256_cvtps_epi32(x.v); }
inline Vec numbers_of(Words w) { return _mm256_cvtepi32_ps(w); }
inline void store_halves(uint32_t* to, Words values) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
[[gnu::always_inline]] inline Words dot_pairs(Words sum, Words a, Words b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#endif

// Integer codes with x as 16-bit integers times a scale per chunk, as in IntegerDot; one instruction multiplies the codes
// of a pair of inputs with two of them and adds the products, exactly.
//
//   chunk → [R] of {start of the sums, scale}, then [units][R][pairs of a unit] of two integers
template <class T, Code C>
struct PairDot {
  using X = uint32_t;
  static constexpr int pairs = kUnit<C> / 2;
  static constexpr float kMost = 32639;  // with codes of 8 bits, a chunk's sum is below 2^30

  static int64_t words(const LinearArgs& a) { return chunked_words<C>(a); }

  static void arrange(const LinearArgs& a, int64_t row, int R, int64_t begin, int64_t end, X* to) {
    const int lowest = C == Code::int8 ? 0 : C == Code::int4 ? -8 : int(a.values[0]);  // the number of the code 0
    const auto one = [&](const T* x, int64_t count, X* header, X* at, int64_t step) {
      arrange_chunk(x, count, lowest, header, at, step);
    };
    arrange_chunks<T, C>(a, row, R, begin, end, to, one);
  }

  // Arranges a chunk of one row; units are `step` apart.
  static void arrange_chunk(const T* x, int64_t count, int lowest, X* header, X* to, int64_t step) {
    const float peak = largest_magnitude(x, count);  // NaN if x is not finite: the sum is then computed again exactly
    const float lift = peak < 0x1p-64f ? 0x1p64f : 1;  // for the smallest peaks, kMost / peak overflows float
    const float steps = peak > 0 ? kMost / (peak * lift) : 0, scale = peak / kMost;
    Words sum = repeated_word(0);
    for (int64_t i = 0; i < count; i += Vec::width) {
      const Words value = rounded_words(load(x + i, int(count - i < Vec::width ? count - i : Vec::width)) * Vec(lift) *
                                        Vec(steps));
      sum = sum_of(sum, value);
      X halves[Vec::width / 2];
      store_halves(halves, value);
      for (int64_t p = 0; p < Vec::width && i + p < count; p += kUnit<C> < Vec::width ? kUnit<C> : Vec::width) {
        X* at = to + (i + p) / kUnit<C> * step + (i + p) % kUnit<C> / 2;
        std::memcpy(at, halves + p / 2, sizeof(X) * (kUnit<C> < Vec::width ? kUnit<C> : Vec::width) / 2);
      }
    }
    int32_t lanes[Vec::width], total = 0;
    std::memcpy(lanes, &sum, sizeof lanes);
    for (int32_t lane : lanes) total += lane;
    header[0] = uint32_t(lowest * total);  // only codes of 8 bits are multiplied as signed
    std::memcpy(header + 1, &scale, 4);
  }

  // The codes of pair `pair` of each row.
  [[gnu::always_inline]] static Words codes_of(const Unit<C>& d, int pair) {
    const Words words = d.words[0];
#if !defined(__AVX512F__)
    if constexpr (C == Code::int8) return _mm256_srai_epi16(pair ? words : _mm256_slli_epi16(words, 8), 8);
#endif
    constexpr int bits = Coding<C>::bits, mask = (1 << bits) - 1;
    if constexpr (C == Code::three) {
      const Words rest = d.words[1];
      if (pair == 7) return joined_bits(shifted_halves(rest, 6), masked_halves(shifted_halves(words, 13), 4));
      return masked_halves(pair < 5 ? shifted_halves(words, 3 * pair) : shifted_halves(rest, 3 * (pair - 5)), mask);
    }
    const Words moved = pair ? shifted_halves(words, bits * pair) : words;
    return pair == pairs - 1 ? moved : masked_halves(moved, mask);
  }

  template <int R, int most = 4>
  struct Sums {
#if defined(__AVX512F__)
    static constexpr int chains = sum_chains(R, most);
#else
    static constexpr int chains = 1;  // only the addition waits for the previous one
#endif
    static constexpr int units = 2;
    const X* header;
    Words sum[chains][R];

    explicit Sums(const X*& x) : header(x) {
      for (int c = 0; c < chains; ++c) {
        for (int r = 0; r < R; ++r) sum[c][r] = repeated_word(c ? 0 : x[2 * r]);
      }
      x += 2 * R;
    }
    template <int U>
    [[gnu::always_inline]] void add(const Coding<C>& coding, const uint8_t* p, const X*& x) {
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) {
        const Unit<C> d = load_unit<C>(coding, p + u * kUnitBytes<C>);
#pragma GCC unroll 8
        for (int pair = 0; pair < pairs; ++pair) {
          const Words w = codes_of(d, pair);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            Words& to = sum[pair % chains][r];
            to = dot_pairs(to, w, repeated_word(x[(u * R + r) * pairs + pair]));
          }
        }
      }
      x += U * R * pairs;
    }
    Vec total(int r) const {
      Words all = sum[0][r];
      for (int c = 1; c < chains; ++c) all = sum_of(all, sum[c][r]);
      float scale;
      std::memcpy(&scale, header + 2 * r + 1, 4);
      return numbers_of(all) * Vec(scale);
    }
  };
};

template <>
struct UnitDot<f16, Code::two> : PairDot<f16, Code::two> {};
template <>
struct UnitDot<f16, Code::three> : PairDot<f16, Code::three> {};
#if !defined(__AVX512BF16__)
template <>
struct UnitDot<bf16, Code::two> : PairDot<bf16, Code::two> {};
template <>
struct UnitDot<bf16, Code::three> : PairDot<bf16, Code::three> {};
#endif

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)

template <>
struct UnitDot<bf16, Code::int8> : PairDot<bf16, Code::int8> {};
template <>
struct UnitDot<bf16, Code::int4> : PairDot<bf16, Code::int4> {};
template <>
struct UnitDot<f16, Code::int8> : PairDot<f16, Code::int8> {};
template <>
struct UnitDot<f16, Code::int4> : PairDot<f16, Code::int4> {};

// fp8 and fp6 through fp16, two codes of a row at once: in the halves of a word their bits are moved to those of fp16,
// whose conversion keeps subnormals. x as [inputs / 2][R][2]. The sums of four rows of the weight are in a register, of
// codes 0 and 1 of each pair apart.
template <class T, Code C>
struct HalfDot {
  using X = float;
  static constexpr int pairs = kUnit<C> / 2;
  static constexpr float lacking = C == Code::fp8 ? 256.0f : 4096.0f;  // for the difference of the exponents' bias
  static int64_t words(const LinearArgs& a) { return a.inputs; }
  static void arrange(const LinearArgs& a, int64_t row, int R, int64_t begin, int64_t end, X* to) {
    const int64_t length = a.inputs / a.groups;
    for (int r = 0; r < R; ++r) {
      const T* x = static_cast<const T*>(a.x) + (row + r) * a.inputs;
      for (int64_t i = begin * length; i < end * length; ++i) to[(i / 2 * R + r) * 2 + i % 2] = widen(x[i]);
    }
  }

  // Pair `pair` of each row at the bits of fp16.
  [[gnu::always_inline]] static __m256i halves_of(const Unit<C>& d, int pair) {
    if constexpr (C == Code::fp8) {
      const __m256i upper = pair ? d.words[0] : _mm256_slli_epi16(d.words[0], 8);
      return _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(short(0xbf80)));
    } else {
      __m256i upper;
      if (pair < 6) {
        upper = _mm256_slli_epi16(d.words[pair / 2], pair % 2 ? 4 : 10);
      } else {
        const __m256i high = pair == 6 ? _mm256_slli_epi16(d.words[2], 2) : d.words[2];
        const __m256i lower = _mm256_set1_epi16(0x3c00);
        upper = _mm256_or_si256(_mm256_and_si256(lower, _mm256_srli_epi16(d.words[pair - 6], 2)),
                                _mm256_andnot_si256(lower, high));
      }
      return _mm256_and_si256(_mm256_srai_epi16(upper, 2), _mm256_set1_epi16(short(0x9f00)));
    }
  }

  template <int R>
  struct Sums {
    static constexpr int chains = R == 1 ? 4 : R == 2 ? 2 : 1, units = C == Code::fp8 ? 2 : 1;
    Vec first[chains][R], second[chains][R];  // of four rows each
    explicit Sums(const X*&) {}
    template <int U>
    [[gnu::always_inline]] void add(const Coding<C>& coding, const uint8_t* p, const X*& x) {
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) {
        const Unit<C> d = load_unit<C>(coding, p + u * kUnitBytes<C>);
#pragma GCC unroll 8
        for (int pair = 0; pair < pairs; ++pair) {
          const __m256i halves = halves_of(d, pair);
          const Vec low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
          const Vec high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
          const int c = (u * pairs + pair) % chains;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            double both;
            std::memcpy(&both, x + ((u * pairs + pair) * R + r) * 2, 8);
            const Vec twice = _mm256_castpd_ps(_mm256_set1_pd(both));
            first[c][r] = fma(low, twice, first[c][r]), second[c][r] = fma(high, twice, second[c][r]);
          }
        }
      }
      x += U * kUnit<C> * R;
    }
    Vec total(int r) const {
      Vec low = first[0][r], high = second[0][r];
      for (int c = 1; c < chains; ++c) low = low + first[c][r], high = high + second[c][r];
      const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(low.v, high.v));  // of rows 0, 1, 4, 5, 2, 3, 6, 7
      return Vec(_mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8))) * Vec(lacking);
    }
  };
};

template <class T>
struct UnitDot<T, Code::fp8> : HalfDot<T, Code::fp8> {};
template <class T>
struct UnitDot<T, Code::fp6> : HalfDot<T, Code::fp6> {};

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
