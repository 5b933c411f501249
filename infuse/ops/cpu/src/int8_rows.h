// Rows of an int8 cache: the codes of a head's columns, then their float32 scale (ops/cache_rows.py).
#pragma once

#include "vec_math.h"

namespace infuse {
namespace INFUSE_ISA {

// A code of a cache's row. Attention multiplies it as a float.
struct code8 {
  int8_t value;
};
inline Vec load(const code8* p, int n) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
#else
  int8_t codes[Vec::width] = {};
  std::memcpy(codes, p, size_t(n < Vec::width ? n : Vec::width));
#if defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
#else
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = codes[i];
  return r;
#endif
#endif
}

// The same, multiplied as an integer, four at once (attention_quads.h).
struct quad8 {
  int8_t value;
};
constexpr int64_t kQuadColumns = 64;  // of a register of codes

inline float scale_of(const void* row, int64_t width) {
  float scale;
  std::memcpy(&scale, static_cast<const char*>(row) + width, sizeof(scale));
  return scale;
}

// The scales of `count` rows; those beyond, up to a whole register, are 0.
inline void load_scales(const void* rows, int64_t step, int count, int64_t width, float* scales) {
  const int whole = (count + Vec::width - 1) / Vec::width * Vec::width;
  for (int i = 0; i < count; ++i) scales[i] = scale_of(static_cast<const char*>(rows) + i * step, width);
  for (int i = count; i < whole; ++i) scales[i] = 0;
}

// The largest magnitude of x; NaN if any value is not finite.
template <class T>
float largest_magnitude(const T* x, int64_t width) {
  Vec most, poison;
  for (int64_t c = 0; c < width; c += Vec::width) {
    const Vec here = load(x + c, int(width - c < Vec::width ? width - c : Vec::width));
    most = max(absolute(here), most), poison = fma(here, Vec(0.0f), poison);
  }
  return most.largest() + poison.sum();
}

// Writes a row, like the reference bit for bit. A value that is not finite makes the whole row NaN.
template <class T>
void quantize_row(const T* x, int64_t width, int8_t* row) {
  const float largest = largest_magnitude(x, width);
  const float scale = largest == largest ? largest / 127.0f : __builtin_nanf("");  // with the bits of PyTorch's
  const bool any = scale > 0;
  for (int64_t c = 0; c < width; c += Vec::width) {
    const int n = int(width - c < Vec::width ? width - c : Vec::width);
    const Vec steps = any ? nearest(load(x + c, n) / Vec(scale)) : Vec();
    store(row + c, larger(Vec(-127.0f), smaller(Vec(127.0f), steps)), n);
  }
  std::memcpy(row + width, &scale, sizeof(scale));
}

}  // namespace INFUSE_ISA
}  // namespace infuse
