// Rotary position embedding over the heads of one merged projection, and the append of keys and values to a cache.
#pragma once

#include "attention_kernels.h"
#include "int8_rows.h"

namespace infuse {
namespace INFUSE_ISA {

// Pairs (i, i + E/2).
template <class T, class C>
void turn_halves(const T* x, const C* cos, const C* sin, T* y, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += Vec::width) {
    const int n = int(half - i < Vec::width ? half - i : Vec::width);
    const Vec first = load(x + i, n), second = load(x + half + i, n);
    store(y + i, first * load(cos + i, n) - second * load(sin + i, n), n);
    store(y + half + i, fma(second, load(cos + half + i, n), first * load(sin + half + i, n)), n);
  }
}

// Pairs (2i, 2i + 1).
template <class T, class C>
void turn_neighbours(const T* x, const C* cos, const C* sin, T* y, int64_t width) {
  float signs[Vec::width];
  for (int i = 0; i < Vec::width; ++i) signs[i] = i % 2 ? 1.0f : -1.0f;
  const Vec sign = load(signs, Vec::width);
  for (int64_t i = 0; i < width; i += Vec::width) {
    const int n = int(width - i < Vec::width ? width - i : Vec::width);
    const Vec here = load(x + i, n);
    store(y + i, fma(here, load(cos + i, n), swapped_pairs(here) * (load(sin + i, n) * sign)), n);
  }
}

constexpr int64_t kMostQuantized = 1024;  // columns of a row

// The target of head n of token t of batch row b: queries, then keys, then values. T is the type of what is written.
template <class T>
T* rotary_target(const RotaryArgs& a, int64_t b, int64_t t, int64_t n) {
  if (n < a.heads) return static_cast<T*>(a.q) + b * a.q_b + t * a.q_t + n * a.q_n;
  if (n < a.heads + a.kv_heads) return static_cast<T*>(a.keys) + b * a.keys_b + (n - a.heads) * a.keys_n +
      (a.start + t) * a.keys_t;
  return static_cast<T*>(a.values) + b * a.values_b + (n - a.heads - a.kv_heads) * a.values_n +
         (a.start + t) * a.values_t;
}

template <class T, class C>
void rotary_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / a.tokens, t = i % a.tokens;
    const C* cos = static_cast<const C*>(a.cos) + b * a.cos_b + t * a.cos_t;
    const C* sin = static_cast<const C*>(a.sin) + b * a.sin_b + t * a.sin_t;
    for (int64_t n = 0; n < a.heads + 2 * a.kv_heads; ++n) {
      const T* x = static_cast<const T*>(a.x) + b * a.x_b + t * a.x_t + n * a.x_n;
      T rotated[kMostQuantized];
      const bool quantizes = a.to_int8 && n >= a.heads;
      T* y = quantizes ? rotated : rotary_target<T>(a, b, t, n);
      const int64_t turned = a.cos && n < a.heads + a.kv_heads ? a.turned : 0;
      if (turned) a.interleaved ? turn_neighbours(x, cos, sin, y, turned) : turn_halves(x, cos, sin, y, turned);
      std::memcpy(y + turned, x + turned, size_t(a.width - turned) * sizeof(T));
      if (quantizes) quantize_row(y, a.width, rotary_target<int8_t>(a, b, t, n));
    }
  }
}

template <class T>
void rotary_typed(const RotaryArgs& a, int64_t begin, int64_t end) {
  return a.wide_turns ? rotary_tokens<T, float>(a, begin, end) : rotary_tokens<T, T>(a, begin, end);
}

inline void rotary(const RotaryArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32: return rotary_typed<float>(a, begin, end);
    case Type::bf16: return rotary_typed<bf16>(a, begin, end);
    case Type::f16: return rotary_typed<f16>(a, begin, end);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
