// Products of many rows of x with tiles of integer codes, with x rounded to 8 bits if the weight's format allows it. An
// instruction does twice the operations of one for bf16; without bf16 instructions the gain is larger.
//
//   x    → [block of up to 6 rows][group][{start of the sums, scale}][rows] in 64 bytes,
//          then [rows][group's inputs / 4] of four bytes
//   tile → [inputs / 4][2 halves][16 outputs] of four unsigned codes, for int4; int8 is multiplied in its panels
//
// The sums of a group are exact and are scaled by the scales of the weight and of x. Halves are as in tile.h.
#pragma once

#include "fixed_point.h"
#include "tile_output.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512VNNI__)

constexpr int kIntegerRows = 6;  // rows of x at once: 12 sums. On AMD Zen 5, 8 rows are 5 % slower, 12 rows 40 %.
constexpr float kMostByte = 127;
enum Header { kStart, kScale };
constexpr int64_t kHeaderWords = 16;  // of a group and block: so the rows of groups of 64 are whole cache lines
// Prefetch distance of x in words, 4 KiB, if x is larger than kFarXBytes. For less, which is in the core's cache, it costs
// up to 5 %.
constexpr int64_t kXAhead = 1024, kFarXBytes = 1 << 19;

inline uint32_t* integer_block(const LinearArgs& a, int64_t b, int64_t first_row) {
  return static_cast<uint32_t*>(a.scratch) + first_row * (a.inputs / 4) + b * a.groups * kHeaderWords;
}
inline size_t integer_x_bytes(const LinearArgs& a) {
  return size_t(a.rows * (a.inputs / 4) + row_blocks(a.rows, kIntegerRows) * a.groups * kHeaderWords) *
         sizeof(uint32_t);
}
// int8 needs no tile: its panels have the same order, but for the sign. Filling one took 2 to 4 % of a product of 128 rows.
constexpr bool in_panels(Code code) { return code == Code::int8; }
inline size_t integer_tile_bytes(const LinearArgs& a) {
  return in_panels(a.code) ? 0 : size_t(a.inputs / 4 * kTileOutputs) * sizeof(uint32_t);
}

// Arranges N groups, 4, 2 or 1, of row r of a block of `count` rows; `to`: the first group of the block.
template <int N, class T, Code C>
void arrange_group_bytes(const LinearArgs& a, const T* x, int64_t length, int64_t count, int64_t r, uint32_t* to) {
  const int64_t words = kHeaderWords + length / 4 * count;
  __m512i lanes[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) lanes[g] = g < N ? peaks_of(x + g * length, length) : lanes[g % N];
  const FourFixedPoints fixed(lanes, kMostByte);
  if (!fixed.finite) __atomic_store_n(a.finite, false, __ATOMIC_RELAXED);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    char* bytes = reinterpret_cast<char*>(to + g * words + kHeaderWords + r * (length / 4));
    lanes[g] = g < N ? put_bytes<C>(fixed[g], x + g * length, length, bytes) : lanes[g % N];
  }
  const __m128i sums = lanes_of_four(lanes, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
  alignas(16) uint32_t starts[4];
  _mm_store_si128(reinterpret_cast<__m128i*>(starts), _mm_mullo_epi32(sums, _mm_set1_epi32(-Coding<C>::moved)));
  for (int g = 0; g < N; ++g, to += words) {
    to[kStart * count + r] = starts[g];
    std::memcpy(to + kScale * count + r, &fixed.scale[g], 4);
  }
}

// Arranges row r of a block of `count` rows.
template <class T, Code C>
void arrange_bytes(const LinearArgs& a, const T* x, int64_t count, int64_t r, uint32_t* to) {
  const int64_t length = a.inputs / a.groups, words = kHeaderWords + length / 4 * count;
  int64_t g = 0;
  for (; g + 4 <= a.groups; g += 4, x += 4 * length, to += 4 * words) {
    arrange_group_bytes<4, T, C>(a, x, length, count, r, to);
  }
  if (g + 2 <= a.groups) {
    arrange_group_bytes<2, T, C>(a, x, length, count, r, to);
    g += 2, x += 2 * length, to += 2 * words;
  }
  if (g < a.groups) arrange_group_bytes<1, T, C>(a, x, length, count, r, to);
}

template <class T, Code C>
void arrange_integer_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const auto [first_row, count] = row_block(a.rows, kIntegerRows, b);
    uint32_t* to = integer_block(a, b, first_row);
    for (int64_t r = 0; r < count; ++r) arrange_bytes<T, C>(a, static_cast<const T*>(a.x) + (first_row + r) * a.inputs,
        count, r, to);
  }
}

// Writes one panel to half 0 or 1.
template <Code C>
void fill_integer_tile(const LinearArgs& a, int64_t panel, int half, uint32_t* tile) {
  constexpr int quads = kUnit<C> / 4;
  const bool there = panel * kPanelRows < a.outputs;
  const int64_t units = a.inputs / kUnit<C>;
  const uint8_t* p = static_cast<const uint8_t*>(a.weight) + panel * units * kUnitBytes<C>;
  uint32_t* to = tile + half * kPanelRows;
  for (int64_t u = 0; u < units; ++u, p += kUnitBytes<C>) {
    const __m512i word = there ? load_words(p) : _mm512_setzero_si512();
    for (int q = 0; q < quads; ++q, to += kTileOutputs) _mm512_store_si512(to, moved_codes<C>(word, q));
  }
}

// The codes of each half of a tile. Words are kTileStep apart.
struct Halves {
  const uint32_t *low, *high;
};
template <Code C>
constexpr int64_t kTileStep = in_panels(C) ? kPanelRows : kTileOutputs;
template <Code C>
[[gnu::always_inline]] inline __m512i tile_codes(const uint32_t* word) {
  return in_panels(C) ? moved_codes<C>(_mm512_loadu_si512(word), 0) : _mm512_load_si512(word);
}

// The tile of outputs (or gates) from o on, whose second half is `beyond` later; filled into `room` if it is int4.
template <Code C>
Halves tile_of(const LinearArgs& a, int64_t o, int64_t beyond, uint32_t* room) {
  if constexpr (in_panels(C)) {
    const auto* low = static_cast<const uint32_t*>(a.weight) + o * (a.inputs / 4);
    return {low, o + beyond < a.outputs ? low + beyond * (a.inputs / 4) : low};
  } else {
    for (int half = 0; half < 2; ++half) fill_integer_tile<C>(a, (o + half * beyond) / kPanelRows, half, room);
    return {room, room + kPanelRows};
  }
}

// Multiplies a block of R rows by one tile and writes y; `zeros`: the weight has zero points; `room`: [R][kTileOutputs].
template <class T, Code C, int R, bool zeros>
void multiply_integer_tile(const LinearArgs& a, Halves tile, int64_t o, int64_t first_row, const uint32_t* x,
                           TileAhead ahead, float* room) {
  const int64_t groups = a.groups, words = a.inputs / groups / 4, beyond = a.gated ? a.outputs / 2 : kPanelRows;
  // The sums of a missing half are computed but not written, so any scales will do.
  const int64_t left = o * groups, right = o + beyond < a.outputs ? (o + beyond) * groups : left;
  const Scales of_weight(a);
  const int8_t *left_zero = a.zero + left, *right_zero = a.zero + right;
  const bool far = a.rows * a.inputs > kFarXBytes;
  Vec sums[R][2];  // in registers: an array in memory took a tenth of the time
  for (int64_t g = 0; g < groups; ++g) {
    ahead.fetch();
    const uint32_t* header = x;
    if (far) prefetch(header + kXAhead, Into::all);
    x += kHeaderWords;
    __m512i low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_set1_epi32(int(header[kStart * R + r]));
    for (const uint32_t* end = x + words; x < end;) {
      if (far) {
        for (int r = 0; r < R; ++r) prefetch(x + r * words + kXAhead, Into::all);
      }
      const uint32_t* second = x + R / 2 * words;  // rows from R / 2 on: few addresses are needed
      for (const uint32_t* stop = end - x < 16 ? end : x + 16; x < stop;
           tile.low += kTileStep<C>, tile.high += kTileStep<C>, ++x, ++second) {
        const __m512i w0 = tile_codes<C>(tile.low), w1 = tile_codes<C>(tile.high);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const uint32_t word = r < R / 2 ? x[r * words] : second[(r - R / 2) * words];
          const __m512i bytes = _mm512_set1_epi32(int(word));
          low[r] = dot_quads(low[r], w0, bytes), high[r] = dot_quads(high[r], w1, bytes);
        }
      }
    }
    x += (R - 1) * words;
    const Vec scale0 = of_weight.load(left + g * kPanelRows), scale1 = of_weight.load(right + g * kPanelRows);
    const float* scales = reinterpret_cast<const float*>(header + kScale * R);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec scale(scales[r]);
      Vec sum0 = _mm512_cvtepi32_ps(low[r]), sum1 = _mm512_cvtepi32_ps(high[r]);
      if constexpr (zeros) {  // before scaling: the two parts may be far larger than their difference
        const Vec moved(Coding<C>::zero_unit / Coding<C>::moved * float(int(header[kStart * R + r])));  // exact
        sum0 = fma(load_zeros(left_zero + g * kPanelRows), moved, sum0),
            sum1 = fma(load_zeros(right_zero + g * kPanelRows), moved, sum1);
      }
      sums[r][0] = fma(sum0 * scale0, scale, sums[r][0]), sums[r][1] = fma(sum1 * scale1, scale, sums[r][1]);
    }
  }
  if (T* y = whole_output<T>(a, first_row, o)) return write_whole<R>(a, sums, o, y);
#pragma GCC unroll 8  // or the compiler keeps the sums in memory
  for (int r = 0; r < R; ++r) {
    float* row = room + r * kTileOutputs;
    store(row, sums[r][0], Vec::width), store(row + kPanelRows, sums[r][1], Vec::width);
  }
  write_sums<T>(a, room, R, o, first_row);
}

template <class T, Code C>
void integer_tile_rows(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* room) {
  const int64_t columns = a.gated ? a.outputs / 2 : a.outputs, beyond = a.gated ? columns : kPanelRows;
  const RowBlocks blocks(a.rows, kIntegerRows);
  alignas(64) float sums[kIntegerRows * kTileOutputs];
  for (int64_t o = begin; o < end; o += tile_columns(a)) {
    const Halves tile = tile_of<C>(a, o, beyond, room);
    const int64_t next = next_tile(a, o, begin, end);
    const TileAhead ahead = next == o ? TileAhead() : TileAhead(a, next, blocks.count, a.groups);
    for (int64_t b = 0; b < blocks.count; ++b) {
      const auto [first_row, count] = blocks[b];
      const uint32_t* x = integer_block(a, b, first_row);
      prefetch_output<T>(a, first_row + count, kIntegerRows, o);
      with_rows<kIntegerRows>(count, [&](auto R) {
        constexpr int rows = decltype(R)::value;
        a.zero ? multiply_integer_tile<T, C, rows, true>(a, tile, o, first_row, x, ahead.part(b), sums)
            : multiply_integer_tile<T, C, rows, false>(a, tile, o, first_row, x, ahead.part(b), sums);
      });
    }
  }
}

// Calls run(T(), std::integral_constant<Code, code>) for the type and the code of `a`, which must be an integer code.
template <class F>
void with_integers(const LinearArgs& a, const F& run) {
  with_type(a.type, [&](auto t) { a.code == Code::int8 ? run(t, CodeOf<Code::int8>())
      : run(t, CodeOf<Code::int4>()); });
}

inline TileKernels integer_tile_kernels() {
  return {
      kIntegerRows,
      integer_x_bytes,
      [](const LinearArgs& a, int64_t begin, int64_t end) {
        with_integers(a, [&](auto t, auto code) { arrange_integer_rows<decltype(t), code>(a, begin, end); });
      },
      integer_tile_bytes,
      tile_columns,
      [](const LinearArgs&) { return int64_t(1); },
      [](const LinearArgs& a) {  // as many rows as fit a core's cache of 1 MiB together with a tile
        constexpr int64_t kChunkBytes = 1 << 19, kLeastRows = 320;
        const int64_t rows = kChunkBytes / (a.inputs + 4 * a.groups * kHeaderWords / kIntegerRows);
        return rows < kLeastRows ? kLeastRows : rows;
      },
      [](const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile) {
        with_integers(a, [&](auto t, auto code) { integer_tile_rows<decltype(t), code>(a, begin, end, tile); });
      },
  };
}

#else

inline TileKernels integer_tile_kernels() { return {}; }

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
