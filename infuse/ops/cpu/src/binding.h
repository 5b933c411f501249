// What the bindings share: PyTorch's stable headers, and the type of a tensor.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "kernels.h"

namespace infuse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Of a tensor that Python has checked to be float32, bfloat16 or float16.
inline Type type_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 ? Type::bf16 : t.scalar_type() == ScalarType::Half ? Type::f16 : Type::f32;
}

}  // namespace infuse
