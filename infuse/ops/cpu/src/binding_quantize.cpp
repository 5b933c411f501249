// The search for each group's grid as a PyTorch operator. ops/cpu/quantize.py checks shapes, dtypes and layouts.
#include <atomic>
#include <vector>

#include "binding.h"

namespace infuse {
namespace {

// Minimum number of values per thread: a hundred microseconds of work.
constexpr int64_t kGrainElements = 1 << 16;

Grids grids_of(Code code, bool zeros) {
  switch (code) {
    case Code::int8: return zeros ? Grids::int8_asymmetric : Grids::int8_symmetric;
    case Code::int4: return zeros ? Grids::int4_asymmetric : Grids::int4_symmetric;
    case Code::fp8: return Grids::fp8;
    default: return Grids::fp6;
  }
}

// Fills data, scale and, if there is one, zero. Returns false, with undefined contents, if a value cannot be stored.
bool quantize(Tensor weight, Tensor candidates, double largest_weight, int64_t code, std::vector<Tensor> buffers) {
  const Tensor &data = buffers[0], &scale = buffers[1];
  const bool zero = buffers.size() > 2;
  QuantizeArgs a{};
  a.weight = weight.const_data_ptr();
  a.data = data.mutable_data_ptr();
  a.scale = static_cast<uint16_t*>(scale.mutable_data_ptr());
  a.zero = zero ? static_cast<int8_t*>(buffers[2].mutable_data_ptr()) : nullptr;
  a.candidates = static_cast<const float*>(candidates.const_data_ptr());
  a.count = candidates.size(0);
  a.largest_weight = float(largest_weight);
  a.grids = grids_of(Code(code), zero);
  a.type = type_of(weight);
  const int64_t groups = scale.numel();
  a.length = groups ? weight.numel() / groups : 0;
  if (a.length == 0) return true;
  const auto run = kernels().quantize;
  std::atomic<bool> good{true};
  torch::stable::parallel_for(0, groups, kGrainElements / a.length + 1, [&](int64_t begin, int64_t end) {
    if (!run(a, begin, end)) good = false;
  });
  return good;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"quantize(Tensor weight, Tensor candidates, float largest_weight, int code, Tensor(a!)[] buffers) -> bool",
     TORCH_BOX(&quantize)})

}  // namespace infuse
