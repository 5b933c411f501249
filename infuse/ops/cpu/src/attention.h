// Attention of few queries over a cache: keys and values are read once, block by block, with an online softmax (Milakov
// and Gimelshein 2018). Sums and softmax are float; attention_kernels.h describes the arguments.
#pragma once

#include "activation.h"
#include "attention_products.h"
#include "rotary.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kBlock = 64;                       // keys: with 128, keys and values evict each other from the L1 cache
constexpr int kScoreStep = kBlock + Vec::width;  // score_keys writes beyond the block
constexpr float kInfinity = __builtin_inff();

inline int64_t group_of(const AttentionArgs& a) { return a.heads / a.kv_heads; }
inline int64_t rows_of(const AttentionArgs& a) { return group_of(a) * a.tokens; }
inline int64_t padded_rows(const AttentionArgs& a) {
  const int64_t rows = rows_of(a);
  return rows <= 2 ? rows : (rows + kRows - 1) / kRows * kRows;
}
inline int64_t padded_width(const AttentionArgs& a) { return (a.width + kColumns - 1) / kColumns * kColumns; }
inline int64_t blocks_per_head(const AttentionArgs& a) { return (a.length - a.first_key + kBlock - 1) / kBlock; }
inline int64_t attention_blocks(const AttentionArgs& a) { return a.batch * a.kv_heads * blocks_per_head(a); }
inline int64_t part_begin(const AttentionArgs& a, int64_t part) { return attention_blocks(a) * part / a.parts; }

// The result of some keys for all rows of one key head: weighted sums of values, before division by the sum of weights.
struct Partial {
  float* sums;     // [rows, padded width]
  float* largest;  // largest score of each row
  float* total;    // sum of the weights exp(score - largest)
  float* allowed;  // positive if any key was visible
};

// The scratch of one part: queries, scores, and the partial results of its first and its last head.
struct Scratch {
  int64_t rows, width;
  float* start;
  Scratch(const AttentionArgs& a, int64_t part) : rows(padded_rows(a)), width(padded_width(a)),
                                                 start(a.scratch + part * floats(a)) {}
  static int64_t line(int64_t n) { return (n + 15) / 16 * 16; }  // of 64 bytes
  static int64_t partial_floats(int64_t rows, int64_t width) { return rows * width + 3 * line(rows); }
  static int64_t floats(const AttentionArgs& a) {
    const int64_t rows = padded_rows(a), width = padded_width(a);
    return rows * width + line(rows * kScoreStep) + 3 * line(rows) + width + 2 * partial_floats(rows, width);
  }
  float* queries() const { return start; }
  float* scores() const { return queries() + rows * width; }
  float* keep() const { return scores() + line(rows * kScoreStep); }
  float* query_unit() const { return keep() + line(rows); }         // value of 1 in the queries of each row,
  float* weight_unit() const { return query_unit() + line(rows); }  // and in its weights, if these are integers
  float* room() const { return weight_unit() + line(rows); }
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
  float added[kBlock + Vec::width], allowed[kBlock + Vec::width];
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

// Scales, caps and adjusts the scores of one row in place; returns the largest. Lanes beyond `count` become -infinity.
inline float adjusted_scores(const AttentionArgs& a, const Adjustment& with, int count, float* scores) {
  const Vec scale(a.scale), cap(a.softcap), hidden(-kInfinity), none(0.0f);
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

// Turns the scores of row r into weights relative to the largest score so far; `keep` is the factor for earlier sums.
template <class S>
void weigh_row(const Partial& state, int64_t r, float block_largest, int count, float* scores, float& keep) {
  const float before = state.largest[r], now = block_largest > before ? block_largest : before;
  const Vec base(now == -kInfinity ? 0.0f : now);  // -infinity minus -infinity is NaN
  keep = now == before ? 1.0f : exp_of(before - now);
  Vec total;
  for (int i = 0; i < count; i += Vec::width) total = total +
      Weights<S>::keep(scores, i, exp(load(scores + i, Vec::width) - base));
  state.total[r] = state.total[r] * keep + total.sum();
  state.largest[r] = now;
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

template <class T, class S>
void load_queries(const AttentionArgs& a, const Head& head, const Scratch& scratch) {
  using Query = typename Products<S>::Query;
  const int64_t group = group_of(a), rows = rows_of(a), width = scratch.width;
  Query* to = reinterpret_cast<Query*>(scratch.queries());
  std::memset(to, 0, size_t(scratch.rows * width) * sizeof(Query));
  for (int64_t r = 0; r < rows; ++r) {
    const T* q = static_cast<const T*>(a.q) + head.b * a.q_b + (head.n * group + r % group) * a.q_n + r / group * a.q_t;
    if constexpr (std::is_same_v<Query, T>) {
      std::memcpy(to + r * width, q, size_t(a.width) * sizeof(T));
    } else if constexpr (std::is_same_v<Query, int16_t>) {
      const float most = float(0x7fffffff / 127) / float(a.width);  // else the sum of products may exceed 32 bits
      scratch.query_unit()[r] = to_int16(q, a.width, most < 32767 ? most : 32767, to + r * width);
    } else {
      for (int64_t c = 0; c < a.width; ++c) to[r * width + c] = widen(q[c]);
    }
  }
}

inline void clear(const Scratch& scratch, const Partial& state) {
  std::memset(state.sums, 0, size_t(scratch.rows * scratch.width) * sizeof(float));
  for (int64_t r = 0; r < scratch.rows; ++r) state.largest[r] = -kInfinity, state.total[r] = state.allowed[r] = 0.0f,
      scratch.keep()[r] = 1.0f;
}

// `count` rows of keys or values from `rows` on; none for the later passes over a block.
template <class S>
RowsAhead ahead_of(const AttentionArgs& a, const S* rows, int64_t step, int64_t count) {
  const int64_t row_bytes = a.width * int64_t(sizeof(S)) + (a.of_int8 ? int64_t(sizeof(float)) : 0);
  return {reinterpret_cast<const char*>(rows), step * int64_t(sizeof(S)), row_bytes, int(count < 0 ? 0 : count)};
}

template <class S, int ROWS>
void score_rows(const AttentionArgs& a, const Scratch& scratch, const S* k, int count, RowsAhead ahead) {
  const auto* q = reinterpret_cast<const typename Products<S>::Query*>(scratch.queries());
  for (int64_t r = 0; r < scratch.rows; r += ROWS) {
    score_keys<S, ROWS>(k, a.k_t, count, a.width, q + r * scratch.width, scratch.width,
        scratch.scores() + r * kScoreStep, kScoreStep, ahead);
    ahead.count = 0;
  }
}
template <class S, int ROWS>
void add_rows(const AttentionArgs& a, const Scratch& scratch, const Partial& state, const S* v, int count,
              RowsAhead ahead) {
  for (int64_t r = 0; r < scratch.rows; r += ROWS) {
    const ValueBlock<S> block = {v, a.v_t, count, a.width, scratch.scores() + r * kScoreStep, kScoreStep,
                                 state.sums + r * scratch.width, scratch.width, scratch.keep() + r,
                                 scratch.weight_unit() + r, ahead};
    add_values<S, ROWS>(block);
    ahead.count = 0;
  }
}

// The scales of the keys and values of a block of an int8 cache.
struct BlockScales {
  float keys[kBlock], values[kBlock];
};

inline void multiply_row(float* row, const float* by, int count, float factor) {
  for (int i = 0; i < count; i += Vec::width) {
    store(row + i, load(row + i, Vec::width) * load(by + i, Vec::width) * Vec(factor), Vec::width);
  }
}

// Multiplies the scores of row r by the scales of their keys, or its weights by those of their values; these are then
// rounded if S is multiplied in pairs.
template <class S>
void scale_scores(const Scratch& scratch, int64_t r, const BlockScales& scales, int count) {
  multiply_row(scratch.scores() + r * kScoreStep, scales.keys, count, kInPairs<S> ? scratch.query_unit()[r] : 1.0f);
}
template <class S>
void scale_weights(const Scratch& scratch, int64_t r, const BlockScales& scales, int count) {
  float* row = scratch.scores() + r * kScoreStep;
  multiply_row(row, scales.values, count, 1.0f);
#if defined(__AVX512F__)
  if constexpr (kInPairs<S>) {
    scratch.weight_unit()[r] = to_int16(row, count, 32767.0f, reinterpret_cast<int16_t*>(row));
  }
#endif
}

template <class T, class S>
void attend_block(const AttentionArgs& a, const Head& head, const Scratch& scratch, const Partial& state, int64_t key) {
  const int count = int(a.length - key < kBlock ? a.length - key : kBlock);
  constexpr bool of_int8 = !std::is_same_v<S, T>;
  const S* k = static_cast<const S*>(a.k) + head.b * a.k_b + head.n * a.k_n + key * a.k_t;
  const S* v = static_cast<const S*>(a.v) + head.b * a.v_b + head.n * a.v_n + key * a.v_t;
  BlockScales scales;
  if constexpr (of_int8) load_scales(k, a.k_t, count, a.width, scales.keys);
  const RowsAhead values = ahead_of(a, v, a.v_t, count);
  scratch.rows == 1 ? score_rows<S, 1>(a, scratch, k, count, values)
                    : scratch.rows == 2 ? score_rows<S, 2>(a, scratch, k, count, values)
                    : score_rows<S, kRows>(a, scratch, k, count, values);
  if constexpr (of_int8) load_scales(v, a.v_t, count, a.width, scales.values);  // their rows have been prefetched
  const int64_t group = group_of(a), rows = rows_of(a);
  const bool each_head = a.mask.n != 0 || a.bias.n != 0;  // else one adjustment serves all heads
  Adjustment with;
  for (int64_t r = 0; r < rows; ++r) {
    if (each_head || r % group == 0) adjust(a, head.b, head.n * group + r % group, r / group, key, count, with);
    float* scores = scratch.scores() + r * kScoreStep;
    if (with.any) state.allowed[r] = 1.0f;
    if constexpr (of_int8) scale_scores<S>(scratch, r, scales, count);
    weigh_row<S>(state, r, adjusted_scores(a, with, count, scores), count, scores, scratch.keep()[r]);
    if constexpr (of_int8) scale_weights<S>(scratch, r, scales, count);
  }
  const int64_t left = a.length - key - count;
  const RowsAhead next = ahead_of(a, k + count * a.k_t, a.k_t, left < kBlock ? left : kBlock);
  scratch.rows == 1 ? add_rows<S, 1>(a, scratch, state, v, count, next)
                    : scratch.rows == 2 ? add_rows<S, 2>(a, scratch, state, v, count, next)
                    : add_rows<S, kRows>(a, scratch, state, v, count, next);
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
    for (int64_t i = first; i < last; ++i) attend_block<T, S>(a, head, scratch, state, a.first_key + i * kBlock);
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
#if defined(__AVX512F__)
  using Held = std::conditional_t<std::is_same_v<T, float>, code8, pair8>;
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
