// Reorders the rows of a cache where they are stored: a beam takes the tokens of another one.
#include <cstring>

#include "binding_ops.h"

namespace infuse {
namespace {

// Row b of each storage [B, K, S, D] becomes row sources[b], of the first `length` tokens. Rows that stay are not
// touched. Heads are independent, so that each needs memory for its own rows alone.
void reorder_op(std::vector<Tensor> storages, std::vector<int64_t> sources, int64_t length) {
  struct Head {
    char* first;  // of row 0
    size_t row_bytes, bytes;
  };
  const int64_t rows = int64_t(sources.size());
  std::vector<Head> heads;
  for (const Tensor& tensor : storages) {
    const Array a = Array::written(tensor);
    const bool fits = a.dim() == 4 && a.size(0) == rows && a.size(2) >= length && length >= 0 && a.is_contiguous();
    STD_TORCH_CHECK(fits, "a storage has no ", rows, " rows of ", length, " tokens");
    const size_t element = a.element_size();
    for (int64_t k = 0; k < a.size(1); ++k) {
      char* first = static_cast<char*>(a.mutable_data_ptr()) + size_t(k * a.stride(1)) * element;
      heads.push_back({first, size_t(a.stride(0)) * element, size_t(length * a.size(3)) * element});
    }
  }
  std::vector<int64_t> moved;
  for (int64_t b = 0; b < rows; ++b) {
    STD_TORCH_CHECK(sources[size_t(b)] >= 0 && sources[size_t(b)] < rows, "there is no row ", sources[size_t(b)]);
    if (sources[size_t(b)] != b) moved.push_back(b);
  }
  if (moved.empty()) return;
  parallel_for(0, int64_t(heads.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<char> held;
    for (int64_t i = begin; i < end; ++i) {
      const Head& head = heads[size_t(i)];
      held.resize(head.bytes * moved.size());
      char* to = held.data();
      for (int64_t b : moved) {
        std::memcpy(to, head.first + size_t(sources[size_t(b)]) * head.row_bytes, head.bytes);
        to += head.bytes;
      }
      const char* from = held.data();
      for (int64_t b : moved) {
        std::memcpy(head.first + size_t(b) * head.row_bytes, from, head.bytes);
        from += head.bytes;
      }
    }
  });
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"reorder(Tensor(a!)[] storages, int[] sources, int length) -> ()", TORCH_BOX(&reorder_op)})

}  // namespace infuse
