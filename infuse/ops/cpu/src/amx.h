// AMX: eight registers of 16 rows of 64 bytes, and products of bf16 pairs in them. Intel calls the registers tiles;
// here a tile is a block of weights (tile.h). Each thread configures its registers before use and releases them
// afterwards, since other libraries (oneDNN in PyTorch) use them too.
//
// This code has run only on an emulator of these instructions; its speed on a processor with AMX has not been measured.
#pragma once

#if defined(__AMX_BF16__)

#include <cstdint>

namespace infuse {
namespace INFUSE_ISA {

constexpr int kAmxRows = 16;   // of a register
constexpr int kAmxPairs = 16;  // of bf16, in a row: one step of a product's depth

struct alignas(64) AmxConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(AmxConfiguration) == 64);

// Assembly instead of intrinsics: those of g++ 12 do not declare that loads read memory or that a configuration reads
// all 64 bytes, so the compiler may drop the stores before them.
class AmxRegisters {
 public:
  AmxRegisters() {
    static constexpr AmxConfiguration whole =
        {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" : : "m"(whole) : "memory");
  }
  ~AmxRegisters() { asm volatile("tilerelease" : : : "memory"); }
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
};

template <int To>
[[gnu::always_inline]] inline void amx_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(To));
}
template <int To>
[[gnu::always_inline]] inline void amx_load(const uint32_t* from, int64_t row_words) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(To), "r"(from), "r"(row_words * 4) : "memory");
}
template <int From>
[[gnu::always_inline]] inline void amx_store(float* to, int64_t row_floats) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(From), "r"(to), "r"(row_floats * 4) : "memory");
}
// To[r][c] += sum over p of the products of the pairs X[r][p] and Y[p][c], in float.
template <int To, int X, int Y>
[[gnu::always_inline]] inline void amx_add_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(To), "i"(X), "i"(Y));
}

// The left operand of a product: blocks of 16 rows, steps of 16 pairs. Distances are in words of one pair.
struct AmxRows {
  const uint32_t* at;
  int64_t row, step, block;  // distance to the next
};

// sums[16 * Blocks][32] = x y over `steps` steps of the depth; y is [pairs][32] in rows of y_row words. With four sums
// and four operands, each loaded operand is used twice.
template <int Blocks>
inline void amx_multiply(const AmxRows& x, const uint32_t* y, int64_t y_row, int64_t steps, float* sums,
                         int64_t sum_row) {
  amx_zero<0>();
  amx_zero<1>();
  if constexpr (Blocks == 2) amx_zero<2>(), amx_zero<3>();
  const uint32_t* from = x.at;
  for (int64_t i = 0; i < steps; ++i, from += x.step, y += kAmxPairs * y_row) {
    amx_load<6>(y, y_row);
    amx_load<4>(from, x.row);
    amx_add_products<0, 4, 6>();
    amx_load<7>(y + 16, y_row);
    amx_add_products<1, 4, 7>();
    if constexpr (Blocks == 2) {
      amx_load<5>(from + x.block, x.row);
      amx_add_products<2, 5, 6>();
      amx_add_products<3, 5, 7>();
    }
  }
  amx_store<0>(sums, sum_row);
  amx_store<1>(sums + 16, sum_row);
  if constexpr (Blocks == 2) {
    amx_store<2>(sums + kAmxRows * sum_row, sum_row);
    amx_store<3>(sums + kAmxRows * sum_row + 16, sum_row);
  }
}

// The same for up to 32 rows.
inline void amx_multiply(int64_t rows, const AmxRows& x, const uint32_t* y, int64_t y_row, int64_t steps, float* sums,
                         int64_t sum_row) {
  rows > kAmxRows ? amx_multiply<2>(x, y, y_row, steps, sums, sum_row)
      : amx_multiply<1>(x, y, y_row, steps, sums, sum_row);
}

}  // namespace INFUSE_ISA
}  // namespace infuse

#endif
