// Matrix products with plain weights as PyTorch operators: few rows stream the weight, many rows use tiles of it.
// ops/cpu/linear.py checks shapes, dtypes and layouts.
#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {

void stream_linear(LinearArgs& a, const Array& weight) {
  a.weight = weight.const_data_ptr();
  a.outputs = weight.size(0), a.inputs = weight.size(1);
  if (a.rows == 0 || a.outputs == 0) return;
  const LinearKernels& kernel = kernels().linear;
  a.scratch = scratch_of<Scratch::x>(kernel.scratch_bytes(a));
  kernel.arrange(a);
  const int64_t row_bytes = a.inputs * int64_t(weight.element_size());
  const int64_t unit = a.rows == 1 ? 8 : 24;  // 24: two panels of plain_linear.h
  over_outputs(a.outputs, row_bytes, unit, [&](int64_t begin, int64_t end) { kernel.rows(a, begin, end); });
}

void tile_linear(LinearArgs& a, const Array& weight, int64_t threads) {
  a.weight = weight.const_data_ptr();
  a.outputs = weight.size(0), a.inputs = weight.size(1);
  a.row_bytes = a.inputs * int64_t(weight.element_size());
  multiply_by_tiles(a, a.gated ? a.outputs / 2 : a.outputs, *kernels().linear.tiles.of(a.type), threads);
}

namespace {

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  LinearArgs a{};
  a.inputs = weight.size(1);
  Tensor y = begin_product(a, x, bias, weight.size(0));
  stream_linear(a, weight);
  return y;
}

// Many rows by tiles: act(x @ weight.T + bias), or act(first half) * second half if gated. None if there are no
// tiles for this type or PyTorch is faster.
std::optional<Tensor> tiled_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t act, bool gated) {
  if (!tiles_of(kernels().linear.tiles, type_of(x))) return std::nullopt;
  LinearArgs a{};
  a.inputs = weight.size(1);
  a.activates = act >= 0, a.gated = gated;
  if (a.activates) a.act = Act(act);
  const int64_t columns = gated ? weight.size(0) / 2 : weight.size(0);
  Tensor y = begin_product(a, x, bias, columns);
  if (a.rows == 0 || columns == 0) return y;
  tile_linear(a, weight, thread_count());
  return y;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", TORCH_BOX(&linear)},
    {"tiled_linear(Tensor x, Tensor weight, Tensor? bias, int act, bool gated) -> Tensor?", TORCH_BOX(&tiled_linear)})

}  // namespace infuse
