// Activations, plain and gated, in one pass: computed in float and rounded once.
#pragma once

#include <type_traits>

#include "attention_kernels.h"
#include "vec_math.h"

namespace infuse {
namespace INFUSE_ISA {

inline Vec sigmoid_times(Vec x, float slope) { return x / (Vec(1.0f) + exp(x * Vec(-slope))); }

template <Act ACT, class T>  // T: the type of the result
inline Vec activated(Vec x) {
  if constexpr (ACT == Act::gelu && std::is_same_v<T, bf16>) return gelu_for_bf16(x);
  if constexpr (ACT == Act::silu) return sigmoid_times(x, 1.0f);
  if constexpr (ACT == Act::quick_gelu) return sigmoid_times(x, 1.702f);
  if constexpr (ACT == Act::gelu) return x * Vec(0.5f) * (Vec(1.0f) + erf(x * Vec(0.707106781f)));
  if constexpr (ACT == Act::gelu_tanh) {
    const Vec inner = Vec(0.797884561f) * fma(Vec(0.044715f) * x * x, x, x);
    return Vec(0.5f) * x * (Vec(1.0f) + tanh(inner));
  }
  if constexpr (ACT == Act::relu) return larger(Vec(0.0f), x);
  if constexpr (ACT == Act::relu2) {
    const Vec positive = larger(Vec(0.0f), x);
    return positive * positive;
  }
  if constexpr (ACT == Act::tanh) return tanh(x);
}

// Calls run(std::integral_constant<Act, act>).
template <class F>
void with_activation(Act act, const F& run) {
  switch (act) {
    case Act::silu: return run(std::integral_constant<Act, Act::silu>());
    case Act::gelu: return run(std::integral_constant<Act, Act::gelu>());
    case Act::gelu_tanh: return run(std::integral_constant<Act, Act::gelu_tanh>());
    case Act::quick_gelu: return run(std::integral_constant<Act, Act::quick_gelu>());
    case Act::relu: return run(std::integral_constant<Act, Act::relu>());
    case Act::relu2: return run(std::integral_constant<Act, Act::relu2>());
    case Act::tanh: return run(std::integral_constant<Act, Act::tanh>());
  }
}

template <class T, Act ACT>
void activate_range(const ActivationArgs& a, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.y);
  if (!a.gated) {
    for (int64_t i = begin; i < end; i += Vec::width) {
      const int n = int(end - i < Vec::width ? end - i : Vec::width);
      store(y + i, activated<ACT, T>(load(x + i, n)), n);
    }
    return;
  }
  for (int64_t i = begin; i < end;) {  // [begin, end) may start and end anywhere in a row
    const int64_t row = i / a.columns, column = i - row * a.columns,
        left = end - i < a.columns - column ? end - i : a.columns - column;
    const T* gate = x + row * 2 * a.columns + column;
    for (int64_t c = 0; c < left; c += Vec::width) {
      const int n = int(left - c < Vec::width ? left - c : Vec::width);
      store(y + i + c, activated<ACT, T>(load(gate + c, n)) * load(gate + a.columns + c, n), n);
    }
    i += left;
  }
}

template <class T>
void activate_typed(const ActivationArgs& a, int64_t begin, int64_t end) {
  with_activation(a.act, [&](auto act) { activate_range<T, act>(a, begin, end); });
}

inline void activate(const ActivationArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32: return activate_typed<float>(a, begin, end);
    case Type::bf16: return activate_typed<bf16>(a, begin, end);
    case Type::f16: return activate_typed<f16>(a, begin, end);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
