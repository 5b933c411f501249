// Scores of several rows into weights at once, for products whose weights are rounded: of bytes (attention_quads.h), and
// of pairs of bf16.
#pragma once

#include "attention_products.h"
#include "fixed_point.h"

namespace infuse {
namespace INFUSE_ISA {

// What the weights of some rows are relative to, and what they add up to, row by row: the largest score, the sum of
// weights, the factor for earlier sums; and of integers the value of 1.
struct RowSums {
  float *largest, *total, *keep, *unit;
};

#if defined(__AVX512VNNI__)

// The sums or largest lanes of each of ROWS registers, in order.
template <int ROWS, class F>
[[gnu::always_inline]] inline __m128 lanes_of_rows(const Vec (&x)[ROWS], const F& combine) {
  const auto bits = [&](int r) { return _mm512_castps_si512(x[r < ROWS ? r : ROWS - 1].v); };
  const __m512i four[] = {bits(0), bits(1), bits(2), bits(3)};
  return _mm_castsi128_ps(lanes_of_four(four, [&](__m512i a, __m512i b) {
    return _mm512_castps_si512(combine(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
  }));
}
template <int ROWS>
[[gnu::always_inline]] inline __m128 largest_of_rows(const Vec (&x)[ROWS]) {
  return lanes_of_rows<ROWS>(x, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
template <int ROWS>
[[gnu::always_inline]] inline __m128 sums_of_rows(const Vec (&x)[ROWS]) {
  return lanes_of_rows<ROWS>(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}

// Calls take(row, i, weights) for sixteen scores after sixteen of ROWS rows of kKeyBlock, with e^(score - largest so
// far); what it returns is what counts in the sum. All rows at once, since combining lanes takes longest.
template <int ROWS, class F>
[[gnu::always_inline]] inline void weigh_together(const float* scores, const RowSums& of, const F& take) {
  constexpr __mmask8 there = (1 << ROWS) - 1;
  Vec tops[ROWS], totals[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    const float* row = scores + r * kScoreStep;
    tops[r] = max(max(load(row, 16), load(row + 16, 16)), max(load(row + 32, 16), load(row + 48, 16)));
  }
  const __m128 lowest = _mm_set1_ps(-kInfinity), before = _mm_maskz_loadu_ps(there, of.largest);
  const __m128 now = _mm_max_ps(largest_of_rows<ROWS>(tops), before);
  const __mmask8 any = _mm_cmp_ps_mask(now, lowest, _CMP_NEQ_UQ);  // -infinity minus -infinity is NaN
  const __m128 fallen = _mm_maskz_sub_ps(any, before, now);
  const __m128 keep = _mm512_castps512_ps128(exp(Vec(_mm512_castps128_ps512(fallen))).v);
  alignas(16) float bases[4];
  _mm_store_ps(bases, _mm_maskz_mov_ps(any, now));
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    const Vec base(bases[r]);
#pragma GCC unroll 4
    for (int i = 0; i < kKeyBlock / 16; ++i) {
      const Vec exponent = (load(scores + r * kScoreStep + 16 * i, 16) - base) * Vec(1.442695041f);
      totals[r] = totals[r] + take(r, i, coarse_exp2(larger(Vec(-160.0f), exponent)));
    }
  }
  const __m128 total = _mm_fmadd_ps(_mm_maskz_loadu_ps(there, of.total), keep, sums_of_rows<ROWS>(totals));
  _mm_mask_storeu_ps(of.largest, there, now), _mm_mask_storeu_ps(of.total, there, total);
  _mm_mask_storeu_ps(of.keep, there, keep);
}

#endif

#if defined(__AVX512BF16__)

// Replaces the scores of ROWS rows by their weights in bf16, at the front of each row.
template <int ROWS>
inline void weigh_pairs(float* scores, const RowSums& of) {
  weigh_together<ROWS>(scores, of, [&](int r, int i, Vec weights) __attribute__((always_inline)) {
    return Weights<bf16>::keep(scores + r * kScoreStep, 16 * i, weights);
  });
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
