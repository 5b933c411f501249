// RMSNorm and LayerNorm over rows, with the preceding residual addition: one pass to add and measure, one to write. Rows
// that are scaled alone are not measured.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

// Calls run(c, n, chain) for the columns c of a row, n at a time. Separate chains of sums keep additions from waiting
// for each other.
constexpr int kChains = 4;
template <class F>
[[gnu::always_inline]] inline void over_columns(int64_t columns, const F& run) {
  int64_t c = 0;
  for (; c + kChains * Vec::width <= columns; c += kChains * Vec::width) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) run(c + chain * Vec::width, Vec::width, chain);
  }
  for (; c + Vec::width <= columns; c += Vec::width) run(c, Vec::width, 0);
  if (c < columns) run(c, int(columns - c), 0);
}
inline float sum_of(const Vec (&chains)[kChains]) { return ((chains[0] + chains[1]) + (chains[2] + chains[3])).sum(); }

template <class T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const int64_t C = a.columns;
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * C;
    Vec total[kChains], squares[kChains];
    if (a.residual) {
      const T* residual = static_cast<const T*>(a.residual) + row * C;
      T* sum = static_cast<T*>(a.sum) + row * C;
      over_columns(C, [&](int64_t c, int n, int chain) { store_coarse(sum + c, load(x + c, n) + load(residual + c, n),
          n); });
      x = sum;  // the sum is rounded to the type before it is normalised
    }
    float mean = 0;
    if (a.centred) {
      over_columns(C, [&](int64_t c, int n, int chain) { total[chain] = total[chain] + load(x + c, n); });
      mean = sum_of(total) / float(C);
    }
    if (!a.scales) over_columns(C, [&](int64_t c, int n, int chain) {
      Vec d = load(x + c, n);
      if (a.centred) {
        d = d - Vec(mean);
        if (n < Vec::width) {  // exclude the lanes beyond the tail
          float lanes[Vec::width];
          store(lanes, d, Vec::width);
          d = load(lanes, n);
        }
      }
      squares[chain] = fma(d, d, squares[chain]);
    });
    const float deviation = a.scales ? 1.0f : std::sqrt(sum_of(squares) / float(C) + a.eps);
    const Vec scale(1.0f / deviation), shift(a.centred ? mean : 0.0f),
        offset(a.offset);
    T* y = static_cast<T*>(a.y) + row * C;
    over_columns(C, [&](int64_t c, int n, int chain) {
      Vec out = (load(x + c, n) - shift) * scale;
      if (weight) out = out * (load(weight + c, n) + offset);
      if (bias) out = out + load(bias + c, n);
      store_coarse(y + c, out, n);
    });
  }
}

inline void norm(const NormArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32: return norm_rows<float>(a, begin, end);
    case Type::bf16: return norm_rows<bf16>(a, begin, end);
    case Type::f16: return norm_rows<f16>(a, begin, end);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
