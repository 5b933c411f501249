// Queries, keys and values of two sequences in one array: RMS norms of queries and keys in each head, then rotation.
#pragma once

#include "norm.h"
#include "rotary.h"

namespace infuse {
namespace INFUSE_ISA {

// y = x / rms(x) * weight, rounded to the type.
template <class T>
void normalise_head(const T* x, const T* weight, T* y, int64_t width, float eps) {
  Vec squares[kChains];
  over_columns(width, [&](int64_t c, int n, int chain) {
    const Vec here = load(x + c, n);
    squares[chain] = fma(here, here, squares[chain]);
  });
  const Vec rate(1.0f / std::sqrt(sum_of(squares) / float(width) + eps));
  over_columns(width, [&](int64_t c, int n, int) { store_coarse(y + c, load(x + c, n) * rate * load(weight + c, n),
      n); });
}

template <class T>
void joined_tokens(const JoinedArgs& a, int64_t begin, int64_t end) {
  const int64_t all = 3 * a.heads * a.width, tokens = a.tokens[0] + a.tokens[1];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / tokens, t = row % tokens;
    const int of = t >= a.tokens[0];
    const int64_t at = of ? t - a.tokens[0] : t;
    const T* x = static_cast<const T*>(a.x[of]) + (b * a.tokens[of] + at) * all;
    T* y = static_cast<T*>(a.y) + row * all;
    for (int64_t n = 0; n < 2 * a.heads; ++n) {
      const T* weight = static_cast<const T*>(n < a.heads ? a.q[of] : a.k[of]);
      const T* from = x + n * a.width;
      T* to = y + n * a.width;
      if (weight) normalise_head(from, weight, to, a.width, a.eps), from = to;
      if (a.cos) {
        turn_neighbours(from, a.cos + t * a.width, a.sin + t * a.width, to, a.width);
      } else if (!weight) {
        std::memcpy(to, from, size_t(a.width) * sizeof(T));
      }
    }
    const int64_t values = 2 * a.heads * a.width;
    std::memcpy(y + values, x + values, size_t(a.heads * a.width) * sizeof(T));
  }
}

inline void joined(const JoinedArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32: return joined_tokens<float>(a, begin, end);
    case Type::bf16: return joined_tokens<bf16>(a, begin, end);
    case Type::f16: return joined_tokens<f16>(a, begin, end);
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
