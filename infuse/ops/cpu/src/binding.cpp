// The kernels as PyTorch operators, `torch.ops.infuse_cpu.*`, built against PyTorch's stable ABI: one binary for torch
// >= 2.10. ops/cpu/*.py checks shapes and dtypes and declines unsupported ones.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {
namespace {

// Which sources this library was built from: infuse/native/build.py looks for it before the library is loaded.
[[gnu::used]] const char kSources[] = INFUSE_SOURCES;

void run_norm(NormArgs& a, const NormRule& rule, const Array& x, const Array& y) {
  a.x = x.const_data_ptr(), a.y = y.mutable_data_ptr();
  a.columns = x.size(x.dim() - 1);
  a.rows = a.columns ? x.numel() / a.columns : 0;
  a.weight = rule.weight ? rule.weight->const_data_ptr() : nullptr;
  a.bias = rule.bias ? rule.bias->const_data_ptr() : nullptr;
  a.eps = float(rule.eps), a.offset = float(rule.offset), a.centred = rule.centred;
  a.scales = rule.scales;
  a.type = type_of(x);
  const auto run = kernels().norm;
  over_rows(a.rows, a.columns, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

std::vector<int64_t> isa() { return numbers_of(kernels().isa); }
bool has_amx() { return amx_multiplies(); }
// Whether many rows of float32 use our tiles.
bool has_float_tiles() { return tiles_of(kernels().linear.tiles, Type::f32); }
// In the order of `Limits` in infuse/native/__init__.py.
std::vector<int64_t> limits() {
  return {few_plain_rows(), kFewTokens, kFewRows, kFewRowsFloat, kFewRowsInteger, kMostTiled};
}

}  // namespace

void norm(const NormRule& rule, const Array& x, const Array& y) {
  NormArgs a{};
  run_norm(a, rule, x, y);
}

void add_norm(const NormRule& rule, const Array& x, const Array& residual, const Array& sum, const Array& y) {
  NormArgs a{};
  a.residual = residual.const_data_ptr(), a.sum = sum.mutable_data_ptr();
  run_norm(a, rule, x, y);
}

void rounded_norm(const Array& x, const Array& weight, double eps, double offset, bool rounds, const Array& y) {
  const int64_t columns = x.size(x.dim() - 1), rows = columns ? x.numel() / columns : 0, sizes[] = {rows, columns};
  const int64_t last = -1;
  const Type type = type_of(x);
  const auto convert = kernels().router.convert;
  std::vector<float> wide(size_t(rows * columns)), factors(static_cast<size_t>(columns));
  convert(x.const_data_ptr(), type, wide.data(), Type::f32, rows * columns);
  convert(weight.const_data_ptr(), type, factors.data(), Type::f32, columns);
  if (offset != 0) {
    for (float& each : factors) each += float(offset);
  }
  Tensor squares = empty(sizes, 2, aoti_torch_dtype_float32());
  auto* square = static_cast<float*>(squares.mutable_data_ptr());
  for (size_t i = 0; i < wide.size(); ++i) square[i] = wide[i] * wide[i];
  const Tensor sums = torch::stable::sum(squares, torch::headeronly::IntHeaderOnlyArrayRef(&last, 1), true);
  for (int64_t r = 0; r < rows; ++r) {
    const float mean = static_cast<const float*>(sums.const_data_ptr())[r] / float(columns);
    const float scale = 1.0f / std::sqrt(mean + float(eps));
    for (int64_t c = 0; c < columns; ++c) wide[size_t(r * columns + c)] *= scale;
  }
  if (rounds && type != Type::f32) {
    convert(wide.data(), Type::f32, y.mutable_data_ptr(), type, rows * columns);
    convert(y.const_data_ptr(), type, wide.data(), Type::f32, rows * columns);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) wide[size_t(r * columns + c)] *= factors[size_t(c)];
  }
  convert(wide.data(), Type::f32, y.mutable_data_ptr(), type, rows * columns);
}

namespace {

Tensor norm_op(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, double offset,
               bool centred) {
  Tensor y = empty_as(x);
  norm({weight, bias, eps, offset, centred}, x, Array::written(y));
  return y;
}

std::tuple<Tensor, Tensor> add_norm_op(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                       std::optional<Tensor> bias, double eps, double offset, bool centred) {
  Tensor sum = empty_as(x), y = empty_as(x);
  add_norm({weight, bias, eps, offset, centred}, x, residual, Array::written(sum), Array::written(y));
  return {sum, y};
}

Tensor rounded_norm_op(Tensor x, Tensor weight, double eps, double offset, bool rounds) {
  Tensor y = empty_as(x);
  rounded_norm(x, weight, eps, offset, rounds, Array::written(y));
  return y;
}

}  // namespace

INFUSE_OPERATORS(CompositeExplicitAutograd,
    {"isa() -> int[]", TORCH_BOX(&isa)},
    {"has_amx() -> bool", TORCH_BOX(&has_amx)},
    {"has_float_tiles() -> bool", TORCH_BOX(&has_float_tiles)},
    {"limits() -> int[]", TORCH_BOX(&limits)})

// Only for CPU tensors: the pointers of other devices' tensors and of fake tensors (tracing) cannot be read here.
INFUSE_OPERATORS(CPU,
    {"norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset, bool centred) -> Tensor", TORCH_BOX(&norm_op)},
    {"add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset, bool centred) -> "
     "(Tensor, Tensor)", TORCH_BOX(&add_norm_op)},
    {"rounded_norm(Tensor x, Tensor weight, float eps, float offset, bool rounds) -> Tensor", TORCH_BOX(&rounded_norm_op)})

}  // namespace infuse
