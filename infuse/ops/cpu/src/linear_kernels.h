// Arguments and table of the matrix products with few rows (linear.h).
//
// Suffixes: R rows of x, I inputs, O outputs, G groups of inputs that share a scale.
#pragma once

#include <cstddef>

#include "types.h"

namespace infuse {

constexpr int64_t kMostIntegerInputs = 1 << 16;  // of a group whose x is rounded to 8 bits: 255 * 127 * 65536 is below 2^31

// y[R, O] = x[R, I] @ w[O, I].T + bias[O]. A plain weight has the type of x; a quantized one lies in panels (panels.h)
// and has w = scale * (code - zero * unit), as infuse/quant/integer.py and floating.py define it.
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

  // Of products by tiles: y = act(...), or where gated y[R, O / 2] = act(first half) * second half.
  bool activates, gated;
  Act act;

  bool* finite;  // of x rounded to 8 bits: becomes false, by any thread, where x is not
  int64_t row_bytes, ahead;  // of tiles: a weight row; from a tile to the next that its thread is likely to take, in outputs or gates

  void* scratch;  // shared by the threads, filled by `arrange`, aligned to 64 bytes
};

// Products with more rows than the others are good at, bf16 and an even number of inputs: weights are brought tile by
// tile into a core's cache, for all rows of x (tile.h). All null where there are no bf16 instructions.
struct TileKernels {
  int block_rows;  // of x, the blocks that `arrange` counts
  size_t (*x_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&, int64_t begin_block, int64_t end_block);
  size_t (*tile_bytes)(const LinearArgs&);
  int64_t (*tile_columns)(const LinearArgs&);  // outputs, or gates, of a tile
  int64_t (*most_tiles)(const LinearArgs&);    // that a thread takes at once, if there is work for all threads
  int64_t (*chunk_rows)(const LinearArgs&);    // of x that meet all tiles before the next ones do, if there are enough for all threads
  void (*multiply)(const LinearArgs&, int64_t begin, int64_t end, uint32_t* tiles);  // outputs, or gates
};

struct LinearKernels {
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&);                          // x into the order in which the kernels read it
  void (*rows)(const LinearArgs&, int64_t begin, int64_t end);  // outputs [begin, end)
  TileKernels tiles;
};

// Outputs and rows of weights begin at whole panels.
struct PanelKernels {
  int few_rows;  // the blocks of x in which `few` reads it
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&, int64_t most, int64_t begin_block, int64_t end_block);
  void (*few)(const LinearArgs&, int64_t begin, int64_t end);
  TileKernels tiles;
  // of integer codes, x in 8 bits and of any type; all null where there are no such instructions
  TileKernels integer_tiles;
  void (*dequantize)(const LinearArgs&, int64_t begin, int64_t end);  // w, rows [begin, end), into y[O, I] of `type`
  void (*gather)(const LinearArgs&, int64_t begin, int64_t end);      // w[index], into y
};

}  // namespace infuse
