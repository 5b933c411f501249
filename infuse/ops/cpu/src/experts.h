// The steps of a mixture's experts around their products: gate and sum. In float, rounded once.
#pragma once

#include "activation.h"
#include "expert_kernels.h"
#include "panels.h"

namespace infuse {
namespace INFUSE_ISA {

template <class T, Act ACT>
void gate_rows(const ExpertGateArgs& a) {
  const Vec gate_limit(a.gate_limit), act_limit(a.act_limit), up_limit(a.up_limit), down_limit(-a.up_limit),
      offset(a.up_offset);
  for (int64_t r = 0; r < a.rows; ++r) {
    const T* gate = static_cast<const T*>(a.products) + r * a.stride;
    T* to = static_cast<T*>(a.to) + r * a.columns;
    for (int64_t i = 0; i < a.columns; i += Vec::width) {
      const int n = int(a.columns - i < Vec::width ? a.columns - i : Vec::width);
      Vec y = smaller(act_limit, activated<ACT, T>(smaller(gate_limit, load(gate + i, n))));
      if (a.gated) y = y * (smaller(up_limit, larger(down_limit, load(gate + a.columns + i, n))) + offset);
      store(to + i, y, n);
    }
  }
}

template <class T>
void weigh_rows(const WeighArgs& a, int64_t begin, int64_t end) {
  T* to = static_cast<T*>(a.to);
  for (int64_t i = begin; i < end; i += Vec::width) {
    const int n = int(end - i < Vec::width ? end - i : Vec::width);
    Vec sum;
    for (int64_t k = 0; k < a.count; ++k) {
      sum = fma(Vec(a.weights[k]), load(static_cast<const T*>(a.from[k]) + i, n), sum);
    }
    store(to + i, sum, n);
  }
}

inline ExpertKernels expert_kernels() {
  return {
      [](const ExpertGateArgs& a) {
        with_type(a.type, [&](auto t) {
          with_activation(a.act, [&](auto act) { gate_rows<decltype(t), decltype(act)::value>(a); });
        });
      },
      [](const WeighArgs& a, int64_t begin, int64_t end) {
        with_type(a.type, [&](auto t) { weigh_rows<decltype(t)>(a, begin, end); });
      },
  };
}

}  // namespace INFUSE_ISA
}  // namespace infuse
