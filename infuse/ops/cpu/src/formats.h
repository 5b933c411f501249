// The formats of infuse/quant as kernels see them, one row for each.
//
// Scales in blocks: those of a block of a panel lie together, field by field, each [count][16 rows] of it. A group's
// scale is d * sc, or d; its shift is dmin * mn, or -m, or 0. nibbles: a byte holds sc and, above it, mn.
// infuse/quant/blocks.py defines the fields.
#pragma once

#include <array>
#include <cstdint>

#include "types.h"

namespace infuse {

enum class Factor { none, i8, nibbles, e4m3 };  // the type of sc; unsigned ones are below 128

// Bytes of fields are those of one row.
struct BlockLayout {
  int inputs, group;
  bool wide;         // d is float32, else float16
  Factor factor;
  bool shifts;       // dmin and mn, or m where there is no factor

  constexpr int groups() const { return inputs / group; }
  constexpr int d_bytes() const { return wide ? 4 : 2; }
  constexpr int factors() const { return factor == Factor::none ? 0 : groups(); }
  // Where sc begins, and where mn does.
  constexpr int sc_at() const { return d_bytes() + (shifts ? 2 : 0); }
  constexpr int mn_at() const { return sc_at() + (factor == Factor::nibbles ? 0 : factors()); }
  constexpr int bytes() const { return mn_at() + (shifts ? factors() : 0); }
};

struct Format {
  Code code;
  const float* values;  // of codes with a table, or the number of the code 0 of integers
  bool blocks;
  BlockLayout layout;
};

// Tables of 16 values.
inline constexpr float kUnsigned4[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr float kE2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
inline constexpr float kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr float kNf4[] = {
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0};
inline constexpr float kFp4[] = {0, 0.0625 / 12, 8.0 / 12, 1, 4.0 / 12, 0.5, 2.0 / 12, 0.25,
                                 -0.0f, -0.0625 / 12, -8.0 / 12, -1, -4.0 / 12, -0.5, -2.0 / 12, -0.25};
inline constexpr float kZero[] = {0}, kLess2[] = {-2}, kLess4[] = {-4}, kLess16[] = {-16}, kLess32[] = {-32};

// In the order of CODES in infuse/native/__init__.py.
inline constexpr Format kFormats[] = {
    {Code::int8, nullptr, false, {}},
    {Code::int4, nullptr, false, {}},
    {Code::fp8, nullptr, false, {}},
    {Code::fp6, nullptr, false, {}},
    {Code::nibble, kE2m1, false, {}},  // mxfp4
    {Code::real4, kNf4, false, {}},
    {Code::real4, kFp4, false, {}},
    {Code::nibble, kUnsigned4, true, {32, 32, false, Factor::none, true}},   // q4_1
    {Code::five, kLess16, true, {32, 32, false, Factor::none, false}},       // q5_0
    {Code::five, kZero, true, {32, 32, false, Factor::none, true}},          // q5_1
    {Code::nibble, kIq4, true, {32, 32, false, Factor::none, false}},        // iq4_nl
    {Code::two, kZero, true, {256, 16, false, Factor::nibbles, true}},       // q2_k
    {Code::three, kLess4, true, {256, 16, false, Factor::i8, false}},        // q3_k
    {Code::nibble, kUnsigned4, true, {256, 32, false, Factor::i8, true}},    // q4_k
    {Code::five, kZero, true, {256, 32, false, Factor::i8, true}},           // q5_k
    {Code::six, kLess32, true, {256, 16, false, Factor::i8, false}},         // q6_k
    {Code::nibble, kIq4, true, {256, 32, false, Factor::i8, false}},         // iq4_xs
    {Code::nibble, kE2m1, true, {64, 16, true, Factor::e4m3, false}},        // nvfp4
    {Code::two, kLess2, false, {}},    // int2
    {Code::three, kLess4, false, {}},  // int3
};

}  // namespace infuse
