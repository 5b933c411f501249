// Numbers of rows (tokens of all sequences) and values at which another algorithm multiplies. Python reads them from
// the operator `limits`: infuse/native/__init__.py.
#pragma once

#include <cstdint>

namespace infuse {

// Most rows of x for which plain weights stream and a decoder layer runs in one call. In bf16, the four products of a
// layer of the Llama-1B shape take 24 % less time than by tiles with 9 rows, 23 % with 16 and 3 % with 24.
constexpr int64_t kFewPlainRows = 16;
constexpr int64_t kFewPlainRowsAmx = 8;  // the same with AMX, where more rows than these have not been measured
// Most tokens of a sequence whose attention is split over the keys. The sums of more, by tiles, round otherwise.
constexpr int64_t kFewTokens = 8;
// Most rows of x for which an encoder's layer runs part by part, with plain weights.
constexpr int64_t kFewEncoderRows = 8;
// Most rows of x for which quantized weights are decoded anew for each block of x. With more rows, a tile of them is
// decoded once (bf16; break-even for 8192 x 2048 at 26 to 30 rows in every format), or the whole weight (float32,
// measured with 1024 x 1024).
constexpr int64_t kFewRows = 28, kFewRowsFloat = 24;
constexpr int64_t kFewRowsInteger = 8;  // the same if x may be rounded to 8 bits
// The same for an expert in bf16 whose tiles AMX multiplies: break-even for 1024 x 1024 and 1024 x 512 at 6 rows in 4
// bits, 7 in fp8 and 13 in int8, whose streams are integer products.
constexpr int64_t kFewRowsAmx = 6, kFewRowsAmxBytes = 12;
// Most rows of an expert, on average, for which plain weights stream where there are no tiles: PyTorch's product for
// each expert breaks even between 16 and 32 rows (float32 and float16, AVX2 and AVX-512).
constexpr int64_t kFewExpertRows = 20;
// Most values of x in bf16 (4 MiB) that all threads share when they multiply by tiles of plain weights. With more, PyTorch's
// product is equally fast or up to 6 % faster.
constexpr int64_t kMostTiled = 1 << 21;

}  // namespace infuse
