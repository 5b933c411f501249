// Arguments and table of the matrix products with few rows (linear.h).
//
// Suffixes: R rows of x, I inputs, O outputs, G groups of inputs that share a scale.
#pragma once

#include <cstddef>

#include "types.h"

namespace infuse {

// y[R, O] = x[R, I] @ w[O, I].T + bias[O]. A plain weight has the type of x; a quantized one has
// w = scale * (code - zero * unit), as infuse/quant/integer.py stores it.
struct LinearArgs {
  const void* x;       // contiguous
  const void* weight;  // contiguous: elements, or codes of `bits` bits
  const void* bias;    // or null
  void* y;             // contiguous
  int64_t rows, inputs, outputs;
  Type type;  // of x, y, bias

  int bits;               // 0: a plain weight; 8, 4: a quantized one
  const uint16_t* scale;  // bf16 [O, groups]
  const int8_t* zero;     // [O, groups] or null
  int64_t groups;

  void* scratch;  // shared by the threads, filled by `arrange`, aligned to 64 bytes
};

struct LinearKernels {
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&);                          // x into the order in which the kernels read it
  void (*rows)(const LinearArgs&, int64_t begin, int64_t end);  // outputs [begin, end)
  void (*dequantize)(const LinearArgs&, int64_t begin, int64_t end);  // w, rows [begin, end), into y[O, I] of `type`
};

}  // namespace infuse
