// Matrix products with few rows over quantized weights, and dequantization for more.
#pragma once

#include "codes.h"

namespace infuse {
namespace INFUSE_ISA {

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

}  // namespace INFUSE_ISA
}  // namespace infuse
