// Functions of Vec: comparisons, rounding, transposition; exp, tanh and erf to 1-2 units in the last place of float32,
// with NaN, infinities and overflow as in PyTorch.
#pragma once

#include <utility>

#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

// smaller(limit, x) and larger(limit, x) return x if x is NaN: the second operand decides, as in x86's min and max.
// nearest(x): the nearest integer, ties to even; |x| < 2^22. apart(x): x, but the compiler must not merge it into an
// fma with later operations. swap_blocks<S>(a, b): in a, lanes whose number has bit S set take lane - S of b; in b, the
// other lanes take lane + S of a.
#if defined(__AVX512F__)

inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
inline Vec absolute(Vec x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x.v); }
inline Vec with_sign_of(Vec magnitude, Vec x) { return _mm512_or_ps(magnitude.v,
    _mm512_and_ps(_mm512_set1_ps(-0.0f), x.v)); }
// yes if a < b, else no, per lane.
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v);
}
// x * 2^n for integers n; beyond the range of float32 it becomes infinite or (gradually) zero.
inline Vec times_power(Vec x, Vec n) { return _mm512_scalef_ps(x.v, n.v); }
inline Vec power(Vec n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n.v); }
inline Vec swapped_pairs(Vec x) { return _mm512_permute_ps(x.v, 0xB1); }
inline Vec root(Vec x) { return _mm512_sqrt_ps(x.v); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec apart(Vec x) {
  asm("" : "+v"(x.v));
  return x;
}
inline Vec bf16_towards_zero(Vec x) { return _mm512_and_ps(x.v,
    _mm512_castsi512_ps(_mm512_set1_epi32(int(0xffff0000)))); }
inline Vec nearest_bf16(Vec x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(x.v)), 16));
}
inline void store(int8_t* p, Vec whole, int n) {
  _mm_mask_storeu_epi8(p, first(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole.v)));
}
template <int S>
inline void swap_blocks(Vec& a, Vec& b) {
  alignas(64) int32_t to_a[16], to_b[16];
  for (int i = 0; i < 16; ++i) to_a[i] = i & S ? 16 + i - S : i, to_b[i] = i & S ? 16 + i : i + S;
  const __m512 old = a.v;
  a = _mm512_permutex2var_ps(old, _mm512_load_si512(to_a), b.v);
  b = _mm512_permutex2var_ps(old, _mm512_load_si512(to_b), b.v);
}

#elif defined(__AVX2__)

inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a.v, b.v); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
inline Vec absolute(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v); }
inline Vec with_sign_of(Vec magnitude, Vec x) { return _mm256_or_ps(magnitude.v,
    _mm256_and_ps(_mm256_set1_ps(-0.0f), x.v)); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no.v, yes.v,
    _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)); }
inline Vec power(Vec n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23));
}
inline Vec times_power(Vec x, Vec n) {  // in two steps, since 2^n alone may not be a normal number
  const Vec half =
      _mm256_round_ps(_mm256_mul_ps(n.v, _mm256_set1_ps(0.5f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return x * power(half) * power(n - half);
}
inline Vec swapped_pairs(Vec x) { return _mm256_permute_ps(x.v, 0xB1); }
inline Vec root(Vec x) { return _mm256_sqrt_ps(x.v); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec apart(Vec x) {
  asm("" : "+x"(x.v));
  return x;
}
inline Vec bf16_towards_zero(Vec x) { return _mm256_and_ps(x.v,
    _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000)))); }
inline Vec nearest_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v),
      odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  return bf16_towards_zero(_mm256_castsi256_ps(_mm256_add_epi32(bits, up)));
}
inline void store(int8_t* p, Vec whole, int n) {
  const __m256i wide = _mm256_cvtps_epi32(whole.v);
  __m128i codes = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  codes = _mm_packs_epi16(codes, codes);
  const int64_t eight = _mm_cvtsi128_si64(codes);
  std::memcpy(p, &eight, size_t(n < 8 ? n : 8));
}
template <int S>
inline void swap_blocks(Vec& a, Vec& b) {
  const __m256 x = a.v, y = b.v;
  if constexpr (S == 4) a = _mm256_permute2f128_ps(x, y, 0x20), b = _mm256_permute2f128_ps(x, y, 0x31);
  if constexpr (S == 2) a = _mm256_shuffle_ps(x, y, 0x44), b = _mm256_shuffle_ps(x, y, 0xEE);
  if constexpr (S == 1) a = _mm256_blend_ps(x, _mm256_moveldup_ps(y), 0xAA),
      b = _mm256_blend_ps(_mm256_movehdup_ps(x), y, 0xAA);
}

#else

inline Vec smaller(Vec a, Vec b) {
  for (int i = 0; i < Vec::width; ++i) b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return b;
}
inline Vec larger(Vec a, Vec b) {
  for (int i = 0; i < Vec::width; ++i) b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return b;
}
inline Vec absolute(Vec x) {
  for (int i = 0; i < Vec::width; ++i) x.v[i] = __builtin_fabsf(x.v[i]);
  return x;
}
inline Vec with_sign_of(Vec magnitude, Vec x) {
  for (int i = 0; i < Vec::width; ++i) x.v[i] = __builtin_copysignf(magnitude.v[i], x.v[i]);
  return x;
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  for (int i = 0; i < Vec::width; ++i) no.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i];
  return no;
}
inline float power_of(int n) {
  const uint32_t bits = uint32_t(n + 127) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline Vec power(Vec n) {
  for (int i = 0; i < Vec::width; ++i) n.v[i] = power_of(n.v[i] == n.v[i] ? int(n.v[i]) : 0);
  return n;
}
inline Vec times_power(Vec x, Vec n) {  // in two steps, since 2^n alone may not be a normal number
  for (int i = 0; i < Vec::width; ++i) {
    const int whole = n.v[i] == n.v[i] ? int(n.v[i]) : 0, half = whole / 2;
    x.v[i] = x.v[i] * power_of(half) * power_of(whole - half);
  }
  return x;
}
inline Vec swapped_pairs(Vec x) {
  for (int i = 0; i < Vec::width; i += 2) {
    const float even = x.v[i];
    x.v[i] = x.v[i + 1], x.v[i + 1] = even;
  }
  return x;
}
inline Vec root(Vec x) {
  for (int i = 0; i < Vec::width; ++i) x.v[i] = std::sqrt(x.v[i]);
  return x;
}
inline Vec apart(Vec x) {
#if defined(__FP_FAST_FMAF)
  asm("" : "+m"(x.v));
#endif
  return x;
}
inline Vec nearest(Vec x) {
  const Vec magic(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  return x + magic - magic;
}
inline Vec bf16_towards_zero(Vec x) {
  for (int i = 0; i < Vec::width; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x.v[i], 4);
    bits &= 0xffff0000;
    std::memcpy(&x.v[i], &bits, 4);
  }
  return x;
}
inline Vec nearest_bf16(Vec x) {
  for (int i = 0; i < Vec::width; ++i) {
    bf16 rounded;
    narrow(x.v[i], rounded);
    x.v[i] = widen(rounded);
  }
  return x;
}
inline void store(int8_t* p, Vec whole, int n) {
  for (int i = 0; i < (n < Vec::width ? n : Vec::width); ++i) p[i] = int8_t(whole.v[i]);
}
template <int S>
inline void swap_blocks(Vec& a, Vec& b) {
  for (int i = 0; i < Vec::width; ++i) {
    if (i & S) std::swap(a.v[i], b.v[i - S]);
  }
}

#endif

// Transposes Vec::width rows of Vec::width lanes: blocks of 2S x 2S swap their off-diagonal quarters, with S from half
// the width down to 1.
template <int S = Vec::width / 2>
inline void transpose(Vec* rows) {
  for (int r = 0; r < Vec::width; ++r) {
    if (!(r & S)) swap_blocks<S>(rows[r], rows[r + S]);
  }
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// e^x = 2^n (1 + p): p = e^r - 1 with |r| <= ln(2) / 2. The polynomial is the minimax fit of (e^r - 1 - r) / r^2, with
// an error of 3e-9; ln(2) is split into two parts so that n * ln(2) is exact.
struct Reduced {
  Vec p, n;
};
inline Reduced reduced(Vec x) {
  const Vec magic(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = fma(x, Vec(1.44269504f), magic) - magic;
  Vec r = fma(n, Vec(-0.693145752f), x);
  r = fma(n, Vec(-1.42860677e-6f), r);
  Vec q = fma(Vec(1.395060182e-3f), r, Vec(8.368953564e-3f));
  q = fma(q, r, Vec(4.166620415e-2f));
  q = fma(q, r, Vec(1.666651831e-1f));
  q = fma(q, r, Vec(5.000000096e-1f));
  return {fma(q * r, r, r), n};
}

inline Vec exp(Vec x) {
  // Beyond these limits the result is 0 or infinity anyway; n stays in the range of two powers of two.
  const Reduced e = reduced(larger(Vec(-105.0f), smaller(Vec(89.0f), x)));
  return times_power(e.p + Vec(1.0f), e.n);
}

// 2^x with a relative error of 3e-6, for x >= -160 (where it is zero) or NaN; for results that are rounded to bf16.
inline Vec coarse_exp2(Vec x) {
  const Vec n = nearest(x), r = x - n;
  Vec p = fma(Vec(9.685705416e-3f), r, Vec(5.592202395e-2f));
  p = fma(p, r, Vec(2.402186543e-1f));
  p = fma(p, r, Vec(6.931210160e-1f));
  return times_power(fma(p, r, Vec(1.0f)), n);
}

inline Vec tanh(Vec x) {
  const Vec twice = smaller(Vec(20.0f), absolute(x) * Vec(2.0f));  // tanh(10) is 1 in float32
  const Reduced e = reduced(twice);
  const Vec scale = power(e.n), less_one = fma(scale, e.p, scale - Vec(1.0f));  // e^2x - 1 without cancellation
  return with_sign_of(less_one / (less_one + Vec(2.0f)), x);
}

// After N. Juffa: an odd polynomial near zero, 1 - e^polynomial elsewhere; within 1 unit in the last place.
inline Vec erf(Vec x) {
  const Vec t = smaller(Vec(8.0f), absolute(x)), s = t * t;  // erf(4) is 1 in float32
  Vec far = fma(Vec(-1.72853470e-5f), t, Vec(3.83197126e-4f));
  far = fma(far, s, fma(Vec(-3.88396438e-3f), t, Vec(2.42546219e-2f)));
  far = fma(far, t, Vec(-1.06777877e-1f));
  far = fma(far, t, Vec(-6.34846687e-1f));
  far = fma(far, t, Vec(-1.28717512e-1f));
  far = Vec(1.0f) - exp(fma(far, t, Vec(0.0f) - t));
  Vec near = fma(Vec(-5.96761703e-4f), s, Vec(4.99119423e-3f));
  near = fma(near, s, Vec(-2.67681349e-2f));
  near = fma(near, s, Vec(1.12819925e-1f));
  near = fma(near, s, Vec(-3.76125336e-1f));
  near = fma(near, s, Vec(1.28379166e-1f));
  near = fma(near, t, t);
  return with_sign_of(where_less(Vec(0.927734375f), t, far, near), x);
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|). log2 Phi(-t) is a polynomial, the minimax fit up to 13.7 with an error of
// 4.1e-5; beyond it the result rounds to max(x, 0). Within 0.52 units in the last place of bf16, also for x < -5, where
// 1 + erf has lost its digits. Summed in pairs, since a chain of ten takes a quarter longer.
inline Vec gelu_for_bf16(Vec x) {
  const Vec t = smaller(Vec(13.7f), absolute(x)), t2 = t * t, t4 = t2 * t2;
  const Vec p8 = fma(Vec(-1.714145492e-9f), t, Vec(1.284115996e-7f)),
      p6 = fma(Vec(-4.220554719e-6f), t, Vec(8.051414625e-5f)),
      p4 = fma(Vec(-9.975456633e-4f), t, Vec(8.564664982e-3f)),
      p2 = fma(Vec(-5.370585993e-2f), t, Vec(-4.590995014e-1f)),
      p0 = fma(Vec(-1.150835395f), t, Vec(-1.000040770f));
  const Vec p = fma(fma(p8, t4, fma(p6, t2, p4)), t4, fma(p2, t2, p0));
  return larger(Vec(0.0f), x) - t * coarse_exp2(p);
}

// log(1 + e^x) to 2 units in the last place. With u = e^-|x| it is max(x, 0) + log(1 + u), and log(1 + u) is
// 2 artanh(s), s = u / (2 + u) <= 1/3: a polynomial, the minimax fit of (artanh(s) / s - 1) / s^2 * 2.
inline Vec softplus(Vec x) {
  const Vec u = exp(Vec(0.0f) - absolute(x)), s = u / (u + Vec(2.0f)), s2 = s * s;
  Vec p = fma(Vec(1.951719105e-1f), s2, Vec(2.263381393e-1f));
  p = fma(p, s2, Vec(2.851503901e-1f));
  p = fma(p, s2, Vec(4.000209479e-1f));
  p = fma(p, s2, Vec(6.666664739e-1f));
  return larger(Vec(0.0f), x) + fma(s * s2, p, s + s);
}

}  // namespace INFUSE_ISA
}  // namespace infuse
