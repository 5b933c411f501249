// The blocks of GGUF files as codes and scales in the rows of infuse/quant/blocks.py. Bits are moved, values stay.
// weights/gguf/blocks.py has the same in PyTorch, and the types that are not here.
#include <cstring>

#include "binding.h"

namespace infuse {
namespace {

constexpr int64_t kGrainBytes = 1 << 18;  // of a thread: some hundred microseconds

uint64_t word_at(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

// The low nibbles of eight bytes, two in a byte, in order.
void put_low_nibbles(uint64_t bytes, uint8_t* to) {
  bytes &= 0x0f0f0f0f0f0f0f0full;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffull;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffull;
  const uint32_t packed = uint32_t(bytes | bytes >> 16);
  std::memcpy(to, &packed, 4);
}

// The low nibbles of `count` bytes, then their high ones.
template <int count>
void put_halves(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < count; i += 8) {
    const uint64_t bytes = word_at(from + i);
    put_low_nibbles(bytes, to + i / 2);
    put_low_nibbles(bytes >> 4, to + count / 2 + i / 2);
  }
}

// Eight scales and eight minima of 6 bits, from 12 bytes.
void put_six_bits(const uint8_t* from, uint8_t* scales, uint8_t* minima) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t scale = from[i], least = from[4 + i], high = from[8 + i];
    scales[i] = scale & 63, scales[4 + i] = uint8_t((high & 15) | (scale >> 2 & 48));
    minima[i] = least & 63, minima[4 + i] = uint8_t(high >> 4 | (least >> 2 & 48));
  }
}

// Byte i of the result has bit i of each of the eight bytes (Hacker's Delight, 7-3).
uint64_t transposed_bits(uint64_t x) {
  for (const auto [shift, mask] : {std::pair(7, 0x00aa00aa00aa00aaull), std::pair(14, 0x0000cccc0000ccccull),
                                   std::pair(28, 0x00000000f0f0f0f0ull)}) {
    const uint64_t swapped = (x ^ x >> shift) & mask;
    x ^= swapped ^ swapped << shift;
  }
  return x;
}

// Blocks of 32 values: bytes of scales, [a word of fifth bits], then byte j with values j and j + 16.
template <int of_scale, bool fifth>
void split_small(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from, of_scale);
  put_halves<16>(from + of_scale + (fifth ? 4 : 0), data);
  if (fifth) std::memcpy(data + 16, from + of_scale, 4);
}
void split_q8_0(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from, 2);
  std::memcpy(data, from + 2, 32);
}
void split_q4_k(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from, 4);
  put_six_bits(from + 4, scale + 4, scale + 12);
  for (int i = 0; i < 4; ++i) put_halves<32>(from + 16 + 32 * i, data + 32 * i);
}
void split_q5_k(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from, 4);
  put_six_bits(from + 4, scale + 4, scale + 12);
  for (int i = 0; i < 4; ++i) {  // two runs of 32 values: 16 bytes of nibbles and 4 of fifth bits each
    uint8_t both[32];
    put_halves<32>(from + 48 + 32 * i, both);
    std::memcpy(data + 40 * i, both, 16), std::memcpy(data + 40 * i + 20, both + 16, 16);
    const uint64_t fifths = transposed_bits(word_at(from + 16 + 8 * i));  // of values 8 i to 8 i + 7 of all runs
    for (int run = 0; run < 8; ++run) data[20 * run + 16 + i] = uint8_t(fifths >> 8 * run);
  }
}
void split_q6_k(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from + 208, 2);
  std::memcpy(scale + 2, from + 192, 16);
  uint8_t codes[256];
  for (int half = 0; half < 2; ++half) {
    const uint8_t *low = from + 64 * half, *high = from + 128 + 32 * half;
    uint8_t* to = codes + 128 * half;
    for (int i = 0; i < 32; ++i) {
      to[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
      to[i + 32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      to[i + 64] = uint8_t(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      to[i + 96] = uint8_t(low[i + 32] >> 4 | high[i] >> 6 << 4);
    }
  }
  for (int i = 0; i < 32; ++i, data += 6) {  // eight codes, 48 bits
    uint64_t bytes = word_at(codes + 8 * i);
    bytes = (bytes & 0x003f003f003f003full) | (bytes & 0x3f003f003f003f00ull) >> 2;
    bytes = (bytes & 0x00000fff00000fffull) | (bytes & 0x0fff00000fff0000ull) >> 4;
    bytes = (bytes & 0xffffffull) | bytes >> 32 << 24;
    std::memcpy(data, &bytes, 6);
  }
}
// Values of two bits, from 64 bytes: byte i of each half has four that are 32 apart.
void two_bits(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] = from[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}
// Eight codes of `bits` bits, one in a byte → one after the other.
template <int bits>
uint64_t dense(const uint8_t* codes) {
  uint64_t packed = 0;
  for (int i = 0; i < 8; ++i) packed |= uint64_t(codes[i]) << bits * i;
  return packed;
}
void split_q2_k(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from + 80, 4);
  std::memcpy(scale + 4, from, 16);
  uint8_t codes[256];
  two_bits(from + 16, codes);
  for (int i = 0; i < 32; ++i) {
    const uint64_t packed = dense<2>(codes + 8 * i);
    std::memcpy(data + 2 * i, &packed, 2);
  }
}
void split_q3_k(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from + 108, 2);
  for (int i = 0; i < 16; ++i) {
    const unsigned low = from[96 + i % 8] >> i / 8 * 4 & 15, high = from[104 + i % 4] >> i / 4 * 2 & 3;
    scale[2 + i] = uint8_t(int(low | high << 4) - 32);
  }
  uint8_t codes[256];
  two_bits(from + 32, codes);
  for (int i = 0; i < 256; ++i) codes[i] |= uint8_t((from[i % 32] >> i / 32 & 1) << 2);
  for (int i = 0; i < 32; ++i) {
    const uint64_t packed = dense<3>(codes + 8 * i);
    std::memcpy(data + 3 * i, &packed, 3);
  }
}
void split_iq4_xs(const uint8_t* from, uint8_t* data, uint8_t* scale) {
  std::memcpy(scale, from, 2);
  const unsigned high = from[2] | from[3] << 8;
  for (int i = 0; i < 8; ++i) {
    const unsigned low = from[4 + i / 2] >> 4 * (i % 2) & 15;
    scale[2 + i] = uint8_t(int(low | (high >> 2 * i & 3) << 4) - 32);
    put_halves<16>(from + 8 + 16 * i, data + 16 * i);
  }
}

struct Split {
  int64_t bytes, data, scale;  // of a block in the file and here
  void (*one)(const uint8_t* from, uint8_t* data, uint8_t* scale);
};
// In the order of COMPILED in weights/gguf/blocks.py.
constexpr Split kSplits[] = {
    {18, 16, 2, split_small<2, false>},   // Q4_0
    {34, 32, 2, split_q8_0},              // Q8_0
    {20, 16, 4, split_small<4, false>},   // Q4_1
    {22, 20, 2, split_small<2, true>},    // Q5_0
    {24, 20, 4, split_small<4, true>},    // Q5_1
    {18, 16, 2, split_small<2, false>},   // IQ4_NL
    {144, 128, 20, split_q4_k},           // Q4_K
    {176, 160, 20, split_q5_k},           // Q5_K
    {210, 192, 18, split_q6_k},           // Q6_K
    {136, 128, 10, split_iq4_xs},         // IQ4_XS
    {84, 64, 20, split_q2_k},             // Q2_K
    {110, 96, 18, split_q3_k},            // Q3_K
};

// Splits rows of blocks, uint8 [rows, blocks * bytes], contiguous in a row, into data and scale [rows, ...], contiguous.
void split_blocks(Tensor raw, int64_t type, Tensor data, Tensor scale) {
  const Split& split = kSplits[type];
  const int64_t rows = raw.size(0), blocks = raw.size(1) / split.bytes, step = raw.stride(0);
  const auto* from = static_cast<const uint8_t*>(raw.const_data_ptr());
  auto* codes = static_cast<uint8_t*>(data.mutable_data_ptr());
  auto* scales = static_cast<uint8_t*>(scale.mutable_data_ptr());
  const int64_t grain = kGrainBytes / std::max<int64_t>(raw.size(1), 1) + 1;
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = r * blocks + b;
        split.one(from + r * step + b * split.bytes, codes + at * split.data, scales + at * split.scale);
      }
    }
  });
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"split_blocks(Tensor raw, int type, Tensor(a!) data, Tensor(b!) scale) -> ()", TORCH_BOX(&split_blocks)})

}  // namespace infuse
