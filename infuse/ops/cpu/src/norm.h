// RMSNorm and LayerNorm over rows, with the residual addition before them: one pass to add and measure, one to write.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

template <class T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const int64_t C = a.columns;
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * C;
    if (a.residual) {
      const T* residual = static_cast<const T*>(a.residual) + row * C;
      T* sum = static_cast<T*>(a.sum) + row * C;
      for (int64_t c = 0; c < C; c += Vec::width) {
        const int n = int(C - c < Vec::width ? C - c : Vec::width);
        store(sum + c, load(x + c, n) + load(residual + c, n), n);
      }
      x = sum;  // the sum is rounded to the type before it is normalised
    }
    float mean = 0;
    if (a.centred) {
      Vec total;
      for (int64_t c = 0; c < C; c += Vec::width) total = total + load(x + c, int(C - c < Vec::width ? C - c : Vec::width));
      mean = total.sum() / float(C);
    }
    Vec squares;
    for (int64_t c = 0; c < C; c += Vec::width) {
      const int n = int(C - c < Vec::width ? C - c : Vec::width);
      Vec d = load(x + c, n);
      if (a.centred) {
        d = d - Vec(mean);
        if (n < Vec::width) {  // lanes beyond the tail must not count
          float lanes[Vec::width];
          store(lanes, d, Vec::width);
          d = load(lanes, n);
        }
      }
      squares = fma(d, d, squares);
    }
    const Vec scale(1.0f / std::sqrt(squares.sum() / float(C) + a.eps)), shift(a.centred ? mean : 0.0f), offset(a.offset);
    T* y = static_cast<T*>(a.y) + row * C;
    for (int64_t c = 0; c < C; c += Vec::width) {
      const int n = int(C - c < Vec::width ? C - c : Vec::width);
      Vec out = (load(x + c, n) - shift) * scale;
      if (weight) out = out * (load(weight + c, n) + offset);
      if (bias) out = out + load(bias + c, n);
      store(y + c, out, n);
    }
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
