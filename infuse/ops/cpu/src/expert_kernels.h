// Arguments and table of the steps of a mixture's experts around their products (experts.h).
#pragma once

#include "types.h"

namespace infuse {

// Of one expert: to[rows, columns] = act(gate) * (up + up_offset), or act(gate) if not gated. `products` holds a row's
// gates, then its up values if gated; its rows are `stride` elements apart. Gates are at most gate_limit before the
// activation and act_limit after it, up values within +-up_limit; infinity for no limit.
struct ExpertGateArgs {
  const void* products;
  void* to;  // contiguous
  int64_t rows, columns, stride;
  Act act;
  bool gated;
  float gate_limit, act_limit, up_limit, up_offset;
  Type type;
};

// Of one token: to[i] = the sum of weights[k] * from[k][i], in float32 in the order of `from`, rounded once.
struct WeighArgs {
  const void* const* from;
  const float* weights;
  int64_t count;
  void* to;
  Type type;
};

struct ExpertKernels {
  void (*gate)(const ExpertGateArgs&);
  void (*weigh)(const WeighArgs&, int64_t begin, int64_t end);  // elements [begin, end)
};

}  // namespace infuse
