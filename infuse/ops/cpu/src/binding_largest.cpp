// The index of each row's largest value as a PyTorch operator: torch.argmax compares one value at a time, in float32.
#include <limits>

#include "binding_ops.h"

namespace infuse {
namespace {

constexpr int64_t kChunk = 2048, kLanes = 16;  // values that are converted, and compared, at once
constexpr int kFours = kLanes / 4;
// In the 16 bytes of a vector on every machine.
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Masks __attribute__((vector_size(16)));

// Values [first, first + kChunk) of a row as float; beyond its end, -infinity.
void widen(const char* row, Type type, int64_t first, int64_t count, float* to) {
  const int64_t n = std::min(kChunk, count - first);
  kernels().router.convert(row + first * (type == Type::f32 ? 4 : 2), type, to, Type::f32, n);
  std::fill(to + n, to + kChunk, -std::numeric_limits<float>::infinity());
}

int64_t largest_of(const char* row, Type type, int64_t count) {
  alignas(64) float values[kChunk], most[kLanes];
  float largest = 0;
  int64_t best = -1;  // the chunk with the largest value
  for (int64_t first = 0; first < count; first += kChunk) {
    widen(row, type, first, count, values);
    Four most_of[kFours], v[kFours];
    Masks numbers = Masks{} - 1;
    std::memcpy(most_of, values, sizeof most_of);
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      std::memcpy(v, values + i, sizeof v);
      for (int j = 0; j < kFours; ++j) {
        const Masks larger = v[j] > most_of[j];
        most_of[j] = Four((larger & Masks(v[j])) | (~larger & Masks(most_of[j])));
        numbers &= v[j] == v[j];
      }
    }
    if (!(numbers[0] & numbers[1] & numbers[2] & numbers[3])) {
      return first + (std::find_if(values, values + kChunk, [](float each) { return each != each; }) - values);
    }
    std::memcpy(most, most_of, sizeof most);
    const float of_chunk = *std::max_element(most, most + kLanes);
    if (best < 0 || of_chunk > largest) largest = of_chunk, best = first;
  }
  widen(row, type, best, count, values);
  return best + (std::find(values, values + kChunk, largest) - values);
}

}  // namespace

void largest(const Array& x, int64_t* to) {
  const int64_t columns = x.size(x.dim() - 1), rows = columns ? x.numel() / columns : 0;
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  const Type type = type_of(x);
  over_rows(rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      to[r] = largest_of(from + r * columns * int64_t(x.element_size()), type, columns);
    }
  });
}

namespace {

Tensor largest_op(Tensor x) {
  const int64_t columns = x.size(x.dim() - 1), rows = columns ? x.numel() / columns : 0;
  STD_TORCH_CHECK(columns, "there is no largest of no values");
  Tensor index = empty(&rows, 1, aoti_torch_dtype_int64());
  largest(x, static_cast<int64_t*>(index.mutable_data_ptr()));
  return index;
}

}  // namespace

INFUSE_OPERATORS(CPU, {"largest(Tensor x) -> Tensor", TORCH_BOX(&largest_op)})

}  // namespace infuse
