// Arguments and table of the matrix products (linear.h).
#pragma once

#include "types.h"

namespace infuse {

struct LinearKernels {};

}  // namespace infuse
