// Arguments and table of the matrix products with few rows (linear.h).
//
// Suffixes: R rows of x, I inputs, O outputs, G groups of inputs that share a scale.
#pragma once

#include <cstddef>

#include "formats.h"

namespace infuse {

// Most inputs of a group whose x is rounded to 8 bits: 255 * 127 * 65536 is below 2^31.
constexpr int64_t kMostIntegerInputs = 1 << 16;

// y[R, O] = x[R, I] @ w[O, I].T + bias[O]. A plain weight has the type of x. A quantized one is stored in panels
// (panels.h), with w = scale * (code - zero * unit) or w = scale * (code - lowest code) + offset; or w = scale * code -
// shift where scales are in blocks.
struct LinearArgs {
  const void* x;       // contiguous
  const void* weight;  // elements [O, I], or codes in panels
  const void* bias;    // or null
  void* y;             // contiguous
  int64_t rows, inputs, outputs;
  Type type;  // of x, y, bias

  Code code;             // of a quantized weight
  const float* values;   // of the codes, if they are those of a table
  Scaling scaling;       // of `scale`
  const BlockLayout* blocks;
  const uint8_t* scale;
  int64_t scale_bytes;   // of a row
  const int8_t* zero;    // or null
  const float* offset;   // or null; never with zero
  int64_t groups;
  const int64_t* index;  // the rows of the weight that `gather` reads

  // In products by tiles: y = act(...), or if gated y[R, O / 2] = act(first half) * second half.
  bool activates, gated;
  Act act;

  bool* finite;  // if x is rounded to 8 bits: any thread sets it to false if x is not finite
  // In products by tiles. row_bytes: of a weight row. ahead: distance, in outputs or gates, from the first tile of
  // a call of `multiply` to the first tile that the same thread is likely to take in its next call.
  int64_t row_bytes, ahead;

  void* scratch;  // shared by the threads, filled by `arrange`, aligned to 64 bytes

  bool once;  // for one row of x, the weight is fetched past the outer caches: others' code and tensors stay there
};

// Products with many rows: weights are loaded tile by tile into a core's cache, for all rows of x (tile.h).
struct TileKernels {
  int block_rows;  // rows of x in each block that `arrange` counts
  size_t (*x_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&, int64_t begin_block, int64_t end_block);
  size_t (*tile_bytes)(const LinearArgs&);
  int64_t (*tile_columns)(const LinearArgs&);  // outputs, or gates, of a tile
  int64_t (*most_tiles)(const LinearArgs&);    // that a thread takes at once, if there is work for all threads
  // Rows of x that are multiplied by all tiles before the next ones, if there are enough for all threads.
  int64_t (*chunk_rows)(const LinearArgs&);
  void (*multiply)(const LinearArgs&, int64_t begin, int64_t end, uint32_t* tiles);  // outputs, or gates
};

// Pointers are null without AVX-512, and in bf16 without bf16 instructions. The number of inputs in bf16 must be even.
struct TilesByType {
  TileKernels f32, bf16;

  const TileKernels* of(Type type) const {
    const TileKernels& found = type == Type::f32 ? f32 : bf16;
    return type != Type::f16 && found.multiply ? &found : nullptr;
  }
};

struct LinearKernels {
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&);                          // reorders x as the kernels read it
  void (*rows)(const LinearArgs&, int64_t begin, int64_t end);  // outputs [begin, end)
  TilesByType tiles;
};

// Outputs and rows of weights begin at whole panels.
struct PanelKernels {
  int few_rows;  // the blocks of x in which `few` reads it
  size_t (*scratch_bytes)(const LinearArgs&);
  void (*arrange)(const LinearArgs&, int64_t most, int64_t begin_block, int64_t end_block);
  void (*arrange_groups)(const LinearArgs&, int64_t begin, int64_t end);  // of all blocks
  void (*few)(const LinearArgs&, int64_t begin, int64_t end);
  TilesByType tiles;
  // Integer codes, with x of any type rounded to 8 bits; all pointers are null without such instructions.
  TileKernels integer_tiles;
  void (*dequantize)(const LinearArgs&, int64_t begin, int64_t end);  // w, rows [begin, end), into y[O, I] of `type`
  void (*gather)(const LinearArgs&, int64_t begin, int64_t end);      // w[index], into y
};

}  // namespace infuse
