// Element types, codes of quantized weights, and activations. bf16 and fp16 are passed as uint16_t.
#pragma once

#include <cstdint>

namespace infuse {

enum class Type { f32, bf16, f16 };

// How a code becomes a number. nibble and real4 have tables of 16 values: of numbers that bf16 holds exactly, and of any.
// two, three, five and six are integers less an offset. formats.h says which formats of infuse/quant have them.
enum class Code { int8, int4, fp8, fp6, nibble, real4, two, three, five, six };

constexpr bool is_nibble(Code code) { return code == Code::int4 || code == Code::nibble || code == Code::real4; }
constexpr int bits_of(Code code) {
  switch (code) {
    case Code::two: return 2;
    case Code::three: return 3;
    case Code::five: return 5;
    case Code::fp6: case Code::six: return 6;
    default: return is_nibble(code) ? 4 : 8;
  }
}

// Where the scales of groups are: numbers of these types, or in blocks (formats.h).
enum class Scaling { bf16, f16, f32, blocks };

// The formats of these codes may have scales in f16.
constexpr bool has_half_scales(Code code) {
  return code == Code::int8 || code == Code::int4 || code == Code::two || code == Code::three;
}
// Those of these may have an offset for each group.
constexpr bool has_offsets(Code code) { return has_half_scales(code) && code != Code::int8; }
// Those of these may have scales in f32.
constexpr bool has_wide_scales(Code code) { return has_half_scales(code) || code == Code::fp8 || code == Code::real4; }

enum class Act { silu, gelu, gelu_tanh, quick_gelu, relu, relu2, tanh };

}  // namespace infuse
