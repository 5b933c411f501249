// The element types that kernels know. bf16 and fp16 travel as uint16_t.
#pragma once

#include <cstdint>

namespace infuse {

enum class Type { f32, bf16, f16 };

}  // namespace infuse
