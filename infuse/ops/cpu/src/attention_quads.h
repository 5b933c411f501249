// The products of attention over an int8 cache, by the instructions for bytes (VNNI). Queries and weights are integers
// of two digits, 256 * high + low, each row with the value of 1: more exact than bf16.
#pragma once

#include "attention_products.h"
#include "fixed_point.h"

namespace infuse {
namespace INFUSE_ISA {

// The scales of the keys and values of a block of an int8 cache.
template <class S>
struct BlockScales {
  alignas(64) float keys[kKeyBlock], values[kKeyBlock];
  float poison;  // of quads: NaN if a value's scale is, else 0
};

constexpr int64_t kQueryBytes = 8;  // of a column of a query: two digits, for each of four keys
constexpr int64_t kQueryChunk = kQuadColumns * kQueryBytes;

// The queries of some rows as arrange_query wrote them, chunk by chunk of 64 columns.
struct QuadQueries {
  const int8_t* digits;
  const float* unit;      // value of 1
  const int32_t* start;  // of the sums
};

#if defined(__AVX512VNNI__)

constexpr float kMostQuery = 32639;   // 127 * 256 + 127
constexpr float kMostWeight = 65535;

// Those of the 64 columns from c on that a row has.
inline __mmask64 columns_there(int64_t width, int64_t c) {
  return width - c >= kQuadColumns ? ~__mmask64(0) : (__mmask64(1) << (width - c)) - 1;
}

// A query as the scores take it: for each 64 columns, `step` bytes apart, four registers of high digits, then four of
// low ones. Register j has columns 16 l + 4 j to 16 l + 4 j + 3 in its quarter l, for each of four keys. `to` is zeros.
template <class T>
void arrange_query(const T* q, int64_t width, int8_t* to, int64_t step, float& unit, int32_t& start) {
  const float most = float(0x7fffffff / 127) / float(width);  // else a sum of products may exceed 32 bits
  const FixedPoint fixed = FixedPoint::of(q, width, most < kMostQuery ? most : kMostQuery);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t c = 0; c < width; c += 16) {
    const __m512i value = fixed(load(q + c, int(width - c < 16 ? width - c : 16)));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
    const __m128i digits[] = {_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(value)};
    sum = _mm512_add_epi32(sum, value);
    int8_t* quarter = to + c / kQuadColumns * step + c % kQuadColumns;
    for (int digit = 0; digit < 2; ++digit, quarter += 256) {
      const auto at = [&](int j) { return reinterpret_cast<__m128i*>(quarter + 64 * j); };
      _mm_store_si128(at(0), _mm_shuffle_epi32(digits[digit], 0x00));
      _mm_store_si128(at(1), _mm_shuffle_epi32(digits[digit], 0x55));
      _mm_store_si128(at(2), _mm_shuffle_epi32(digits[digit], 0xAA));
      _mm_store_si128(at(3), _mm_shuffle_epi32(digits[digit], 0xFF));
    }
  }
  unit = fixed.scale;
  start = int32_t(-128u * uint32_t(_mm512_reduce_add_epi32(sum)));  // codes are multiplied as unsigned, 128 more
}

// Columns of four rows of codes, unsigned: words[j] has those of register j of a query, four keys in each quarter.
[[gnu::always_inline]] inline void columns_of_four(const char* const (&rows)[4], __mmask64 there, __m512i (&words)[4]) {
  const __m512i moved = _mm512_set1_epi8(char(0x80));
  const auto codes = [&](const char* p) { return _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, p), moved); };
  const __m512i a = codes(rows[0]), b = codes(rows[1]), c = codes(rows[2]), d = codes(rows[3]);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab_high = _mm512_unpackhi_epi32(a, b), cd_high = _mm512_unpackhi_epi32(c, d);
  words[0] = _mm512_unpacklo_epi64(ab, cd), words[1] = _mm512_unpackhi_epi64(ab, cd);
  words[2] = _mm512_unpacklo_epi64(ab_high, cd_high), words[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

[[gnu::always_inline]] inline __m512i dot_quads_at(__m512i sum, __m512i a, const int8_t* b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "m"(*reinterpret_cast<const __m512i*>(b)));
  return sum;
}

// Lane i of the result: the sum of the quarters' lanes i % 4 of x[i / 4].
[[gnu::always_inline]] inline __m512i sum_quarters(__m512i a, __m512i b, __m512i c, __m512i d) {
  const auto sum = [](__m512i x, __m512i y) { return _mm512_add_epi32(x, y); };
  const __m512i ab = sum(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
  const __m512i cd = sum(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xEE));
  return sum(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
}

// scores[r * kScoreStep + i] = q row r times key i with its scale, for whole sixteens of keys; those beyond `count`
// repeat the last key. WHOLE: there are kKeyBlock of them.
template <int ROWS, bool WHOLE>
void score_quads(const quad8* k, int64_t step, int count, int64_t width, const QuadQueries& q, const float* key_scales,
                 float* scores, const RowsAhead& ahead) {
  const char* const rows = reinterpret_cast<const char*>(k);
  const int64_t last = (width - 1) / kQuadColumns * kQuadColumns;
  const __mmask64 in_last = columns_there(width, last);
  for (int i = 0; i < (WHOLE ? kKeyBlock : count); i += 16) {
    __m512i quarters[4][ROWS];
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const int key = i + 4 * quad;
      ahead.fetch(key, 4);
      const auto row = [&](int j) { return rows + (WHOLE || key + j < count ? key + j : count - 1) * step; };
      const char* at[4] = {row(0), row(1), row(2), row(3)};
      __m512i high[ROWS], low[ROWS];
      for (int r = 0; r < ROWS; ++r) high[r] = low[r] = _mm512_setzero_si512();
      const int8_t* digits = q.digits;
      for (int64_t c = 0; c <= last; c += kQuadColumns, digits += ROWS * kQueryChunk) {
        __m512i words[4];
        columns_of_four(at, c < last ? ~__mmask64(0) : in_last, words);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            high[r] = dot_quads_at(high[r], words[j], digits + r * kQueryChunk + 64 * j);
            low[r] = dot_quads_at(low[r], words[j], digits + r * kQueryChunk + 256 + 64 * j);
          }
        }
        for (const char*& p : at) p += kQuadColumns;
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) quarters[quad][r] = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
    }
    const Vec scales = load(key_scales + i, Vec::width);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const __m512i sum = sum_quarters(quarters[0][r], quarters[1][r], quarters[2][r], quarters[3][r]);
      const Vec whole_sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(q.start[r])));
      store(scores + r * kScoreStep + i, whole_sum * (scales * Vec(q.unit[r])), Vec::width);
    }
  }
}

// The scales of `count` rows, then zeros. By registers: loads of sixteen that were just stored one by one would wait.
inline void load_quad_scales(const quad8* rows, int64_t step, int count, int64_t width, float* scales) {
  if (count < kKeyBlock) {
    std::memset(scales, 0, kKeyBlock * sizeof(float));
    return load_scales(rows, step, count, width, scales);
  }
  const char* row = reinterpret_cast<const char*>(rows) + width;
  for (int i = 0; i < kKeyBlock; i += 16) {
    __m128 fours[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, row += 4 * step) {
      const auto scale = [&](int n) { return scale_of(row + n * step, 0); };
      fours[j] = _mm_setr_ps(scale(0), scale(1), scale(2), scale(3));
    }
    const __m256 low = _mm256_set_m128(fours[1], fours[0]), high = _mm256_set_m128(fours[3], fours[2]);
    _mm512_store_ps(scales + i, _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
  }
}

// NaN if a value's scale is, else 0.
inline float poison_of(const BlockScales<quad8>& scales) {
  Vec poison;
  for (int i = 0; i < kKeyBlock; i += 16) poison = fma(load(scales.values + i, 16), Vec(0.0f), poison);
  return poison.sum();
}

// Replaces the scores of a row, scaled and adjusted, by the digits of its weights times the values' scales: kKeyBlock
// bytes of high ones, then of low ones. Returns the sum of the weights; `unit` is the value of 1.
inline float weigh_quads(float* row, float base, const BlockScales<quad8>& scales, float& unit) {
  constexpr int VECS = kKeyBlock / 16;
  Vec weights[VECS], total, most;
#pragma GCC unroll 4
  for (int i = 0; i < VECS; ++i) {
    const Vec weight = coarse_exp2(larger(Vec(-160.0f), (load(row + 16 * i, 16) - Vec(base)) * Vec(1.442695041f)));
    total = total + weight;
    weights[i] = weight * load(scales.values + 16 * i, 16);
    most = max(weights[i], most);
  }
  const float largest = most.largest();
  const Vec inverse(largest > 1e-33f ? kMostWeight / largest : 0.0f);  // beyond that it may be infinite
  auto* digits = reinterpret_cast<__m128i*>(row);
#pragma GCC unroll 4
  for (int i = 0; i < VECS; ++i) {
    const __m512i whole = _mm512_cvtps_epi32((weights[i] * inverse).v);
    _mm_store_si128(digits + i, _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
    _mm_store_si128(digits + VECS + i, _mm512_cvtepi32_epi8(whole));
  }
  unit = largest / kMostWeight + scales.poison;
  return total.sum();
}

// Adds 64 columns from c on, four keys at a time. The sums are stored as four registers:
// quarter l of number 2 HALF + j has columns 16 l + 8 HALF + 4 j to 16 l + 8 HALF + 4 j + 3; `finished` reorders them.
template <int ROWS, int HALF, bool WHOLE>
[[gnu::always_inline]] inline void add_quad_columns(const ValueBlock<quad8>& b, int64_t c) {
  const __mmask64 there = columns_there(b.width, c);
  const auto* rows = reinterpret_cast<const char*>(b.v) + c;
  const auto* digits = reinterpret_cast<const char*>(b.weights);
  const int64_t step = b.v_step;
  const int count = b.count;
  const bool fetches = HALF == 0 && c == 0;
  const RowsAhead ahead = b.ahead;
  __m512i high[ROWS][2], low[ROWS][2];
  for (int r = 0; r < ROWS; ++r) high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm512_setzero_si512();
  const auto join = [](__m512i x, __m512i y) {
    return HALF ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y);
  };
  for (int i = 0; i < (WHOLE ? kKeyBlock : count); i += 4, digits += 4) {
    const auto key = [&](int j) {
      return _mm512_maskz_loadu_epi8(there, rows + (WHOLE || i + j < count ? i + j : count - 1) * step);
    };
    const __m512i ab = join(key(0), key(1)), cd = join(key(2), key(3));
    const __m512i values[2] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd)};
    if (fetches) ahead.fetch(i, 4);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      int highs, lows;
      const char* row = digits + r * kScoreStep * int64_t(sizeof(float));
      std::memcpy(&highs, row, 4), std::memcpy(&lows, row + kKeyBlock, 4);
      const __m512i high_weights = _mm512_set1_epi32(highs), low_weights = _mm512_set1_epi32(lows);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        high[r][j] = dot_quads(high[r][j], high_weights, values[j]);
        low[r][j] = dot_quads(low[r][j], low_weights, values[j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][j], 8), low[r][j]);
      add_block(b, r, c + 32 * HALF + 16 * j, Vec(_mm512_cvtepi32_ps(sum)) * Vec(b.unit[r]));
    }
  }
}

template <int ROWS, bool WHOLE>
void add_quads(const ValueBlock<quad8>& b) {
  for (int64_t c = 0; c < b.width; c += kQuadColumns) {
    add_quad_columns<ROWS, 0, WHOLE>(b, c);
    add_quad_columns<ROWS, 1, WHOLE>(b, c);
  }
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
