// Matrix products with few rows as PyTorch operators. Shapes, dtypes and layouts are checked by ops/cpu/linear.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"

namespace infuse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Type type_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 ? Type::bf16 : t.scalar_type() == ScalarType::Half ? Type::f16 : Type::f32;
}

// Weights below this are not worth waking a second thread.
constexpr int64_t kOneThreadBytes = 1 << 17;
// A thread takes pieces of this size until none is left: one that is slowed down does not hold up the other.
constexpr int64_t kPieceBytes = 1 << 18;

// x in the kernels' order; each thread that calls keeps its buffer, since allocating one costs more than filling it.
void* scratch_of(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = (bytes + 4095) / 4096 * 4096;
    buffer.reset(std::aligned_alloc(64, size));
  }
  return buffer.get();
}

template <class F>
void over_outputs(int64_t outputs, int64_t row_bytes, const F& run) {
  const int64_t threads = torch::stable::get_num_threads(), bytes = outputs * row_bytes;
  if (threads == 1 || bytes <= kOneThreadBytes) {
    run(0, outputs);
    return;
  }
  const int64_t piece = std::max<int64_t>(8, std::min(kPieceBytes, bytes / threads / 2) / std::max<int64_t>(row_bytes, 1) / 8 * 8);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t o; (o = next.fetch_add(piece, std::memory_order_relaxed)) < outputs;) run(o, std::min(o + piece, outputs));
    }
  });
}

// An uninitialised tensor [..., columns] with the rows and the type of x. Directly, not through the dispatcher: half a microsecond.
Tensor empty_rows(const Tensor& x, int64_t columns) {
  constexpr int64_t kMostAxes = 8;
  int64_t sizes[kMostAxes], strides[kMostAxes], stride = 1;
  const int64_t axes = x.dim();
  STD_TORCH_CHECK(axes >= 1 && axes <= kMostAxes, "x has ", axes, " axes");
  for (int64_t i = axes - 1; i >= 0; --i) {
    sizes[i] = i == axes - 1 ? columns : x.size(i);
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t dtype, device, index;
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(axes, sizes, strides, dtype, device, index, &made));
  return Tensor(made);
}

Tensor run_linear(LinearArgs& a, const Tensor& x, const std::optional<Tensor>& bias, int64_t row_bytes) {
  Tensor y = empty_rows(x, a.outputs);
  a.x = x.const_data_ptr();
  a.bias = bias ? bias->const_data_ptr() : nullptr;
  a.y = y.mutable_data_ptr();
  a.rows = a.inputs ? x.numel() / a.inputs : y.numel() / std::max<int64_t>(a.outputs, 1);
  a.type = type_of(x);
  if (a.rows == 0 || a.outputs == 0) return y;
  const LinearKernels& kernel = kernels().linear;
  a.scratch = scratch_of(kernel.scratch_bytes(a));
  kernel.arrange(a);
  over_outputs(a.outputs, row_bytes, [&](int64_t begin, int64_t end) { kernel.rows(a, begin, end); });
  return y;
}

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  LinearArgs a{};
  a.weight = weight.const_data_ptr();
  a.outputs = weight.size(0), a.inputs = weight.size(1);
  return run_linear(a, x, bias, a.inputs * int64_t(weight.element_size()));
}

void take_codes(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero, int64_t bits) {
  a.weight = data.const_data_ptr();
  a.bits = int(bits);
  a.outputs = data.size(0), a.inputs = data.size(1) * 8 / bits;
  a.scale = static_cast<const uint16_t*>(scale.const_data_ptr());
  a.zero = zero ? static_cast<const int8_t*>(zero->const_data_ptr()) : nullptr;
  a.groups = scale.size(1);
}

Tensor quantized_linear(
    Tensor x, Tensor data, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> bias, int64_t bits) {
  LinearArgs a{};
  take_codes(a, data, scale, zero, bits);
  return run_linear(a, x, bias, data.size(1) + a.groups * (zero ? 3 : 2));
}

// The values of a quantized weight, into `to` [outputs, inputs].
void dequantize(Tensor data, Tensor scale, std::optional<Tensor> zero, int64_t bits, Tensor to) {
  LinearArgs a{};
  take_codes(a, data, scale, zero, bits);
  a.type = type_of(to);
  a.y = to.mutable_data_ptr();
  if (a.inputs == 0) return;
  const auto run = kernels().linear.dequantize;
  over_outputs(a.outputs, a.inputs * int64_t(to.element_size()), [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int bits) -> Tensor");
  m.def("dequantize(Tensor data, Tensor scale, Tensor? zero, int bits, Tensor(a!) to) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, CompositeExplicitAutograd, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}

}  // namespace infuse
