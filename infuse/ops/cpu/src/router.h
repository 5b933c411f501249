// The logits of a mixture's router, and conversions between types.
#pragma once

#include "panels.h"
#include "router_kernels.h"

namespace infuse {
namespace INFUSE_ISA {

template <class F>
void convert_from(const F* from, void* to, Type to_type, int64_t count) {
  with_type(to_type, [&](auto t) {
    auto* out = static_cast<decltype(t)*>(to);
    for (int64_t i = 0; i < count; i += Vec::width) {
      const int n = int(count - i < Vec::width ? count - i : Vec::width);
      store(out + i, load(from + i, n), n);
    }
  });
}

// One token times one expert's row. Only the width decides the order of the sum.
template <class W>
float dot(const float* x, const W* w, int64_t inputs) {
  constexpr int kSums = 4;
  Vec sums[kSums];
  int64_t i = 0;
  for (; i + kSums * Vec::width <= inputs; i += kSums * Vec::width) {
    for (int s = 0; s < kSums; ++s) {
      const int64_t at = i + s * Vec::width;
      sums[s] = fma(load(x + at, Vec::width), load(w + at, Vec::width), sums[s]);
    }
  }
  for (; i < inputs; i += Vec::width) {
    const int n = int(inputs - i < Vec::width ? inputs - i : Vec::width);
    sums[0] = fma(load(x + i, n), load(w + i, n), sums[0]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
}

template <class W, class R>
void logit_rows(const LogitArgs& a, int64_t begin, int64_t end) {
  const W *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
  with_type(a.type, [&](auto t) {
    auto* logits = static_cast<decltype(t)*>(a.logits);
    for (int64_t e = begin; e < end; ++e) {
      for (int64_t token = 0; token < a.tokens; ++token) {
        R rounded;
        narrow(dot(a.x + token * a.inputs, weight + e * a.inputs, a.inputs) + (bias ? widen(bias[e]) : 0), rounded);
        narrow(widen(rounded), logits[token * a.experts + e]);
      }
    }
  });
}

inline RouterKernels router_kernels() {
  return {
      [](const LogitArgs& a, int64_t begin, int64_t end) {
        with_type(a.weight_type, [&](auto w) {
          with_type(a.rounded, [&](auto r) { logit_rows<decltype(w), decltype(r)>(a, begin, end); });
        });
      },
      [](const void* from, Type type, void* to, Type to_type, int64_t count) {
        with_type(type, [&](auto t) { convert_from(static_cast<const decltype(t)*>(from), to, to_type, count); });
      },
  };
}

}  // namespace INFUSE_ISA
}  // namespace infuse
