// Arguments and table of the vector steps of a mixture's router (router.h).
#pragma once

#include "types.h"

namespace infuse {

// logits[t, e] = x[t] . weight[e] + bias[e]: computed in float32, rounded to `rounded`, then stored as `type`.
struct LogitArgs {
  const float* x;             // [tokens, inputs]
  const void *weight, *bias;  // [experts, inputs]; [experts] or null, of the weight's type
  void* logits;               // [tokens, experts]
  int64_t tokens, inputs, experts;
  Type weight_type, rounded, type;
};

struct RouterKernels {
  void (*logits)(const LogitArgs&, int64_t begin, int64_t end);  // experts [begin, end)
  void (*convert)(const void* from, Type type, void* to, Type to_type, int64_t count);
};

}  // namespace infuse
