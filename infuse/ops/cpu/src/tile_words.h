// Words of 32 bits, in which products by tiles read their operands: one float, or two consecutive values in bf16.
#pragma once

#include "elements.h"
#include "vec_math.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512F__)

// Values in a word.
template <class T>
constexpr int kInWord = 4 / int(sizeof(T));

// to[w] = the words w of up to 16 rows that are `step` elements apart, copied as bits.
template <class T>
void load_columns(const T* rows, int64_t step, int64_t there, int words, Vec (&to)[16]) {
  for (int r = 0; r < 16 && r < there; ++r) to[r] = _mm512_maskz_loadu_ps(first(words), rows + r * step);
  transpose(to);
}

// sum + x * y for 16 words.
template <class T>
__m512 add_words(__m512 sum, __m512 x, __m512 y);
template <>
inline __m512 add_words<float>(__m512 sum, __m512 x, __m512 y) {
  return _mm512_fmadd_ps(x, y, sum);
}
#if defined(__AVX512BF16__)
template <>
inline __m512 add_words<bf16>(__m512 sum, __m512 x, __m512 y) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
}
#endif

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
