// What a step of a program is given beside its values, and what its parts compute with: sums, norms, products by numbers
// and matrices.
#pragma once

#include <cmath>
#include <cstring>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"
#include "binding_product.h"

namespace infuse {

// What a step is given beside its values. The new tokens are appended at `start` to keys and values [B, K, S, D], which
// a program of several blocks holds itself; states, which are given in their place, are overwritten (turns_of). `value`:
// what a LayerInputPart multiplies with. Those of states are a CrossAttentionPart's; its mask [R, 1 or H, 1, L] hides
// states.
struct Given {
  Maybe cos, sin, mask, bias, keys, values, value, state_keys, state_values, states_mask;
  int64_t start;
  bool once;  // as in LinearArgs
};

struct StepValues {
  const Given& given;
  mutable bool wrote_state = false;

  Maybe norm(const NormPart& part, const Maybe& of) const {
    if (part.kind == NormKind::factor) return times(of, first_of(*part.weight));
    Maybe made = array_as(*of);
    if (part.kind == NormKind::rounded_rms || part.kind == NormKind::torch_rms) {
      rounded_norm(*of, *part.weight, part.eps, part.offset, part.kind == NormKind::rounded_rms, *made);
    } else {
      infuse::norm(part.rule(), *of, *made);
    }
    return made;
  }
  static Array in_type(const Array& from, ScalarType type) {
    if (from.scalar_type() == type) return from;
    const int64_t sizes[] = {from.size(0), from.size(1), from.size(2)};
    const Array to(sizes, 3, type);
    kernels().router.convert(from.const_data_ptr(), type_of(from), to.mutable_data_ptr(), type_of(to), from.numel());
    return to;
  }
  Maybe sum(const Maybe& a, const Maybe& b) const {
    Array to = array_as(*a);
    const void* from[] = {a->const_data_ptr(), b->const_data_ptr()};
    kernels().sum_arrays({from, to.mutable_data_ptr(), 2, type_of(to)}, 0, to.numel());
    return to;
  }
  Maybe before(const std::optional<FactorsPart>& factors, const Maybe& x) const {
    return factors && factors->before != 1 ? times(x, factors->before) : x;
  }
  Maybe after(const std::optional<FactorsPart>& factors, const Maybe& y) const {
    return factors && factors->after != 1 ? times(y, factors->after) : y;
  }
  // Rows of so many columns, in place.
  static void times_sections(const std::optional<FactorsPart>& factors, const Array& rows, int64_t columns) {
    if (!factors) return;
    int64_t at = 0;
    for (const SectionPart& section : factors->sections) {
      float factor = float(section.factor);
      if (factors->rounded && type_of(rows) != Type::f32) {
        uint16_t rounded;
        kernels().router.convert(&factor, Type::f32, &rounded, type_of(rows), 1);
        kernels().router.convert(&rounded, type_of(rows), &factor, Type::f32, 1);
      }
      for (int64_t row = at; factor != 1 && row < rows.numel(); row += columns) {
        void* some = bytes_at(rows, row);
        const void* from[] = {some};
        kernels().experts.weigh({from, &factor, 1, some, type_of(rows)}, 0, section.columns);
      }
      at += section.columns;
    }
  }
  // Columns [at, at + width) of rows [B, T, ...], normalised if there is a norm.
  Array section(const Array& rows, int64_t at, int64_t width, const std::optional<NormPart>& part) const {
    const Array some = array_rows(rows, width);
    const size_t row_bytes = size_t(width) * rows.element_size();
    for (int64_t row = 0; row < rows.numel() / rows.size(2); ++row) {
      std::memcpy(bytes_at(some, row * width), bytes_at(rows, row * rows.size(2) + at), row_bytes);
    }
    return part ? *norm(*part, some) : some;
  }
  static char* bytes_at(const Array& of, int64_t element) {
    return static_cast<char*>(of.mutable_data_ptr()) + element * int64_t(of.element_size());
  }
  static double first_of(const Array& t) {
    float first = 0;
    kernels().router.convert(t.const_data_ptr(), type_of(t), &first, Type::f32, 1);
    return first;
  }
  static void widen(const Array& from, float* to) {
    kernels().router.convert(from.const_data_ptr(), type_of(from), to, Type::f32, from.numel());
  }
  Maybe times(const Maybe& of, double scale) const {
    const Array made = array_as(*of);
    const void* from[] = {of->const_data_ptr()};
    const float factor = float(scale);
    kernels().experts.weigh({from, &factor, 1, made.mutable_data_ptr(), type_of(made)}, 0, made.numel());
    return made;
  }
  // A product of rows [B, T, ...].
  Maybe made_by(const LinearPart& part, const Array& rows) const {
    const Array made = array_rows(rows, part.outputs);
    multiply(part, rows, made, given.once);
    return made;
  }
  // A product [B, T, C], like `like`.
  Maybe times(const LinearPart& part, const Array& by, const Array& like) const {
    const Array made = array_as(like);
    multiply(part, by, made, given.once);
    return made;
  }
};

}  // namespace infuse
