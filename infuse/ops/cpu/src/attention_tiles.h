// Attention of many queries: tiles of queries over blocks of keys with an online softmax (Dao et al. 2022). Sums and
// softmax are float. Products are of pairs of bf16 if the CPU multiplies them (AVX512-BF16 or AMX), else of floats.
#pragma once

#include "amx.h"
#include "latent.h"
#include "elements.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kTileQueries = 128;  // rows of a tile: queries times heads per key head
constexpr int kTileKeys = kMostKeys;  // of a block
constexpr int64_t kTileScoreStep = kTileKeys + Vec::width;

// What a tile multiplies: words of `values` numbers; `step_rows` rows are in registers at once.
struct InFloats {
  using Word = float;
  using Held = Vec;
  static constexpr int values = 1, step_rows = Vec::width == 16 ? 8 : 4, depth_step = 1;
  static constexpr float exponent_unit = 1.0f;  // of store_weights
  static Held at(const Word* p) { return load(p, Vec::width); }
  static Held repeated(Word x) { return Vec(x); }
  static Vec add(Vec sum, Held x, Held y) { return fma(x, y, sum); }
};
#if defined(__AVX512BF16__)
struct InPairs {
  using Word = uint32_t;
  using Held = __m512bh;
  static constexpr float exponent_unit = 1.442695041f;  // powers of two
#if defined(__AMX_BF16__)
  static constexpr int values = 2, step_rows = 2 * kAmxRows, depth_step = kAmxPairs;
#else
  static constexpr int values = 2, step_rows = 8, depth_step = 1;
#endif
  static Held at(const Word* p) { return pairs_at(p); }
  static Held repeated(Word x) { return infuse::INFUSE_ISA::repeated(x); }
  static Vec add(Vec sum, Held x, Held y) { return _mm512_dpbf16_ps(sum.v, x, y); }
};
#endif

// The scratch of one thread. Widths are padded with zeros, to `depth` words for scores and `columns` for sums, and so
// are the rows of the last step.
template <class P>
struct Tile {
  using Word = typename P::Word;
  static constexpr int weight_step = kTileKeys / P::values;
  int64_t depth, columns;
  Word* q;         // [rows][depth] words of consecutive columns
  Word* k;         // [depth][kTileKeys]
  Word* v;         // [kTileKeys / values][columns] words of consecutive keys
  float* sums;     // [rows][columns]
  float* scores;   // [step_rows][kTileScoreStep]
  Word* weights;   // [step_rows][weight_step]
  float* added;    // [step_rows][columns], of one block of keys
  float *largest, *total, *allowed;  // [rows]

  Tile(const AttentionArgs& a, void* at)
      : depth(((a.width + P::values - 1) / P::values + P::depth_step - 1) / P::depth_step * P::depth_step),
        columns((a.width + kColumns - 1) / kColumns * kColumns) {
    char* p = static_cast<char*>(at);
    const auto take = [&](int64_t words) {
      char* from = p;
      p += (words * 4 + 63) / 64 * 64;
      return static_cast<void*>(from);
    };
    q = static_cast<Word*>(take(kTileQueries * depth));
    k = static_cast<Word*>(take(depth * kTileKeys));
    v = static_cast<Word*>(take(weight_step * columns));
    sums = static_cast<float*>(take(kTileQueries * columns));
    scores = static_cast<float*>(take(P::step_rows * kTileScoreStep));
    weights = static_cast<Word*>(take(P::step_rows * weight_step));
    added = static_cast<float*>(take(P::depth_step > 1 ? P::step_rows * columns : 0));
    largest = static_cast<float*>(take(kTileQueries));
    total = static_cast<float*>(take(kTileQueries));
    allowed = static_cast<float*>(take(kTileQueries));
    bytes = p - static_cast<char*>(at);
  }
  int64_t bytes;
};

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

  // Calls run(row, head, query) for each row.
  template <class F>
  void each(int64_t group, const F& run) const {
    for (int64_t r = 0, query = t; r < rows; ++query) {
      for (int64_t n = 0; n < group; ++n, ++r) run(r, head.n * group + n, query);
    }
  }
};

// ---- loading ----

inline void load_query(const bf16* q, int64_t width, uint32_t* to) { std::memcpy(to, q, size_t(width) * sizeof(bf16)); }
template <class T>
void load_query(const T* q, int64_t width, float* to) {
  for (int64_t c = 0; c < width; c += Vec::width) {
    const int n = int(width - c < Vec::width ? width - c : Vec::width);
    store(to + c, load(q + c, n), n);
  }
}

template <class P, class T>
void load_tile_queries(const AttentionArgs& a, const Rows& of, const Tile<P>& tile) {
  const int64_t group = group_of(a), whole = a.width / P::values;
  of.each(group, [&](int64_t r, int64_t n, int64_t t) {
    auto* to = tile.q + r * tile.depth;
    std::memset(to + whole, 0, size_t(tile.depth - whole) * sizeof(*to));
    load_query(static_cast<const T*>(a.q) + of.head.b * a.q_b + n * a.q_n + t * a.q_t, a.width, to);
    tile.largest[r] = -kInfinity, tile.total[r] = tile.allowed[r] = 0.0f;
  });
  std::memset(tile.sums, 0, size_t(of.rows * tile.columns) * sizeof(float));
  const int64_t padding = (of.rows + P::step_rows - 1) / P::step_rows * P::step_rows - of.rows;
  std::memset(tile.q + of.rows * tile.depth, 0, size_t(padding * tile.depth) * sizeof(typename P::Word));
}

template <class S>
float row_scale_of(const S* row, int64_t width) {
  return std::is_same_v<S, code8> ? scale_of(row, width) : 1.0f;
}
template <class S>
Vec columns_of(const S* row, int64_t c, int64_t width, float scale) {
  const int64_t left = width - c;
  const Vec x = load(row + c, left <= 0 ? 0 : int(left < Vec::width ? left : Vec::width));
  return std::is_same_v<S, code8> ? x * Vec(scale) : x;
}

template <class S>
void load_keys(const AttentionArgs& a, const S* k, int count, const Tile<InFloats>& tile) {
  for (int i = 0; i < count; i += Vec::width) {
    for (int64_t c = 0; c < tile.depth; c += Vec::width) {
      Vec lanes[Vec::width];
      for (int r = 0; r < Vec::width && i + r < count; ++r) {
        const S* row = k + (i + r) * a.k_t;
        lanes[r] = columns_of(row, c, a.width, row_scale_of(row, a.width));
      }
      transpose(lanes);
      for (int64_t p = 0; p < Vec::width && c + p < tile.depth; ++p) {
        store(tile.k + (c + p) * kTileKeys + i, lanes[p], Vec::width);
      }
    }
  }
}
template <class S>
void load_values(const AttentionArgs& a, const S* v, int count, const Tile<InFloats>& tile) {
  for (int i = 0; i < count; ++i) {
    const S* row = v + i * a.v_t;
    const float scale = row_scale_of(row, a.width);
    for (int64_t c = 0; c < tile.columns; c += Vec::width) {
      store(tile.v + i * tile.columns + c, columns_of(row, c, a.width, scale), Vec::width);
    }
  }
}

#if defined(__AVX512BF16__)

// Keys and values of type S: up to 32 columns of a row in bf16, or 16 of them.
template <class S>
struct Columns {
  static __m512i pairs(const S* p, float, __mmask32 there) { return _mm512_maskz_loadu_epi16(there, p); }
  static __m256i some(const S* p, float, __mmask16 there) { return _mm256_maskz_loadu_epi16(there, p); }
};
template <>
struct Columns<code8> {
  static __m512 values(const code8* p, float scale, __mmask16 there) {
    const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(there, p)));
    return _mm512_mul_ps(codes, _mm512_set1_ps(scale));
  }
  static __m512i pairs(const code8* p, float scale, __mmask32 there) {
    const __m512 low = values(p, scale, __mmask16(there)), high = values(p + 16, scale, __mmask16(there >> 16));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
  static __m256i some(const code8* p, float scale, __mmask16 there) {
    return (__m256i)_mm512_cvtneps_pbh(values(p, scale, there));
  }
};
template <class S>
void load_keys(const AttentionArgs& a, const S* k, int count, const Tile<InPairs>& tile) {
  for (int i = 0; i < count; i += 16) {
    for (int64_t c = 0; c < tile.depth; c += 16) {
      Vec words[16];
      const __mmask32 there = first_of_32(a.width > 2 * c ? a.width - 2 * c : 0);
      for (int r = 0; r < 16 && i + r < count; ++r) {
        const S* row = k + (i + r) * a.k_t;
        words[r] = _mm512_castsi512_ps(Columns<S>::pairs(row + 2 * c, row_scale_of(row, a.width), there));
      }
      transpose(words);
      for (int64_t p = 0; p < 16 && c + p < tile.depth; ++p) {
        _mm512_store_ps(tile.k + (c + p) * kTileKeys + i, words[p].v);
      }
    }
  }
}

template <class S>
void load_values(const AttentionArgs& a, const S* v, int count, const Tile<InPairs>& tile) {
  constexpr int step = InPairs::depth_step;
  const int pairs = ((count + 1) / 2 + step - 1) / step * step;
  for (int pair = 0; pair < pairs; ++pair) {
    const S *even = v + 2 * pair * a.v_t, *odd = even + a.v_t;
    const bool has_even = 2 * pair < count, has_odd = 2 * pair + 1 < count;
    const float even_scale = has_even ? row_scale_of(even, a.width) : 0.0f,
        odd_scale = has_odd ? row_scale_of(odd, a.width) : 0.0f;
    for (int64_t c = 0; c < tile.columns; c += Vec::width) {
      const int64_t left = a.width - c;
      const __mmask16 some = left <= 0 ? __mmask16(0) : first(int(left < Vec::width ? left : Vec::width));
      const __mmask16 low = has_even ? some : __mmask16(0), high = has_odd ? some : __mmask16(0);
      const __m512i x = _mm512_cvtepu16_epi32(Columns<S>::some(even + c, even_scale, low));
      const __m512i y = _mm512_cvtepu16_epi32(Columns<S>::some(odd + c, odd_scale, high));
      _mm512_store_si512(tile.v + pair * tile.columns + c, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
    }
  }
}

#endif

// Loads the keys and values [key, key + count) of a head.
template <class P, class S>
void load_block(const AttentionArgs& a, const Head& head, int64_t key, int count, const Tile<P>& tile) {
  load_keys(a, static_cast<const S*>(a.k) + head.b * a.k_b + head.n * a.k_n + key * a.k_t, count, tile);
  load_values(a, static_cast<const S*>(a.v) + head.b * a.v_b + head.n * a.v_n + key * a.v_t, count, tile);
}

// ---- the two products and the softmax between them ----

// sums[r][two registers] += x[r][i] times y[i], summed over `depth` words.
template <class P, int R>
[[gnu::always_inline]] inline void add_products(const typename P::Word* x, int64_t x_step, const typename P::Word* y,
                                                int64_t y_step, int64_t depth, Vec (&sums)[R][2]) {
  for (int64_t i = 0; i < depth; ++i) {
    const typename P::Held y0 = P::at(y + i * y_step), y1 = P::at(y + i * y_step + Vec::width);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename P::Held both = P::repeated(x[r * x_step + i]);
      sums[r][0] = P::add(sums[r][0], both, y0);
      sums[r][1] = P::add(sums[r][1], both, y1);
    }
  }
}

template <class P, int R>
void score_tile(const Tile<P>& tile, int64_t row, int count) {
  for (int key = 0; key < count; key += 2 * Vec::width) {
    Vec sums[R][2];
    add_products<P, R>(tile.q + row * tile.depth, tile.depth, tile.k + key, kTileKeys, tile.depth, sums);
    for (int r = 0; r < R; ++r) {
      store(tile.scores + r * kTileScoreStep + key, sums[r][0], Vec::width);
      store(tile.scores + r * kTileScoreStep + key + Vec::width, sums[r][1], Vec::width);
    }
  }
}

// Scales the sums of these rows by `keep` and adds their weights times the values.
template <class P, int R>
void add_values_tile(const Tile<P>& tile, int64_t row, int count, const float* keep) {
  for (int64_t c = 0; c < tile.columns; c += 2 * Vec::width) {
    Vec sums[R][2];  // of this block only: one running sum over thousands of keys would lose digits
    add_products<P, R>(tile.weights, tile.weight_step, tile.v + c, tile.columns, (count + P::values - 1) / P::values,
                       sums);
    for (int r = 0; r < R; ++r) {
      float* to = tile.sums + (row + r) * tile.columns + c;
      for (int half = 0; half < 2; ++half, to += Vec::width) {
        store(to, fma(load(to, Vec::width), Vec(keep[r]), sums[r][half]), Vec::width);
      }
    }
  }
}

// The same for rows [row, row + rows), at most step_rows.
template <class P>
void score_tile_rows(const Tile<P>& tile, int64_t row, int64_t rows, int count) {
  with_rows<P::step_rows>(rows, [&](auto R) { score_tile<P, decltype(R)::value>(tile, row, count); });
}
template <class P>
void add_tile_values(const Tile<P>& tile, int64_t row, int64_t rows, int count, const float* keep) {
  with_rows<P::step_rows>(rows, [&](auto R) { add_values_tile<P, decltype(R)::value>(tile, row, count, keep); });
}

#if defined(__AMX_BF16__)

template <>
inline void score_tile_rows(const Tile<InPairs>& tile, int64_t row, int64_t rows, int count) {
  const AmxRows queries = {tile.q + row * tile.depth, tile.depth, kAmxPairs, kAmxRows * tile.depth};
  for (int key = 0; key < count; key += 2 * Vec::width) {
    amx_multiply(rows, queries, tile.k + key, kTileKeys, tile.depth / kAmxPairs, tile.scores + key, kTileScoreStep);
  }
}

template <>
inline void add_tile_values(const Tile<InPairs>& tile, int64_t row, int64_t rows, int count, const float* keep) {
  const AmxRows weights = {tile.weights, tile.weight_step, kAmxPairs, kAmxRows * tile.weight_step};
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

#endif

// Stores weights from key i on, e^x as exactly as the words are; exponents are in P::exponent_unit.
inline Vec store_weights(float* to, int i, Vec exponent) {
  const Vec weight = exp(exponent);
  store(to + i, weight, Vec::width);
  return weight;
}
#if defined(__AVX512BF16__)
inline Vec store_weights(uint32_t* to, int i, Vec exponent) {
  const Vec weight = coarse_exp2(larger(Vec(-160.0f), exponent));
  _mm256_store_si256(reinterpret_cast<__m256i*>(to + i / 2), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight.v)));
  return weight;
}
#endif

// Keys of a block that weights are stored for.
template <class P>
int written_keys(int count) {
  return P::depth_step > 1 ? kTileKeys : (count + Vec::width - 1) / Vec::width * Vec::width;
}

// Turns the scores of a row, times `scale`, into weights relative to its largest score so far (`block_largest` is
// already scaled). Returns the factor for earlier sums.
template <class P>
float weigh_tile_row(const Tile<P>& tile, int64_t row, int r, float block_largest, float scale, int count) {
  float* scores = tile.scores + r * kTileScoreStep;
  const float before = tile.largest[row + r], now = block_largest > before ? block_largest : before;
  // -infinity minus -infinity is NaN
  const Vec base(now == -kInfinity ? 0.0f : -now), factor(scale), unit(P::exponent_unit);
  const float keep = now == before ? 1.0f : before == -kInfinity ? 0.0f : exp_of(before - now);
  const int written = written_keys<P>(count);
  for (int i = count; i < written; ++i) scores[i] = -kInfinity;
  Vec total;
  for (int i = 0; i < written; i += Vec::width) {
    // Multiplied last: a mask may have added -3e38 to every score, whose difference is 0.
    const Vec exponent = fma(load(scores + i, Vec::width), factor, base) * unit;
    total = total + store_weights(tile.weights + r * tile.weight_step, i, exponent);
  }
  tile.total[row + r] = tile.total[row + r] * keep + total.sum();
  tile.largest[row + r] = now;
  return keep;
}

// The same for `rows` rows whose scores are neither masked nor changed. The factors of all rows are computed at once:
// whether a row has a larger score than before cannot be predicted.
template <class P>
void weigh_tile_rows(const Tile<P>& tile, int64_t row, int64_t rows, float scale, int count, float* keep) {
  const int written = written_keys<P>(count);
  alignas(64) float tops[P::step_rows], bases[P::step_rows];
  for (int64_t r = 0; r < rows; ++r) {
    float* scores = tile.scores + r * kTileScoreStep;
    for (int i = count; i < written; ++i) scores[i] = -kInfinity;
    tops[r] = largest_score(scores, written);
  }
  const Vec lowest(-kInfinity), factor(scale), unit(P::exponent_unit);
  for (int64_t r = 0; r < rows; r += Vec::width) {
    const int n = int(rows - r < Vec::width ? rows - r : Vec::width);
    float* largest = tile.largest + row + r;
    const Vec before = load(largest, n), now = max(load(tops + r, n) * factor, before);
    store(keep + r, where_less(lowest, now, exp(before - now), Vec(1.0f)), n);
    store(bases + r, where_less(lowest, now, Vec(0.0f) - now * unit, Vec(0.0f)), n);
    store(largest, now, n);
  }
  const Vec steps = factor * unit;
  for (int64_t r = 0; r < rows; ++r) {
    const float* scores = tile.scores + r * kTileScoreStep;
    const Vec base(bases[r]);
    Vec total;
    for (int i = 0; i < written; i += Vec::width) {
      const Vec exponent = fma(load(scores + i, Vec::width), steps, base);
      total = total + store_weights(tile.weights + r * tile.weight_step, i, exponent);
    }
    tile.total[row + r] = tile.total[row + r] * keep[r] + total.sum();
  }
}

// Whether a bool mask, one for all heads, shows keys [key, key + count) to queries [first, last]. Models pass the causal
// order of a prompt's later parts as such a mask, which hides nothing before the part.
inline bool shows_all(const AttentionArgs& a, int64_t b, int64_t first, int64_t last, int64_t key, int count) {
  const Scored& m = a.mask;
  if (!m.is_bool || m.n != 0 || m.l != 1) return false;
  for (int64_t t = first; t <= last; ++t) {
    const uint8_t* row = static_cast<const uint8_t*>(m.data) + b * m.b + t * m.t + key;
    uint8_t hidden = 0;
    for (int i = 0; i < count; ++i) hidden |= row[i] == 0;
    if (hidden) return false;
  }
  return true;
}

template <class P>
void attend_rows(const AttentionArgs& a, const Rows& of, const Tile<P>& tile, int64_t row, int64_t rows, int64_t key,
                 int count) {
  const int64_t group = group_of(a);
  if (a.causal) {  // the other keys are in the future of all these rows
    const int64_t seen = a.length - a.tokens + of.t + (row + rows - 1) / group + 1 - key;
    if (seen < count) count = int(seen);
  }
  score_tile_rows(tile, row, rows, count);
  const bool each_head = a.mask.n != 0 || a.bias.n != 0,
      each_query = a.causal || a.window || a.mask.t != 0 || a.bias.t != 0;
  const int64_t first_query = a.length - a.tokens + of.t + row / group;
  const bool all_keys = !a.window && (!a.causal || key + count <= first_query + 1);
  alignas(64) float keep[P::step_rows];
  const int64_t first = of.t + row / group, last = of.t + (row + rows - 1) / group;
  const bool plain = all_keys && !a.bias.data && a.softcap <= 0 && a.scale > 0;
  if (plain && (!a.mask.data || shows_all(a, of.head.b, first, last, key, count))) {
    for (int64_t r = 0; r < rows; ++r) tile.allowed[row + r] = 1.0f;
    weigh_tile_rows(tile, row, rows, a.scale, count, keep);
    return add_tile_values(tile, row, rows, count, keep);
  }
  Adjustment with;
  for (int r = 0; r < rows; ++r) {
    const int64_t n = (row + r) % group, t = of.t + (row + r) / group;
    if (r == 0 || each_head || (each_query && n == 0)) adjust(a, of.head.b, of.head.n * group + n, t, key, count, with);
    if (with.any) tile.allowed[row + r] = 1.0f;
    float* scores = tile.scores + r * kTileScoreStep;
    if (with.adds || with.hides || a.softcap > 0 || a.scale <= 0 || count < kTileKeys) {
      keep[r] = weigh_tile_row(tile, row, r, adjusted_scores(a, with, count, a.scale, scores), 1.0f, count);
    } else {
      keep[r] = weigh_tile_row(tile, row, r, largest_score(scores, count) * a.scale, a.scale, count);
    }
  }
  add_tile_values(tile, row, rows, count, keep);
}

// Divides and rounds, like write_head.
template <class P, class T>
void write_tile(const AttentionArgs& a, const Rows& of, const Tile<P>& tile) {
  of.each(group_of(a), [&](int64_t r, int64_t n, int64_t t) {
    const Vec scale(row_scale(a, n, tile.total[r], tile.largest[r], tile.allowed[r] > 0));
    T* out = static_cast<T*>(a.out) + ((of.head.b * a.tokens + t) * a.heads + n) * a.width;
    const float* sums = tile.sums + r * tile.columns;
    int64_t c = 0;
    for (; c + Vec::width <= a.width; c += Vec::width) {
      store_coarse(out + c, load(sums + c, Vec::width) * scale, Vec::width);
    }
    if (c < a.width) store_coarse(out + c, load(sums + c, Vec::width) * scale, int(a.width - c));
  });
}

// Prefetches the tile that this thread is likely to take next, since the rows of one head are far apart. Only the first
// keys and values are prefetched, since the others are read sequentially.
inline void fetch_tile(const AttentionArgs& a, int64_t index) {
  if (index >= attention_tiles(a)) return;
  const int64_t per_head = tiles_per_head(a), queries = queries_of_tile(a), group = group_of(a),
      t = index % per_head * queries;
  const Head head(a, index / per_head);
  const auto fetch = [&](const void* from, int64_t first, int64_t step, int64_t rows, int64_t element_bytes) {
    for (int64_t r = 0; r < rows; ++r) prefetch(static_cast<const char*>(from) + (first + r * step) * element_bytes);
  };
  const int64_t q = head.b * a.q_b + head.n * group * a.q_n + t * a.q_t, rest = a.tokens - t;
  const int64_t element_bytes = a.type == Type::f32 ? 4 : 2;
  for (int64_t n = 0; n < group; ++n) {
    fetch(a.q, q + n * a.q_n, a.q_t, rest < queries ? rest : queries, element_bytes);
  }
  if (t > 0) return;  // the keys of this head are in the cache
  const int64_t keys = a.length < kTileQueries ? a.length : kTileQueries, held_bytes = a.of_int8 ? 1 : element_bytes;
  fetch(a.k, head.b * a.k_b + head.n * a.k_n, a.k_t, keys, held_bytes);
  fetch(a.v, head.b * a.v_b + head.n * a.v_n, a.v_t, keys, held_bytes);
}

template <class P, class T>
void attend_tile_in(const AttentionArgs& a, int64_t index, void* scratch) {
  const Tile<P> tile(a, scratch);
  const int64_t per_head = tiles_per_head(a), queries = queries_of_tile(a), group = group_of(a),
      t = index % per_head * queries;
  const int64_t count_t = a.tokens - t < queries ? a.tokens - t : queries;
  const Rows of = {Head(a, index / per_head), t, count_t * group};
  load_tile_queries<P, T>(a, of, tile);
  fetch_tile(a, index + a.ahead);
  const int64_t position = a.length - a.tokens + t;  // the first query's position among the keys
  const int64_t low = a.window ? position - a.window + 1 : 0, high = a.causal ? position + count_t : a.length;
  const int64_t end = high < a.length ? high : a.length;
  for (int64_t key = low > 0 ? low : 0; key < end; key += kTileKeys) {
    const int count = int(end - key < kTileKeys ? end - key : kTileKeys);
    a.of_int8 ? load_block<P, code8>(a, of.head, key, count, tile) : load_block<P, T>(a, of.head, key, count, tile);
    for (int64_t row = 0; row < of.rows; row += P::step_rows) {
      const int64_t rows = of.rows - row < P::step_rows ? of.rows - row : P::step_rows;
      if (a.causal && position + (row + rows - 1) / group < key) continue;  // all these keys are in the future
      if (a.window && position + row / group - a.window >= key + count - 1) continue;
      attend_rows(a, of, tile, row, rows, key, count);
    }
  }
  write_tile<P, T>(a, of, tile);
}

inline void attend_tile(const AttentionArgs& a, int64_t index, void* scratch) {
  if (a.type == Type::f32) return attend_tile_in<InFloats, float>(a, index, scratch);
  if (a.type == Type::f16) return attend_tile_in<InFloats, f16>(a, index, scratch);
#if defined(__AVX512BF16__)
#if defined(__AMX_BF16__)
  const AmxRegisters configured;
#endif
  return attend_tile_in<InPairs, bf16>(a, index, scratch);
#else
  return attend_tile_in<InFloats, bf16>(a, index, scratch);
#endif
}

inline int64_t tile_bytes(const AttentionArgs& a) {
#if defined(__AVX512BF16__)
  if (a.type == Type::bf16) return Tile<InPairs>(a, nullptr).bytes;
#endif
  return Tile<InFloats>(a, nullptr).bytes;
}

inline AttentionKernels attention_kernels() {
#if defined(__AVX512BF16__)
  constexpr bool in_pairs = true;
#else
  constexpr bool in_pairs = false;
#endif
  return {rotary, activate, attend, combine, attention_blocks, Scratch::floats, absorb, expand, attend_tile,
          attention_tiles, tile_bytes, in_pairs};
}

}  // namespace INFUSE_ISA
}  // namespace infuse
