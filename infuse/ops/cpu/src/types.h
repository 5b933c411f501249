// Element types, codes of quantized weights, and activations. bf16 and fp16 are passed as uint16_t.
#pragma once

#include <cstdint>

namespace infuse {

enum class Type { f32, bf16, f16 };

// As infuse/quant defines them, in the order of CODES in infuse/native/__init__.py.
enum class Code { int8, int4, fp8, fp6, mxfp4 };

constexpr bool is_nibble(Code code) { return code == Code::int4 || code == Code::mxfp4; }
constexpr int bits_of(Code code) { return is_nibble(code) ? 4 : code == Code::fp6 ? 6 : 8; }

// Formats of these codes may have scales in f16.
constexpr bool has_half_scales(Code code) { return code == Code::int8 || code == Code::int4; }

enum class Act { silu, gelu, gelu_tanh, quick_gelu, relu, relu2, tanh };

}  // namespace infuse
