// Matrix products with few rows, over plain and quantized weights.
#pragma once

#include "linear_kernels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

inline LinearKernels linear_kernels() { return {}; }

}  // namespace INFUSE_ISA
}  // namespace infuse
