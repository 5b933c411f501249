#pragma once
#include "activation.h"
#include "rotary.h"
namespace infuse {
namespace INFUSE_ISA {
inline AttentionKernels attention_kernels() { return {rotary, activate, nullptr, nullptr, nullptr, nullptr}; }
}  // namespace INFUSE_ISA
}  // namespace infuse
