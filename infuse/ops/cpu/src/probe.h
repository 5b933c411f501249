// What bounds every kernel: a pure memory read, and products of registers alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace infuse {
namespace INFUSE_ISA {

// The exclusive or of all 64-bit words of `bytes` bytes, a multiple of 8. With four accumulators no load waits for the
// previous operation. Each has 32 bytes on every instruction set: with 64 bytes, an AMD EPYC (Zen 4) reads 6 % less.
inline uint64_t read_bytes(const void* data, int64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(32)));
  typedef uint64_t UnalignedLine __attribute__((vector_size(32), aligned(8), may_alias));
  constexpr int kLines = 4, kLineBytes = 32;
  const char* p = static_cast<const char*>(data);
  Line sums[kLines] = {};
  int64_t i = 0;
  for (; i + kLines * kLineBytes <= bytes; i += kLines * kLineBytes) {
    for (int k = 0; k < kLines; ++k) sums[k] ^= *reinterpret_cast<const UnalignedLine*>(p + i + k * kLineBytes);
  }
  for (int k = 1; k < kLines; ++k) sums[0] ^= sums[k];
  uint64_t result = 0;
  for (int k = 0; k < kLineBytes / 8; ++k) result ^= sums[0][k];
  for (; i < bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, p + i, 8);
    result ^= word;
  }
  return result;
}

#if defined(__AVX2__)

// Runs multiply(sum, x, y) `rounds` times on each of 14 sums: with x and y all registers of AVX2, and more than an
// instruction's latency times those that start in a cycle. x and y are zero; NaN or tiny values may be slow.
template <class V, class F>
inline double repeat(int64_t rounds, double operations, const F& multiply) {
  constexpr int kSums = 14;
  V sums[kSums] = {};
  const V x = {}, y = {};
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 14
    for (int k = 0; k < kSums; ++k) multiply(sums[k], x, y);
  }
  return double(rounds) * kSums * operations;
}

#endif

// Multiplies in registers and returns the number of operations, a product and a sum being two; 0 without `which`.
inline double multiply_registers(Instruction which, int64_t rounds) {
  switch (which) {
    case Instruction::float_fma:
#if defined(__AVX512F__)
      return repeat<__m512>(rounds, 2 * 16, [](__m512& sum, const __m512& x, const __m512& y) {
        asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
      });
#elif defined(__AVX2__)
      return repeat<__m256>(rounds, 2 * 8, [](__m256& sum, const __m256& x, const __m256& y) {
        asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
      });
#else
      return 0;
#endif
    case Instruction::bf16_dot:
#if defined(__AVX512BF16__)
      return repeat<__m512>(rounds, 2 * 32, [](__m512& sum, const __m512& x, const __m512& y) {
        asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
      });
#else
      return 0;
#endif
    case Instruction::byte_dot:
#if defined(__AVX512VNNI__)
      return repeat<__m512i>(rounds, 2 * 64, [](__m512i& sum, const __m512i& x, const __m512i& y) {
        asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
      });
#else
      return 0;
#endif
    case Instruction::amx_bf16: {
#if defined(__AMX_BF16__)
      const AmxRegisters configured;
      amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
      amx_zero<4>(), amx_zero<5>(), amx_zero<6>(), amx_zero<7>();
      for (int64_t i = 0; i < rounds; ++i) {
        amx_add_products<0, 4, 6>();
        amx_add_products<1, 4, 7>();
        amx_add_products<2, 5, 6>();
        amx_add_products<3, 5, 7>();
      }
      return double(rounds) * 4 * 2 * kAmxRows * 16 * 2 * kAmxPairs;
#else
      return 0;
#endif
    }
  }
  return 0;
}

}  // namespace INFUSE_ISA
}  // namespace infuse
