// The search for each group's scale, and the codes, for fp8 and fp6: infuse/quant/floating.py operation by operation.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace infuse {
namespace INFUSE_ISA {

inline Vec at_least_smallest(Vec scale) { return larger(Vec(1.17549435e-38f), scale); }  // 2^-126, SMALLEST_SCALE

// x with a zero mantissa: the largest power of two that is not larger than x; x >= 0.
inline Vec power_below(Vec x) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7f800000)));
#elif defined(__AVX2__)
  return _mm256_and_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)));
#else
  for (int i = 0; i < Vec::width; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x.v[i], 4);
    bits &= 0x7f800000;
    std::memcpy(&x.v[i], &bits, 4);
  }
  return x;
#endif
}

// A grid of GRIDS in floating.py: `exponent` and `mantissa` bits, smallest normal value 2^lowest, largest value `most`.
template <int exponent, int mantissa, int lowest, int most>
struct FloatGrid {
  static constexpr float smallest_normal = 1.0f / (1 << -lowest);
  // Times a binade: near this product, float32 has the spacing of the grid.
  static constexpr float rounds = 1.5f * (1 << (23 - mantissa));

  // The grid value nearest to x >= 0; of two equally near values, the one with the even code.
  static Vec rounded(Vec x) {
    const Vec within = smaller(Vec(float(most)), x), binade = larger(Vec(smallest_normal), power_below(within));
    return fma(binade, Vec(-rounds), apart(fma(binade, Vec(rounds), within)));  // the products are exact
  }

  // Writes the codes of one group.
  template <class T>
  static void write(const T* w, int64_t length, float scale, uint8_t* to) {
    const Vec none(0.0f), normal(smallest_normal), first_normal_code(float(1 << mantissa)),
        negative(float(1 << (exponent + mantissa)));
    for (int64_t i = 0; i < length; i += Vec::width) {
      const int n = int(length - i < Vec::width ? length - i : Vec::width);
      const Vec steps = load(w + i, n) / Vec(scale), magnitude = rounded(absolute(steps));
      // The code is exponent and mantissa of float32 minus an offset. Subnormals need the smallest normal value added.
      const Vec moved = where_less(magnitude, normal, magnitude + normal, magnitude);
      const Vec sign = where_less(steps, none, where_less(none, magnitude, negative, none), none);  // never -0
      float values[Vec::width], added[Vec::width];
      store(values, moved, Vec::width),
          store(added, where_less(magnitude, normal, sign - first_normal_code, sign), Vec::width);
      uint8_t codes[Vec::width];
      for (int j = 0; j < Vec::width; ++j) {
        int32_t bits;
        std::memcpy(&bits, values + j, 4);
        codes[j] = uint8_t((bits >> (23 - mantissa)) - ((126 + lowest) << mantissa) + int32_t(added[j]));
      }
      std::memcpy(to + i, codes, size_t(n));
    }
  }

  // The scale with the least squared error; if equal, the first. A candidate is the grid value that the largest value
  // is scaled to.
  static Vec best_scale(const QuantizeArgs& a, const float* values, Vec largest_value) {
    constexpr int together = 4;  // as in Search of quantize.h
    Vec best, least(__builtin_inff());
    for (int64_t first = 0; first < a.count; first += together) {
      Vec scale[together], inverse[together], squares[together];
      for (int k = 0; k < together; ++k) {
        const int64_t c = first + k < a.count ? first + k : a.count - 1;  // a duplicate does not win
        scale[k] = at_least_smallest(nearest_bf16(largest_value / Vec(a.candidates[c])));
        inverse[k] = Vec(1.0f) / scale[k];
      }
      for (int64_t j = 0; j < a.length; ++j) {
        const Vec w = absolute(load(values + j * Vec::width, Vec::width));
        for (int k = 0; k < together; ++k) {
          const Vec steps = apart(w * inverse[k]), off = steps - rounded(steps);
          squares[k] = fma(off, off, squares[k]);
        }
      }
      for (int k = 0; k < together; ++k) {
        const Vec error = root(squares[k]) * scale[k];
        best = where_less(error, least, scale[k], best);
        least = where_less(error, least, error, least);
      }
    }
    return best;
  }
};

using Fp8Grid = FloatGrid<4, 3, -6, 448>;
using Fp6Grid = FloatGrid<3, 2, -2, 28>;

}  // namespace INFUSE_ISA
}  // namespace infuse
