// PyTorch operators that describe the binary, and the memory read and products that probes time.
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "binding.h"

namespace infuse {
namespace {

// Long enough for one sequential stream at full speed (with 256 KiB it is 7 % slower), short enough that a thread that
// the system suspends does not delay the others.
constexpr int64_t kPieceBytes = 4 << 20;

// The exclusive or of the 64-bit words of x, read by all of PyTorch's threads. x must be contiguous, and its bytes a
// multiple of 8.
int64_t read_bytes(Tensor x) {
  const int64_t bytes = x.numel() * int64_t(x.element_size());
  STD_TORCH_CHECK(x.is_contiguous() && bytes % 8 == 0,
                  "read_bytes takes a contiguous tensor of a multiple of 8 bytes, not of ", bytes);
  const char* data = static_cast<const char*>(x.const_data_ptr());
  const auto read = kernels().read_bytes;
  const int64_t threads = torch::stable::get_num_threads();
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> result{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t at; (at = next.fetch_add(kPieceBytes, std::memory_order_relaxed)) < bytes;) {
        sum ^= read(data + at, std::min(kPieceBytes, bytes - at));
      }
    }
    result.fetch_xor(sum, std::memory_order_relaxed);
  });
  return int64_t(result.load());
}

// Multiplies in the registers of all of PyTorch's threads, and returns how many operations that are.
double multiply_registers(int64_t instruction, int64_t rounds) {
  const auto multiply = kernels().multiply_registers;
  std::atomic<int64_t> operations{0};
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) operations += int64_t(multiply(Instruction(instruction), rounds));
  });
  return double(operations.load());
}

#if defined(__clang__)
constexpr char kCompiler[] = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr char kCompiler[] = "g++ " __VERSION__;
#else
constexpr char kCompiler[] = "an unknown compiler";
#endif

std::vector<int64_t> levels() { return numbers_of(level_names()); }
std::vector<int64_t> compiler() { return numbers_of(kCompiler); }
std::vector<int64_t> torch_version() { return numbers_of(TORCH_VERSION); }

}  // namespace

INFUSE_OPERATORS(CompositeExplicitAutograd,
    {"read_bytes(Tensor x) -> int", TORCH_BOX(&read_bytes)},
    {"multiply_registers(int instruction, int rounds) -> float", TORCH_BOX(&multiply_registers)},
    {"levels() -> int[]", TORCH_BOX(&levels)},
    {"compiler() -> int[]", TORCH_BOX(&compiler)},
    {"torch_version() -> int[]", TORCH_BOX(&torch_version)})

}  // namespace infuse
