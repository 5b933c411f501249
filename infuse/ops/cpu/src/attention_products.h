// The two products of attention over one block of keys: scores = q k^T, and sums = keep * sums + weights v.
// Rows are the queries that share a key head, ROWS at a time, so that a key is loaded once for all of them. S is the
// type of keys and values: that of the activations, or of codes of an int8 cache, whose scales are applied outside
// (codes as integers: attention_quads.h).
#pragma once

#include <type_traits>

#include "attention_kernels.h"
#include "elements.h"
#include "int8_rows.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr float kInfinity = __builtin_inff();

// Rows are padded to 1, 2 or a multiple of 4.
constexpr int kRows = 4;
// Queries and sums are padded to a multiple of this many columns, the widest step of all instruction sets.
constexpr int64_t kColumns = 32;

constexpr int kScoreStep = kKeyBlock + Vec::width;  // of the scores of a row: score_keys writes beyond the block

// Multiplies keys of type S: as floats, or (below) as pairs of bf16.
template <class S>
struct Products {
  using Query = float;
  using Reg = Vec;
  static constexpr int step = Vec::width;
  static Reg key(const S* p, int n) { return load(p, n); }
  static Reg query(const Query* p) { return load(p, step); }
  static Vec add(Reg k, Reg q, Vec sum) { return fma(k, q, sum); }
};

// Rows that are needed next, fetched line by line all through the work on others: the hardware would begin anew with each
// block, and memory would wait for the products. Line by line, since with four at once memory gave 0.8 of the rate.
struct Ahead {
  const char* at = nullptr;
  const char* row_end = nullptr;  // rows without bytes between them are one
  int64_t row_bytes = 0, gap_bytes = 0;
  int64_t left = 0;    // lines
  int64_t a_time = 0;  // of them are fetched
  Into into = Into::all;

  Ahead() = default;
  Ahead(const void* rows, int64_t step_bytes, int64_t bytes, int64_t count) : at(static_cast<const char*>(rows)) {
    const bool whole = step_bytes == bytes;
    row_bytes = whole ? count * bytes : bytes, gap_bytes = whole ? 0 : step_bytes - (bytes + 63) / 64 * 64;
    row_end = at + row_bytes, left = (whole ? 1 : count) * ((row_bytes + 63) / 64);
    into = fetches_into_outer() ? Into::outer : Into::all;
  }
  // Distributes what is left over so many times.
  void over(int64_t times) { a_time = (left + times - 1) / times; }
  [[gnu::always_inline]] void fetch() { fetch(a_time); }
  [[gnu::always_inline]] void fetch(int64_t lines) {
    if (left <= 0) return;
    for (left -= lines; lines > 0; --lines) {
      prefetch(at, into);
      at += 64;
      if (at >= row_end) at += gap_bytes, row_end = at + row_bytes;
    }
  }
};

// Lane i of the result is the sum of the lanes of x[i]. Inlined, or the sums would be kept in memory.
[[gnu::always_inline]] inline Vec sum_each(const Vec (&x)[Vec::width]) {
#if defined(__AVX512F__)
  // Of two registers: the sums of a's halves, then those of b's; of quarters, likewise; of pairs, in each quarter.
  const auto halves = [](Vec a, Vec b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a.v, b.v), _mm512_shuffle_f32x4(a.v, b.v, 0x4E));
  };
  const auto quarters = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  const auto pairs = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a, b), _mm512_shuffle_ps(a, b, 0x4E));
  };
  __m512 quads[4];  // quads[j]: quarter i holds four partial sums of x[4 i + j]
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) quads[j] = quarters(halves(x[j], x[4 + j]), halves(x[8 + j], x[12 + j]));
  const __m512 low = pairs(quads[0], quads[1]), high = pairs(quads[2], quads[3]);
  return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD));
#elif defined(__AVX2__)
  const auto sum = [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); };
  __m256 quads[2];  // quads[j]: both halves hold partial sums of x[4 j] to x[4 j + 3]
  for (int j = 0; j < 2; ++j) {
    const __m256 a = x[4 * j].v, b = x[4 * j + 1].v, c = x[4 * j + 2].v, d = x[4 * j + 3].v;
    const __m256 ab = sum(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = sum(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    quads[j] = sum(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  }
  return sum(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
      _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#else
  Vec sums;
  for (int i = 0; i < Vec::width; ++i) sums.v[i] = x[i].sum();
  return sums;
#endif
}

// Stores consecutive lanes to each of ROWS rows.
template <int ROWS>
void store_by_rows(Vec x, float* to, int64_t step) {
#if defined(__AVX512F__)
  if constexpr (ROWS == 4) {  // through memory it would take longer than the products
    _mm_storeu_ps(to, _mm512_castps512_ps128(x.v));
    _mm_storeu_ps(to + step, _mm512_extractf32x4_ps(x.v, 1));
    _mm_storeu_ps(to + 2 * step, _mm512_extractf32x4_ps(x.v, 2));
    _mm_storeu_ps(to + 3 * step, _mm512_extractf32x4_ps(x.v, 3));
    return;
  }
#endif
  constexpr int COUNT = Vec::width / ROWS;
  float lanes[Vec::width];
  store(lanes, x, Vec::width);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) std::memcpy(to + r * step, lanes + r * COUNT, COUNT * sizeof(float));
}

// scores[r * kScoreStep + i] = scale times q row r times key i. Writes up to Vec::width meaningless scores beyond `count`.
template <class S, int ROWS>
void score_keys(const S* k, int64_t k_step, int count, int64_t width, const typename Products<S>::Query* q,
                int64_t q_step, float scale, float* scores, Ahead& ahead) {
  using P = Products<S>;
  constexpr int KEYS = Vec::width / ROWS;
  Ahead lines = ahead;  // in registers
  for (int i = 0; i < count; i += KEYS) {
    const S* key[KEYS];
    for (int j = 0; j < KEYS; ++j) key[j] = k + (i + j < count ? i + j : count - 1) * k_step;
    lines.fetch();
    Vec sums[Vec::width];
    const auto add_step = [&](int64_t c, int n) __attribute__((always_inline)) {
      typename P::Reg keys[KEYS];
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) keys[j] = P::key(key[j] + c, n);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const typename P::Reg query = P::query(q + r * q_step + c);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; ++j) sums[r * KEYS + j] = P::add(keys[j], query, sums[r * KEYS + j]);
      }
    };
    int64_t c = 0;
    for (; c + P::step <= width; c += P::step) add_step(c, P::step);
    if (c < width) add_step(c, int(width - c));
    store_by_rows<ROWS>(sum_each(sums) * Vec(scale), scores + i, kScoreStep);
  }
  ahead = lines;
}

// One block of values, with its weights [rows, count] and the sums [rows, width] that it is added to.
template <class S>
struct ValueBlock {
  const S* v;
  int64_t v_step;
  int count;
  int64_t width;
  const float* weights;  // rows of kScoreStep
  float* sums;
  int64_t sum_step;
  const float* keep;  // factor of the sums so far, for each row
  const float* unit;  // value of 1 in the weights of each row, if these are integers (attention_quads.h)
  Ahead* ahead;
};

template <class S>
void add_block(const ValueBlock<S>& b, int r, int64_t c, Vec sum) {
  float* sums = b.sums + r * b.sum_step + c;
  store(sums, fma(load(sums, Vec::width), Vec(b.keep[r]), sum), Vec::width);
}

// Adds columns [c, c + COLUMNS * Vec::width), or only n < Vec::width of them if COLUMNS is 1.
template <class S, int ROWS, int COLUMNS>
void add_columns(const ValueBlock<S>& b, int64_t c, int n) {
  Ahead lines = *b.ahead;  // in registers
  Vec sums[ROWS][COLUMNS];  // of this block only: one running sum over thousands of keys would lose digits
  const int last = COLUMNS == 1 ? n : Vec::width;
  for (int i = 0; i < b.count; ++i) {
    const S* v = b.v + i * b.v_step + c;
    lines.fetch();
    Vec values[COLUMNS];
#pragma GCC unroll 4
    for (int j = 0; j < COLUMNS; ++j) values[j] = load(v + j * Vec::width, last);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Vec weight(b.weights[r * kScoreStep + i]);
#pragma GCC unroll 4
      for (int j = 0; j < COLUMNS; ++j) sums[r][j] = fma(weight, values[j], sums[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < COLUMNS; ++j) add_block(b, r, c + j * Vec::width, sums[r][j]);
  *b.ahead = lines;
}

// Converts a row of weights for the product with values of type S; returns its sum. Here they stay floats.
template <class S>
struct Weights {
  static Vec keep(float* row, int i, Vec weights) {
    store(row + i, weights, Vec::width);
    return weights;
  }
};

#if defined(__AVX512BF16__)

inline __mmask32 first_of_32(int64_t n) { return n >= 32 ? __mmask32(~0u) : __mmask32((1u << n) - 1); }
inline Vec multiply_pairs(__m512i a, __m512i b, Vec sum) { return _mm512_dpbf16_ps(sum.v, (__m512bh)a, (__m512bh)b); }

template <>
struct Products<bf16> {
  using Query = bf16;
  using Reg = __m512i;
  static constexpr int step = 32;
  static Reg key(const bf16* p, int n) { return _mm512_maskz_loadu_epi16(first_of_32(n), p); }
  static Reg query(const Query* p) { return _mm512_loadu_si512(p); }
  static Vec add(Reg k, Reg q, Vec sum) { return multiply_pairs(k, q, sum); }
};

// Rounds to bf16 and packs at the front of the row: the product takes the weights of two keys at once.
template <>
struct Weights<bf16> {
  static Vec keep(float* row, int i, Vec weights) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weights.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<bf16*>(row) + i), rounded);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
  }
};

// Adds 32 * GROUPS columns of two values at a time, interleaved by unpacking. Each group of 32 sums is therefore stored
// as columns 0-3, 8-11, 16-19, 24-27 and then 4-7, 12-15, 20-23, 28-31; Finished reorders them.
template <int ROWS, int GROUPS>
void add_column_groups(const ValueBlock<bf16>& b, int64_t c, int64_t n) {
  constexpr int SUMS = 2 * GROUPS;
  const __mmask32 mask = GROUPS == 1 ? first_of_32(n) : __mmask32(~0u);
  Ahead lines = *b.ahead;  // in registers
  const int count = b.count;
  const int64_t step = b.v_step;
  const bf16* v = b.v + c;
  const auto* weights = reinterpret_cast<const bf16*>(b.weights);
  Vec sums[ROWS][SUMS];
  for (int i = 0; i < count; i += 2, v += 2 * step) {
    lines.fetch();
    const __mmask32 second = i + 1 < count ? mask : 0;  // do not load beyond the end: 0 times garbage may be NaN
    __m512i values[SUMS];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) {
      const __m512i even = _mm512_maskz_loadu_epi16(mask, v + 32 * g);
      const __m512i odd = _mm512_maskz_loadu_epi16(second, v + step + 32 * g);
      values[2 * g] = _mm512_unpacklo_epi16(even, odd), values[2 * g + 1] = _mm512_unpackhi_epi16(even, odd);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      int pair;
      std::memcpy(&pair, weights + 2 * r * kScoreStep + i, 4);
      const __m512i weight = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < SUMS; ++j) sums[r][j] = multiply_pairs(values[j], weight, sums[r][j]);
    }
  }
  *b.ahead = lines;
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < SUMS; ++j) add_block(b, r, c + j * 16, sums[r][j]);
  }
}

template <int ROWS>
void add_pairs(const ValueBlock<bf16>& b) {
  int64_t c = 0;
  for (; c + 64 <= b.width; c += 64) add_column_groups<ROWS, 2>(b, c, 64);
  for (; c < b.width; c += 32) add_column_groups<ROWS, 1>(b, c, b.width - c);
}

#endif

// Whether the values of two keys are multiplied at once, with weights of 16 bits.
#if defined(__AVX512BF16__)
template <class S>
constexpr bool kInPairs = std::is_same_v<S, bf16>;
#else
template <class S>
constexpr bool kInPairs = false;
#endif

template <class S, int ROWS>
void add_one_by_one(const ValueBlock<S>& b) {
  constexpr int COLUMNS = Vec::width == 16 ? 4 : 2;  // the sums use half of the 32 or 16 registers
  int64_t c = 0;
  for (; c + COLUMNS * Vec::width <= b.width; c += COLUMNS * Vec::width) add_columns<S, ROWS, COLUMNS>(b, c,
      Vec::width);
  for (; c < b.width; c += Vec::width) add_columns<S, ROWS, 1>(b, c,
      int(b.width - c < Vec::width ? b.width - c : Vec::width));
}

template <class S, int ROWS>
void add_values(const ValueBlock<S>& b) {
#if defined(__AVX512BF16__)
  if constexpr (kInPairs<S>) return add_pairs<ROWS>(b);
#endif
  if constexpr (!kInPairs<S>) add_one_by_one<S, ROWS>(b);
}

// How often adding a block's values fetches lines.
template <class S, int ROWS>
int64_t value_steps(int64_t width, int count) {
  if (std::is_same_v<S, quad8>) return (width + 63) / 64 * ((ROWS + 1) / 2) * ((count + 3) / 4);
  if (kInPairs<S>) return (width / 64 + (width % 64 + 31) / 32) * ((count + 1) / 2);
  constexpr int columns = (Vec::width == 16 ? 4 : 2) * Vec::width;
  return (width / columns + (width % columns + Vec::width - 1) / Vec::width) * count;
}

// The sums of one row in column order, copied to `room` if they are stored in another order.
template <class S>
const float* finished(const float* sums, int64_t width, float* room) {
  if (!kInPairs<S> && !std::is_same_v<S, quad8>) return sums;
  for (int64_t c = 0; std::is_same_v<S, quad8> && c < width; c += kQuadColumns) {
    for (int i = 0; i < 16; ++i) std::memcpy(room + c + 16 * (i % 4) + 4 * (i / 4), sums + c + 4 * i, 16);
  }
  for (int64_t c = 0; kInPairs<S> && c < width; c += 32) {
    for (int i = 0; i < 4; ++i) {
      std::memcpy(room + c + 8 * i, sums + c + 4 * i, 16);
      std::memcpy(room + c + 8 * i + 4, sums + c + 16 + 4 * i, 16);
    }
  }
  return room;
}

}  // namespace INFUSE_ISA
}  // namespace infuse
