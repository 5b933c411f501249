// Gated sums and modulated norms over rows [tokens of a batch row, columns]: one pass to add and measure, one to write.
#pragma once

#include "norm.h"

namespace infuse {
namespace INFUSE_ISA {

template <class T, class V>  // of x, and of gate, scale and shift
void modulated_rows(const ModulatedArgs& a, int64_t begin, int64_t end) {
  const int64_t C = a.columns;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / a.tokens;
    const T* x = static_cast<const T*>(a.x) + row * C;
    if (a.gate) {
      const T* residual = static_cast<const T*>(a.residual) + row * C;
      const V* gate = static_cast<const V*>(a.gate) + b * a.gate_b;
      T* sum = static_cast<T*>(a.sum) + row * C;
      over_columns(C, [&](int64_t c, int n, int) {
        store_coarse(sum + c, fma(load(gate + c, n), load(x + c, n), load(residual + c, n)), n);
      });
      x = sum;  // the sum is rounded to the type before it is normalised
    }
    if (!a.scale) continue;
    Vec total[kChains], squares[kChains];
    float mean = 0;
    if (a.centred) {
      over_columns(C, [&](int64_t c, int n, int chain) { total[chain] = total[chain] + load(x + c, n); });
      mean = sum_of(total) / float(C);
    }
    over_columns(C, [&](int64_t c, int n, int chain) {
      Vec d = load(x + c, n) - Vec(mean);
      if (n < Vec::width) {  // exclude the lanes beyond the tail
        float lanes[Vec::width];
        store(lanes, d, Vec::width);
        d = load(lanes, n);
      }
      squares[chain] = fma(d, d, squares[chain]);
    });
    const Vec rate(1.0f / std::sqrt(sum_of(squares) / float(C) + a.eps)), centre(mean), one(1.0f);
    const V* scale = static_cast<const V*>(a.scale) + b * a.scale_b;
    const V* shift = static_cast<const V*>(a.shift) + b * a.shift_b;
    T* y = static_cast<T*>(a.y) + row * C;
    over_columns(C, [&](int64_t c, int n, int) {
      const Vec normed = (load(x + c, n) - centre) * rate;
      store_coarse(y + c, fma(normed, one + load(scale + c, n), load(shift + c, n)), n);
    });
  }
}

inline void modulated(const ModulatedArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32: return modulated_rows<float, float>(a, begin, end);
    case Type::bf16:
      return a.wide ? modulated_rows<bf16, float>(a, begin, end) : modulated_rows<bf16, bf16>(a, begin, end);
    case Type::f16:
      return a.wide ? modulated_rows<f16, float>(a, begin, end) : modulated_rows<f16, f16>(a, begin, end);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
