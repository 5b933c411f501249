// The products of attention over an int8 cache, by the instructions for bytes (VNNI). Queries and weights are integers
// of two digits, 256 * high + low, each row with the value of 1: more exact than bf16.
#pragma once

#include "attention_weights.h"
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
  __m512i codes[4];
  if (there == ~__mmask64(0)) {
    for (int i = 0; i < 4; ++i) codes[i] = _mm512_xor_si512(_mm512_loadu_si512(rows[i]), moved);
  } else {
    for (int i = 0; i < 4; ++i) codes[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, rows[i]), moved);
  }
  const __m512i low[] = {_mm512_unpacklo_epi32(codes[0], codes[1]), _mm512_unpacklo_epi32(codes[2], codes[3])},
      high[] = {_mm512_unpackhi_epi32(codes[0], codes[1]), _mm512_unpackhi_epi32(codes[2], codes[3])};
  words[0] = _mm512_unpacklo_epi64(low[0], low[1]), words[1] = _mm512_unpackhi_epi64(low[0], low[1]);
  words[2] = _mm512_unpacklo_epi64(high[0], high[1]), words[3] = _mm512_unpackhi_epi64(high[0], high[1]);
}

// sum += a * c and other += b * c, as dot_quads. Volatile, so that products stay in the order written: those of one sum
// next to each other would wait for each other.
[[gnu::always_inline]] inline void dot_two_quads(__m512i& sum, __m512i& other, __m512i a, __m512i b, const int8_t* c) {
  __m512i both;
  asm volatile("vmovdqa64 %5, %2\n\tvpdpbusd %2, %3, %0\n\tvpdpbusd %2, %4, %1"
               : "+v"(sum), "+v"(other), "=&v"(both)
               : "v"(a), "v"(b), "m"(*reinterpret_cast<const __m512i*>(c)));
}

// Of sum_pairs(sum_quarters(a, b), sum_quarters(c, d)), lane i is the sum of the quarters' lanes i % 4 of a, b, c or d.
[[gnu::always_inline]] inline __m512i sum_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
}
[[gnu::always_inline]] inline __m512i sum_pairs(__m512i ab, __m512i cd) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
}

// scores[r * kScoreStep + i] = q row r times key i with its scale, for whole sixteens of keys; those beyond `count`
// repeat the last key. WHOLE: there are kKeyBlock of them. Eight keys at a time, so that a register of digits is loaded
// once for two products.
template <int ROWS, bool WHOLE>
void score_quads(const quad8* k, int64_t step, int count, int64_t width, const QuadQueries& q, const float* key_scales,
                 float* scores, Ahead& lines) {
  Ahead ahead = lines;  // in registers
  const char* const rows = reinterpret_cast<const char*>(k);
  const int64_t last = (width - 1) / kQuadColumns * kQuadColumns;
  const __mmask64 in_last = columns_there(width, last);
  for (int i = 0; i < (WHOLE ? kKeyBlock : count); i += 16) {
    __m512i pairs[2][ROWS];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int key = i + 8 * half;
      ahead.fetch();
      const auto row = [&](int j) { return rows + (WHOLE || key + j < count ? key + j : count - 1) * step; };
      const char* at[2][4] = {{row(0), row(1), row(2), row(3)}, {row(4), row(5), row(6), row(7)}};
      __m512i high[2][ROWS], low[2][ROWS];
      for (int r = 0; r < ROWS; ++r) {
        high[0][r] = high[1][r] = low[0][r] = low[1][r] = _mm512_setzero_si512();
      }
      const int8_t* digits = q.digits;
      for (int64_t c = 0; c <= last; c += kQuadColumns, digits += ROWS * kQueryChunk) {
        __m512i words[2][4];
        const __mmask64 there = c < last ? ~__mmask64(0) : in_last;
        columns_of_four(at[0], there, words[0]);
        columns_of_four(at[1], there, words[1]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const int8_t* at_row = digits + r * kQueryChunk + 64 * j;
            dot_two_quads(high[0][r], high[1][r], words[0][j], words[1][j], at_row);
            dot_two_quads(low[0][r], low[1][r], words[0][j], words[1][j], at_row + 256);
          }
        }
        for (auto& quad : at) {
          for (const char*& p : quad) p += kQuadColumns;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        pairs[half][r] = sum_quarters(_mm512_add_epi32(_mm512_slli_epi32(high[0][r], 8), low[0][r]),
                                      _mm512_add_epi32(_mm512_slli_epi32(high[1][r], 8), low[1][r]));
      }
    }
    const Vec scales = load(key_scales + i, Vec::width);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const __m512i sum = sum_pairs(pairs[0][r], pairs[1][r]);
      const Vec whole_sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(q.start[r])));
      store(scores + r * kScoreStep + i, whole_sum * (scales * Vec(q.unit[r])), Vec::width);
    }
  }
  lines = ahead;
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

// Replaces the scores of ROWS rows, scaled and adjusted, by the digits of their weights times the values' scales:
// kKeyBlock bytes of high ones, then of low ones. Updates each row's largest score and sum of weights; `keep` is the
// factor for its earlier sums, `unit` the value of 1. All rows at once, since the additions across lanes take longest.
template <int ROWS>
inline void weigh_quads(float* scores, const BlockScales<quad8>& scales, const RowSums& of) {
  constexpr int VECS = kKeyBlock / 16;
  constexpr __mmask8 there = (1 << ROWS) - 1;
  alignas(16) float inverses[4];
  Vec most[ROWS], weights[ROWS][VECS];
  weigh_together<ROWS>(scores, of, [&](int r, int i, Vec weight) __attribute__((always_inline)) {
    weights[r][i] = weight * load(scales.values + 16 * i, 16);
    most[r] = max(weights[r][i], most[r]);
    return weight;
  });
  const __m128 largest = largest_of_rows<ROWS>(most), steps = _mm_set1_ps(kMostWeight);
  const __mmask8 divides = _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-33f), _CMP_GT_OQ);  // beyond, it may be infinite
  _mm_store_ps(inverses, _mm_maskz_div_ps(divides, steps, largest));
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    const Vec inverse(inverses[r]);
    const auto words = [&](int i) {
      return _mm512_packus_epi32(_mm512_cvtps_epi32((weights[r][i] * inverse).v),
                                 _mm512_cvtps_epi32((weights[r][i + 1] * inverse).v));
    };
    const __m512i low = words(0), high = words(2), byte = _mm512_set1_epi16(255);
    // Packing works in quarters of registers: word 4 l + j holds the keys from 16 j + 4 l on.
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i highs = _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8)),
        lows = _mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte));
    float* row = scores + r * kScoreStep;
    _mm512_storeu_si512(row, _mm512_permutexvar_epi32(turned, highs));
    _mm512_storeu_si512(row + kKeyBlock / 4, _mm512_permutexvar_epi32(turned, lows));
  }
  _mm_mask_storeu_ps(of.unit, there, _mm_add_ps(_mm_div_ps(largest, steps), _mm_set1_ps(scales.poison)));
}

// Adds 64 columns from c on, four keys at a time. The sums are stored as four registers: quarter l of number j has
// columns 16 l + 4 j to 16 l + 4 j + 3; `finished` reorders them.
template <int ROWS, bool WHOLE>
[[gnu::always_inline]] inline void add_quad_columns(const ValueBlock<quad8>& b, int first_row, int64_t c,
                                                    Ahead& ahead) {
  const __mmask64 there = columns_there(b.width, c);
  const auto* rows = reinterpret_cast<const char*>(b.v) + c;
  const int64_t row_bytes = kScoreStep * int64_t(sizeof(float));
  const auto* digits = reinterpret_cast<const char*>(b.weights) + first_row * row_bytes;
  const int64_t step = b.v_step;
  const int count = b.count;
  Ahead lines = ahead;  // in registers
  __m512i high[ROWS][4], low[ROWS][4];
  for (int r = 0; r < ROWS; ++r) {
    for (int j = 0; j < 4; ++j) high[r][j] = low[r][j] = _mm512_setzero_si512();
  }
  for (int i = 0; i < (WHOLE ? kKeyBlock : count); i += 4, digits += 4) {
    const auto key = [&](int j) {
      return _mm512_maskz_loadu_epi8(there, rows + (WHOLE || i + j < count ? i + j : count - 1) * step);
    };
    const __m512i k0 = key(0), k1 = key(1), k2 = key(2), k3 = key(3);
    const __m512i ab = _mm512_unpacklo_epi8(k0, k1), cd = _mm512_unpacklo_epi8(k2, k3),
        ab_high = _mm512_unpackhi_epi8(k0, k1), cd_high = _mm512_unpackhi_epi8(k2, k3);
    const __m512i values[4] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd),
                               _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
    lines.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      int highs, lows;
      std::memcpy(&highs, digits + r * row_bytes, 4), std::memcpy(&lows, digits + r * row_bytes + kKeyBlock, 4);
      const __m512i high_weights = _mm512_set1_epi32(highs), low_weights = _mm512_set1_epi32(lows);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        high[r][j] = dot_quads(high[r][j], high_weights, values[j]);
        low[r][j] = dot_quads(low[r][j], low_weights, values[j]);
      }
    }
  }
  ahead = lines;
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][j], 8), low[r][j]);
      add_block(b, first_row + r, c + 16 * j, Vec(_mm512_cvtepi32_ps(sum)) * Vec(b.unit[first_row + r]));
    }
  }
}

// Two rows at a time: the sums take sixteen registers, and a weight is loaded once for four products.
template <int ROWS>
constexpr int kQuadRows = ROWS < 2 ? ROWS : 2;
template <int ROWS, bool WHOLE>
void add_quads(const ValueBlock<quad8>& b) {
  constexpr int AT_ONCE = kQuadRows<ROWS>;
  for (int r = 0; r < ROWS; r += AT_ONCE) {
    for (int64_t c = 0; c < b.width; c += kQuadColumns) add_quad_columns<AT_ONCE, WHOLE>(b, r, c, *b.ahead);
  }
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
