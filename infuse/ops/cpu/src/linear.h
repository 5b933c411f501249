// Matrix products with few rows, over plain and quantized weights: each weight is read from memory once, in order, and
// used for all rows of x. Weights lie as PyTorch stores them; x is brought once into the order that suits them.
#pragma once

#include <type_traits>

#include "linear_kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kMostRows = 8;    // rows of x in registers at once
constexpr int kPanel = 12;      // weight rows that are used for all rows of x before the next ones
constexpr int kAhead = 2048;    // bytes: how far ahead of the use weights are asked for

// Inlined by force: g++ takes a function that only prefetches for one without effect, and drops the call.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// How many weight rows go through the registers with R rows of x: the more, the less often x is read.
constexpr int weight_rows(int R) {
#if defined(__AVX512F__)
  return R == 1 ? 1 : R == 2 ? 2 : R <= 6 ? 4 : 3;
#else
  return R == 1 || R > 4 ? 1 : 2;
#endif
}

// ---- elements: how a block of weights is loaded, and what it is multiplied with ----

// Any type: widened to float.
template <class T>
struct Elements {
  using X = float;
  using Weights = Vec;
  static constexpr int block = Vec::width;
  static void arrange(const T* x, int n, X* to) { store(to, load(x, n), block); }
  static Weights weights(const T* w, int n) { return load(w, n); }
  static Vec dot(Weights w, const X* x, Vec acc) { return fma(w, load(x, block), acc); }
};

#if defined(__AVX512BF16__)

// bf16 as pairs: the products of neighbours are added in float.
template <>
struct Elements<bf16> {
  using X = bf16;
  using Weights = __m512bh;
  static constexpr int block = 32;
  static __mmask32 first_words(int n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }
  static __m512bh pairs(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }
  static void arrange(const bf16* x, int n, X* to) { _mm512_store_si512(to, _mm512_maskz_loadu_epi16(first_words(n), x)); }
  static Weights weights(const bf16* w, int n) {
    return pairs(n >= 32 ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi16(first_words(n), w));
  }
  static Vec dot(Weights w, const X* x, Vec acc) { return _mm512_dpbf16_ps(acc.v, w, pairs(_mm512_load_si512(x))); }
};

#elif defined(__AVX2__)

// bf16 without bf16 instructions: a 32-bit lane holds two neighbours; shifted up it is the even one, masked the odd one.
template <>
struct Elements<bf16> {
  using X = float;
  static constexpr int block = 2 * Vec::width;
  struct Weights {
    Vec even, odd;
  };
  static void arrange(const bf16* x, int n, X* to) {
    for (int i = 0; i < block; ++i) to[i / 2 + (i % 2) * Vec::width] = i < n ? widen(x[i]) : 0.0f;
  }
  static Weights weights(const bf16* w, int n) {
    if (n < block) {
      bf16 padded[block] = {};
      std::memcpy(padded, w, size_t(n) * sizeof(bf16));
      return weights(padded, block);
    }
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(w);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))))};
#else
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))))};
#endif
  }
  static Vec dot(Weights w, const X* x, Vec acc) {
    return fma(w.odd, load(x + Vec::width, Vec::width), fma(w.even, load(x, Vec::width), acc));
  }
};

#endif

// Calls run(std::integral_constant<int, rows>) for rows in 1 .. kMostRows.
template <class F>
void with_rows(int64_t rows, const F& run) {
  switch (rows) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    case 6: return run(std::integral_constant<int, 6>());
    case 7: return run(std::integral_constant<int, 7>());
    case 8: return run(std::integral_constant<int, 8>());
  }
}

// Rows of x in blocks of nearly the same size, none larger than kMostRows: run(first, count).
template <class F>
void in_row_blocks(int64_t rows, const F& run) {
  const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
  for (int64_t b = 0; b < blocks; ++b) run(rows * b / blocks, rows * (b + 1) / blocks - rows * b / blocks);
}

// ---- plain weights ----

template <class P>
int64_t arranged_columns(int64_t inputs) {
  return (inputs + P::block - 1) / P::block * P::block;
}

// Each block of rows of x lies as [inputs / block][rows][block], so that it is read in order (and, at widths that are
// powers of two, does not fall into one set of the cache). Rows are padded with zeros.
template <class T>
void arrange_plain(const LinearArgs& a) {
  using P = Elements<T>;
  const int64_t stride = arranged_columns<P>(a.inputs);
  in_row_blocks(a.rows, [&](int64_t first, int64_t count) {
    typename P::X* to = static_cast<typename P::X*>(a.scratch) + first * stride;
    for (int64_t i = 0; i < a.inputs; i += P::block) {
      for (int64_t r = first; r < first + count; ++r, to += P::block) {
        P::arrange(static_cast<const T*>(a.x) + r * a.inputs + i, int(a.inputs - i < P::block ? a.inputs - i : P::block), to);
      }
    }
  });
}

// sums[n][r] = the product of weight row n with row r of x. With few of them, several chains each, so that additions overlap.
template <class T, int N, int R>
void dot_rows(const T* w, int64_t inputs, const typename Elements<T>::X* x, float (&sums)[N][R]) {
  using P = Elements<T>;
  constexpr int chains = N * R >= 4 ? 1 : 4 / (N * R);
  // Memory is asked for in the order in which it lies: one stream, though several rows are read at once.
  const char* ahead = reinterpret_cast<const char*>(w) + (N == 1 ? kAhead : N * inputs * int64_t(sizeof(T)));
  Vec acc[chains][N][R];
  const auto step = [&](int64_t i, int count, int chain) __attribute__((always_inline)) {
    typename P::Weights weights[N];
    for (int n = 0; n < N; ++n) {
      prefetch(ahead + (i * N + n * P::block) * int64_t(sizeof(T)));
      if constexpr (N > 1) __builtin_prefetch(w + n * inputs + i + 8 * P::block, 0, 3);
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
  dot_rows<T, N, R>(static_cast<const T*>(a.weight) + o * a.inputs, a.inputs, static_cast<const X*>(a.scratch) + r * stride, sums);
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
    in_row_blocks(a.rows, [&](int64_t first, int64_t count) {
      with_rows(count, [&](auto rows) {
        constexpr int R = decltype(rows)::value, N = weight_rows(R);
        int64_t p = o;
        for (; p + N <= stop; p += N) plain_block<T, N, R>(a, p, first);
        for (; p < stop; ++p) plain_block<T, 1, R>(a, p, first);
      });
    });
  }
}

// ---- the table ----

template <class F>
auto with_type(Type type, const F& run) {
  switch (type) {
    case Type::bf16: return run(bf16());
    case Type::f16: return run(f16());
    default: return run(float());
  }
}

inline size_t linear_scratch_bytes(const LinearArgs& a) {
  return with_type(a.type, [&](auto t) {
    using P = Elements<decltype(t)>;
    return size_t(a.rows * arranged_columns<P>(a.inputs)) * sizeof(typename P::X);
  });
}

inline void linear_arrange(const LinearArgs& a) {
  with_type(a.type, [&](auto t) { arrange_plain<decltype(t)>(a); });
}

inline void linear_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto t) { plain_rows<decltype(t)>(a, begin, end); });
}

inline void linear_dequantize(const LinearArgs&, int64_t, int64_t) {}

inline LinearKernels linear_kernels() { return {linear_scratch_bytes, linear_arrange, linear_rows, linear_dequantize}; }

}  // namespace INFUSE_ISA
}  // namespace infuse
