// Shared by all products: loading and multiplying blocks of weights and x, and splitting the rows of x into blocks.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "linear_kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kMostRows = 8;  // rows of x in registers at once, with plain weights
// The same with weights in panels: one register of sums for each row, or two.
#if defined(__AVX512F__)
constexpr int kMostPanelRows = 12;
#else
constexpr int kMostPanelRows = 8;
#endif
// Rows of a plain weight that are multiplied with several rows of x before the next ones: 12 take up to 2 % less than 24.
constexpr int kPanel = 12;
// Prefetch distance of weights, in bytes. On an AMD EPYC (Zen 5) 2048 streams 1 to 7 % less, and 8192 between 2 % less
// and 8 % more.
constexpr int kAhead = 4096;
constexpr int kNearAhead = 1024;  // for one row of x on Zen 4 (kernels.h)
constexpr int kFarAhead = 8192;  // of codes for several rows of x: 6 to 8 % faster with 8 rows

enum class Into { once, outer, all };  // the nearest cache for data that is read once, the outer caches, all caches
// Always inline: g++ thinks that a function that only prefetches has no effect, and drops the call.
[[gnu::always_inline]] inline void prefetch(const void* p, Into into = Into::outer) {
  if (into == Into::once) return __builtin_prefetch(p, 0, 0);
  into == Into::outer ? __builtin_prefetch(p, 0, 2) : __builtin_prefetch(p, 0, 3);
}

struct Fetch {
  int64_t ahead;
  Into into;
};
// `once`: the weights outgrow all caches.
inline Fetch fetch_for_one_row(bool once) {
  if (fetches_into_outer()) return {kNearAhead, Into::outer};
  return {kAhead, once ? Into::once : Into::outer};
}

// Rows of a plain weight in registers at once with R > 1 rows of x; with more of them, x is read less often.
constexpr int weight_rows(int R) {
#if defined(__AVX512F__)
  return R <= 6 ? 4 : 3;
#else
  return R > 4 ? 1 : 2;
#endif
}

// The even lanes of 2 * width consecutive values, then the odd ones.
inline void deinterleave(Vec a, Vec b, float* to) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(a.v, even, b.v));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(a.v, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b.v));
#elif defined(__AVX2__)
  const auto in_order = [](__m256 v) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)); };
  _mm256_storeu_ps(to, in_order(_mm256_shuffle_ps(a.v, b.v, 0x88)));
  _mm256_storeu_ps(to + 8, in_order(_mm256_shuffle_ps(a.v, b.v, 0xdd)));
#else
  for (int i = 0; i < Vec::width; ++i) {
    const float x = 2 * i < Vec::width ? a.v[2 * i] : b.v[2 * i - Vec::width];
    const float y = 2 * i < Vec::width ? a.v[2 * i + 1] : b.v[2 * i + 1 - Vec::width];
    to[i] = x, to[Vec::width + i] = y;
  }
#endif
}

// ---- elements: loading a block of weights and multiplying it with x ----

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

// Pairs of consecutive bf16 as operands: 16 consecutive pairs, or one pair in all lanes.
inline __m512bh pairs_at(const uint32_t* p) { return reinterpret_cast<__m512bh>(_mm512_load_si512(p)); }
inline __m512bh repeated(uint32_t pair) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(int(pair))); }

// bf16 as pairs: the two products of a pair are summed in float.
template <>
struct Elements<bf16> {
  using X = bf16;
  using Weights = __m512bh;
  static constexpr int block = 32;
  static __mmask32 first_words(int n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }
  static __m512bh pairs(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }
  static void arrange(const bf16* x, int n, X* to) { _mm512_store_si512(to,
      _mm512_maskz_loadu_epi16(first_words(n), x)); }
  static Weights weights(const bf16* w, int n) {
    return pairs(n >= 32 ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi16(first_words(n), w));
  }
  static Vec dot(Weights w, const X* x, Vec acc) { return _mm512_dpbf16_ps(acc.v, w, pairs(_mm512_load_si512(x))); }
};

#elif defined(__AVX2__)

// bf16 without bf16 instructions: a 32-bit lane holds two consecutive values. Shifting left gives the even one, masking
// the odd one.
template <>
struct Elements<bf16> {
  using X = float;
  static constexpr int block = 2 * Vec::width;
  struct Weights {
    Vec even, odd;
  };
  static void arrange(const bf16* x, int n, X* to) {
    deinterleave(load(x, n), n > Vec::width ? load(x + Vec::width, n - Vec::width) : Vec(), to);
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

// Calls run(std::integral_constant<int, rows>) for rows in 1 .. Most.
template <int Most, class F>
void with_rows(int64_t rows, const F& run) {
  if constexpr (Most > 0) {
    if (rows == Most) return run(std::integral_constant<int, Most>());
    with_rows<Most - 1>(rows, run);
  }
}

// Rows of x in blocks of nearly the same size, none larger than `most`; the first ones have a row more.
struct RowBlock {
  int64_t first, count;
};
inline int64_t row_blocks(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
struct RowBlocks {
  int64_t count, size, larger;

  RowBlocks(int64_t rows, int64_t most)
      : count(row_blocks(rows, most)), size(count ? rows / count : 0), larger(rows - size * count) {}
  RowBlock operator[](int64_t b) const { return {b * size + (b < larger ? b : larger), size + (b < larger)}; }
};
inline RowBlock row_block(int64_t rows, int64_t most, int64_t b) { return RowBlocks(rows, most)[b]; }

// Calls run with a value of the element type.
template <class F>
auto with_type(Type type, const F& run) {
  switch (type) {
    case Type::bf16: return run(bf16());
    case Type::f16: return run(f16());
    default: return run(float());
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
