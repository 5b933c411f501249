// What operators read of a tensor, without calls into PyTorch: there, an allocation takes 0.4 us and a question 5 to
// 50 ns, more in a decode step, where streaming weights have driven the code that answers out of the caches. Its names
// are those of Tensor.
#pragma once

#include <cstdlib>
#include <memory>

#include <torch/csrc/stable/tensor.h>

#include "types.h"

namespace infuse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMostAxes = 8;

class Array {
 public:
  // A tensor's memory, which the tensor keeps.
  Array(const Tensor& t) : Array(t, const_cast<void*>(t.const_data_ptr())) {}
  // The same, to be written to.
  static Array written(const Tensor& t) { return Array(t, t.mutable_data_ptr()); }
  // Memory of its own, uninitialised, contiguous.
  Array(const int64_t* sizes, int64_t axes, ScalarType type) : type_(type), axes_(axes) {
    STD_TORCH_CHECK(axes <= kMostAxes, "more than ", kMostAxes, " axes: ", axes);
    for (int64_t i = axes; i-- > 0;) sizes_[i] = sizes[i], strides_[i] = numel_, numel_ *= sizes[i];
    constexpr size_t kAlignment = 64;
    const size_t bytes = size_t(numel_) * element_size();
    memory_.reset(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment), std::free);
    STD_TORCH_CHECK(memory_, "no memory for ", bytes, " bytes");
    data_ = memory_.get();
  }

  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return data_; }
  ScalarType scalar_type() const { return type_; }
  size_t element_size() const {
    switch (type_) {
      case ScalarType::BFloat16:
      case ScalarType::Half:
      case ScalarType::Short: return 2;
      case ScalarType::Float:
      case ScalarType::Int: return 4;
      case ScalarType::Double:
      case ScalarType::Long: return 8;
      default: return 1;
    }
  }
  int64_t dim() const { return axes_; }
  int64_t size(int64_t axis) const { return sizes_[axis]; }
  int64_t stride(int64_t axis) const { return strides_[axis]; }
  int64_t numel() const { return numel_; }
  // Index `index` of an axis alone, which stays.
  Array at(int64_t axis, int64_t index) const {
    Array one = *this;
    one.data_ = static_cast<char*>(data_) + size_t(index * strides_[axis]) * element_size();
    one.numel_ = sizes_[axis] ? numel_ / sizes_[axis] : 0, one.sizes_[axis] = 1;
    return one;
  }
  // The first `count` of an axis, and the last.
  Array first(int64_t axis, int64_t count) const {
    Array some = *this;
    some.numel_ = sizes_[axis] ? numel_ / sizes_[axis] * count : 0, some.sizes_[axis] = count;
    return some;
  }
  Array last(int64_t axis, int64_t count) const {
    Array some = first(axis, count);
    some.data_ = static_cast<char*>(data_) + size_t((sizes_[axis] - count) * strides_[axis]) * element_size();
    return some;
  }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int64_t i = axes_; i-- > 0; stride *= sizes_[i]) {
      if (sizes_[i] != 1 && strides_[i] != stride && numel_) return false;
    }
    return true;
  }

 private:
  Array(const Tensor& t, void* data) : data_(data), type_(t.scalar_type()) {
    const auto sizes = t.sizes(), strides = t.strides();
    axes_ = int64_t(sizes.size());
    STD_TORCH_CHECK(axes_ <= kMostAxes, "more than ", kMostAxes, " axes: ", axes_);
    for (int64_t i = 0; i < axes_; ++i) {
      sizes_[i] = sizes[size_t(i)], strides_[i] = strides[size_t(i)];
      numel_ *= sizes_[i];
    }
  }

  void* data_;
  std::shared_ptr<void> memory_;  // if it is its own
  ScalarType type_;
  int64_t axes_, numel_ = 1, sizes_[kMostAxes], strides_[kMostAxes];
};

using Maybe = std::optional<Array>;

inline Type type_of(const Array& a) {
  if (a.scalar_type() == ScalarType::BFloat16) return Type::bf16;
  return a.scalar_type() == ScalarType::Half ? Type::f16 : Type::f32;
}

// Uninitialised arrays of the type of `like`: of these sizes; with its rows and `columns`; with its sizes.
inline Array array(std::initializer_list<int64_t> sizes, const Array& like) {
  return Array(sizes.begin(), int64_t(sizes.size()), like.scalar_type());
}
inline Array array_rows(const Array& x, int64_t columns) {
  int64_t sizes[kMostAxes];
  for (int64_t i = 0; i < x.dim() - 1; ++i) sizes[i] = x.size(i);
  sizes[x.dim() - 1] = columns;
  return Array(sizes, x.dim(), x.scalar_type());
}
inline Array array_as(const Array& x) { return array_rows(x, x.size(x.dim() - 1)); }

}  // namespace infuse
