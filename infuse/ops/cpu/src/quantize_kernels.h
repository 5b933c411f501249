// Arguments and table of the search for a group's grid (quantize.h).
//
// Suffixes: G groups, N values of a group.
#pragma once

#include "types.h"

namespace infuse {

// The meaning of each candidate, as in infuse/quant/integer.py and floating.py.
enum class Grids {
  int8_symmetric,   // the code of the largest value
  int8_asymmetric,  // codes between the smallest and the largest value; the first candidate is always possible
  int4_symmetric,   // the step is the extreme value divided by this
  int4_asymmetric,  // two numbers: the part of half the span cut off at the high end, and the step in half spans
  fp8, fp6,         // the grid value that the largest value is scaled to
};

struct QuantizeArgs {
  const void* weight;  // [G, N] contiguous
  // int8, fp8: codes [G, N]; int4: code + 8, two per byte [G, N / 2]; fp6: four in three bytes [G, N * 3 / 4].
  void* data;
  uint16_t* scale;     // bf16 [G]
  int8_t* zero;        // [G], or null if the grids are symmetric
  int64_t length;      // N; even for int4, a multiple of 4 for fp6
  const float* candidates;
  int64_t count;  // of candidates
  float largest_weight;
  Grids grids;
  Type type;
};

// Quantizes groups [begin, end); false if one of them holds NaN, an infinity or more than `largest_weight`.
using QuantizeKernel = bool (*)(const QuantizeArgs&, int64_t begin, int64_t end);

}  // namespace infuse
