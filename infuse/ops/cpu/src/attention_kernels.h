// Arguments and table of rotary + append, attention and activations (attention.h).
#pragma once

#include "types.h"

namespace infuse {

struct AttentionKernels {};

}  // namespace infuse
