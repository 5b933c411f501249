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

inline bool has_shifts(const LinearArgs& a) { return a.zero || a.offset || (a.blocks && a.blocks->shifts); }

// The sums of the groups of x, [rows][groups], stored after the arranged x. Zero points, offsets and shifts are
// multiplied with them.
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
    for (int64_t r = first; has_shifts(a) && r < first + count; ++r) {
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

template <Code C>
struct PanelRow {
  const LinearArgs& a;
  const Coding<C> coding;
  const Scales scales;
  const int64_t panel;
  const int row, lane, in_register;
  const uint8_t* codes;

  PanelRow(const LinearArgs& a, int64_t o)
      : a(a), coding(a), scales(a), panel(o / kPanelRows), row(int(o % kPanelRows)),
        lane(row / Vec::width * Vec::width), in_register(row % Vec::width),
        codes(static_cast<const uint8_t*>(a.weight) + panel * (a.inputs / kUnit<C>) * kUnitBytes<C>) {}

  // Calls run(input, value) for all inputs.
  template <class F>
  void each(const F& run) const {
    const int64_t length = a.groups ? a.inputs / a.groups : 0;
    for (int64_t g = 0; g < a.groups; ++g) {
      const OfGroup group = group_of(a, scales, panel, g, lane, Coding<C>::zero_unit);
      const float scale = of(group.scale), zero = of(group.zero), shift = of(group.shift);
      for (int64_t i = g * length; i < (g + 1) * length; ++i) {
        float product = (code(i) - zero) * scale;
        round_here(product);
        run(i, product - shift);
      }
    }
  }

 private:
  float of(Vec v) const {
    alignas(64) float lanes[Vec::width];
    store(lanes, v, Vec::width);
    return lanes[in_register];
  }
  float code(int64_t i) const {
    uint32_t words[Coding<C>::words];
    const uint8_t* p = codes + i / kUnit<C> * kUnitBytes<C>;
    for (int w = 0; w < kWholeWords<C>; ++w, p += kWordBytes) std::memcpy(words + w, p + 4 * row, 4);
    if constexpr (kWholeWords<C> < Coding<C>::words) words[kWholeWords<C>] = p[2 * row] | p[2 * row + 1] << 16;
    return coding.value(words, int(i % kUnit<C>));
  }
};

// Dequantizes rows [begin, end) of whole panels, rounded to T as the reference rounds.
template <class T, Code C>
void dequantize_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups;
  const Scales scales(a);
  for (int64_t panel = begin / kPanelRows; panel * kPanelRows < end; ++panel) {
    for (int lane = 0; lane < kPanelRows; lane += Vec::width) {
      const Coding<C> coding(a, lane);
      const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C> + 4 * lane;
      const int64_t o = panel * kPanelRows + lane;
      for (int64_t u = 0; u < units; ++u, p += kUnitBytes<C>) {
        const OfGroup group = group_of(a, scales, panel, u / in_group, lane, Coding<C>::zero_unit);
        alignas(64) float value[kUnit<C>][Vec::width];
        const Unit<C> d = load_unit<C>(coding, p);
        for (int j = 0; j < kUnit<C>; ++j) {
          store(value[j], group.value_of_reference(coding.values(d.words, j)), Vec::width);
        }
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
    T* to = static_cast<T*>(a.y) + i * a.inputs;
    PanelRow<C>(a, a.index[i]).each([&](int64_t k, float value) { narrow(value, to[k]); });
  }
}

// Computes exactly as the reference, weight by weight. Used if a result is not finite: multiplying a group's sum by a
// scale gives another value than multiplying its terms if the scale or x is not finite.
template <class T, Code C>
float dot_as_reference(const LinearArgs& a, int64_t o, int64_t r) {
  const T* x = static_cast<const T*>(a.x) + r * a.inputs;
  float sum = 0;
  PanelRow<C>(a, o).each([&](int64_t i, float value) {
    T w;
    narrow(value, w);
    sum += widen(w) * widen(x[i]);
  });
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

// Whether there is a one_row for these codes, and whether it takes them: in groups of one chunk, without shifts.
template <class T, Code C>
constexpr bool has_one_row = Vec::width == kPanelRows && (C == Code::int8 || C == Code::int4) && sizeof(T) == 2;
template <class T, Code C>
bool takes_one_row(const LinearArgs& a) {
  const int64_t in_group = a.inputs / kUnit<C> / a.groups;
  return in_group <= kChunkUnits && in_group % UnitDot<T, C>::template Sums<1>::units == 0 && !has_shifts(a);
}

// few_rows for one row, with the same results: as few instructions as possible beside the products, since the lines
// awaited from memory at once are those whose instructions the processor holds at once.
template <class T, Code C, class S, Into into>
void one_row(const LinearArgs& a, int64_t panel, int64_t row, int64_t ahead) {
  using P = UnitDot<T, C>;
  using Sums = typename P::template Sums<1>;
  const int64_t units = a.inputs / kUnit<C>, group_bytes = units / a.groups * kUnitBytes<C>;
  const Coding<C> coding(a, 0);
  const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C>;
  const typename P::X* x = static_cast<const typename P::X*>(a.scratch) + row * P::words(a);
  const S* scales = reinterpret_cast<const S*>(a.scale) + panel * a.groups * kPanelRows;
  Vec acc;
  for (const uint8_t* end = p + a.groups * group_bytes; p < end; scales += kPanelRows) {
    Sums sums(x);
    const uint8_t* stop = p + group_bytes;
    do {
      for (int u = 0; u < Sums::units; ++u) prefetch_unit<C>(p + ahead + u * kUnitBytes<C>, into);
      sums.template add<Sums::units>(coding, p, x);
      p += Sums::units * kUnitBytes<C>;
    } while (p < stop);
    acc = fma(sums.total(0), load(scales, Vec::width), acc);
  }
  const int64_t o = panel * kPanelRows;
  finish<T, C>(a, acc, o, int(a.outputs - o < kPanelRows ? a.outputs - o : kPanelRows), row);
}

// Scales in blocks whose factors are floating numbers, as the type S of few_rows: it expands kExpanded groups at once.
struct InBlocks;
constexpr int64_t kExpanded = 64;  // 8 KiB with the shifts, which stay in the nearest cache

// Writes scales and shifts [groups][Vec::width] of groups [begin, end), which begin and end with blocks.
inline void expand(const LinearArgs& a, int64_t panel, int64_t begin, int64_t end, int lane, float* scales,
                   float* shifts) {
  const int in_block = a.blocks->groups();
  for (int64_t b = begin / in_block; b < end / in_block; ++b) {
    const OfBlock block(a, panel, b, lane);
    for (int g = 0; g < in_block; ++g, scales += Vec::width) store(scales, block.scale(g), Vec::width);
    for (int g = 0; a.blocks->shifts && g < in_block; ++g, shifts += Vec::width) {
      store(shifts, Vec() - block.shift(g), Vec::width);
    }
  }
}

// S: the type of the scales. Asking for it in each group takes 1.1 to 1.3 times as long with 8 rows: the compiler then
// keeps sums in memory.
template <class T, Code C, int R, class S>
void few_rows(const LinearArgs& a, int64_t panel, int64_t first) {
  using P = UnitDot<T, C>;
  constexpr bool blocks = std::is_same_v<S, InBlocks>;
  using Number = std::conditional_t<blocks, float, S>;
  const auto [ahead, into] = R == 1 ? fetch_for_one_row(a.once) : Fetch{kFarAhead, Into::all};
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups, at_once = blocks ? kExpanded : a.groups;
  constexpr int added = P::template Sums<R>::units;
  const float* sums = group_sums(a, arranged_bytes<P>(a)) + first * a.groups;
  const int8_t* zeros = a.zero ? a.zero + panel * a.groups * kPanelRows : nullptr;
  alignas(64) float room[blocks ? 2 : 1][blocks ? kExpanded * Vec::width : 1];
  for (int lane = 0; lane < kPanelRows; lane += Vec::width) {
    const Coding<C> coding(a, lane);
    const int64_t o = panel * kPanelRows + lane;
    const int count = int(a.outputs - o < Vec::width ? a.outputs - o : Vec::width);
    if (count <= 0) return;
    const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C> + 4 * lane;
    const typename P::X* x = static_cast<const typename P::X*>(a.scratch) + first * P::words(a);
    Vec acc[R];
    for (int64_t begin = 0; begin < a.groups; begin += at_once) {
      const int64_t end = begin + at_once < a.groups ? begin + at_once : a.groups;
      const Number* scales = reinterpret_cast<const Number*>(a.scale) + panel * a.groups * kPanelRows + lane;
      if constexpr (blocks) {
        expand(a, panel, begin, end, lane, room[0], room[1]);
        scales = room[0];
      }
      for (int64_t g = begin; g < end; ++g, scales += blocks ? Vec::width : kPanelRows) {
        const Vec scale = load(scales, Vec::width);
        for (int64_t left = in_group; left > 0; left -= kChunkUnits) {
          typename P::template Sums<R> sums_of_chunk(x);
          const uint8_t* stop = p + (left < kChunkUnits ? left : kChunkUnits) * kUnitBytes<C>;
          for (; p + (added - 1) * kUnitBytes<C> < stop; p += added * kUnitBytes<C>) {
            for (int u = 0; u < added; ++u) prefetch_unit<C>(p + ahead + u * kUnitBytes<C>, into);
            sums_of_chunk.template add<added>(coding, p, x);
          }
          for (; p < stop; p += kUnitBytes<C>) sums_of_chunk.template add<1>(coding, p, x);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) acc[r] = fma(sums_of_chunk.total(r), scale, acc[r]);
        }
        if constexpr (blocks) {
          if (!a.blocks->shifts) continue;
          const Vec shift = load(room[1] + (g - begin) * Vec::width, Vec::width);
          for (int r = 0; r < R; ++r) acc[r] = fma(shift, Vec(sums[r * a.groups + g]), acc[r]);
        } else if (zeros) {
          const Vec shift = scale * load_zeros(zeros + g * kPanelRows + lane) * Vec(-Coding<C>::zero_unit);
          for (int r = 0; r < R; ++r) acc[r] = fma(shift, Vec(sums[r * a.groups + g]), acc[r]);
        } else if (has_offsets(C) && a.offset) {
          const Vec offset = load(a.offset + (panel * a.groups + g) * kPanelRows + lane, Vec::width);
          const Vec shift = fma(scale, Vec(-least_code(Coding<C>::zero_unit)), offset);
          for (int r = 0; r < R; ++r) acc[r] = fma(shift, Vec(sums[r * a.groups + g]), acc[r]);
        }
      }
    }
    for (int r = 0; r < R; ++r) finish<T, C>(a, acc[r], o, count, first + r);
  }
}

// Subtracts a block's shifts from R rows; `sums` of x are those of the block's groups, `step` apart for each row. Its own
// function, since the compiler otherwise keeps sums of products in memory: 1.2 times as long with 4 rows.
template <Factor F, int R>
[[gnu::noinline]] void subtract_shifts(const BlockLayout& layout, const uint8_t* block, int lane, const float* sums,
                                       int64_t step, Vec* from) {
  const auto least = F == Factor::nibbles ? load_nibbles<4> : load_bytes;
  const uint8_t* mn = block + layout.mn_at() * kPanelRows + lane;
  Vec shifts[R];
  for (int i = 0; i < layout.groups(); ++i, mn += kPanelRows) {
    const Vec shift = least(mn);
    for (int r = 0; r < R; ++r) shifts[r] = fma(shift, Vec(sums[r * step + i]), shifts[r]);
  }
  const Vec low = load(reinterpret_cast<const f16*>(block + layout.d_bytes() * kPanelRows) + lane, Vec::width);
  for (int r = 0; r < R; ++r) from[r] = fma(Vec() - low, shifts[r], from[r]);
}

// The same with scales in blocks: one for each, or also factors for its groups. Factors are multiplied with the sums of
// their groups, and a block's sum with its scale.
template <class T, Code C, int R, Factor F>
void block_rows(const LinearArgs& a, int64_t panel, int64_t first) {
  using P = UnitDot<T, C>;
  constexpr bool factors = F != Factor::none;
  const auto factor = F == Factor::nibbles ? load_nibbles<0> : load_bytes;
  const auto [ahead, into] = R == 1 ? fetch_for_one_row(a.once) : Fetch{kFarAhead, Into::all};
  const BlockLayout& layout = *a.blocks;
  const int in_block = factors ? layout.groups() : 1;
  const int64_t units = a.inputs / kUnit<C>, in_group = units / a.groups;
  const int64_t row_bytes = kPanelRows, block_bytes = layout.bytes() * row_bytes;
  const float* sums = group_sums(a, arranged_bytes<P>(a)) + first * a.groups;
  for (int lane = 0; lane < kPanelRows; lane += Vec::width) {
    const Coding<C> coding(a, lane);
    const int64_t o = panel * kPanelRows + lane;
    const int count = int(a.outputs - o < Vec::width ? a.outputs - o : Vec::width);
    if (count <= 0) return;
    const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C> + 4 * lane;
    const uint8_t* block = a.scale + panel * kPanelRows * a.scale_bytes;
    const typename P::X* x = static_cast<const typename P::X*>(a.scratch) + first * P::words(a);
    Vec acc[R];
    for (int64_t g = 0; g < a.groups; g += in_block, block += block_bytes) {
      const Vec d = load(reinterpret_cast<const f16*>(block) + lane, Vec::width);
      if (layout.shifts) {
        if constexpr (factors) {
          subtract_shifts<F, R>(layout, block, lane, sums + g, a.groups, acc);
        } else {
          const Vec low = load(reinterpret_cast<const f16*>(block + layout.d_bytes() * row_bytes) + lane, Vec::width);
          for (int r = 0; r < R; ++r) acc[r] = fma(low, Vec(sums[r * a.groups + g]), acc[r]);
        }
      }
      const uint8_t* sc = block + layout.sc_at() * row_bytes + lane;
      Vec made[R];
      for (int i = 0; i < in_block; ++i, sc += row_bytes) {
        typename P::template Sums<R, kUnit<C> == 16 ? 2 : 4> sums_of_group(x);
        for (int64_t u = 0; u < in_group; ++u, p += kUnitBytes<C>) {
          prefetch_unit<C>(p + ahead, into);
          sums_of_group.template add<1>(coding, p, x);
        }
        const Vec scale = factors ? factor(sc) : d;
        for (int r = 0; r < R; ++r) made[r] = fma(sums_of_group.total(r), scale, made[r]);
      }
      for (int r = 0; r < R; ++r) acc[r] = factors ? fma(made[r], d, acc[r]) : acc[r] + made[r];
    }
    for (int r = 0; r < R; ++r) finish<T, C>(a, acc[r], o, count, first + r);
  }
}

// Calls run with a null pointer to the type of the scales.
template <Code C, class F>
void with_scales(const LinearArgs& a, const F& run) {
  if constexpr (C == Code::real4) {
    run(static_cast<float*>(nullptr));
  } else {
    if constexpr (C == Code::nibble) {
      if (a.scaling == Scaling::blocks) return run(static_cast<InBlocks*>(nullptr));
    }
    if constexpr (has_half_scales(C)) {
      if (a.scaling == Scaling::f16) return run(static_cast<f16*>(nullptr));
    }
    if constexpr (has_wide_scales(C)) {
      if (a.scaling == Scaling::f32) return run(static_cast<float*>(nullptr));
    }
    run(static_cast<bf16*>(nullptr));
  }
}

// The way for R rows of x from `first` on, by where the scales are.
template <class T, Code C, int R>
void rows_of_panel(const LinearArgs& a, int64_t panel, int64_t first) {
  const bool bytes = a.blocks && a.blocks->factor == Factor::i8, one = a.blocks && a.blocks->factor == Factor::none;
  if constexpr (C == Code::six) {
    block_rows<T, C, R, Factor::i8>(a, panel, first);
  } else if constexpr (C == Code::five) {
    bytes ? block_rows<T, C, R, Factor::i8>(a, panel, first) : block_rows<T, C, R, Factor::none>(a, panel, first);
  } else {
    if constexpr (C == Code::two) {
      if (a.blocks) return block_rows<T, C, R, Factor::nibbles>(a, panel, first);
    }
    if constexpr (C == Code::three || C == Code::nibble) {
      if (bytes) return block_rows<T, C, R, Factor::i8>(a, panel, first);
    }
    if constexpr (C == Code::nibble) {
      if (one) return block_rows<T, C, R, Factor::none>(a, panel, first);
    }
    with_scales<C>(a, [&](auto* scale) {
      using S = std::remove_pointer_t<decltype(scale)>;
      if constexpr (R == 1 && has_one_row<T, C>) {
        if (takes_one_row<T, C>(a)) {
          const auto [ahead, into] = fetch_for_one_row(a.once);
          return into == Into::outer ? one_row<T, C, S, Into::outer>(a, panel, first, ahead)
                                     : one_row<T, C, S, Into::once>(a, panel, first, ahead);
        }
      }
      few_rows<T, C, R, S>(a, panel, first);
    });
  }
}

template <class T, Code C>
void panel_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t panel = begin / kPanelRows; panel * kPanelRows < end; ++panel) {
    for (int64_t b = 0; b < row_blocks(a.rows, kMostPanelRows); ++b) {
      const auto [first, count] = row_block(a.rows, kMostPanelRows, b);
      with_rows<kMostPanelRows>(count, [&, first = first](auto rows) {
        rows_of_panel<T, C, decltype(rows)::value>(a, panel, first);
      });
    }
  }
}

}  // namespace INFUSE_ISA
}  // namespace infuse
