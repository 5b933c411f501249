// Matrix products with few rows over plain weights, as a PyTorch operator. Shapes, dtypes and layouts are checked by ops/cpu/linear.py.
#include "binding_linear.h"

namespace infuse {
namespace {

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  LinearArgs a{};
  a.weight = weight.const_data_ptr();
  a.outputs = weight.size(0), a.inputs = weight.size(1);
  Tensor y = begin_product(a, x, bias);
  if (a.rows == 0 || a.outputs == 0) return y;
  const LinearKernels& kernel = kernels().linear;
  a.scratch = scratch_of<Scratch::x>(kernel.scratch_bytes(a));
  kernel.arrange(a);
  const int64_t row_bytes = a.inputs * int64_t(weight.element_size());
  over_outputs(a.outputs, row_bytes, 8, [&](int64_t begin, int64_t end) { kernel.rows(a, begin, end); });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) { m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, CompositeExplicitAutograd, m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace infuse
