// Matrix products of few rows with plain weights.
#pragma once

#include "attention_products.h"
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

// ---- one row of x ----

// The product of a weight row with x. With AVX-512 in one chain, which adds in the order of several_rows and is as fast:
// the next row's chain begins meanwhile. Narrower registers need several, so that additions overlap.
template <class T>
float dot_row(const T* w, int64_t inputs, const typename Elements<T>::X* x, Fetch fetch) {
  using P = Elements<T>;
  constexpr int steps = 4, chains = Vec::width == 16 ? 1 : steps;
  Vec acc[steps];
  const auto step = [&](int64_t i, int count, int s) __attribute__((always_inline)) {
    // prefetch each cache line once
    if (s * P::block * sizeof(T) % 64 == 0) {
      prefetch(reinterpret_cast<const char*>(w + i) + fetch.ahead, fetch.into);
    }
    acc[s % chains] = P::dot(P::weights(w + i, count), x + i, acc[s % chains]);
  };
  int64_t i = 0;
  for (; i + steps * P::block <= inputs; i += steps * P::block) {
    for (int s = 0; s < steps; ++s) step(i + s * P::block, P::block, s);
  }
  for (; i < inputs; i += P::block) step(i, int(inputs - i < P::block ? inputs - i : P::block), 0);
  return ((acc[0] + acc[1]) + (acc[2] + acc[3])).sum();
}

template <class T>
void one_row(const LinearArgs& a, int64_t begin, int64_t end) {
  const auto* x = static_cast<const typename Elements<T>::X*>(a.scratch);
  const T* bias = static_cast<const T*>(a.bias);
  const Fetch fetch = fetch_for_one_row(a.once);
  for (int64_t o = begin; o < end; ++o) {
    const float sum = dot_row(static_cast<const T*>(a.weight) + o * a.inputs, a.inputs, x, fetch);
    narrow(sum + (bias ? widen(bias[o]) : 0.0f), static_cast<T*>(a.y)[o]);
  }
}

// ---- several rows of x ----
//
// kPanel rows of the weight are multiplied with a chunk of their inputs at a time: that much of x stays in the nearest
// cache, and so do the sums. The next kPanel rows are prefetched meanwhile, in the order of memory, into all caches:
// AMD's Zen 5 drops prefetches while 64 lines are awaited, and fewer of these; on Zen 4 into the outer caches, as those
// into the nearest one wait for each other. If a block of rows of x is so small that it stays there, it is one chunk.

constexpr int64_t kChunkBytes = 8192, kWholeBytes = 16384;  // of a block of rows of x
constexpr int kBlocksAtOnce = 2;  // blocks of rows of x that are multiplied with a chunk of the weight

template <int R>
using PanelSums = float[kPanel][R][Vec::width];

// sums[n][r] += weight row n times row r of x over `inputs` of them; rows of the weight are `step` apart. Prefetches N
// lines from `ahead` on in each step.
template <class T, int N, int R>
void add_chunk(const T* w, int64_t step, int64_t inputs, const typename Elements<T>::X* x,
               float (*sums)[R][Vec::width], const char* ahead, Into into) {
  using P = Elements<T>;
  Vec acc[N][R];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[n][r] = load(sums[n][r], Vec::width);
  }
  const auto add = [&](int64_t i, int count) __attribute__((always_inline)) {
    typename P::Weights weights[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      prefetch(ahead + (i * N + n * P::block) * int64_t(sizeof(T)), into);
      weights[n] = P::weights(w + n * step + i, count);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[n][r] = P::dot(weights[n], x + i * R + r * P::block, acc[n][r]);
    }
  };
  int64_t i = 0;
  for (; i + P::block <= inputs; i += P::block) add(i, P::block);
  if (i < inputs) add(i, int(inputs - i));
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(sums[n][r], acc[n][r], Vec::width);
  }
}

// y of weight rows [o, o + count) and rows [first, first + R) of x.
template <class T, int R>
void write_panel(const LinearArgs& a, const PanelSums<R>& sums, int64_t o, int count, int64_t first) {
  const T* bias = static_cast<const T*>(a.bias);
  for (int n = 0; n < count; n += Vec::width) {
    const int there = count - n < Vec::width ? count - n : Vec::width;
    for (int r = 0; r < R; ++r) {
      Vec of_rows[Vec::width];
      for (int i = 0; i < Vec::width; ++i) of_rows[i] = load(sums[n + i < kPanel ? n + i : n][r], Vec::width);
      Vec sum = sum_each(of_rows);
      if (bias) sum = sum + load(bias + o + n, there);
      store(static_cast<T*>(a.y) + (first + r) * a.outputs + o + n, sum, there);
    }
  }
}

// Multiplies weight rows [o, o + count) with blocks [begin, end) of the rows of x.
template <class T>
void several_rows(const LinearArgs& a, int64_t o, int count, int64_t begin, int64_t end) {
  using X = typename Elements<T>::X;
  const T* w = static_cast<const T*>(a.weight) + o * a.inputs;
  const T* next = o + count < a.outputs ? w + count * a.inputs : w;
  const int64_t stride = arranged_columns<Elements<T>>(a.inputs);
  alignas(64) float sums[kBlocksAtOnce][kPanel * kMostRows * Vec::width];
  const auto each_block = [&](const auto& run) {
    for (int64_t b = begin; b < end; ++b) {
      const auto [first, rows] = row_block(a.rows, kMostRows, b);
      with_rows<kMostRows>(rows, [&, first = first](auto R) {
        run(R, first, reinterpret_cast<PanelSums<decltype(R)::value>&>(sums[b - begin]));
      });
    }
  };
  const int64_t bytes = row_block(a.rows, kMostRows, end - 1).count * int64_t(sizeof(X));  // of one input of x
  const bool whole = a.inputs * bytes <= kWholeBytes;
  const int64_t chunk = whole ? a.inputs : kChunkBytes / bytes / Elements<T>::block * Elements<T>::block;
  const Into into = fetches_into_outer() ? Into::outer : Into::all;
  each_block([](auto, int64_t, auto& sums) { std::memset(sums, 0, sizeof sums); });
  for (int64_t i = 0; i < a.inputs; i += chunk) {
    const int64_t inputs = a.inputs - i < chunk ? a.inputs - i : chunk;
    each_block([&](auto rows, int64_t first, auto& sums) {
      constexpr int R = decltype(rows)::value, N = weight_rows(R);
      const X* x = static_cast<const X*>(a.scratch) + first * stride + i * R;
      int n = 0;
      const auto ahead = [&] {
        return reinterpret_cast<const char*>(whole ? w + (n + N) * a.inputs : next + i * count + n * inputs);
      };
      const auto add = [&](auto some) {
        constexpr int at_once = decltype(some)::value;
        add_chunk<T, at_once, R>(w + n * a.inputs + i, a.inputs, inputs, x, sums + n, ahead(), into);
        n += at_once;
      };
      while (n + N <= count) add(std::integral_constant<int, N>());
      while (n < count) add(std::integral_constant<int, 1>());
    });
  }
  each_block([&](auto rows, int64_t first, auto& sums) {
    write_panel<T, decltype(rows)::value>(a, sums, o, count, first);
  });
}

template <class T>
void plain_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  if (a.rows == 1) return one_row<T>(a, begin, end);
  const int64_t blocks = row_blocks(a.rows, kMostRows);
  for (int64_t o = begin; o < end; o += kPanel) {
    for (int64_t b = 0; b < blocks; b += kBlocksAtOnce) {
      several_rows<T>(a, o, int(end - o < kPanel ? end - o : kPanel), b, blocks - b < kBlocksAtOnce ? blocks
          : b + kBlocksAtOnce);
    }
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
