// What comes before and after attention over latents: queries times the key rows of `expand`, and sums of latents times
// its value rows. The attention between them is that of attention.h, with all heads on one key head.
#pragma once

#include "attention.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int64_t kMostRank = 1024;

// Multiplies rows [first, first + ROWS) of one head's queries by its key rows.
template <class T, int ROWS>
void absorb_rows(const LatentArgs& a, int64_t head, int64_t first) {
  alignas(64) float weights[ROWS * kScoreStep], sums[ROWS * (kMostRank + kQuadColumns)], room[kMostRank + kQuadColumns];
  const int64_t rows = a.batch * a.tokens, step = (a.rank + kColumns - 1) / kColumns * kColumns;
  const T* keys = static_cast<const T*>(a.expand) + head * (a.plain + a.value) * a.rank;
  float ones[ROWS];
  for (int r = 0; r < ROWS; ++r) ones[r] = 1.0f;
  std::memset(sums, 0, size_t(ROWS * step) * sizeof(float));
  const auto query = [&](int64_t row) {
    return static_cast<const T*>(a.q) + row / a.tokens * a.q_b + row % a.tokens * a.q_t + head * a.q_n;
  };
  for (int64_t n = 0; n < a.plain; n += kKeyBlock) {
    const int count = int(a.plain - n < kKeyBlock ? a.plain - n : kKeyBlock);
    for (int r = 0; r < ROWS; ++r) {
      for (int i = 0; i < count; i += Vec::width) {
        const int lanes = count - i < Vec::width ? count - i : Vec::width;
        const Vec q = first + r < rows ? load(query(first + r) + n + i, lanes) : Vec(0.0f);
        Weights<T>::keep(weights + r * kScoreStep, i, q);
      }
    }
    const int64_t left = a.plain - n - count, ahead = left < kKeyBlock ? left : kKeyBlock, row_bytes = a.rank * int64_t(sizeof(T));
    Ahead next(keys + (n + count) * a.rank, row_bytes, row_bytes, ahead);
    next.over(value_steps<T, ROWS>(a.rank, count));
    add_values<T, ROWS>({keys + n * a.rank, a.rank, count, a.rank, weights, sums, step, ones, ones, &next});
  }
  const int64_t width = a.rank + a.turned_width;
  for (int64_t row = first; row < first + ROWS && row < rows; ++row) {
    const int64_t b = row / a.tokens, t = row % a.tokens;
    T* to = static_cast<T*>(a.queries) + ((b * a.heads + head) * a.tokens + t) * width;
    const float* made = finished<T>(sums + (row - first) * step, a.rank, room);
    for (int64_t c = 0; c < a.rank; c += Vec::width) {
      const int lanes = int(a.rank - c < Vec::width ? a.rank - c : Vec::width);
      store(to + c, load(made + c, lanes), lanes);
    }
    const T* turned = static_cast<const T*>(a.turned) + b * a.turned_b + t * a.turned_t + head * a.turned_n;
    std::memcpy(to + a.rank, turned, size_t(a.turned_width) * sizeof(T));
  }
}

template <class T>
void absorb_head(const LatentArgs& a, int64_t head) {
  const int64_t rows = a.batch * a.tokens;
  if (rows == 1) return absorb_rows<T, 1>(a, head, 0);
  if (rows == 2) return absorb_rows<T, 2>(a, head, 0);
  for (int64_t first = 0; first < rows; first += kRows) absorb_rows<T, kRows>(a, head, first);
}

// Multiplies sums of latents by the value rows of one head.
template <class T>
void expand_head(const LatentArgs& a, int64_t head) {
  using Query = typename Products<T>::Query;
  alignas(64) Query sums[kMostRank + kColumns];
  alignas(64) float made[kScoreStep];
  const T* values = static_cast<const T*>(a.expand) + (head * (a.plain + a.value) + a.plain) * a.rank;
  std::memset(sums, 0, sizeof(sums));
  for (int64_t row = 0; row < a.batch * a.tokens; ++row) {
    load_query(static_cast<const T*>(a.sums) + (row * a.heads + head) * a.rank, a.rank, sums);
    T* to = static_cast<T*>(a.out) + (row * a.heads + head) * a.value;
    for (int64_t v = 0; v < a.value; v += kKeyBlock) {
      const int count = int(a.value - v < kKeyBlock ? a.value - v : kKeyBlock);
      Ahead none;
      score_keys<T, 1>(values + v * a.rank, a.rank, count, a.rank, sums, 0, 1.0f, made, none);
      for (int i = 0; i < count; i += Vec::width) {
        const int lanes = count - i < Vec::width ? count - i : Vec::width;
        store(to + v + i, load(made + i, lanes), lanes);
      }
    }
  }
}

template <class Run>
void with_type(const LatentArgs& a, Run run) {
  switch (a.type) {
    case Type::f32: return run(float());
    case Type::bf16: return run(bf16());
    case Type::f16: return run(f16());
  }
}

inline void absorb(const LatentArgs& a, int64_t begin, int64_t end) {
  with_type(a, [&](auto type) {
    for (int64_t head = begin; head < end; ++head) absorb_head<decltype(type)>(a, head);
  });
}
inline void expand(const LatentArgs& a, int64_t begin, int64_t end) {
  with_type(a, [&](auto type) {
    for (int64_t head = begin; head < end; ++head) expand_head<decltype(type)>(a, head);
  });
}

}  // namespace INFUSE_ISA
}  // namespace infuse
