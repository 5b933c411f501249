// Products of many rows of x with tiles (tile.h) in AVX-512: bf16 pairs or floats; and the table, with AMX for bf16.
//
//   x → [block of up to 12 rows][words][rows]
//
// A deep tile is filled and multiplied with all blocks of x piece by piece, and its sums wait in memory in between.
#pragma once

#include "amx_tile.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512F__)

constexpr int kWordsAFetch = 4;
constexpr int kTileRows = 12;  // rows of x in registers at once: 24 sums, 2 weights
// Most words of a piece, 64 or 128 KiB of each tile: a running sum of more floats loses digits. With 192 words, which
// fit the L1 cache, products took 1 to 7 % longer.
template <class T>
constexpr int64_t kPieceWords = sizeof(T) == 4 ? 512 : 1024;
// A piece's part of x beyond this size is prefetched, this many words ahead: 0.47 -> 0.75 of the peak for 512 x 8192
// floats. For less, which is in the core's cache, it costs up to 5 %.
constexpr int64_t kFarBytes = 1 << 19, kFarWords = 512;

template <class T>
int64_t words_of(const LinearArgs& a) {
  return a.inputs / kInWord<T>;
}

template <class T>
size_t tile_x_bytes(const LinearArgs& a) {
  return size_t(a.rows * a.inputs) * sizeof(T);
}

template <class T>
bool is_deep(const LinearArgs& a) {
  return words_of<T>(a) > kPieceWords<T>;
}
// Words of a piece, and of the sums that wait.
template <class T>
int64_t tile_words(const LinearArgs& a) {
  return (is_deep<T>(a) ? kPieceWords<T> + a.rows : words_of<T>(a) + kTileRows) * kTileOutputs;
}
template <class T>
size_t tile_bytes(const LinearArgs& a) {
  return size_t(tile_words<T>(a)) * sizeof(uint32_t);
}

// Arranges blocks [begin, end) of x.
template <class T>
void arrange_tile_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t words = words_of<T>(a);
  for (int64_t b = begin; b < end; ++b) {
    const auto [first_row, count] = row_block(a.rows, kTileRows, b);
    const T* x = static_cast<const T*>(a.x) + first_row * a.inputs;
    uint32_t* to = static_cast<uint32_t*>(a.scratch) + first_row * words;
    for (int64_t i = 0; i < words; i += 16) {
      const int left = int(words - i < 16 ? words - i : 16);
      Vec columns[16];
      load_columns(x + i * kInWord<T>, a.inputs, count, left, columns);
      for (int w = 0; w < left; ++w) _mm512_mask_storeu_ps(to + (i + w) * count, first(int(count)), columns[w].v);
    }
  }
}

// A piece of a tile: words [begin, end) of all `words`, for outputs (or gates) from o on.
struct Piece {
  int64_t o, begin, end, words;
  const uint32_t* tile;
  bool far;  // x is prefetched
};

// Adds the products of one piece with rows [first_row, first_row + R) to `waiting` [R][kTileOutputs]. Writes y after
// the last piece.
template <class T, int R>
void multiply_piece(const LinearArgs& a, const Piece& p, int64_t first_row, float* waiting, TileAhead ahead) {
  const uint32_t* x = static_cast<const uint32_t*>(a.scratch) + first_row * p.words + p.begin * R;
  const uint32_t* tile = p.tile;
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t i = p.begin; i < p.end;) {
    ahead.fetch();
    if (p.far) {
      for (int line = 0; line < R * kWordsAFetch / 16; ++line) __builtin_prefetch(x + kFarWords + 16 * line);
    }
    for (const int64_t stop = p.end - i < kWordsAFetch ? p.end : i + kWordsAFetch; i < stop;
         ++i, tile += kTileOutputs, x += R) {
      const __m512 w0 = _mm512_load_ps(tile), w1 = _mm512_load_ps(tile + kPanelRows);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512 word = _mm512_castsi512_ps(_mm512_set1_epi32(int(x[r])));
        sums[r][0] = add_words<T>(sums[r][0], w0, word);
        sums[r][1] = add_words<T>(sums[r][1], w1, word);
      }
    }
  }
  if (p.begin == 0 && p.end == p.words) {
    if (T* to = whole_output<T>(a, first_row, p.o)) return write_whole<R>(a, sums, p.o, to);
  }
  // Added at the end, since one running sum over thousands of inputs would lose digits.
  const __mmask16 earlier = p.begin ? 0xffff : 0;
  for (int r = 0; r < R; ++r) {
    float *low = waiting + r * kTileOutputs, *high = low + kPanelRows;
    _mm512_store_ps(low, _mm512_add_ps(sums[r][0], _mm512_maskz_load_ps(earlier, low)));
    _mm512_store_ps(high, _mm512_add_ps(sums[r][1], _mm512_maskz_load_ps(earlier, high)));
  }
  if (p.end == p.words) write_sums<T>(a, waiting, R, p.o, first_row);
}

// Rows of x that fit a core's cache of 1 MiB together with a tile of weights. At least kLeastRows, since filling the
// tiles would take too long for fewer.
inline int64_t chunk_rows(const LinearArgs& a) {
  constexpr int64_t kChunkBytes = 1 << 19, kLeastRows = 320;
  const int64_t rows = kChunkBytes / ((a.type == Type::f32 ? 4 : 2) * a.inputs);
  return rows < kLeastRows ? kLeastRows : rows;
}

// Computes outputs (or gates) [begin, end) tile by tile; fill(o, first, last, tile) loads the weights of inputs
// [first, last) from output o on. Meanwhile it prefetches the weights of the next tile.
template <class T, class Fill>
void multiply_tiles(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* tile, const Fill& fill) {
  const RowBlocks blocks(a.rows, kTileRows);
  const int64_t words = words_of<T>(a), depth = is_deep<T>(a) ? kPieceWords<T> : words,
      pieces = depth ? (words + depth - 1) / depth : 1;
  float* sums = reinterpret_cast<float*>(tile + depth * kTileOutputs);
  for (int64_t o = begin; o < end; o += tile_columns(a)) {
    const int64_t next = next_tile(a, o, begin, end);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t first = i * depth, last = first + depth < words ? first + depth : words;
      fill(o, first * kInWord<T>, last * kInWord<T>, tile);
      const Piece piece = {o, first, last, words, tile, a.rows * (last - first) * 4 > kFarBytes};
      const TileAhead ahead =
          next == o ? TileAhead() : TileAhead(a, next, pieces * blocks.count, (last - first) / kWordsAFetch);
      for (int64_t b = 0; b < blocks.count; ++b) {
        const auto [first_row, count] = blocks[b];
        if (last == words) prefetch_output<T>(a, first_row + count, kTileRows, o);
        float* waiting = sums + (pieces > 1 ? first_row * kTileOutputs : 0);
        with_rows<kTileRows>(count, [&, first_row = first_row, b = b](auto R) {
          multiply_piece<T, decltype(R)::value>(a, piece, first_row, waiting, ahead.part(i * blocks.count + b));
        });
      }
    }
  }
}

// The tiles of the type of x: those of AMX for bf16, if this table has it.
template <class T>
struct Tiles {
  static TileKernels kernels() {
    return {kTileRows, tile_x_bytes<T>, arrange_tile_rows<T>, tile_bytes<T>, tile_columns,
        [](const LinearArgs&) { return int64_t(1); }, chunk_rows, nullptr};
  }
  template <class Fill>
  static void multiply(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* room, const Fill& fill) {
    multiply_tiles<T>(a, begin, end, room, fill);
  }
};
#if defined(__AMX_BF16__)
template <>
struct Tiles<bf16> {
  static TileKernels kernels() {
    return {kAmxRows, amx_x_bytes, arrange_amx_rows, amx_tile_bytes, tile_columns, most_amx_tiles,
        [](const LinearArgs& a) { return a.rows; }, nullptr};
  }
  template <class Fill>
  static void multiply(const LinearArgs& a, int64_t begin, int64_t end, uint32_t* room, const Fill& fill) {
    multiply_amx_tiles(a, begin, end, room, [&](int64_t o, uint32_t* to) { fill(o, 0, a.inputs, to); });
  }
};
#endif

template <class T>
TileKernels plain_tiles() {
  TileKernels made = Tiles<T>::kernels();
  made.multiply = [](const LinearArgs& a, int64_t begin, int64_t end, uint32_t* room) {
    const int64_t gates = a.outputs / 2;
    Tiles<T>::multiply(a, begin, end, room, [&](int64_t o, int64_t first, int64_t last, uint32_t* to) {
      fill_plain_tile<T>(a, o, a.gated ? gates : a.outputs, 0, first, last, to);
      fill_plain_tile<T>(a, a.gated ? gates + o : o + kPanelRows, a.outputs, 1, first, last, to);
    });
  };
  return made;
}

template <class T>
TileKernels panel_tiles() {
  TileKernels made = Tiles<T>::kernels();
  made.multiply = [](const LinearArgs& a, int64_t begin, int64_t end, uint32_t* room) {
    const int64_t beyond = a.gated ? a.outputs / 2 / kPanelRows : 1;  // panels from the first half to the second
    with_code(a.code, [&](auto code) {
      Tiles<T>::multiply(a, begin, end, room, [&](int64_t o, int64_t first, int64_t last, uint32_t* to) {
        for (int64_t half = 0; half < 2; ++half) {
          fill_tile<T, code>(a, o / kPanelRows + half * beyond, int(half), first, last, to);
        }
      });
    });
  };
  return made;
}

// make(T()) of each type that this table multiplies by tiles.
template <class F>
TilesByType by_type(const F& make) {
#if defined(__AVX512BF16__)
  return {make(float()), make(bf16())};
#else
  return {make(float()), {}};
#endif
}
inline TilesByType plain_tile_kernels() {
  return by_type([](auto type) { return plain_tiles<decltype(type)>(); });
}
inline TilesByType panel_tile_kernels() {
  return by_type([](auto type) { return panel_tiles<decltype(type)>(); });
}

#else

inline TilesByType plain_tile_kernels() { return {}; }
inline TilesByType panel_tile_kernels() { return {}; }

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
