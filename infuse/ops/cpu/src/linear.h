// Matrix products with few rows, over plain and quantized weights: each weight is read from memory once, in order, and
// used for all rows of x. Weights lie as PyTorch stores them; x is brought once into the order that suits them.
#pragma once

#include "plain_linear.h"
#include "quantized_linear.h"

namespace infuse {
namespace INFUSE_ISA {

template <class F>
auto with_type(Type type, const F& run) {
  switch (type) {
    case Type::bf16: return run(bf16());
    case Type::f16: return run(f16());
    default: return run(float());
  }
}

// Calls run(T(), std::integral_constant<int, bits>) for the type and the bits of `a`.
template <class F>
auto with_format(const LinearArgs& a, const F& run) {
  return with_type(a.type, [&](auto t) {
    switch (a.bits) {
      case 8: return run(t, std::integral_constant<int, 8>());
      case 4: return run(t, std::integral_constant<int, 4>());
      default: return run(t, std::integral_constant<int, 0>());
    }
  });
}

inline size_t linear_scratch_bytes(const LinearArgs& a) {
  return with_format(a, [&](auto t, auto bits) {
    using T = decltype(t);
    if constexpr (bits == 0) {
      using P = Elements<T>;
      return size_t(a.rows * arranged_columns<P>(a.inputs)) * sizeof(typename P::X);
    } else {
      using P = Codes<T, bits>;
      const size_t group_sums = a.zero ? size_t(a.rows * a.groups) * sizeof(float) : 0;
      return size_t(a.rows * coded_columns<P>(a.inputs)) * sizeof(typename P::X) + group_sums;
    }
  });
}

inline void linear_arrange(const LinearArgs& a) {
  with_format(a, [&](auto t, auto bits) {
    if constexpr (bits == 0) {
      arrange_plain<decltype(t)>(a);
    } else {
      arrange_coded<decltype(t), bits>(a);
    }
  });
}

inline void linear_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  with_format(a, [&](auto t, auto bits) {
    using T = decltype(t);
    if constexpr (bits == 0) {
      plain_rows<T>(a, begin, end);
    } else if (a.inputs / a.groups % Codes<T, bits>::unit == 0) {
      coded_rows<T, bits, false>(a, begin, end);
    } else if constexpr (Codes<T, bits>::unit > 32) {
      coded_rows<T, bits, true>(a, begin, end);
    }
  });
}

inline void linear_dequantize(const LinearArgs& a, int64_t begin, int64_t end) {
  with_format(a, [&](auto t, auto bits) {
    if constexpr (bits != 0) dequantize_rows<decltype(t), bits>(a, begin, end);
  });
}

inline LinearKernels linear_kernels() { return {linear_scratch_bytes, linear_arrange, linear_rows, linear_dequantize}; }

}  // namespace INFUSE_ISA
}  // namespace infuse
