// The index of each row's largest value as a PyTorch operator: torch.argmax compares one value at a time, in float32.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <limits>

#include "binding.h"

namespace infuse {
namespace {

constexpr int64_t kChunk = 2048;  // values that are compared at once
typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t Masks __attribute__((vector_size(32)));
constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);

// Calls run(values, first, count) for chunks of a row as float, filled up with -infinity, until it returns true.
template <class F>
void over_chunks(const char* row, Type type, int64_t count, const F& run) {
  alignas(64) float values[kChunk];
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t n = std::min(kChunk, count - first);
    std::fill(values + n, values + kChunk, -std::numeric_limits<float>::infinity());
    kernels().router.convert(row + first * (type == Type::f32 ? 4 : 2), type, values, Type::f32, n);
    if (run(values, first, n)) return;
  }
}

int64_t largest_of(const char* row, Type type, int64_t count) {
  Lanes most = Lanes{} - std::numeric_limits<float>::infinity();
  Masks numbers = Masks{} - 1;
  over_chunks(row, type, count, [&](const float* values, int64_t, int64_t) {
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      Lanes v;
      std::memcpy(&v, values + i, sizeof v);
      numbers &= v == v;
      most = v > most ? v : most;
    }
    return false;
  });
  float largest = most[0];
  bool all_numbers = true;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    largest = std::max(largest, most[lane]);
    all_numbers = all_numbers && numbers[lane];
  }
  int64_t found = 0;
  over_chunks(row, type, count, [&](const float* values, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (all_numbers ? values[i] == largest : values[i] != values[i]) {
        found = first + i;
        return true;
      }
    }
    return false;
  });
  return found;
}

// Of x [..., V], contiguous: the first of equals, and the first NaN if there is one, as torch.argmax.
Tensor largest(Tensor x) {
  const int64_t columns = x.size(x.dim() - 1), rows = columns ? x.numel() / columns : 0;
  STD_TORCH_CHECK(columns, "there is no largest of no values");
  Tensor index = empty(&rows, 1, aoti_torch_dtype_int64());
  auto* to = static_cast<int64_t*>(index.mutable_data_ptr());
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  const Type type = type_of(x);
  over_rows(rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      to[r] = largest_of(from + r * columns * (type == Type::f32 ? 4 : 2), type, columns);
    }
  });
  return index;
}

}  // namespace

INFUSE_OPERATORS(CPU, {"largest(Tensor x) -> Tensor", TORCH_BOX(&largest)})

}  // namespace infuse
