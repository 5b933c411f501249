// The element types and the activations that kernels know. bf16 and fp16 travel as uint16_t.
#pragma once

#include <cstdint>

namespace infuse {

enum class Type { f32, bf16, f16 };

enum class Act { silu, gelu, gelu_tanh, quick_gelu, relu, relu2, tanh };

}  // namespace infuse
