// Matrix products of few rows with plain weights.
#pragma once

#include "elements.h"

namespace infuse {
namespace INFUSE_ISA {

template <class P>
int64_t arranged_columns(int64_t inputs) {
  return (inputs + P::block - 1) / P::block * P::block;
}

// Stores each block of rows of x as [inputs / block][rows][block], so that it is read sequentially (and, if the width
// is a power of two, does not map to one cache set). Rows are padded with zeros.
template <class T>
void arrange_plain(const LinearArgs& a) {
  using P = Elements<T>;
  const int64_t stride = arranged_columns<P>(a.inputs);
  for (int64_t b = 0; b < row_blocks(a.rows, kMostRows); ++b) {
    const auto [first, count] = row_block(a.rows, kMostRows, b);
    typename P::X* to = static_cast<typename P::X*>(a.scratch) + first * stride;
    for (int64_t i = 0; i < a.inputs; i += P::block) {
      for (int64_t r = first; r < first + count; ++r, to += P::block) {
        P::arrange(static_cast<const T*>(a.x) + r * a.inputs + i,
            int(a.inputs - i < P::block ? a.inputs - i : P::block), to);
      }
    }
  }
}

// sums[n][r] = the product of weight row n with row r of x. Few sums have several chains each, so that additions
// overlap.
template <class T, int N, int R>
void dot_rows(const T* w, int64_t inputs, const typename Elements<T>::X* x, float (&sums)[N][R]) {
  using P = Elements<T>;
  constexpr int chains = N * R >= 4 ? 1 : 4 / (N * R);
  // Prefetches in memory order: one stream, though several rows are read at once.
  const char* ahead = reinterpret_cast<const char*>(w) + (N == 1 ? kAhead : N * inputs * int64_t(sizeof(T)));
  Vec acc[chains][N][R];
  const auto step = [&](int64_t i, int count, int chain) __attribute__((always_inline)) {
    typename P::Weights weights[N];
    for (int n = 0; n < N; ++n) {
      // prefetch each cache line once
      if (chain * P::block * sizeof(T) % 64 == 0) prefetch(ahead + (i * N + n * P::block) * int64_t(sizeof(T)));
      if constexpr (N > 1) __builtin_prefetch(w + n * inputs + i + 8 * P::block, 0, 3);  // from the L2 cache, see above
      weights[n] = P::weights(w + n * inputs + i, count);
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) acc[chain][n][r] = P::dot(weights[n], x + i * R + r * P::block, acc[chain][n][r]);
    }
  };
  int64_t i = 0;
  for (; i + chains * P::block <= inputs; i += chains * P::block) {
    for (int c = 0; c < chains; ++c) step(i + c * P::block, P::block, c);
  }
  for (; i < inputs; i += P::block) step(i, int(inputs - i < P::block ? inputs - i : P::block), 0);
  for (int n = 0; n < N; ++n) {
    for (int r = 0; r < R; ++r) {
      for (int c = 1; c < chains; ++c) acc[0][n][r] = acc[0][n][r] + acc[c][n][r];
      sums[n][r] = acc[0][n][r].sum();
    }
  }
}

template <class T, int N, int R>
void plain_block(const LinearArgs& a, int64_t o, int64_t r) {
  using X = typename Elements<T>::X;
  const int64_t stride = arranged_columns<Elements<T>>(a.inputs);
  float sums[N][R];
  dot_rows<T, N, R>(static_cast<const T*>(a.weight) + o * a.inputs, a.inputs,
      static_cast<const X*>(a.scratch) + r * stride, sums);
  const T* bias = static_cast<const T*>(a.bias);
  T* y = static_cast<T*>(a.y) + r * a.outputs + o;
  for (int i = 0; i < R; ++i) {
    for (int n = 0; n < N; ++n) narrow(sums[n][i] + (bias ? widen(bias[o + n]) : 0.0f), y[i * a.outputs + n]);
  }
}

template <class T>
void plain_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; o += kPanel) {
    const int64_t stop = end - o < kPanel ? end : o + kPanel;
    for (int64_t b = 0; b < row_blocks(a.rows, kMostRows); ++b) {
      const auto [first, count] = row_block(a.rows, kMostRows, b);
      with_rows<kMostRows>(count, [&, first = first](auto rows) {
        constexpr int R = decltype(rows)::value, N = weight_rows(R);
        int64_t p = o;
        for (; p + N <= stop; p += N) plain_block<T, N, R>(a, p, first);
        for (; p < stop; ++p) plain_block<T, 1, R>(a, p, first);
      });
    }
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
