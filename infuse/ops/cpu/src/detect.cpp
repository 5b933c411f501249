// Which instruction set runs. Compiled without instruction set flags, since it must run everywhere.
// INFUSE_CPU_ISA=generic|avx2|avx512|avx512_bf16 forces a lower one than the machine has.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

#if defined(__GLIBC__)
// Of our own and hidden, so that the binary needs no glibc 2.32 for it; 0: always count references atomically.
extern "C" char __libc_single_threaded = 0;
#endif

namespace infuse {
namespace {

using Table = const Kernels& (*)();

struct Level {
  const char* name;
  bool there;
  Table table;
};

// From the highest.
std::vector<Level> levels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  return {
      {"avx512_bf16", avx512_bf16, kernels_avx512_bf16},
      {"avx512", avx512, kernels_avx512},
      {"avx2", avx2, kernels_avx2},
      {"generic", true, kernels_generic},
  };
#else
  return {{"generic", true, kernels_generic}};
#endif
}

const Kernels& chosen() {
  const char* forced = std::getenv("INFUSE_CPU_ISA");
  bool allowed = forced == nullptr || *forced == 0;
  for (const Level& level : levels()) {
    allowed = allowed || std::strcmp(forced, level.name) == 0;
    if (allowed && level.there) return level.table();
  }
  return kernels_generic();
}

}  // namespace

bool multiplies_tiles() {
#if defined(__x86_64__)
  static const bool found = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);  // AMX-BF16
  }();
  return found;
#else
  return false;
#endif
}

const Kernels& kernels() {
  static const Kernels& table = chosen();
  return table;
}

const char* level_names() {
  static const std::string names = [] {
    std::string text;
    for (const Level& level : levels()) text += std::string(text.empty() ? "" : "\n") + level.name + (level.there ? "" : " missing");
    return text;
  }();
  return names.c_str();
}

}  // namespace infuse
