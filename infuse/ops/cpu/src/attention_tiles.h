// Attention of many queries in bf16, with bf16 instructions (AVX512-BF16 or AMX): tiles of queries over blocks of keys
// with an online softmax (Dao et al. 2022). Sums and softmax are float. Without these instructions PyTorch's fused
// attention runs.
#pragma once

#include "amx.h"
#include "attention.h"
#include "elements.h"

namespace infuse {
namespace INFUSE_ISA {

#if defined(__AVX512BF16__)

constexpr int kTileQueries = 128;  // rows of a tile: queries times heads per key head
#if defined(__AMX_BF16__)
constexpr int kStepRows = 2 * kAmxRows;  // rows in registers at once
constexpr int kDepthStep = kAmxPairs;
#else
constexpr int kStepRows = 8;
constexpr int kDepthStep = 1;
#endif
constexpr int kPairs = kBlock / 2;
constexpr int64_t kTileScoreStep = kBlock + Vec::width;

// The scratch of one thread. Widths are padded with zeros, to `depth` pairs for scores and `columns` for sums, and so
// are the rows of the last step.
struct Tile {
  int64_t depth, columns;
  uint32_t* q;       // [rows][depth] pairs of consecutive columns
  uint32_t* k;       // [depth][kBlock]
  uint32_t* v;       // [kPairs][columns] pairs of consecutive keys
  float* sums;       // [rows][columns]
  float* scores;     // [kStepRows][kTileScoreStep]
  uint32_t* weights; // [kStepRows][kPairs]
  float* added;      // [kStepRows][columns], of one block of keys
  float *largest, *total, *allowed;  // [rows]

  Tile(const AttentionArgs& a, void* at)
      : depth(((a.width + 1) / 2 + kDepthStep - 1) / kDepthStep * kDepthStep), columns((a.width + 31) / 32 * 32) {
    char* p = static_cast<char*>(at);
    const auto take = [&](int64_t words) {
      char* from = p;
      p += (words * 4 + 63) / 64 * 64;
      return static_cast<void*>(from);
    };
    q = static_cast<uint32_t*>(take(kTileQueries * depth));
    k = static_cast<uint32_t*>(take(depth * kBlock));
    v = static_cast<uint32_t*>(take(kPairs * columns));
    sums = static_cast<float*>(take(kTileQueries * columns));
    scores = static_cast<float*>(take(kStepRows * kTileScoreStep));
    weights = static_cast<uint32_t*>(take(kStepRows * kPairs));
    added = static_cast<float*>(take(kDepthStep > 1 ? kStepRows * columns : 0));
    largest = static_cast<float*>(take(kTileQueries));
    total = static_cast<float*>(take(kTileQueries));
    allowed = static_cast<float*>(take(kTileQueries));
    bytes = p - static_cast<char*>(at);
  }
  int64_t bytes;
};

inline int64_t tile_bytes(const AttentionArgs& a) { return Tile(a, nullptr).bytes; }
inline int64_t queries_of_tile(const AttentionArgs& a) {
  const int64_t queries = kTileQueries / group_of(a);
  return queries < a.tokens ? queries : a.tokens;
}
inline int64_t tiles_per_head(const AttentionArgs& a) { return (a.tokens + queries_of_tile(a) - 1) /
    queries_of_tile(a); }
inline int64_t attention_tiles(const AttentionArgs& a) { return a.batch * a.kv_heads * tiles_per_head(a); }

// Consecutive queries from t on, for all heads of one key head, as rows of (query, head).
struct Rows {
  Head head;
  int64_t t, rows;
};

inline void load_tile_queries(const AttentionArgs& a, const Rows& of, const Tile& tile) {
  const int64_t group = group_of(a);
  for (int64_t r = 0; r < of.rows; ++r) {
    const bf16* q = static_cast<const bf16*>(a.q) + of.head.b * a.q_b + (of.head.n * group + r % group) * a.q_n +
        (of.t + r / group) * a.q_t;
    uint32_t* to = tile.q + r * tile.depth;
    std::memset(to + a.width / 2, 0, size_t(tile.depth - a.width / 2) * sizeof(uint32_t));
    std::memcpy(to, q, size_t(a.width) * sizeof(bf16));
    tile.largest[r] = -kInfinity, tile.total[r] = tile.allowed[r] = 0.0f;
  }
  std::memset(tile.sums, 0, size_t(of.rows * tile.columns) * sizeof(float));
  const int64_t padding = (of.rows + kStepRows - 1) / kStepRows * kStepRows - of.rows;
  std::memset(tile.q + of.rows * tile.depth, 0, size_t(padding * tile.depth) * sizeof(uint32_t));
}

inline void load_keys(const AttentionArgs& a, const bf16* k, int count, const Tile& tile) {
  for (int i = 0; i < kBlock; i += 16) {
    for (int64_t c = 0; c < tile.depth; c += 16) {
      Vec words[16];
      const __mmask32 there = first_of_32(a.width > 2 * c ? a.width - 2 * c : 0);
      for (int r = 0; r < 16 && i + r < count; ++r) {
        words[r] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(there, k + (i + r) * a.k_t + 2 * c));
      }
      transpose(words);
      for (int64_t p = 0; p < 16 && c + p < tile.depth; ++p) _mm512_store_ps(tile.k + (c + p) * kBlock + i, words[p].v);
    }
  }
}

inline void load_values(const AttentionArgs& a, const bf16* v, int count, const Tile& tile) {
  for (int pair = 0; pair < kPairs; ++pair) {
    const bf16* even = v + 2 * pair * a.v_t;
    for (int64_t c = 0; c < tile.columns; c += Vec::width) {
      const int64_t left = a.width - c;
      const __mmask16 some = left <= 0 ? __mmask16(0) : first(int(left < Vec::width ? left : Vec::width));
      const __mmask16 low = 2 * pair < count ? some : __mmask16(0), high = 2 * pair + 1 < count ? some : __mmask16(0);
      const __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(low, even + c));
      const __m512i y = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high, even + a.v_t + c));
      _mm512_store_si512(tile.v + pair * tile.columns + c, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
    }
  }
}

// ---- the two products and the softmax between them ----

#if defined(__AMX_BF16__)

// Computes the scores of rows [row, row + rows), at most kStepRows, with `count` keys.
inline void score_tile_rows(const Tile& tile, int64_t row, int64_t rows, int count) {
  const AmxRows queries = {tile.q + row * tile.depth, tile.depth, kAmxPairs, kAmxRows * tile.depth};
  for (int key = 0; key < count; key += 2 * Vec::width) {
    amx_multiply(rows, queries, tile.k + key, kBlock, tile.depth / kAmxPairs, tile.scores + key, kTileScoreStep);
  }
}

// Scales the sums of these rows by `keep` and adds their weights times the values.
inline void add_tile_values(const Tile& tile, int64_t row, int64_t rows, int count, const float (&keep)[kStepRows]) {
  const AmxRows weights = {tile.weights, kPairs, kAmxPairs, kAmxRows * kPairs};
  const int64_t steps = ((count + 1) / 2 + kAmxPairs - 1) / kAmxPairs;
  for (int64_t c = 0; c < tile.columns; c += 2 * Vec::width) {
    amx_multiply(rows, weights, tile.v + c, tile.columns, steps, tile.added + c, tile.columns);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* to = tile.sums + (row + r) * tile.columns;
    const float* added = tile.added + r * tile.columns;
    for (int64_t c = 0; c < tile.columns; c += Vec::width) {
      store(to + c, fma(load(to + c, Vec::width), Vec(keep[r]), load(added + c, Vec::width)), Vec::width);
    }
  }
}

#else

// sums[r][two registers] += x[r][i] times y[i], summed over `depth` pairs.
template <int R>
[[gnu::always_inline]] inline void add_products(const uint32_t* x, int64_t x_step, const uint32_t* y, int64_t y_step,
                                                int64_t depth, __m512 (&sums)[R][2]) {
  for (int64_t i = 0; i < depth; ++i) {
    const __m512bh y0 = pairs_at(y + i * y_step), y1 = pairs_at(y + i * y_step + Vec::width);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh both = repeated(x[r * x_step + i]);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, y0);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, y1);
    }
  }
}

template <int R>
void score_tile(const Tile& tile, int64_t row, int count) {
  for (int key = 0; key < count; key += 2 * Vec::width) {
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    add_products<R>(tile.q + row * tile.depth, tile.depth, tile.k + key, kBlock, tile.depth, sums);
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(tile.scores + r * kTileScoreStep + key, sums[r][0]);
      _mm512_storeu_ps(tile.scores + r * kTileScoreStep + key + Vec::width, sums[r][1]);
    }
  }
}

template <int R>
void add_values_tile(const Tile& tile, int64_t row, int count, const float (&keep)[kStepRows]) {
  for (int64_t c = 0; c < tile.columns; c += 2 * Vec::width) {
    __m512 sums[R][2];
    float* to = tile.sums + row * tile.columns + c;
    for (int r = 0; r < R; ++r) {
      for (int half = 0; half < 2; ++half) {
        sums[r][half] =
            _mm512_mul_ps(_mm512_load_ps(to + r * tile.columns + half * Vec::width), _mm512_set1_ps(keep[r]));
      }
    }
    add_products<R>(tile.weights, kPairs, tile.v + c, tile.columns, (count + 1) / 2, sums);
    for (int r = 0; r < R; ++r) {
      for (int half = 0; half < 2; ++half) _mm512_store_ps(to + r * tile.columns + half * Vec::width, sums[r][half]);
    }
  }
}

// As the AMX versions above, for rows [row, row + rows), at most kStepRows.
inline void score_tile_rows(const Tile& tile, int64_t row, int64_t rows, int count) {
  with_rows<kStepRows>(rows, [&](auto R) { score_tile<decltype(R)::value>(tile, row, count); });
}
inline void add_tile_values(const Tile& tile, int64_t row, int64_t rows, int count, const float (&keep)[kStepRows]) {
  with_rows<kStepRows>(rows, [&](auto R) { add_values_tile<decltype(R)::value>(tile, row, count, keep); });
}

#endif

// The largest of all kBlock scores of a row; only for scores without mask, bias or soft cap.
inline float largest_score(const float* scores) {
  Vec largest = load(scores, Vec::width);
  for (int i = Vec::width; i < kBlock; i += Vec::width) largest = max(load(scores + i, Vec::width), largest);
  return largest.largest();
}

// Turns the scores of a row, times `scale`, into weights relative to its largest score so far (`block_largest` is
// already scaled). Returns the factor for earlier sums.
inline float weigh_tile_row(const Tile& tile, int64_t row, int r, float block_largest, float scale, int count) {
  const float* scores = tile.scores + r * kTileScoreStep;
  const float before = tile.largest[row + r], now = block_largest > before ? block_largest : before;
  // -infinity minus -infinity is NaN
  const Vec base(now == -kInfinity ? 0.0f : -now), factor(scale), log2_e(1.442695041f);
  const float keep = now == before ? 1.0f : before == -kInfinity ? 0.0f : exp_of(before - now);
  const int written = (count + Vec::width - 1) / Vec::width * Vec::width;
  Vec total;
  for (int i = 0; i < kBlock; i += Vec::width) {
    const Vec exponent = fma(load(scores + i, Vec::width), factor, base) * log2_e;
    const Vec weight = i < written ? coarse_exp2(larger(Vec(-160.0f), exponent)) : Vec();
    total = total + weight;
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile.weights + r * kPairs + i / 2),
        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight.v)));
  }
  tile.total[row + r] = tile.total[row + r] * keep + total.sum();
  tile.largest[row + r] = now;
  return keep;
}

inline void attend_rows(const AttentionArgs& a, const Rows& of, const Tile& tile, int64_t row, int64_t rows,
                        int64_t key, int count) {
  const int64_t group = group_of(a);
  score_tile_rows(tile, row, rows, count);
  const bool each_head = a.mask.n != 0 || a.bias.n != 0,
      each_query = a.causal || a.window || a.mask.t != 0 || a.bias.t != 0;
  Adjustment with;
  float keep[kStepRows];
  for (int r = 0; r < rows; ++r) {
    const int64_t n = (row + r) % group, t = of.t + (row + r) / group;
    if (r == 0 || each_head || (each_query && n == 0)) adjust(a, of.head.b, of.head.n * group + n, t, key, count, with);
    if (with.any) tile.allowed[row + r] = 1.0f;
    float* scores = tile.scores + r * kTileScoreStep;
    if (with.adds || with.hides || a.softcap > 0 || a.scale <= 0 || count < kBlock) {
      keep[r] = weigh_tile_row(tile, row, r, adjusted_scores(a, with, count, scores), 1.0f, count);
    } else {
      keep[r] = weigh_tile_row(tile, row, r, largest_score(scores) * a.scale, a.scale, count);
    }
  }
  add_tile_values(tile, row, rows, count, keep);
}

// Divides and rounds, like write_head.
inline void write_tile(const AttentionArgs& a, const Rows& of, const Tile& tile) {
  const int64_t group = group_of(a);
  for (int64_t r = 0; r < of.rows; ++r) {
    const Vec scale(row_scale(a, of.head.n * group + r % group, tile.total[r], tile.largest[r], tile.allowed[r] > 0));
    bf16* out = static_cast<bf16*>(a.out) +
        ((of.head.b * a.tokens + of.t + r / group) * a.heads + of.head.n * group + r % group) * a.width;
    for (int64_t c = 0; c < a.width; c += Vec::width) {
      store(out + c, load(tile.sums + r * tile.columns + c, Vec::width) * scale,
          int(a.width - c < Vec::width ? a.width - c : Vec::width));
    }
  }
}

// Prefetches the tile that this thread is likely to take next, since the rows of one head are far apart. Only the first
// keys and values are prefetched, since the others are read sequentially.
inline void fetch_tile(const AttentionArgs& a, int64_t index) {
  if (index >= attention_tiles(a)) return;
  const int64_t per_head = tiles_per_head(a), queries = queries_of_tile(a), group = group_of(a),
      t = index % per_head * queries;
  const Head head(a, index / per_head);
  const auto fetch = [&](const void* from, int64_t step, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) prefetch(static_cast<const bf16*>(from) + r * step);
  };
  const bf16* q = static_cast<const bf16*>(a.q) + head.b * a.q_b + head.n * group * a.q_n + t * a.q_t;
  for (int64_t n = 0; n < group; ++n) fetch(q + n * a.q_n, a.q_t, a.tokens - t < queries ? a.tokens - t : queries);
  if (t > 0) return;  // the keys of this head are in the cache
  const int64_t keys = a.length < kTileQueries ? a.length : kTileQueries;
  fetch(static_cast<const bf16*>(a.k) + head.b * a.k_b + head.n * a.k_n, a.k_t, keys);
  fetch(static_cast<const bf16*>(a.v) + head.b * a.v_b + head.n * a.v_n, a.v_t, keys);
}

inline void attend_tile(const AttentionArgs& a, int64_t index, void* scratch) {
#if defined(__AMX_BF16__)
  const AmxRegisters configured;
#endif
  const Tile tile(a, scratch);
  const int64_t per_head = tiles_per_head(a), queries = queries_of_tile(a), group = group_of(a),
      t = index % per_head * queries;
  const int64_t count_t = a.tokens - t < queries ? a.tokens - t : queries;
  const Rows of = {Head(a, index / per_head), t, count_t * group};
  load_tile_queries(a, of, tile);
  fetch_tile(a, index + a.ahead);
  const int64_t position = a.length - a.tokens + t;  // the first query's position among the keys
  const int64_t low = a.window ? position - a.window + 1 : 0, high = a.causal ? position + count_t : a.length;
  const int64_t end = high < a.length ? high : a.length;
  for (int64_t key = low > 0 ? low : 0; key < end; key += kBlock) {
    const int count = int(end - key < kBlock ? end - key : kBlock);
    load_keys(a, static_cast<const bf16*>(a.k) + of.head.b * a.k_b + of.head.n * a.k_n + key * a.k_t, count, tile);
    load_values(a, static_cast<const bf16*>(a.v) + of.head.b * a.v_b + of.head.n * a.v_n + key * a.v_t, count, tile);
    for (int64_t row = 0; row < of.rows; row += kStepRows) {
      const int64_t rows = of.rows - row < kStepRows ? of.rows - row : kStepRows;
      if (a.causal && position + (row + rows - 1) / group < key) continue;  // all these keys are in the future
      if (a.window && position + row / group - a.window >= key + count - 1) continue;
      attend_rows(a, of, tile, row, rows, key, count);
    }
  }
  write_tile(a, of, tile);
}

#endif

inline AttentionKernels attention_kernels() {
  AttentionKernels made =
      {rotary, activate, attend, combine, attention_blocks, Scratch::floats, nullptr, nullptr, nullptr};
#if defined(__AVX512BF16__)
  made.tile = attend_tile, made.tiles = attention_tiles, made.tile_bytes = tile_bytes;
#endif
  return made;
}

}  // namespace INFUSE_ISA
}  // namespace infuse
