// Numbers of rows (tokens of all sequences) and values at which one way of multiplying gives way to another. Python
// reads them from the operator `limits`: infuse/native/__init__.py.
#pragma once

#include <cstdint>

namespace infuse {

// Up to so many rows of x, plain weights are multiplied as they stream, and a layer of a decoder goes in one call.
constexpr int64_t kFewPlainRows = 8;
// Up to so many rows of x, quantized weights are decoded for each block of x anew; beyond, a tile of them is decoded
// once (where both take as long, 8192 x 2048, bf16: 26 to 30 in every format) or the whole weight (1024 x 1024,
// float32).
constexpr int64_t kFewRows = 28, kFewRowsFloat = 24;
constexpr int64_t kFewRowsInteger = 8;  // the same where x may be rounded to 8 bits
// Values of x, 4 MiB, up to which all threads share it as they multiply by tiles of plain weights; beyond, PyTorch's
// product is as fast or up to 6 % faster.
constexpr int64_t kMostTiled = 1 << 21;

}  // namespace infuse
