// Arguments and table of the matrix products with few rows (linear.h).
//
// Suffixes: R rows of x, I inputs, O outputs, G groups of inputs that share a scale.
#pragma once

#include <cstddef>

#include "types.h"

namespace infuse {

// y[R, O] = x[R, I] @ w[O, I].T + bias[O]. A plain weight has the type of x; a quantized one lies in panels (panels.h) and has
// w = scale * (code - zero * unit), as infuse/quant/integer.py and floating.py define it.
struct LinearArgs {
  const void* x;       // contiguous
  const void* weight;  // elements [O, I], or codes in panels
  const void* bias;    // or null
  void* y;             // contiguous
  int64_t rows, inputs, outputs;
  Type type;  // of x, y, bias

  Code code;              // of a quantized weight
  const uint16_t* scale;  // bf16
  const int8_t* zero;     // or null
  int64_t groups;
  const int64_t* index;   // the rows of the weight that `gather` takes

  // Of products by tiles over plain weights: y = act(...), or where gated y[R, O / 2] = act(first half) * second half.
  bool activates, gated;
  Act act;

  void* scratch;  // shared by the threads, filled by `arrange`, aligned to 64 bytes
};

// `many` takes more rows than the others are good at, bf16 and an even number of inputs, in a tile of 64 bytes for each input; it is null
// where there are no bf16 instructions.
struct LinearKernels {
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&);                          // x into the order in which the kernels read it
  void (*rows)(const LinearArgs&, int64_t begin, int64_t end);  // outputs [begin, end)
  void (*arrange_many)(const LinearArgs&, int64_t begin_block, int64_t end_block);
  void (*many)(const LinearArgs&, int64_t begin, int64_t end, uint32_t* tile);  // outputs, or gates
  int tile_rows;  // the blocks of x that arrange_many counts
};

// Outputs and rows of weights begin at whole panels. `many` is as above.
struct PanelKernels {
  int few_rows, tile_rows;  // the blocks of x in which `few` and `many` read it
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&, int64_t most, int64_t begin_block, int64_t end_block);
  void (*few)(const LinearArgs&, int64_t begin, int64_t end);
  void (*many)(const LinearArgs&, int64_t begin, int64_t end, uint32_t* tile);
  void (*dequantize)(const LinearArgs&, int64_t begin, int64_t end);  // w, rows [begin, end), into y[O, I] of `type`
  void (*gather)(const LinearArgs&, int64_t begin, int64_t end);      // w[index], into y
};

}  // namespace infuse
