// Chooses the instruction set. Compiled without instruction set flags, since it must run on every machine.
// INFUSE_CPU_ISA=generic|avx2|avx512|avx512_bf16|avx512_amx selects a lower one than the machine's. A trailing
// exclamation mark (avx512_amx!) forces it even if it was not detected, for emulators of missing instructions.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <string>
#include <vector>

#include "kernels.h"

#if defined(__GLIBC__)
// Our own hidden copy, so that the binary does not need glibc 2.32; 0: always count references atomically.
extern "C" char __libc_single_threaded = 0;
#endif

namespace infuse {
namespace {

enum class Found { yes, missing, refused, unbuilt };

struct Level {
  const char* name;
  Found (*found)();
  const Kernels& (*table)();
};

#if defined(__x86_64__)

bool avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool avx512() {
  return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
bool intel() {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
}
bool amd() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}
bool avx512_bf16() { return avx512() && __builtin_cpu_supports("avx512bf16"); }

[[gnu::target("xsave")]] uint64_t saved_states() { return _xgetbv(0); }

// Whether the processor has AMX for bf16, the system saves its registers on thread switches, and it permits this
// process to use them: on Linux a process must ask once.
Found amx() {
  constexpr int kConfiguration = 17, kData = 18;  // XSAVE state numbers, in XCR0 and for arch_prctl
  constexpr long kAskPermission = 0x1023;         // ARCH_REQ_XCOMP_PERM
  static const Found found = [] {
    unsigned a, b, c, d;
    if (!avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) ||
        !(d >> 22 & 1)) return Found::missing;
    if (!(saved_states() >> kConfiguration & 1) || !(saved_states() >> kData & 1)) return Found::refused;
#if defined(__linux__)
    return syscall(SYS_arch_prctl, kAskPermission, kData) == 0 ? Found::yes : Found::refused;
#else
    return Found::refused;
#endif
  }();
  return found;
}

Found if_there(bool there) { return there ? Found::yes : Found::missing; }

#endif

// Highest first.
constexpr Level kLevels[] = {
#if defined(__x86_64__)
#if defined(INFUSE_WITH_AMX)
    {"avx512_amx", amx, kernels_avx512_amx},
#else  // the compiler did not know it
    {"avx512_amx", [] { return Found::unbuilt; }, nullptr},
#endif
    {"avx512_bf16", [] { return if_there(avx512_bf16()); }, kernels_avx512_bf16},
    {"avx512", [] { return if_there(avx512()); }, kernels_avx512},
    {"avx2", [] { return if_there(avx2()); }, kernels_avx2},
#endif
    {"generic", [] { return Found::yes; }, kernels_generic},
};

std::string forced_level() {
  const char* text = std::getenv("INFUSE_CPU_ISA");
  return text ? text : "";
}

// Does not ask the system for levels above the forced one.
const Kernels& chosen() {
  const std::string forced = forced_level();
  bool allowed = forced.empty();
  for (const Level& level : kLevels) {
    const bool anyhow = forced == std::string(level.name) + "!";
    allowed = allowed || anyhow || forced == level.name;
    // found() is always called, since it also asks for permission
    if (allowed && (level.found() == Found::yes || (anyhow && level.table))) return level.table();
  }
  return kernels_generic();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& table = chosen();
  return table;
}

bool left_to_pytorch(Type type) {
#if defined(__x86_64__)
  static const bool amx_left = kernels().isa != std::string("avx512_amx") && amx() == Found::yes;
  static const bool mkl_left = forced_level().find('!') == std::string::npos && intel();
  return type == Type::f32 ? mkl_left : amx_left;
#else
  return false;
#endif
}

bool amx_multiplies() { return left_to_pytorch(Type::bf16) || kernels().isa == std::string("avx512_amx"); }

bool fetches_into_outer() {
#if defined(__x86_64__)
  static const bool zen4 = [] {
    unsigned a, b, c, d;
    if (!amd() || !avx512() || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    return (a >> 8 & 0xf) + (a >> 20 & 0xff) == 0x19;  // the family; Zen 3's has no AVX-512
  }();
  return zen4;
#else
  return false;
#endif
}

bool reads_past_caches() {
#if defined(__x86_64__)
  static const bool found = amd();
  return found;
#else
  return false;
#endif
}

const char* level_names() {
  static const std::string names = [] {
    std::string text;
    for (const Level& level : kLevels) {
      const Found found = level.found();
      text += std::string(text.empty() ? "" : "\n") + level.name;
      text += found == Found::yes ? "" : found == Found::missing ? " missing"
              : found == Found::refused ? " refused" : " unbuilt";
    }
    return text;
  }();
  return names.c_str();
}

}  // namespace infuse
