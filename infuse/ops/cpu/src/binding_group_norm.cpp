// GroupNorm as a PyTorch operator. It returns None for unsupported arguments, and the caller uses another body.
#include <optional>
#include <vector>

#include "binding.h"

namespace infuse {
namespace {

using Maybe = std::optional<Tensor>;

// Rows of one chunk at least, and chunks of one sample at most: the sums of all chunks are a few percent of x.
constexpr int64_t kLeastRows = 32, kMostChunks = 64;

// Whether x [B, C, ...] lies in memory as [B, ..., C] without gaps.
bool is_channels_last(const Tensor& x) {
  int64_t step = x.size(1);
  if (x.stride(1) != 1) return false;
  for (int64_t axis = x.dim() - 1; axis > 1; --axis) {
    if (x.size(axis) != 1 && x.stride(axis) != step) return false;
    step *= x.size(axis);
  }
  return x.size(0) == 1 || x.stride(0) == step;
}

bool per_channel(const Maybe& t, const Tensor& x) {
  return !t || (t->scalar_type() == x.scalar_type() && t->dim() == 1 && t->size(0) == x.size(1) && t->is_contiguous());
}

Tensor empty_with_strides_of(const Tensor& x) {
  int64_t sizes[kMostAxes], strides[kMostAxes];
  for (int64_t i = 0; i < x.dim(); ++i) sizes[i] = x.size(i), strides[i] = x.stride(i);
  int32_t dtype;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(x.dim(), sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// `out` may be x; it has the strides of x.
Maybe group_norm(Tensor x, Maybe weight, Maybe bias, Maybe added, int64_t groups, double eps, bool silu, Maybe out) {
  const ScalarType type = x.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Half) return std::nullopt;
  if (x.dim() < 3 || x.dim() > kMostAxes || !per_channel(weight, x) || !per_channel(bias, x)) return std::nullopt;
  if (groups < 1 || x.size(1) % groups || x.numel() == 0) return std::nullopt;
  GroupNormArgs a{};
  a.channels_last = is_channels_last(x);
  if (!a.channels_last && !x.is_contiguous()) return std::nullopt;
  if (added && (added->scalar_type() != type || added->dim() != 2 || added->size(0) != x.size(0) ||
                added->size(1) != x.size(1) || (added->size(1) > 1 && added->stride(1) != 1))) {
    return std::nullopt;
  }
  Tensor y = out ? *out : empty_with_strides_of(x);
  a.x = x.const_data_ptr(), a.y = y.mutable_data_ptr(), a.type = type_of(x);
  a.weight = weight ? weight->const_data_ptr() : nullptr, a.bias = bias ? bias->const_data_ptr() : nullptr;
  if (added) a.added = added->const_data_ptr(), a.added_step = added->stride(0);
  a.batch = x.size(0), a.channels = x.size(1), a.positions = x.numel() / (a.batch * a.channels);
  a.groups = groups, a.eps = eps, a.silu = silu;
  a.chunks = a.channels_last ? std::clamp<int64_t>(a.positions / kLeastRows, 1, kMostChunks) : 1;
  std::vector<float> scratch(size_t((a.chunks * 2 + kCoefficients) * a.batch * a.channels));
  a.coefficients = scratch.data(), a.sums = scratch.data() + kCoefficients * a.batch * a.channels;
  const auto& run = kernels().group_norm;
  const int64_t measured = a.channels_last ? a.chunks : a.channels, applied = x.numel() / (a.channels_last ? a.channels
      : a.positions);
  over_rows(a.batch * measured, a.channels * a.positions / measured,
            [&](int64_t begin, int64_t end) { run.measure(a, begin, end); });
  over_rows(a.batch, a.channels * (a.chunks + 4), [&](int64_t begin, int64_t end) { run.solve(a, begin, end); });
  over_rows(applied, x.numel() / applied, [&](int64_t begin, int64_t end) { run.apply(a, begin, end); });
  return y;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"group_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? added, int groups, float eps, bool silu, Tensor(a!)? "
     "out) -> Tensor?", TORCH_BOX(&group_norm)})

}  // namespace infuse
