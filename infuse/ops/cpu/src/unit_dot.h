// Multiplies units of codes (panels.h) with few rows of x, which were arranged in the order in which they are read.
//
// UnitDot<T, C>::Sums<R> holds the sums of R rows of x over a chunk of a group: constructed at a position in the
// arranged x, extended unit by unit by add(), and returned by total(), still without the group's scale. `X` is the
// element of the arranged x; a row has `words` of them.
#pragma once

#include <type_traits>

#include "fixed_point.h"
#include "linear_kernels.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int64_t kChunkUnits = 32;  // units after which a long group starts a new sum: short sums round less

// Calls run(first unit, units) for the chunks of the groups of a row.
template <Code C, class F>
void over_chunks(const LinearArgs& a, const F& run) {
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups;
  for (int64_t g = 0; g < units; g += in_group) {
    for (int64_t u = 0; u < in_group; u += kChunkUnits) run(g + u,
        in_group - u < kChunkUnits ? in_group - u : kChunkUnits);
  }
}

// Parallel sums per row, so that no product waits for the previous one: 8 to 16 in total, as registers allow.
constexpr int sum_chains(int R) {
#if defined(__AVX512F__)
  return R <= 4 ? 4 : 2;
#else
  return R >= 4 ? 1 : 4 / R;
#endif
}

template <int R>
struct FloatSums {
  static constexpr int chains = sum_chains(R);
  Vec partial[chains][R];

  Vec total(int r) const {
    Vec sum = partial[0][r];
    for (int c = 1; c < chains; ++c) sum = sum + partial[c][r];
    return sum;
  }
};

// Any type: codes and x as float, x as [inputs][R].
template <class T, Code C>
struct UnitDot {
  using X = float;
  static int64_t words(const LinearArgs& a) { return a.inputs; }
  static void arrange(const LinearArgs& a, int64_t row, int R, int r, X* to) {
    const T* x = static_cast<const T*>(a.x) + row * a.inputs;
    for (int64_t i = 0; i < a.inputs; ++i) to[i * R + r] = widen(x[i]);
  }
  template <int R>
  struct Sums : FloatSums<R> {
    static constexpr int units = 1;  // best number of units to add at once
    explicit Sums(const X*&) {}
    template <int U>
    [[gnu::always_inline]] void add(const uint8_t* p, const X*& x) {
      const Unit<C> d = load_unit<C>(p);
#pragma GCC unroll 16
      for (int j = 0; j < kUnit<C>; ++j) {
        const Vec w = codes<C>(d, j);
        for (int r = 0; r < R; ++r) this->partial[j % this->chains][r] =
            fma(w, Vec(x[j * R + r]), this->partial[j % this->chains][r]);
      }
      x += kUnit<C> * R;
    }
  };
};

#if defined(__AVX512BF16__)

// bf16: codes and x as pairs of bf16, x as [inputs / 2][R].
template <Code C>
struct UnitDot<bf16, C> {
  using X = uint32_t;
  static int64_t words(const LinearArgs& a) { return a.inputs / 2; }
  static void arrange(const LinearArgs& a, int64_t row, int R, int r, X* to) {
    const bf16* x = static_cast<const bf16*>(a.x) + row * a.inputs;
    for (int64_t i = 0; i < a.inputs / 2; ++i) std::memcpy(to + i * R + r, x + 2 * i, 4);
  }
  template <int R>
  struct Sums : FloatSums<R> {
    static constexpr int units = 1;
    explicit Sums(const X*&) {}
    template <int U>
    [[gnu::always_inline]] void add(const uint8_t* p, const X*& x) {
      const Unit<C> d = load_unit<C>(p);
#pragma GCC unroll 8
      for (int pair = 0; pair < kUnit<C> / 2; ++pair) {
        const __m512bh w = reinterpret_cast<__m512bh>(float_pair<C>(d, pair));
        Vec(&sums)[R] = this->partial[pair % this->chains];
        for (int r = 0; r < R; ++r) sums[r] = _mm512_dpbf16_ps(sums[r].v, w, repeated(x[pair * R + r]));
      }
      x += kUnit<C> / 2 * R;
    }
  };
};

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

  static int64_t words(const LinearArgs& a) {
    const int64_t in_group = a.inputs / kUnit<C> / a.groups;
    return a.inputs / 2 + 2 * a.groups * ((in_group + kChunkUnits - 1) / kChunkUnits);
  }

  static void arrange(const LinearArgs& a, int64_t row, int R, int r, X* to) {
    const T* x = static_cast<const T*>(a.x) + row * a.inputs;
    over_chunks<C>(a, [&](int64_t first_unit, int64_t units) {
      const T* from = x + first_unit * kUnit<C>;
      // if x is not finite, the sum is NaN and is computed again exactly
      const FixedPoint fixed = FixedPoint::of(from, units * kUnit<C>, kMost);
      X* header = to + 2 * r;
      X* quad = to + 2 * R + 2 * quads * r;
      __m512i sum = _mm512_setzero_si512();
      by_sixteen(units * kUnit<C>, [&](int64_t i, int n) {
        const __m512i value = fixed(load(from + i, n));
        sum = _mm512_add_epi32(sum, value);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
        const __m128i highs = in_quads<C>(high),
            lows = in_quads<C>(_mm512_sub_epi32(value, _mm512_slli_epi32(high, 8)));
        const __m128i both[] = {_mm_unpacklo_epi32(highs, lows), _mm_unpackhi_epi32(highs, lows)};  // two quads each
        for (int q = 0; q < n / 4; q += quads, quad += 2 * R * quads) {
          if (quads == 2) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(quad), both[q / 2]);
          } else {
            _mm_storel_epi64(reinterpret_cast<__m128i*>(quad),
                q % 2 ? _mm_unpackhi_epi64(both[q / 2], both[q / 2]) : both[q / 2]);
          }
        }
      });
      header[0] = -uint32_t(kMoved<C>) * uint32_t(_mm512_reduce_add_epi32(sum));
      std::memcpy(header + 1, &fixed.scale, 4);
      to += 2 * R + 2 * quads * R * units;
    });
  }

  template <int R>
  struct Sums {
    static constexpr int chains = R == 1 ? 4 : R <= 3 ? 2 : 1, units = chains < quads ? 1 : chains / quads;
    const X* header;
    __m512i high[chains][R], low[chains][R];

    explicit Sums(const X*& x) : header(x) {
      for (int c = 0; c < chains; ++c) {
        for (int r = 0; r < R; ++r) high[c][r] = low[c][r] = _mm512_setzero_si512();
      }
      for (int r = 0; r < R; ++r) low[0][r] = _mm512_set1_epi32(int(x[2 * r]));
      x += 2 * R;
    }
    template <int U>
    [[gnu::always_inline]] void add(const uint8_t* p, const X*& x) {
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        const __m512i d = load_words(p + u * kUnitBytes<C>);
#pragma GCC unroll 2
        for (int quad = 0; quad < quads; ++quad) {
          const int c = (u * quads + quad) % chains;
          const __m512i w = moved_codes<C>(d, quad);
          for (int r = 0; r < R; ++r) {
            const X* digits = x + ((u * R + r) * quads + quad) * 2;
            high[c][r] = dot_quads(high[c][r], w, _mm512_set1_epi32(int(digits[0])));
            low[c][r] = dot_quads(low[c][r], w, _mm512_set1_epi32(int(digits[1])));
          }
        }
      }
      x += U * R * quads * 2;
    }
    Vec total(int r) const {
      __m512i highs = high[0][r], lows = low[0][r];
      for (int c = 1; c < chains; ++c) highs = _mm512_add_epi32(highs, high[c][r]),
          lows = _mm512_add_epi32(lows, low[c][r]);
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
#if !defined(__AVX512BF16__)  // with it, pairs need as many instructions, and fewer at the end of each group
template <>
struct UnitDot<bf16, Code::int4> : IntegerDot<bf16, Code::int4> {};
#endif

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
