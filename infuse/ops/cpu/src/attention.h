// Attention of few queries over a cache: keys and values are read once, block by block, with an online softmax (Milakov
// and Gimelshein 2018). Sums and softmax are float; attention_kernels.h describes the arguments.
#pragma once

#include "activation.h"
#include "attention_quads.h"
#include "rotary.h"

namespace infuse {
namespace INFUSE_ISA {

inline int64_t group_of(const AttentionArgs& a) { return a.heads / a.kv_heads; }
inline int64_t rows_of(const AttentionArgs& a) { return group_of(a) * a.tokens; }
inline int64_t padded_rows(const AttentionArgs& a) {
  const int64_t rows = rows_of(a);
  return rows <= 2 ? rows : (rows + kRows - 1) / kRows * kRows;
}
inline int64_t padded_width(const AttentionArgs& a) {
  return (a.width + kQuadColumns - 1) / kQuadColumns * kQuadColumns;
}
inline int64_t blocks_per_head(const AttentionArgs& a) { return (a.length - a.first_key + kKeyBlock - 1) / kKeyBlock; }
inline int64_t padded_more_width(const AttentionArgs& a) {
  return (a.more_width + kQuadColumns - 1) / kQuadColumns * kQuadColumns;
}
inline int64_t attention_blocks(const AttentionArgs& a) { return a.batch * a.kv_heads * blocks_per_head(a); }
inline int64_t part_begin(const AttentionArgs& a, int64_t part) { return attention_blocks(a) * part / a.parts; }

// The result of some keys for all rows of one key head: weighted sums of values, before division by the sum of weights.
struct Partial {
  float* sums;     // [rows, padded width]
  float* largest;  // largest score of each row
  float* total;    // sum of the weights exp(score - largest)
  float* allowed;  // positive if any key was visible
};

constexpr int64_t kQueryFloats = 2;  // for a column of a query: kQueryBytes

// The scratch of one part: queries, scores, and the partial results of its first and its last head.
struct Scratch {
  int64_t rows, width, more_width;
  float* start;
  Scratch(const AttentionArgs& a, int64_t part) : rows(padded_rows(a)), width(padded_width(a)),
                                                 more_width(padded_more_width(a)), start(a.scratch + part * floats(a)) {}
  static int64_t line(int64_t n) { return (n + 15) / 16 * 16; }  // of 64 bytes
  static int64_t partial_floats(int64_t rows, int64_t width) { return rows * width + 3 * line(rows); }
  static int64_t more_floats(int64_t rows, int64_t more_width) {
    return more_width ? rows * more_width + line(rows * kScoreStep) : 0;
  }
  static int64_t floats(const AttentionArgs& a) {
    const int64_t rows = padded_rows(a), width = padded_width(a);
    return more_floats(rows, padded_more_width(a)) + kQueryFloats * rows * width + line(rows * kScoreStep) +
           4 * line(rows) + width + 2 * partial_floats(rows, width);
  }
  float* more_queries() const { return start; }
  float* more_scores() const { return start + rows * more_width; }
  float* queries() const { return start + more_floats(rows, more_width); }
  float* scores() const { return queries() + kQueryFloats * rows * width; }
  float* keep() const { return scores() + line(rows * kScoreStep); }
  float* query_unit() const { return keep() + line(rows); }         // value of 1 in the queries of each row,
  float* weight_unit() const { return query_unit() + line(rows); }  // and in its weights, if these are integers
  // as in arrange_query
  int32_t* query_start() const { return reinterpret_cast<int32_t*>(weight_unit() + line(rows)); }
  float* room() const { return weight_unit() + 2 * line(rows); }
  Partial partial(int slot) const {
    float* sums = room() + width + slot * partial_floats(rows, width);
    float* largest = sums + rows * width;
    return {sums, largest, largest + line(rows), largest + 2 * line(rows)};
  }
};

inline float exp_of(float x) {
  float lanes[Vec::width];
  store(lanes, exp(Vec(x)), Vec::width);
  return lanes[0];
}

// ---- masks ----

// The values added to the scores of one row in one block, and the keys that it may attend to.
struct Adjustment {
  float added[kMostKeys + Vec::width], allowed[kMostKeys + Vec::width];
  bool adds, hides;
  bool any;  // any key is allowed
};

template <class T>
void add_strided(const T* p, int64_t step, int n, float* to) {
  if (step == 1) {
    for (int i = 0; i < n; ++i) to[i] += widen(p[i]);
  } else {
    for (int i = 0; i < n; ++i) to[i] += widen(p[i * step]);
  }
}
inline void add_scored(const Scored& s, int64_t offset, int n, float* to) {
  switch (s.type) {
    case Type::f32: return add_strided(static_cast<const float*>(s.data) + offset, s.l, n, to);
    case Type::bf16: return add_strided(static_cast<const bf16*>(s.data) + offset, s.l, n, to);
    case Type::f16: return add_strided(static_cast<const f16*>(s.data) + offset, s.l, n, to);
  }
}
inline void hide_where_false(const uint8_t* p, int64_t step, int n, float* allowed) {
  if (step == 1) {
    for (int i = 0; i < n; ++i) allowed[i] = p[i] ? allowed[i] : 0.0f;
  } else {
    for (int i = 0; i < n; ++i) allowed[i] = p[i * step] ? allowed[i] : 0.0f;
  }
}

// Sets the keys [begin, end) of the block that the causal order and the window of query t allow.
inline void set_order(const AttentionArgs& a, int64_t t, int64_t key, int n, int& begin, int& end) {
  const int64_t query = a.length - a.tokens + t;
  const int64_t low = a.window ? query - a.window + 1 - key : 0, high = a.causal ? query + 1 - key : n;
  begin = int(low < 0 ? 0 : low > n ? n : low);
  end = int(high < begin ? begin : high > n ? n : high);
}

// Fills the adjustment for head n of batch row b and query t over keys [key, key + count).
inline void adjust(const AttentionArgs& a, int64_t b, int64_t n, int64_t t, int64_t key, int count, Adjustment& to) {
  int begin, end;
  set_order(a, t, key, count, begin, end);
  const bool bool_mask = a.mask.data && a.mask.is_bool, added_mask = a.mask.data && !a.mask.is_bool;
  to.adds = a.bias.data || added_mask;
  to.hides = bool_mask || begin > 0 || end < count;
  to.any = begin < end;
  if (to.adds) std::memset(to.added, 0, sizeof(to.added));
  const int64_t offset = b * a.mask.b + n * a.mask.n + t * a.mask.t + key * a.mask.l;
  if (added_mask) {
    add_scored(a.mask, offset, count, to.added);
    to.any = false;
    for (int i = begin; i < end; ++i) to.any |= to.added[i] != -kInfinity;
  }
  if (a.bias.data) add_scored(a.bias, b * a.bias.b + n * a.bias.n + t * a.bias.t + key * a.bias.l, count, to.added);
  if (!to.hides) return;
  for (int i = 0; i < count; ++i) to.allowed[i] = i >= begin && i < end ? 1.0f : 0.0f;
  if (bool_mask) {
    hide_where_false(static_cast<const uint8_t*>(a.mask.data) + offset, a.mask.l, count, to.allowed);
    float any = 0;
    for (int i = 0; i < count; ++i) any += to.allowed[i];
    to.any = any > 0;
  }
}

// ---- softmax ----

// Scales by `by`, caps and adjusts the scores of one row in place; returns the largest. Lanes beyond `count` become -infinity.
inline float adjusted_scores(const AttentionArgs& a, const Adjustment& with, int count, float by, float* scores) {
  const Vec scale(by), cap(a.softcap), hidden(-kInfinity), none(0.0f);
  Vec largest(-kInfinity);
  for (int i = 0; i < count; i += Vec::width) {
    Vec s = load(scores + i, Vec::width) * scale;
    if (a.softcap > 0) s = tanh(s / cap) * cap;
    if (with.adds) s = s + load(with.added + i, Vec::width);
    if (with.hides) s = where_less(none, load(with.allowed + i, Vec::width), s, hidden);
    store(scores + i, s, Vec::width);
    if (count - i < Vec::width) {
      for (int j = count; j < i + Vec::width; ++j) scores[j] = -kInfinity;
      s = load(scores + i, Vec::width);
    }
    largest = max(s, largest);
  }
  return largest.largest();
}

// The largest of a row's first scores, whole registers; only for scores without mask, bias or soft cap.
inline float largest_score(const float* scores, int count = kKeyBlock) {
  Vec largest = load(scores, Vec::width);
  for (int i = Vec::width; i < count; i += Vec::width) largest = max(load(scores + i, Vec::width), largest);
  return largest.largest();
}

// Raises the largest score so far of row r to that of a block; `keep` is the factor for earlier sums. Returns the score
// that counts as 0.
inline float raise(const Partial& state, int64_t r, float block_largest, float& keep) {
  const float before = state.largest[r], now = block_largest > before ? block_largest : before;
  keep = now == before ? 1.0f : exp_of(before - now);
  state.largest[r] = now;
  return now == -kInfinity ? 0.0f : now;  // -infinity minus -infinity is NaN
}

// Turns the scores of row r into weights relative to the largest score so far.
template <class S>
void weigh_row(const Partial& state, int64_t r, float block_largest, int count, float* scores, float& keep) {
  const Vec base(raise(state, r, block_largest, keep));
  Vec total;
  for (int i = 0; i < count; i += Vec::width) total = total +
      Weights<S>::keep(scores, i, exp(load(scores + i, Vec::width) - base));
  state.total[r] = state.total[r] * keep + total.sum();
}

// The factor of a row's sums: one over the sum of its weights, with that of the sink of head n, if any. A fully masked
// row has sums of zero; a row whose allowed scores are all -infinity is NaN, as in softmax, unless a sink has the weight.
inline float row_scale(const AttentionArgs& a, int64_t n, float total, float largest, bool allowed) {
  if (!allowed) return 1.0f;
  float sink = -kInfinity;
  if (a.sinks.data) {
    sink = 0;
    add_scored(a.sinks, n * a.sinks.n, 1, &sink);
  }
  if (sink != -kInfinity) {
    const float base = sink > largest ? sink : largest, keep = exp_of(largest - base);
    return keep / (total * keep + exp_of(sink - base));
  }
  return total != 0 ? 1.0f / total : __builtin_nanf("");
}

// ---- blocks, heads, parts ----

// One key head of one batch row, from its index over (batch, key head).
struct Head {
  int64_t b, n;
  Head(const AttentionArgs& a, int64_t index) : b(index / a.kv_heads), n(index % a.kv_heads) {}
};

template <class T, class Query>
void load_query(const T* q, int64_t width, Query* to) {
  if constexpr (std::is_same_v<Query, T>) {
    std::memcpy(to, q, size_t(width) * sizeof(T));
  } else {
    for (int64_t c = 0; c < width; ++c) to[c] = widen(q[c]);
  }
}
template <class T, class S>
void load_queries(const AttentionArgs& a, const Head& head, const Scratch& scratch) {
  const int64_t group = group_of(a), rows = rows_of(a), width = scratch.width;
  std::memset(scratch.queries(), 0, size_t(kQueryFloats * scratch.rows * width) * sizeof(float));
  std::memset(scratch.more_queries(), 0, size_t(scratch.rows * scratch.more_width) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    const T* q = static_cast<const T*>(a.q) + head.b * a.q_b + (head.n * group + r % group) * a.q_n + r / group * a.q_t;
    if constexpr (std::is_same_v<S, quad8>) {
      const int64_t at_once = scratch.rows < kRows ? scratch.rows : kRows, first = r / at_once * at_once;
      auto* to = reinterpret_cast<int8_t*>(scratch.queries()) + first * width * kQueryBytes;
      arrange_query(q, a.width, to + (r - first) * kQueryChunk, at_once * kQueryChunk, scratch.query_unit()[r],
                    scratch.query_start()[r]);
      scratch.query_unit()[r] *= a.scale;
    } else {
      using Query = typename Products<S>::Query;
      load_query(q, a.width, reinterpret_cast<Query*>(scratch.queries()) + r * width);
      load_query(q + a.width, a.more_width, reinterpret_cast<Query*>(scratch.more_queries()) + r * scratch.more_width);
    }
  }
}

inline void clear(const Scratch& scratch, const Partial& state) {
  std::memset(state.sums, 0, size_t(scratch.rows * scratch.width) * sizeof(float));
  for (int64_t r = 0; r < scratch.rows; ++r) state.largest[r] = -kInfinity, state.total[r] = state.allowed[r] = 0.0f,
      scratch.keep()[r] = 1.0f;
}

// The rows from `rows` on, of keys or values: at most one block.
template <class S>
Ahead ahead_of(const AttentionArgs& a, const S* rows, int64_t step, int64_t count) {
  const int64_t row_bytes = a.width * int64_t(sizeof(S)) + (a.of_int8 ? int64_t(sizeof(float)) : 0);
  return {rows, step * int64_t(sizeof(S)), row_bytes, count < kKeyBlock ? count : kKeyBlock};
}

template <class S, int ROWS>
void score_rows(const AttentionArgs& a, const Scratch& scratch, const S* k, int count, const float* key_scales,
                Ahead& ahead) {
  constexpr int at_once = std::is_same_v<S, quad8> ? 8 : Vec::width / ROWS;
  ahead.over(scratch.rows / ROWS * ((count + at_once - 1) / at_once));
  for (int64_t r = 0; r < scratch.rows; r += ROWS) {
    float* scores = scratch.scores() + r * kScoreStep;
    if constexpr (std::is_same_v<S, quad8>) {
      const QuadQueries q = {reinterpret_cast<const int8_t*>(scratch.queries()) + r * scratch.width * kQueryBytes,
                             scratch.query_unit() + r, scratch.query_start() + r};
      count == kKeyBlock ? score_quads<ROWS, true>(k, a.k_t, count, a.width, q, key_scales, scores, ahead)
                         : score_quads<ROWS, false>(k, a.k_t, count, a.width, q, key_scales, scores, ahead);
    } else {
      const auto* q = reinterpret_cast<const typename Products<S>::Query*>(scratch.queries()) + r * scratch.width;
      score_keys<S, ROWS>(k, a.k_t, count, a.width, q, scratch.width, a.scale, scores, ahead);
    }
  }
}
// Adds the products of further columns to the scores.
template <class S, int ROWS>
void add_more_scores(const AttentionArgs& a, const Scratch& scratch, const S* k, int count) {
  for (int64_t r = 0; r < scratch.rows; r += ROWS) {
    float* more = scratch.more_scores() + r * kScoreStep;
    const auto* q = reinterpret_cast<const typename Products<S>::Query*>(scratch.more_queries()) + r * scratch.more_width;
    Ahead none;
    score_keys<S, ROWS>(k, a.more_t, count, a.more_width, q, scratch.more_width, a.scale, more, none);
    float* scores = scratch.scores() + r * kScoreStep;
    for (int row = 0; row < ROWS; ++row, scores += kScoreStep, more += kScoreStep) {
      for (int i = 0; i < count; i += Vec::width) {
        store(scores + i, load(scores + i, Vec::width) + load(more + i, Vec::width), Vec::width);
      }
    }
  }
}
template <class S, int ROWS>
void weigh_rows(const Scratch& scratch, const Partial& state, const BlockScales<S>& scales) {
  for (int64_t r = 0; r < scratch.rows; r += ROWS) {
    const RowSums of = {state.largest + r, state.total + r, scratch.keep() + r, scratch.weight_unit() + r};
    float* scores = scratch.scores() + r * kScoreStep;
    if constexpr (std::is_same_v<S, quad8>) weigh_quads<ROWS>(scores, scales, of);
    else weigh_pairs<ROWS>(scores, of);
  }
}
template <class S, int ROWS>
void add_rows(const AttentionArgs& a, const Scratch& scratch, const Partial& state, const S* v, int count,
              Ahead& ahead) {
  ahead.over(scratch.rows / ROWS * value_steps<S, ROWS>(a.width, count));
  for (int64_t r = 0; r < scratch.rows; r += ROWS) {
    const ValueBlock<S> block = {v, a.v_t, count, a.width, scratch.scores() + r * kScoreStep,
                                 state.sums + r * scratch.width, scratch.width, scratch.keep() + r,
                                 scratch.weight_unit() + r, &ahead};
    if constexpr (std::is_same_v<S, quad8>) {
      count == kKeyBlock ? add_quads<ROWS, true>(block) : add_quads<ROWS, false>(block);
    } else {
      add_values<S, ROWS>(block);
    }
  }
}

inline void multiply_row(float* row, const float* by, int count) {
  for (int i = 0; i < count; i += Vec::width) {
    store(row + i, load(row + i, Vec::width) * load(by + i, Vec::width), Vec::width);
  }
}

template <class T, class S>
void attend_block(const AttentionArgs& a, const Head& head, const Scratch& scratch, const Partial& state, int64_t key) {
  const int count = int(a.length - key < kKeyBlock ? a.length - key : kKeyBlock);
  constexpr bool of_int8 = !std::is_same_v<S, T>, in_quads = std::is_same_v<S, quad8>;
  constexpr bool together = in_quads || kInPairs<S>;  // all rows are weighed at once
  const S* k = static_cast<const S*>(a.k) + head.b * a.k_b + head.n * a.k_n + key * a.k_t;
  const S* v = static_cast<const S*>(a.v) + head.b * a.v_b + head.n * a.v_n + key * a.v_t;
  BlockScales<S> scales;
  const auto scales_of = [&](const S* rows, int64_t step, float* to) {
    if constexpr (in_quads) load_quad_scales(rows, step, count, a.width, to);
    else if constexpr (of_int8) load_scales(rows, step, count, a.width, to);
  };
  const int64_t left = a.length - key - count;
  // of rows of bytes the next keys and then the next values; else these values and then the next keys
  const Ahead next_keys = ahead_of(a, k + count * a.k_t, a.k_t, left);
  Ahead during_scores = in_quads ? next_keys : ahead_of(a, v, a.v_t, a.v == a.k ? 0 : count),
      during_sums = in_quads ? ahead_of(a, v + count * a.v_t, a.v_t, left) : next_keys;
  if constexpr (in_quads) during_scores.fetch(during_scores.left / 8);
  scales_of(k, a.k_t, scales.keys);
  scratch.rows == 1 ? score_rows<S, 1>(a, scratch, k, count, scales.keys, during_scores)
                    : scratch.rows == 2 ? score_rows<S, 2>(a, scratch, k, count, scales.keys, during_scores)
                    : score_rows<S, kRows>(a, scratch, k, count, scales.keys, during_scores);
  if constexpr (std::is_same_v<S, T>) {
    if (a.more_width) {
      const S* more = static_cast<const S*>(a.more_k) + head.b * a.more_b + key * a.more_t;
      scratch.rows == 1 ? add_more_scores<S, 1>(a, scratch, more, count)
                        : scratch.rows == 2 ? add_more_scores<S, 2>(a, scratch, more, count)
                        : add_more_scores<S, kRows>(a, scratch, more, count);
    }
  }
  if constexpr (in_quads) during_sums.fetch(during_sums.left / 8);
  scales_of(v, a.v_t, scales.values);
  if constexpr (in_quads) scales.poison = poison_of(scales);
  const int64_t group = group_of(a), rows = rows_of(a);
  const bool each_head = a.mask.n != 0 || a.bias.n != 0;  // else one adjustment serves all heads
  Adjustment with;
  for (int64_t r = 0; r < rows; ++r) {
    if (each_head || r % group == 0) adjust(a, head.b, head.n * group + r % group, r / group, key, count, with);
    float* scores = scratch.scores() + r * kScoreStep;
    if (with.any) state.allowed[r] = 1.0f;
    if constexpr (together) {
      if (count == kKeyBlock && !with.adds && !with.hides && a.softcap <= 0) continue;
      adjusted_scores(a, with, count, 1.0f, scores);
      for (int i = (count + 15) / 16 * 16; i < kKeyBlock; ++i) scores[i] = -kInfinity;
    } else {
      if constexpr (of_int8) multiply_row(scores, scales.keys, count);
      weigh_row<S>(state, r, adjusted_scores(a, with, count, 1.0f, scores), count, scores, scratch.keep()[r]);
      if constexpr (of_int8) multiply_row(scores, scales.values, count);
    }
  }
  if constexpr (together) {
    during_sums.fetch(during_sums.left / 4);
    scratch.rows == 1 ? weigh_rows<S, 1>(scratch, state, scales)
                      : scratch.rows == 2 ? weigh_rows<S, 2>(scratch, state, scales)
                      : weigh_rows<S, kRows>(scratch, state, scales);
  }
  scratch.rows == 1 ? add_rows<S, 1>(a, scratch, state, v, count, during_sums)
                    : scratch.rows == 2 ? add_rows<S, 2>(a, scratch, state, v, count, during_sums)
                    : add_rows<S, kRows>(a, scratch, state, v, count, during_sums);
}

// Divides and rounds.
template <class T, class S>
void write_head(const AttentionArgs& a, const Head& head, const Scratch& scratch, const Partial& state) {
  const int64_t group = group_of(a), rows = rows_of(a);
  for (int64_t r = 0; r < rows; ++r) {
    const Vec scale(row_scale(a, head.n * group + r % group, state.total[r], state.largest[r], state.allowed[r] > 0));
    const float* sums = finished<S>(state.sums + r * scratch.width, a.width, scratch.room());
    T* out = static_cast<T*>(a.out) +
             ((head.b * a.tokens + r / group) * a.heads + head.n * group + r % group) * a.width;
    for (int64_t c = 0; c < a.width; c += Vec::width) {
      store(out + c, load(sums + c, Vec::width) * scale, int(a.width - c < Vec::width ? a.width - c : Vec::width));
    }
  }
}

template <class T, class S>
void attention_part(const AttentionArgs& a, int64_t part) {
  const Scratch scratch(a, part);
  const int64_t per_head = blocks_per_head(a), begin = part_begin(a, part), end = part_begin(a, part + 1);
  for (int64_t block = begin; block < end;) {
    const Head head(a, block / per_head);
    const int64_t first = block % per_head, last = per_head - first < end - block ? per_head : first + end - block;
    const Partial state = scratch.partial(block == begin ? 0 : 1);
    load_queries<T, S>(a, head, scratch);
    clear(scratch, state);
    for (int64_t i = first; i < last; ++i) attend_block<T, S>(a, head, scratch, state, a.first_key + i * kKeyBlock);
    if (first == 0 && last == per_head) write_head<T, S>(a, head, scratch, state);
    block += last - first;
  }
}

// Adds another part's partial result for the same head.
inline void merge(const AttentionArgs& a, const Scratch& scratch, const Partial& into, const Partial& from) {
  for (int64_t r = 0; r < rows_of(a); ++r) {
    const float largest = from.largest[r] > into.largest[r] ? from.largest[r] : into.largest[r];
    const float base = largest == -kInfinity ? 0.0f : largest;
    const float ours = exp_of(into.largest[r] - base), theirs = exp_of(from.largest[r] - base);
    const Vec keep(ours), add(theirs);
    float* sums = into.sums + r * scratch.width;
    const float* others = from.sums + r * scratch.width;
    for (int64_t c = 0; c < scratch.width; c += Vec::width) {
      store(sums + c, fma(load(others + c, Vec::width), add, load(sums + c, Vec::width) * keep), Vec::width);
    }
    into.total[r] = into.total[r] * ours + from.total[r] * theirs;
    into.largest[r] = largest;
    into.allowed[r] = into.allowed[r] + from.allowed[r];
  }
}

// Combines heads that span several parts: each part left its share in its scratch, and the first one receives the sum.
template <class T, class S>
void combine_parts(const AttentionArgs& a) {
  const int64_t per_head = blocks_per_head(a);
  for (int64_t part = 0; part + 1 < a.parts;) {
    const int64_t begin = part_begin(a, part), end = part_begin(a, part + 1), head = end / per_head,
        head_end = (head + 1) * per_head;
    int64_t next = part + 1;
    if (begin < end && end % per_head) {
      const Scratch scratch(a, part);
      const Partial into = scratch.partial(begin >= head * per_head ? 0 : 1);
      for (; next < a.parts && part_begin(a, next) < head_end; ++next) {
        if (part_begin(a, next) < part_begin(a, next + 1)) merge(a, scratch, into, Scratch(a, next).partial(0));
      }
      write_head<T, S>(a, Head(a, head), scratch, into);
      if (part_begin(a, next) > head_end) --next;  // the last of these parts continues with another head
    }
    part = next;
  }
}

// Calls `run` with the types of activations and of keys and values.
template <class T, class Run>
void with_held(const AttentionArgs& a, Run run) {
  if (!a.of_int8) return run(T(), T());
#if defined(__AVX512VNNI__)
  using Held = std::conditional_t<std::is_same_v<T, float>, code8, quad8>;
#else
  using Held = code8;
#endif
  return run(T(), Held());
}
template <class Run>
void with_types(const AttentionArgs& a, Run run) {
  switch (a.type) {
    case Type::f32: return with_held<float>(a, run);
    case Type::bf16: return with_held<bf16>(a, run);
    case Type::f16: return with_held<f16>(a, run);
  }
}

inline void attend(const AttentionArgs& a, int64_t begin, int64_t end) {
  with_types(a, [&](auto active, auto held) {
    for (int64_t part = begin; part < end; ++part) attention_part<decltype(active), decltype(held)>(a, part);
  });
}
inline void combine(const AttentionArgs& a) {
  with_types(a, [&](auto active, auto held) { combine_parts<decltype(active), decltype(held)>(a); });
}

}  // namespace INFUSE_ISA
}  // namespace infuse
