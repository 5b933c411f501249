// The search for each group's grid: infuse/quant/integer.py operation by operation, with the same scales, zeros, codes.
//
// Each lane is a group: the values of `width` groups are transposed, and one number per group there is a Vec here. Only
// the squared errors are summed in another order. Candidates that cannot win are skipped (`hopeless`).
#pragma once

#include <cstdlib>
#include <memory>

#include "quantize_floats.h"

namespace infuse {
namespace INFUSE_ISA {

struct Grid {
  Vec scale, zero;
};

// Finds the offered candidate with the least squared error; if equal, the first one.
// Four are measured at once: their sums do not wait for each other, and values are read once for all.
template <int BITS, bool ZERO>
struct Search {
  static constexpr int together = 4;
  const float* values;  // [N, width]
  int64_t length;
  Grid best, waiting[together];
  Vec least{__builtin_inff()};
  int offered = 0;

  Search(const float* values, int64_t length) : values(values), length(length) {}

  void offer(const Grid& grid) {
    waiting[offered++] = grid;
    if (offered == together) measure();
  }

  Grid result() {
    if (offered) {
      for (int k = offered; k < together; ++k) waiting[k] = waiting[offered - 1];  // a duplicate does not win
      measure();
    }
    return best;
  }

  void measure() {
    const Vec low(BITS == 8 ? -128.0f : -8.0f), high(BITS == 8 ? 127.0f : 7.0f);
    Vec inverse[together], squares[together];
    for (int k = 0; k < together; ++k) inverse[k] = Vec(1.0f) / waiting[k].scale;
    for (int64_t j = 0; j < length; ++j) {
      const Vec w = load(values + j * Vec::width, Vec::width);
      for (int k = 0; k < together; ++k) {
        Vec steps = apart(w * inverse[k]);
        if constexpr (ZERO) steps = steps + waiting[k].zero;
        Vec code = nearest(steps);
        // symmetric int8 stays within 127.5 steps
        if constexpr (BITS == 4 || ZERO) code = smaller(high, larger(low, code));
        const Vec off = steps - code;
        squares[k] = fma(off, off, squares[k]);
      }
    }
    for (int k = 0; k < together; ++k) {
      // Use the root, not the square, and steps times scale, not weights: neither overflows nor underflows.
      const Vec error = root(squares[k]) * absolute(waiting[k].scale);
      best.scale = where_less(error, least, waiting[k].scale, best.scale);
      if constexpr (ZERO) best.zero = where_less(error, least, waiting[k].zero, best.zero);
      least = where_less(error, least, error, least);
    }
    offered = 0;
  }

  // Whether values this far outside a grid's range cost every lane more than the best candidate so far.
  bool hopeless(Vec outside) const { return (where_less(least, outside, Vec(), Vec(1.0f))).largest() == 0; }
};

inline Vec within(Vec low, Vec high, Vec x) { return smaller(high, larger(low, x)); }
constexpr float kRounding = 1e-5f;  // relative to the extreme values: margin for float32 rounding in error bounds

// The scale rounded to the nearest bf16, with its sign.
inline Vec stored(Vec scale) {
  const Vec magnitude = at_least_smallest(nearest_bf16(absolute(scale)));
  return where_less(scale, Vec(), Vec() - magnitude, magnitude);
}

// The smallest and the largest value of each lane, including zero; and the first value with the largest magnitude.
struct Extremes {
  Vec low, high, first, spoiled;
};
inline Extremes extremes(const float* values, int64_t length) {
  Extremes e;
  for (int64_t j = 0; j < length; ++j) {
    const Vec w = load(values + j * Vec::width, Vec::width);
    e.low = smaller(e.low, w), e.high = larger(e.high, w);
    e.first = where_less(absolute(e.first), absolute(w), w, e.first);
    e.spoiled = fma(w, Vec(), e.spoiled);  // NaN once a value is not finite
  }
  return e;
}

inline Grid symmetric_int8(const QuantizeArgs& a, const float* values, const Extremes& e) {
  Search<8, false> search(values, a.length);
  for (int64_t c = 0; c < a.count; ++c) search.offer({stored(absolute(e.first) / Vec(a.candidates[c])), Vec()});
  return search.result();
}

inline Grid symmetric_int4(const QuantizeArgs& a, const float* values, const Extremes& e) {
  Search<4, false> search(values, a.length);
  const Vec extreme = absolute(e.first) * Vec(1.0f - kRounding);
  for (int64_t c = 0; c < a.count; ++c) {
    const Vec scale = stored(e.first / Vec(a.candidates[c])), reach(a.candidates[c] > 0 ? 7.0f : 8.0f);
    if (!search.hopeless(extreme - absolute(scale) * reach)) search.offer({scale, Vec()});
  }
  return search.result();
}

inline Grid asymmetric_int8(const QuantizeArgs& a, const float* values, const Extremes& e) {
  Search<8, true> search(values, a.length);
  Grid first;
  float shortest = a.candidates[0];
  for (int64_t c = 1; c < a.count; ++c) shortest = a.candidates[c] < shortest ? a.candidates[c] : shortest;
  for (int64_t c = 0; c < a.count; ++c) {
    const Vec span(a.candidates[c]);
    Grid grid;
    grid.scale = at_least_smallest(bf16_towards_zero(e.high / span - e.low / span));
    grid.zero = within(Vec(-128.0f), Vec(127.0f), nearest(Vec(127.0f) - e.high / grid.scale));
    if (c == 0) first = grid;
    const Vec top = nearest(e.high / grid.scale + grid.zero), bottom = nearest(e.low / grid.scale + grid.zero);
    const auto where_possible = [&](Vec yes, Vec no) {
      yes = where_less(Vec(127.0f), top, no, yes), yes = where_less(bottom, Vec(-128.0f), no, yes);
      return where_less(top - bottom, Vec(shortest), no, yes);
    };
    search.offer({where_possible(grid.scale, first.scale), where_possible(grid.zero, first.zero)});
  }
  return search.result();
}

inline Grid asymmetric_int4(const QuantizeArgs& a, const float* values, const Extremes& e) {
  Search<4, true> search(values, a.length);
  const Vec half = e.high / Vec(2.0f) - e.low / Vec(2.0f), off = half * Vec(kRounding);
  for (int64_t c = 0; c < a.count; ++c) {
    const Vec top = e.high - apart(Vec(a.candidates[2 * c]) * half);
    Grid grid;
    grid.scale = at_least_smallest(bf16_towards_zero(Vec(a.candidates[2 * c + 1]) * half));
    grid.zero = within(Vec(-128.0f), Vec(112.0f), nearest(Vec(16.0f) * (Vec(7.0f) - top / grid.scale))) / Vec(16.0f);
    const Vec above = e.high - (Vec(7.0f) - grid.zero) * grid.scale,
        below = (Vec(-8.0f) - grid.zero) * grid.scale - e.low;
    const Vec both = (above + below) * Vec(0.7071067f);  // at most the root of the sum of their squares
    if (!search.hopeless(larger(both, larger(above, below)) - off)) search.offer(grid);
  }
  return search.result();
}

inline Grid best_grid(const QuantizeArgs& a, const float* values, const Extremes& e) {
  switch (a.grids) {
    case Grids::int8_symmetric: return symmetric_int8(a, values, e);
    case Grids::int8_asymmetric: return asymmetric_int8(a, values, e);
    case Grids::int4_symmetric: return symmetric_int4(a, values, e);
    case Grids::int4_asymmetric: return asymmetric_int4(a, values, e);
    case Grids::fp8: return {Fp8Grid::best_scale(a, values, absolute(e.first)), Vec()};
    case Grids::fp6: return {Fp6Grid::best_scale(a, values, absolute(e.first)), Vec()};
  }
  return {};
}

// Writes the codes of one group; `zero` is in steps.
template <class T>
void write_codes(const T* w, int64_t length, float scale, float zero, float low, float high, int8_t* to) {
  for (int64_t i = 0; i < length; i += Vec::width) {
    const int n = int(length - i < Vec::width ? length - i : Vec::width);
    store(to + i, within(Vec(low), Vec(high), nearest(load(w + i, n) / Vec(scale) + Vec(zero))), n);
  }
}

// Writes a group to its place in the data; `unpacked` [N] is scratch for formats whose codes share bytes.
template <class T>
void write_group(const QuantizeArgs& a, const T* w, int64_t group, float scale, float zero, uint8_t* unpacked) {
  const int64_t N = a.length;
  uint8_t* data = static_cast<uint8_t*>(a.data);
  switch (a.grids) {
    case Grids::int8_symmetric:
    case Grids::int8_asymmetric:
      return write_codes(w, N, scale, zero, -128.0f, 127.0f, reinterpret_cast<int8_t*>(data) + group * N);
    case Grids::int4_symmetric:
    case Grids::int4_asymmetric: {
      write_codes(w, N, scale, zero, -8.0f, 7.0f, reinterpret_cast<int8_t*>(unpacked));
      uint8_t* to = data + group * (N / 2);
      for (int64_t i = 0; i < N / 2; ++i) to[i] =
          uint8_t(((unpacked[2 * i] + 8) & 15) | (unpacked[2 * i + 1] + 8) << 4);
      return;
    }
    case Grids::fp8: return Fp8Grid::write(w, N, scale, data + group * N);
    case Grids::fp6: {
      Fp6Grid::write(w, N, scale, unpacked);
      uint8_t* to = data + group * (N / 4) * 3;
      for (int64_t i = 0; i < N / 4; ++i) {
        const uint8_t* four = unpacked + 4 * i;
        const uint32_t bits = uint32_t(four[0]) | uint32_t(four[1]) << 6 | uint32_t(four[2]) << 12 |
            uint32_t(four[3]) << 18;
        to[3 * i] = uint8_t(bits), to[3 * i + 1] = uint8_t(bits >> 8), to[3 * i + 2] = uint8_t(bits >> 16);
      }
      return;
    }
  }
}

// [width, N] of `count` groups → [N, width] in float; the lanes of missing groups are zero.
template <class T>
void transposed(const T* w, int64_t count, int64_t length, float* to) {
  for (int64_t i = 0; i < length; i += Vec::width) {
    const int n = int(length - i < Vec::width ? length - i : Vec::width);
    Vec rows[Vec::width];
    for (int g = 0; g < Vec::width; ++g) rows[g] = g < count ? load(w + g * length + i, n) : Vec();
    transpose(rows);
    for (int j = 0; j < n; ++j) store(to + (i + j) * Vec::width, rows[j], Vec::width);
  }
}

template <class T>
bool quantize_groups(const QuantizeArgs& a, int64_t begin, int64_t end) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  const int64_t N = a.length;
  const float zeros_in_step = a.grids == Grids::int4_asymmetric ? 16.0f : 1.0f;
  const size_t values_bytes = (size_t(N) * Vec::width * sizeof(float) + 63) / 64 * 64;
  const std::unique_ptr<void, Free> scratch(std::aligned_alloc(64, values_bytes + (size_t(N) + 63) / 64 * 64));
  if (!scratch) return false;
  float* values = static_cast<float*>(scratch.get());
  uint8_t* unpacked = static_cast<uint8_t*>(scratch.get()) + values_bytes;
  for (int64_t start = begin; start < end; start += Vec::width) {
    const int64_t count = end - start < Vec::width ? end - start : Vec::width;
    const T* w = static_cast<const T*>(a.weight) + start * N;
    transposed(w, count, N, values);
    const Extremes e = extremes(values, N);
    if (!(e.spoiled.sum() == 0) || absolute(e.first).largest() > a.largest_weight) return false;
    const Grid grid = best_grid(a, values, e);
    float scale[Vec::width], zero[Vec::width];
    store(scale, grid.scale, Vec::width), store(zero, grid.zero, Vec::width);
    for (int64_t g = 0; g < count; ++g) {
      bf16 kept;
      narrow(scale[g], kept);  // exact
      a.scale[start + g] = kept.bits;
      if (a.zero) a.zero[start + g] = int8_t(zero[g] * zeros_in_step);
      write_group(a, w + g * N, start + g, scale[g], zero[g], unpacked);
    }
  }
  return true;
}

inline bool quantize(const QuantizeArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32: return quantize_groups<float>(a, begin, end);
    case Type::bf16: return quantize_groups<bf16>(a, begin, end);
    case Type::f16: return quantize_groups<f16>(a, begin, end);
  }
  return false;
}

}  // namespace INFUSE_ISA
}  // namespace infuse
