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

constexpr int coded_weight_rows(int R) {
#if defined(__AVX512F__)
  return R == 3 || R == 4 ? 2 : 1;
#else
  return 1;
#endif
}

// The even ones of 2 * width neighbours, then the odd ones.
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
      if (chain * P::block * sizeof(T) % 64 == 0) prefetch(ahead + (i * N + n * P::block) * int64_t(sizeof(T)));  // each line once
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

// ---- quantized weights ----

constexpr int64_t kMostGroups = 2048;  // of 32 inputs in one weight row, so that their scales lie on the stack (ops/cpu/linear.py)

// One code as a number.
template <int Bits>
float decode_one(const uint8_t* row, int64_t i) {
  if constexpr (Bits == 8) return float(int8_t(row[i]));
  return float(((row[i / 2] >> (i % 2 * 4)) & 15) - 8);
}

// `width` codes as numbers: neighbours of 8 bits, or the low nibbles of 32-bit lanes.
#if defined(__AVX512F__)
inline Vec decode_bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
using Lanes = __m512i;
inline Lanes bytes_in_lanes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Lanes pairs_in_lanes(const uint8_t* p) {  // each byte twice, the second one shifted to its high nibble
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes)), _mm512_set1_epi64(int64_t(4) << 32));
}
inline Lanes high_nibbles(Lanes x) { return _mm512_srli_epi32(x, 4); }
inline Vec decode_nibbles(Lanes x) {  // a look-up reads only the lowest four bits of its index
  return _mm512_permutexvar_ps(x, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}
#elif defined(__AVX2__)
inline Vec decode_bytes(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
using Lanes = __m256i;
inline Lanes bytes_in_lanes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Lanes pairs_in_lanes(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  const __m128i bytes = _mm_cvtsi32_si128(four);
  return _mm256_srlv_epi32(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes)), _mm256_set1_epi64x(int64_t(4) << 32));
}
inline Lanes high_nibbles(Lanes x) { return _mm256_srli_epi32(x, 4); }
inline Vec decode_nibbles(Lanes x) {
  const __m256i code = _mm256_sub_epi32(_mm256_and_si256(x, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
  return _mm256_cvtepi32_ps(code);
}
#else
inline Vec decode_bytes(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float(int8_t(p[i]));
  return r;
}
struct Lanes {
  uint8_t lane[Vec::width];
};
inline Lanes bytes_in_lanes(const uint8_t* p) {
  Lanes r;
  for (int i = 0; i < Vec::width; ++i) r.lane[i] = p[i];
  return r;
}
inline Lanes pairs_in_lanes(const uint8_t* p) {
  Lanes r;
  for (int i = 0; i < Vec::width; ++i) r.lane[i] = uint8_t(p[i / 2] >> (i % 2 * 4));
  return r;
}
inline Lanes high_nibbles(Lanes x) {
  for (int i = 0; i < Vec::width; ++i) x.lane[i] >>= 4;
  return x;
}
inline Vec decode_nibbles(Lanes x) {
  Vec r;
  for (int i = 0; i < Vec::width; ++i) r.v[i] = float((x.lane[i] & 15) - 8);
  return r;
}
#endif

// How a unit of codes is multiplied with x; the inputs of a unit share a scale, or its halves have one each.
// Any type: codes and x as float.
template <class T, int Bits>
struct Codes {
  using X = float;
  static constexpr int unit = 32;
  static void arrange(const T* x, int, X* to) {
    for (int i = 0; i < unit; i += 2 * Vec::width) {
      const Vec a = load(x + i, Vec::width), b = load(x + i + Vec::width, Vec::width);
      if (Bits == 4) {
        deinterleave(a, b, to + i);
      } else {
        store(to + i, a, Vec::width), store(to + i + Vec::width, b, Vec::width);
      }
    }
  }
  // partial[r] += the unit at p with that of row r of x, which lie behind each other.
  template <int R>
  [[gnu::always_inline]] static void dot(const uint8_t* p, int, const X* x, Vec (&partial)[R]) {
    for (int i = 0; i < unit; i += 2 * Vec::width) {
      Vec a, b;
      if constexpr (Bits == 4) {
        const Lanes both = bytes_in_lanes(p + i / 2);
        a = decode_nibbles(both), b = decode_nibbles(high_nibbles(both));
      } else {
        a = decode_bytes(p + i), b = decode_bytes(p + i + Vec::width);
      }
      for (int r = 0; r < R; ++r) {
        partial[r] = fma(a, load(x + r * unit + i, Vec::width), partial[r]);
        partial[r] = fma(b, load(x + r * unit + i + Vec::width, Vec::width), partial[r]);
      }
    }
  }
  static Vec scale(const float* halves) { return Vec(halves[0]); }
};

#if defined(__AVX512BF16__)

// Codes are exact in bf16, so 64 of them are two registers of pairs. The low half of the float lanes belongs to the first
// 32 inputs, the high half to the others.
template <int Bits>
struct Codes<bf16, Bits> {
  using X = bf16;
  static constexpr int unit = 64;
  static __m512bh pairs(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }
  static void arrange(const bf16* x, int n, X* to) {
    const __m512i a = _mm512_loadu_si512(x), b = n > 32 ? _mm512_loadu_si512(x + 32) : _mm512_setzero_si512();
    if (Bits == 8) {
      _mm512_store_si512(to, _mm512_shuffle_i64x2(a, b, 0x44));
      _mm512_store_si512(to + 32, _mm512_shuffle_i64x2(a, b, 0xee));
    } else {
      alignas(64) uint16_t even[32];
      for (int i = 0; i < 32; ++i) even[i] = uint16_t(2 * i);
      const __m512i index = _mm512_load_si512(even);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, index, b));
      _mm512_store_si512(to + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(index, _mm512_set1_epi16(1)), b));
    }
  }
  [[gnu::always_inline]] static void decode(const uint8_t* p, __m512bh& first, __m512bh& second) {
    if constexpr (Bits == 8) {
      first = _mm512_cvtne2ps_pbh(decode_bytes(p + 32).v, decode_bytes(p).v);
      second = _mm512_cvtne2ps_pbh(decode_bytes(p + 48).v, decode_bytes(p + 16).v);
    } else {
      // -8 ... 7 twice: a look-up reads five bits of its index, of which the highest belongs to the next nibble.
      const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
          short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000), short(0xbf80),
          0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
      const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      first = pairs(_mm512_permutexvar_epi16(both, table));
      second = pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
    }
  }
  template <int R>
  [[gnu::always_inline]] static void dot(const uint8_t* p, int n, const X* x, Vec (&partial)[R]) {
    __m512bh first, second;
    uint8_t padded[unit * Bits / 8];
    if (n < unit) {  // the row ends after the first half; the arranged x is zero beyond it
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, p, size_t(n) * Bits / 8);
      p = padded;
    }
    decode(p, first, second);
    for (int r = 0; r < R; ++r) {
      partial[r] = _mm512_dpbf16_ps(partial[r].v, first, pairs(_mm512_load_si512(x + r * unit)));
      partial[r] = _mm512_dpbf16_ps(partial[r].v, second, pairs(_mm512_load_si512(x + r * unit + 32)));
    }
  }
  static Vec scale(const float* halves) {
    return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(halves[0]), _mm512_set1_ps(halves[1]));
  }
};

#endif

template <class P>
int64_t coded_columns(int64_t inputs) {
  return (inputs + P::unit - 1) / P::unit * P::unit;
}

template <class T, int Bits>
void arrange_coded(const LinearArgs& a) {
  using P = Codes<T, Bits>;
  const int64_t stride = coded_columns<P>(a.inputs), length = a.inputs / a.groups;
  const T* x = static_cast<const T*>(a.x);
  typename P::X* arranged = static_cast<typename P::X*>(a.scratch);
  in_row_blocks(a.rows, [&](int64_t first, int64_t count) {
    typename P::X* to = arranged + first * stride;
    for (int64_t i = 0; i < a.inputs; i += P::unit) {
      for (int64_t r = first; r < first + count; ++r, to += P::unit) P::arrange(x + r * a.inputs + i, int(a.inputs - i), to);
    }
  });
  if (!a.zero) return;
  float* sums = reinterpret_cast<float*>(arranged + a.rows * stride);  // of the groups of x: what zero points are multiplied with
  for (int64_t g = 0; g < a.rows * a.groups; ++g) {
    Vec sum;
    for (int64_t i = 0; i < length; i += Vec::width) sum = sum + load(x + g * length + i, Vec::width);
    sums[g] = sum.sum();
  }
}

// What one weight row needs beside its codes: a scale for each group (or each 32 inputs), and scale * zero * unit.
struct RowScales {
  alignas(64) float scale[kMostGroups + 16];
  alignas(64) float shift[kMostGroups + 16];

  template <int Bits>
  void read(const LinearArgs& a, int64_t o, int64_t copies) {
    const bf16* from = reinterpret_cast<const bf16*>(a.scale + o * a.groups);
    for (int64_t g = 0; g < a.groups; g += Vec::width) {
      const int n = int(a.groups - g < Vec::width ? a.groups - g : Vec::width);
      store(scale + g, load(from + g, n), Vec::width);
    }
    if (a.zero) {
      constexpr float step = Bits == 8 ? 1.0f : 1.0f / 16;
      const int8_t* zero = a.zero + o * a.groups;
      for (int64_t g = 0; g < a.groups; ++g) shift[g] = scale[g] * (float(zero[g]) * step);
    }
    if (copies > 1) {  // from the end, so that none is overwritten before it is read
      for (int64_t g = a.groups; g-- > 0;) {
        const float one = scale[g];
        for (int64_t k = 0; k < copies; ++k) scale[g * copies + k] = one;
      }
      scale[a.groups * copies] = 0;
    }
  }
};

// Exactly as the reference, weight by weight: taken where a result is not finite, since a scale or an x that is not finite
// gives another value after the sum of a group than before it.
template <class T, int Bits>
float dot_as_reference(const LinearArgs& a, int64_t o, int64_t r) {
  const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + o * a.inputs * Bits / 8;
  const T* x = static_cast<const T*>(a.x) + r * a.inputs;
  const int64_t length = a.inputs / a.groups;
  float sum = 0;
  for (int64_t i = 0; i < a.inputs; ++i) {
    const int64_t g = o * a.groups + i / length;
    const float zero = a.zero ? float(a.zero[g]) * (Bits == 8 ? 1.0f : 1.0f / 16) : 0.0f;
    T w;
    narrow((decode_one<Bits>(codes, i) - zero) * widen(bf16{a.scale[g]}), w);
    sum += widen(w) * widen(x[i]);
  }
  return sum;
}

// Halves: groups do not consist of whole units, so each 32 inputs have a scale of their own.
template <class T, int Bits, int N, int R, bool Halves>
void coded_block(const LinearArgs& a, int64_t o, int64_t first) {
  using P = Codes<T, Bits>;
  using X = typename P::X;
  const int64_t stride = coded_columns<P>(a.inputs), row_bytes = a.inputs * Bits / 8, length = a.inputs / a.groups;
  const X* x = static_cast<const X*>(a.scratch) + first * stride;
  const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + o * row_bytes;
  const char* ahead = reinterpret_cast<const char*>(codes) + (N == 1 ? kAhead : N * row_bytes);
  RowScales scales[N];
  for (int n = 0; n < N; ++n) scales[n].template read<Bits>(a, o + n, Halves ? length / 32 : 1);
  Vec acc[N][R];
  const auto step = [&](int64_t i, int count, const Vec (&scale)[N]) __attribute__((always_inline)) {
    for (int n = 0; n < N; ++n) {
      if (Bits * P::unit == 512 || i % (2 * P::unit) == 0) prefetch(ahead + i * Bits / 8 * N + n * 64);
      const uint8_t* from = codes + n * row_bytes + i * Bits / 8;
      if constexpr (N > 1) __builtin_prefetch(from + 512, 0, 3);
      Vec partial[R];
      P::template dot<R>(from, count, x + i * R, partial);
      for (int r = 0; r < R; ++r) acc[n][r] = fma(partial[r], scale[n], acc[n][r]);
    }
  };
  Vec scale[N];
  if constexpr (Halves) {
    for (int64_t i = 0; i < a.inputs; i += P::unit) {
      for (int n = 0; n < N; ++n) scale[n] = P::scale(scales[n].scale + i / 32);
      step(i, int(a.inputs - i), scale);
    }
  } else {
    for (int64_t g = 0; g < a.groups; ++g) {
      for (int n = 0; n < N; ++n) scale[n] = Vec(scales[n].scale[g]);
      for (int64_t i = g * length; i < (g + 1) * length; i += P::unit) step(i, P::unit, scale);
    }
  }
  const T* bias = static_cast<const T*>(a.bias);
  const float* group_sums = reinterpret_cast<const float*>(static_cast<const X*>(a.scratch) + a.rows * stride);
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      if (a.zero) {
        for (int64_t g = 0; g < a.groups; g += Vec::width) {
          const int some = int(a.groups - g < Vec::width ? a.groups - g : Vec::width);
          acc[n][r] = acc[n][r] - load(scales[n].shift + g, some) * load(group_sums + (first + r) * a.groups + g, some);
        }
      }
      float sum = acc[n][r].sum();
      if (!std::isfinite(sum)) sum = dot_as_reference<T, Bits>(a, o + n, first + r);
      narrow(sum + (bias ? widen(bias[o + n]) : 0.0f), static_cast<T*>(a.y)[(first + r) * a.outputs + o + n]);
    }
  }
}

template <class T, int Bits, bool Halves>
void coded_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; o += kPanel) {
    const int64_t stop = end - o < kPanel ? end : o + kPanel;
    in_row_blocks(a.rows, [&](int64_t first, int64_t count) {
      with_rows(count, [&](auto rows) {
        constexpr int R = decltype(rows)::value, N = coded_weight_rows(R);
        int64_t p = o;
        for (; p + N <= stop; p += N) coded_block<T, Bits, N, R, Halves>(a, p, first);
        for (; p < stop; ++p) coded_block<T, Bits, 1, R, Halves>(a, p, first);
      });
    });
  }
}

// The weight's values, rounded to T as the reference rounds them.
template <class T, int Bits>
void dequantize_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t length = a.inputs / a.groups;
  for (int64_t o = begin; o < end; ++o) {
    const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + o * a.inputs * Bits / 8;
    T* to = static_cast<T*>(a.y) + o * a.inputs;
    for (int64_t g = 0; g < a.groups; ++g) {
      const int64_t at = o * a.groups + g;
      const Vec scale(widen(bf16{a.scale[at]})), zero(a.zero ? float(a.zero[at]) * (Bits == 8 ? 1.0f : 1.0f / 16) : 0.0f);
      for (int64_t i = g * length; i < (g + 1) * length; i += Vec::width) {
        const Vec code = Bits == 8 ? decode_bytes(codes + i) : decode_nibbles(pairs_in_lanes(codes + i / 2));
        store(to + i, (code - zero) * scale, Vec::width);
      }
    }
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

// Calls run(T(), std::integral_constant<int, bits>) for the type and the bits of `a`.
template <class F>
auto with_format(const LinearArgs& a, const F& run) {
  return with_type(a.type, [&](auto t) {
    switch (a.bits) {
      case 8: return run(t, std::integral_constant<int, 8>());
      case 4: return run(t, std::integral_constant<int, 4>());
      default: return run(t, std::integral_constant<int, 0>());
    }
  });
}

inline size_t linear_scratch_bytes(const LinearArgs& a) {
  return with_format(a, [&](auto t, auto bits) {
    using T = decltype(t);
    if constexpr (bits == 0) {
      using P = Elements<T>;
      return size_t(a.rows * arranged_columns<P>(a.inputs)) * sizeof(typename P::X);
    } else {
      using P = Codes<T, bits>;
      const size_t group_sums = a.zero ? size_t(a.rows * a.groups) * sizeof(float) : 0;
      return size_t(a.rows * coded_columns<P>(a.inputs)) * sizeof(typename P::X) + group_sums;
    }
  });
}

inline void linear_arrange(const LinearArgs& a) {
  with_format(a, [&](auto t, auto bits) {
    if constexpr (bits == 0) {
      arrange_plain<decltype(t)>(a);
    } else {
      arrange_coded<decltype(t), bits>(a);
    }
  });
}

inline void linear_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  with_format(a, [&](auto t, auto bits) {
    using T = decltype(t);
    if constexpr (bits == 0) {
      plain_rows<T>(a, begin, end);
    } else if (a.inputs / a.groups % Codes<T, bits>::unit == 0) {
      coded_rows<T, bits, false>(a, begin, end);
    } else if constexpr (Codes<T, bits>::unit > 32) {
      coded_rows<T, bits, true>(a, begin, end);
    }
  });
}

inline void linear_dequantize(const LinearArgs& a, int64_t begin, int64_t end) {
  with_format(a, [&](auto t, auto bits) {
    if constexpr (bits != 0) dequantize_rows<decltype(t), bits>(a, begin, end);
  });
}

inline LinearKernels linear_kernels() { return {linear_scratch_bytes, linear_arrange, linear_rows, linear_dequantize}; }

}  // namespace INFUSE_ISA
}  // namespace infuse
