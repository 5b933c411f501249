// Rotary + append, attention over a cache, activations.
#pragma once

#include "attention_kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

inline AttentionKernels attention_kernels() { return {}; }

}  // namespace INFUSE_ISA
}  // namespace infuse
