// The detection of ops/cpu/src/detect.cpp on processors and systems that are made up. Built and run by tests/ops/cpu/test_amx.py: prints the level
// that runs, whether products are left to PyTorch, how often the system was asked for AMX, and the names of all levels.
//
//   program AMX_BITS SAVED_STATES PERMITTED      (of CPUID leaf 7; of XCR0; 0 or 1)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

unsigned amx_bits;
unsigned long long saved;
bool permitted;
int asked = 0;

int made_up_cpuid(unsigned leaf, unsigned subleaf, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
  *a = *b = *c = *d = 0;
  if (leaf == 7 && subleaf == 0) *d = amx_bits;
  return 1;
}

long made_up_syscall(long number, long command, long state) {
  if (number != SYS_arch_prctl || command != 0x1023 || state != 18) std::abort();
  ++asked;
  return permitted ? 0 : -1;
}

}  // namespace

#undef _xgetbv
#define _xgetbv(n) saved
#define __get_cpuid_count made_up_cpuid
#define syscall made_up_syscall
#define __builtin_cpu_supports(feature) true
#include "../../../infuse/ops/cpu/src/detect.cpp"

namespace infuse {

#define TABLE(level)                   \
  const Kernels& kernels_##level() {   \
    static const Kernels table{#level}; \
    return table;                      \
  }
TABLE(generic)
TABLE(avx2)
TABLE(avx512)
TABLE(avx512_bf16)
TABLE(avx512_amx)

}  // namespace infuse

int main(int count, char** arguments) {
  if (count != 4) return 2;
  amx_bits = unsigned(std::strtoul(arguments[1], nullptr, 0));
  saved = std::strtoull(arguments[2], nullptr, 0);
  permitted = std::atoi(arguments[3]) != 0;
  const char* runs = infuse::kernels().isa;
  infuse::kernels();
  const int asked_by_kernels = asked;
  const bool left = infuse::left_to_pytorch(infuse::Type::bf16);
  infuse::left_to_pytorch(infuse::Type::bf16);
  std::printf("%s %d %d %d\n%s\n", runs, left, asked_by_kernels, asked, infuse::level_names());
}
