// Products of a block's parts with few rows of x: by one weight, or by several in different formats.
#pragma once

#include <cstring>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {

// y = x w + bias for `rows` rows.
inline void multiply(const LinearPart& part, const Array& x, void* y, int64_t rows, bool once) {
  LinearArgs a{};
  a.x = x.const_data_ptr(), a.y = y;
  a.bias = part.bias ? part.bias->const_data_ptr() : nullptr;
  a.type = type_of(x);
  a.rows = rows;
  a.once = once;
  if (part.code < 0) return stream_linear(a, *part.weight);
  stream_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs);
}

inline void multiply(const LinearPart& part, const Array& x, const Array& y, bool once) {
  multiply(part, x, y.mutable_data_ptr(), y.numel() / part.outputs, once);
}

// The same by parts in several formats, which write their outputs beside each other; several rows are copied there.
inline void multiply(const ProductPart& product, const Array& x, const Array& y, bool once) {
  if (const auto* whole = std::get_if<LinearPart>(&product)) return multiply(*whole, x, y, once);
  const JoinedPart& joined = std::get<JoinedPart>(product);
  const int64_t rows = y.numel() / joined.outputs, element_bytes = int64_t(y.element_size());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for (const LinearPart& part : joined.parts) {
    const size_t bytes = size_t(part.outputs * element_bytes);
    if (rows == 1) {
      multiply(part, x, to, 1, once);
    } else {
      const Array made = array({rows, part.outputs}, y);
      multiply(part, x, made, once);
      for (int64_t r = 0; r < rows; ++r) {
        const char* row = static_cast<const char*>(made.const_data_ptr()) + size_t(r) * bytes;
        std::memcpy(to + r * joined.outputs * element_bytes, row, bytes);
      }
    }
    to += bytes;
  }
}

}  // namespace infuse
