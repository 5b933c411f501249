// Vec: a register of floats in the instruction set of this translation unit, and loads and stores that convert bf16 and
// fp16 from and to float. A tail is loaded and stored by count; lanes beyond it are zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace infuse {
namespace INFUSE_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float widen(f16 x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: mantissa * 2^-24
    float f = float(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
// Round to nearest, ties to even; NaN stays NaN.
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bf16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = x != x ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, f16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000, absolute = bits & 0x7fffffff;
  if (absolute > 0x7f800000) {
    to.bits = uint16_t(sign | 0x7e00);
  } else if (absolute >= 0x477ff000) {  // rounds to 65520 or more
    to.bits = uint16_t(sign | 0x7c00);
  } else if (absolute < 0x38800000) {  // subnormal: units of 2^-24
    float f;
    std::memcpy(&f, &absolute, 4);
    to.bits = uint16_t(sign | uint32_t(std::nearbyint(f * 16777216.0f)));
  } else {
    absolute += 0xfff + ((absolute >> 13) & 1);
    to.bits = uint16_t(sign | ((absolute - 0x38000000) >> 13));
  }
}

#if defined(__AVX512F__)

struct Vec {
  static constexpr int width = 16;
  __m512 v;
  Vec() : v(_mm512_setzero_ps()) {}
  Vec(__m512 v) : v(v) {}
  explicit Vec(float x) : v(_mm512_set1_ps(x)) {}
  friend Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
  friend Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
  friend Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
  friend Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
  friend Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
  friend Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float largest() const { return _mm512_reduce_max_ps(v); }
};
inline __mmask16 first(int n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }
// Whether n is known to be a whole register: the compiler does not optimise away a full mask, and a masked load waits
// until a store before it has left the core.
[[gnu::always_inline]] inline bool is_whole(int n) { return __builtin_constant_p(n) && n >= 16; }
inline Vec load(const float* p, int n) {
  return is_whole(n) ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first(n), p);
}
inline Vec load(const bf16* p, int n) {
  const __m256i bits = is_whole(n) ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                             : _mm256_maskz_loadu_epi16(first(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec load(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store(float* p, Vec x, int n) {
  is_whole(n) ? _mm512_storeu_ps(p, x.v) : _mm512_mask_storeu_ps(p, first(n), x.v);
}
inline __m256i to_bf16(__m512 v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
inline void store(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first(n), to_bf16(x.v)); }
inline void store(f16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int width = 8;
  __m256 v;
  Vec() : v(_mm256_setzero_ps()) {}
  Vec(__m256 v) : v(v) {}
  explicit Vec(float x) : v(_mm256_set1_ps(x)) {}
  friend Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.v, b.v); }
  friend Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.v, b.v); }
  friend Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.v, b.v); }
  friend Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.v, b.v); }
  friend Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
  friend Vec max(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
  float sum() const {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  float largest() const {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
};
template <class T>
inline Vec load_tail(const T* p, int n) {
  float padded[8] = {};
  for (int i = 0; i < n; ++i) padded[i] = widen(p[i]);
  return _mm256_loadu_ps(padded);
}
inline Vec load(const float* p, int n) { return n >= 8 ? Vec(_mm256_loadu_ps(p)) : load_tail(p, n); }
inline Vec load(const bf16* p, int n) {
  if (n < 8) return load_tail(p, n);
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load(const f16* p, int n) {
  return n >= 8 ? Vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) : load_tail(p, n);
}
template <class T>
inline void store(T* p, Vec x, int n) {
  float wide[8];
  _mm256_storeu_ps(wide, x.v);
  for (int i = 0; i < (n < 8 ? n : 8); ++i) narrow(wide[i], p[i]);
}

#else

struct Vec {
  static constexpr int width = 4;
  float v[4];
  Vec() : v{0, 0, 0, 0} {}
  explicit Vec(float x) : v{x, x, x, x} {}
#define INFUSE_LANES(expression) \
  Vec r;                         \
  for (int i = 0; i < 4; ++i) r.v[i] = expression; \
  return r
  friend Vec operator+(Vec a, Vec b) { INFUSE_LANES(a.v[i] + b.v[i]); }
  friend Vec operator-(Vec a, Vec b) { INFUSE_LANES(a.v[i] - b.v[i]); }
  friend Vec operator*(Vec a, Vec b) { INFUSE_LANES(a.v[i] * b.v[i]); }
  friend Vec operator/(Vec a, Vec b) { INFUSE_LANES(a.v[i] / b.v[i]); }
  friend Vec fma(Vec a, Vec b, Vec c) { INFUSE_LANES(a.v[i] * b.v[i] + c.v[i]); }
  friend Vec max(Vec a, Vec b) { INFUSE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
#undef INFUSE_LANES
  float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
  float largest() const { return std::fmax(std::fmax(v[0], v[1]), std::fmax(v[2], v[3])); }
};
template <class T>
inline Vec load(const T* p, int n) {
  Vec r;
  for (int i = 0; i < (n < 4 ? n : 4); ++i) r.v[i] = widen(p[i]);
  return r;
}
template <class T>
inline void store(T* p, Vec x, int n) {
  for (int i = 0; i < (n < 4 ? n : 4); ++i) narrow(x.v[i], p[i]);
}

#endif

// Like store, but subnormal numbers may become zero: a single instruction for bf16 if the CPU has it.
template <class T>
inline void store_coarse(T* p, Vec x, int n) {
  store(p, x, n);
}
#if defined(__AVX512BF16__)
inline void store_coarse(bf16* p, Vec x, int n) {
  const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
  if (is_whole(n)) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
  _mm256_mask_storeu_epi16(p, first(n), bits);
}
#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
