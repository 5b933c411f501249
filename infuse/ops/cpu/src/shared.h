// The elementwise sum of several arrays of one type: how ranks on one host combine their activations.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

template <class T>
void sum_arrays_of(const SumArgs& a, int64_t begin, int64_t end) {
  T* to = static_cast<T*>(a.to);
  for (int64_t i = begin; i < end; i += Vec::width) {
    const int n = int(end - i < Vec::width ? end - i : Vec::width);
    Vec sum = load(static_cast<const T*>(a.from[0]) + i, n);
    for (int k = 1; k < a.count; ++k) sum = sum + load(static_cast<const T*>(a.from[k]) + i, n);
    store(to + i, sum, n);
  }
}

// Sums in float32 in the order of `from` and rounds once, so that every rank gets the same bits. `to` may be in `from`.
inline void sum_arrays(const SumArgs& a, int64_t begin, int64_t end) {
  if (a.type == Type::f32) {
    sum_arrays_of<float>(a, begin, end);
  } else if (a.type == Type::bf16) {
    sum_arrays_of<bf16>(a, begin, end);
  } else {
    sum_arrays_of<f16>(a, begin, end);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
