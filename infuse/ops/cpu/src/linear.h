// The matrix products of one instruction set by type and code.
#pragma once

#include "integer_tile.h"
#include "plain_linear.h"
#include "tile_products.h"

namespace infuse {
namespace INFUSE_ISA {

// Calls run(T(), std::integral_constant<Code, code>) for the type and the code of `a`.
template <class F>
auto with_format(const LinearArgs& a, const F& run) {
  return with_type(a.type, [&](auto t) { return with_code(a.code, [&](auto code) { return run(t, code); }); });
}

inline LinearKernels linear_kernels() {
  return {
      [](const LinearArgs& a) {
        return with_type(a.type, [&](auto t) {
          using P = Elements<decltype(t)>;
          return size_t(a.rows * arranged_columns<P>(a.inputs)) * sizeof(typename P::X);
        });
      },
      [](const LinearArgs& a) { with_type(a.type, [&](auto t) { arrange_plain<decltype(t)>(a); }); },
      [](const LinearArgs& a, int64_t begin, int64_t end) {
        with_type(a.type, [&](auto t) { plain_rows<decltype(t)>(a, begin, end); });
      },
      plain_tile_kernels(),
  };
}

inline PanelKernels panel_kernels() {
  return {
      kMostPanelRows,
      [](const LinearArgs& a) {
        return with_format(a, [&](auto t, auto code) {
          return size_t(arranged_bytes<UnitDot<decltype(t), code>>(a)) +
              (has_shifts(a) ? size_t(a.rows * a.groups) * sizeof(float) : 0);
        });
      },
      [](const LinearArgs& a, int64_t, int64_t begin, int64_t end) {
        with_format(a, [&](auto t, auto code) { arrange_groups<decltype(t), code>(a, begin, end, 0, a.groups); });
      },
      [](const LinearArgs& a, int64_t begin, int64_t end) {
        const int64_t blocks = row_blocks(a.rows, kMostPanelRows);
        with_format(a, [&](auto t, auto code) { arrange_groups<decltype(t), code>(a, 0, blocks, begin, end); });
      },
      [](const LinearArgs& a, int64_t begin, int64_t end) {
        with_format(a, [&](auto t, auto code) { panel_rows<decltype(t), code>(a, begin, end); });
      },
      panel_tile_kernels(),
      integer_tile_kernels(),
      [](const LinearArgs& a, int64_t begin, int64_t end) {
        with_format(a, [&](auto t, auto code) { dequantize_rows<decltype(t), code>(a, begin, end); });
      },
      [](const LinearArgs& a, int64_t begin, int64_t end) {
        with_format(a, [&](auto t, auto code) { gather_rows<decltype(t), code>(a, begin, end); });
      },
  };
}

}  // namespace INFUSE_ISA
}  // namespace infuse
