// Shared by all bindings: PyTorch's stable headers, and the type of a tensor.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "array.h"
#include "kernels.h"
#include "team.h"

namespace infuse {

// The type of a tensor that Python has checked to be float32, bfloat16 or float16.
inline Type type_of(const Tensor& t) {
  if (t.scalar_type() == ScalarType::BFloat16) return Type::bf16;
  return t.scalar_type() == ScalarType::Half ? Type::f16 : Type::f32;
}

// The format of a quantized weight, without the flag of ops/cpu/quantized_linear.py that x may be rounded to 8 bits.
constexpr int64_t kShortX = 64;
inline const Format& format_of(int64_t code) { return kFormats[code & ~kShortX]; }

// An operator by its schema, and a function that TORCH_BOX makes. No schema has a `str`: PyTorch's stable ABI (2.10 to
// 2.13) never deletes the std::string that its conversions make, so each call would leak the text that it takes or
// returns. Return a text as int[], its bytes; take it so or, if it is long, as a tensor of bytes.
struct Operator {
  const char* schema;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};

// The bytes of a text, as an operator returns it.
inline std::vector<int64_t> numbers_of(std::string_view text) {
  std::vector<int64_t> numbers;
  for (const char each : text) numbers.push_back(static_cast<unsigned char>(each));
  return numbers;
}

// Registers operators, once in a file for each dispatch key.
#define INFUSE_OPERATORS(key, ...)                                                                   \
  static const Operator operators_of_##key[] = {__VA_ARGS__};                                        \
  STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) {                                                     \
    for (const Operator& op : operators_of_##key) m.def(op.schema);                                  \
  }                                                                                                  \
  STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, key, m) {                                                    \
    for (const Operator& op : operators_of_##key) {                                                  \
      m.impl(std::string(op.schema, std::strchr(op.schema, '(')).c_str(), op.function);              \
    }                                                                                                \
  }

// An uninitialised tensor. Bypasses the dispatcher, which takes longer than the smaller kernels.
inline Tensor empty(const int64_t* sizes, int64_t axes, int32_t dtype) {
  int64_t strides[kMostAxes], stride = 1;
  STD_TORCH_CHECK(axes <= kMostAxes, "more than ", kMostAxes, " axes: ", axes);
  for (int64_t i = axes; i-- > 0;) strides[i] = stride, stride *= std::max<int64_t>(sizes[i], 1);
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(axes, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}
inline int32_t dtype_of(Type type) {
  return type == Type::f32 ? aoti_torch_dtype_float32()
      : type == Type::bf16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float16();
}
// The same, of the type of `like`.
inline Tensor empty(const int64_t* sizes, int64_t axes, const Tensor& like) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty(sizes, axes, dtype);
}
inline Tensor empty(std::initializer_list<int64_t> sizes, const Tensor& like) {
  return empty(sizes.begin(), int64_t(sizes.size()), like);
}

// An uninitialised tensor [..., columns] with the rows of x; and one with the sizes of x.
inline Tensor empty_rows(const Tensor& x, int64_t columns) {
  int64_t sizes[kMostAxes];
  const int64_t axes = x.dim();
  STD_TORCH_CHECK(axes >= 1 && axes <= kMostAxes, "x has ", axes, " axes");
  for (int64_t i = 0; i < axes - 1; ++i) sizes[i] = x.size(i);
  sizes[axes - 1] = columns;
  return empty(sizes, axes, x);
}
inline Tensor empty_as(const Tensor& x) { return empty_rows(x, x.size(x.dim() - 1)); }

// What may be missing, and where it lies.
using MaybeTensor = std::optional<Tensor>;
template <class T>
const void* data_of(const std::optional<T>& t) { return t ? t->const_data_ptr() : nullptr; }

// Minimum work of a thread, in elements, so that waking another thread saves more than it costs.
constexpr int64_t kGrainElements = 16384;

// Calls run(begin, end) over all rows of `columns` elements, on several threads if there are many.
template <class F>
void over_rows(int64_t rows, int64_t columns, const F& run) {
  if (rows * columns <= kGrainElements) return run(0, rows);
  parallel_for(0, rows, kGrainElements / columns + 1, run);
}

}  // namespace infuse
