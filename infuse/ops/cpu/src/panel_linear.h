// Matrix products with quantized weights in panels, and the dequantization of rows of such weights.
#pragma once

#include "unit_dot.h"

namespace infuse {
namespace INFUSE_ISA {

// ---- x ----

template <class P>
int64_t arranged_bytes(const LinearArgs& a) {
  return a.rows * P::words(a) * int64_t(sizeof(typename P::X));
}

// The sums of the groups of x, [rows][groups], stored after the arranged x. Zero points are multiplied with them.
inline float* group_sums(const LinearArgs& a,
    int64_t arranged) { return reinterpret_cast<float*>(static_cast<char*>(a.scratch) + arranged); }

// Arranges groups [begin, end) of blocks [begin_block, end_block) of up to kMostPanelRows rows of x.
template <class T, Code C>
void arrange_groups(const LinearArgs& a, int64_t begin_block, int64_t end_block, int64_t begin, int64_t end) {
  using P = UnitDot<T, C>;
  const int64_t width = P::words(a), length = a.groups ? a.inputs / a.groups : 0;
  float* sums = group_sums(a, arranged_bytes<P>(a));
  for (int64_t b = begin_block; b < end_block; ++b) {
    const auto [first, count] = row_block(a.rows, kMostPanelRows, b);
    P::arrange(a, first, int(count), begin, end, static_cast<typename P::X*>(a.scratch) + first * width);
    for (int64_t r = first; a.zero && r < first + count; ++r) {
      for (int64_t g = r * a.groups + begin; g < r * a.groups + end; ++g) {
        const T* x = static_cast<const T*>(a.x) + g * length;
        Vec sum;
        for (int64_t i = 0; i < length; i += Vec::width) {
          sum = sum + load(x + i, int(length - i < Vec::width ? length - i : Vec::width));
        }
        sums[g] = sum.sum();
      }
    }
  }
}

// ---- single codes ----

struct PanelRow {
  const uint8_t* codes;
  Scales scales;
  const uint16_t* scale;
  const int8_t* zero;  // or null

  template <Code C>
  static PanelRow of(const LinearArgs& a, int64_t o) {
    const int64_t panel = o / kPanelRows, lane = o % kPanelRows, scales = panel * a.groups * kPanelRows + lane;
    const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + panel * (a.inputs / kUnit<C>) * kUnitBytes<C> +
                           4 * lane;
    return {codes, Scales(a), a.scale + scales, a.zero ? a.zero + scales : nullptr};
  }
  template <Code C>
  float value(int64_t i, int64_t g) const {
    uint32_t words[Coding<C>::words];
    for (int w = 0; w < Coding<C>::words; ++w) std::memcpy(words + w,
        codes + i / kUnit<C> * kUnitBytes<C> + w * kWordBytes, 4);
    const float shift = zero ? float(zero[g * kPanelRows]) * Coding<C>::zero_unit : 0.0f;
    return (Coding<C>::value(words, int(i % kUnit<C>)) - shift) * scales.at(scale + g * kPanelRows);
  }
};

// Dequantizes rows [begin, end) of whole panels, rounded to T as the reference rounds.
template <class T, Code C>
void dequantize_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups;
  const Scales scales(a);
  for (int64_t panel = begin / kPanelRows; panel * kPanelRows < end; ++panel) {
    for (int lane = 0; lane < kPanelRows; lane += Vec::width) {
      const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C> + 4 * lane;
      const int64_t o = panel * kPanelRows + lane;
      for (int64_t u = 0; u < units; ++u, p += kUnitBytes<C>) {
        const int64_t at = (panel * a.groups + u / in_group) * kPanelRows + lane;
        const Vec scale = scales.load(a.scale + at);
        const Vec shift = a.zero ? load_zeros(a.zero + at) * Vec(Coding<C>::zero_unit) : Vec();
        alignas(64) float value[kUnit<C>][Vec::width];
        const Unit<C> d = load_unit<C>(p);
        for (int j = 0; j < kUnit<C>; ++j) store(value[j], (Coding<C>::values(d.words, j) - shift) * scale, Vec::width);
        for (int r = 0; r < Vec::width && o + r < end; ++r) {
          T* to = static_cast<T*>(a.y) + (o + r) * a.inputs + u * kUnit<C>;
          for (int j = 0; j < kUnit<C>; ++j) narrow(value[j][r], to[j]);
        }
      }
    }
  }
}

// Dequantizes the rows a.index[begin .. end).
template <class T, Code C>
void gather_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const PanelRow row = PanelRow::of<C>(a, a.index[i]);
    T* to = static_cast<T*>(a.y) + i * a.inputs;
    for (int64_t k = 0; k < a.inputs; ++k) narrow(row.value<C>(k, k / (a.inputs / a.groups)), to[k]);
  }
}

// Computes exactly as the reference, weight by weight. Used if a result is not finite: multiplying a group's sum by a
// scale gives another value than multiplying its terms if the scale or x is not finite.
template <class T, Code C>
float dot_as_reference(const LinearArgs& a, int64_t o, int64_t r) {
  const PanelRow row = PanelRow::of<C>(a, o);
  const T* x = static_cast<const T*>(a.x) + r * a.inputs;
  float sum = 0;
  for (int64_t i = 0; i < a.inputs; ++i) {
    T w;
    narrow(row.value<C>(i, i / (a.inputs / a.groups)), w);
    sum += widen(w) * widen(x[i]);
  }
  return sum;
}

// ---- few rows: exact codes; the sum of each group is scaled ----

// Writes y for one row and `count` outputs from o on.
template <class T, Code C>
void finish(const LinearArgs& a, Vec acc, int64_t o, int count, int64_t r) {
  if (const float nothing = (acc * Vec(0.0f)).sum(); nothing != 0.0f) {
    alignas(64) float exact[Vec::width];
    store(exact, acc, Vec::width);
    for (int i = 0; i < count; ++i) {
      if (!std::isfinite(exact[i])) exact[i] = dot_as_reference<T, C>(a, o + i, r);
    }
    acc = load(exact, Vec::width);
  }
  if (a.bias) acc = acc + load(static_cast<const T*>(a.bias) + o, count);
  store(static_cast<T*>(a.y) + r * a.outputs + o, acc, count);
}

// S: the type of the scales. Asking for it in each group takes 1.1 to 1.3 times as long with 8 rows: the compiler then
// keeps sums in memory.
template <class T, Code C, int R, class S>
void few_rows(const LinearArgs& a, int64_t panel, int64_t first) {
  using P = UnitDot<T, C>;
  constexpr int ahead = R == 1 ? kAhead : kFarAhead;
  const Into into = R > 1 ? Into::all : a.once ? Into::once : Into::outer;
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups;
  const float* sums = group_sums(a, arranged_bytes<P>(a)) + first * a.groups;
  const S* scales = reinterpret_cast<const S*>(a.scale) + panel * a.groups * kPanelRows;
  const int8_t* zeros = a.zero ? a.zero + panel * a.groups * kPanelRows : nullptr;
  for (int lane = 0; lane < kPanelRows; lane += Vec::width) {
    const int64_t o = panel * kPanelRows + lane;
    const int count = int(a.outputs - o < Vec::width ? a.outputs - o : Vec::width);
    if (count <= 0) return;
    const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C> + 4 * lane;
    const typename P::X* x = static_cast<const typename P::X*>(a.scratch) + first * P::words(a);
    Vec acc[R];
    for (int64_t g = 0; g < a.groups; ++g) {
      const Vec scale = load(scales + g * kPanelRows + lane, Vec::width);
      for (int64_t left = in_group; left > 0; left -= kChunkUnits) {
        typename P::template Sums<R> sums_of_chunk(x);
        constexpr int at_once = decltype(sums_of_chunk)::units;
        const uint8_t* end = p + (left < kChunkUnits ? left : kChunkUnits) * kUnitBytes<C>;
        for (; p + (at_once - 1) * kUnitBytes<C> < end; p += at_once * kUnitBytes<C>) {
          for (int u = 0; u < at_once; ++u) prefetch_unit<C>(p + ahead + u * kUnitBytes<C>, into);
          sums_of_chunk.template add<at_once>(p, x);
        }
        for (; p < end; p += kUnitBytes<C>) sums_of_chunk.template add<1>(p, x);
        for (int r = 0; r < R; ++r) acc[r] = fma(sums_of_chunk.total(r), scale, acc[r]);
      }
      if (zeros) {
        const Vec shift = scale * load_zeros(zeros + g * kPanelRows + lane) * Vec(-Coding<C>::zero_unit);
        for (int r = 0; r < R; ++r) acc[r] = fma(shift, Vec(sums[r * a.groups + g]), acc[r]);
      }
    }
    for (int r = 0; r < R; ++r) finish<T, C>(a, acc[r], o, count, first + r);
  }
}

template <class T, Code C>
void panel_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t panel = begin / kPanelRows; panel * kPanelRows < end; ++panel) {
    for (int64_t b = 0; b < row_blocks(a.rows, kMostPanelRows); ++b) {
      const auto [first, count] = row_block(a.rows, kMostPanelRows, b);
      with_rows<kMostPanelRows>(count, [&, first = first](auto rows) {
        constexpr int R = decltype(rows)::value;
        if constexpr (has_half_scales(C)) {
          if (a.half_scales) return few_rows<T, C, R, f16>(a, panel, first);
        }
        few_rows<T, C, R, bf16>(a, panel, first);
      });
    }
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
