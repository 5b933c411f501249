// The selective scan of Mamba-1. Lanes are channels, so that no sum goes across lanes; the states of a tile stay in the
// nearest cache for all tokens. Nearly all of the time goes into exp, one for each state and token.
#pragma once

#include <algorithm>
#include <cstring>

#include "activation.h"
#include "elements.h"
#include "kernels.h"
#include "vec_math.h"

namespace infuse {
namespace INFUSE_ISA {

// Rows [count, N] of channels as N registers with a channel in each lane, and back.
template <class T>
void by_state(const T* rows, int64_t N, int count, float* to) {
  for (int64_t first = 0; first < N; first += Vec::width) {
    const int n = int(std::min<int64_t>(Vec::width, N - first));
    Vec block[Vec::width];
    for (int lane = 0; lane < count; ++lane) block[lane] = load(rows + lane * N + first, n);
    transpose(block);
    for (int i = 0; i < n; ++i) store(to + (first + i) * Vec::width, block[i], Vec::width);
  }
}
inline void by_channel(const float* from, int64_t N, int count, float* rows) {
  for (int64_t first = 0; first < N; first += Vec::width) {
    const int n = int(std::min<int64_t>(Vec::width, N - first));
    Vec block[Vec::width];
    for (int i = 0; i < n; ++i) block[i] = load(from + (first + i) * Vec::width, Vec::width);
    transpose(block);
    for (int lane = 0; lane < count; ++lane) store(rows + lane * N + first, block[lane], n);
  }
}

constexpr int64_t kScanFloats = std::max<int64_t>(kMostStates * Vec::width, 16 * kScanChannels);  // of one tile

// One register of channels: its rates and states, by state, and what is the same for all tokens.
struct ScanLanes {
  int64_t c;
  int count;
  float *rate, *state;
  Vec dt_bias, skip;
};

template <class W>
void begin_lanes(const SelectiveArgs& a, int64_t b, ScanLanes& of) {
  const int64_t N = a.states;
  by_state(static_cast<const W*>(a.a_log) + of.c * N, N, of.count, of.rate);
  for (int64_t i = 0; i < N; ++i) {
    float* rate = of.rate + i * Vec::width;
    store(rate, Vec(0.0f) - exp(load(rate, Vec::width)), Vec::width);
  }
  if (a.before) {
    by_state(a.before + (b * a.channels + of.c) * N, N, of.count, of.state);
  } else {
    std::memset(of.state, 0, size_t(N) * Vec::width * sizeof(float));
  }
  of.dt_bias = load(static_cast<const W*>(a.dt_bias) + of.c, of.count);
  of.skip = load(static_cast<const W*>(a.skip) + of.c, of.count);
}

template <class T>
[[gnu::always_inline]] inline void scan_token(const SelectiveArgs& a, int64_t b, int64_t t, const ScanLanes& of,
                                              const float* keys, const float* queries, int count) {
  const auto row = [&](const void* from, int64_t of_b, int64_t of_t) {
    return load(static_cast<const T*>(from) + b * of_b + t * of_t + of.c, count);
  };
  const Vec x = row(a.x, a.x_b, a.x_t), step = softplus(row(a.dt, a.dt_b, a.dt_t) + of.dt_bias), given = step * x;
  Vec y;
#pragma GCC unroll 4
  for (int64_t i = 0; i < a.states; ++i) {
    float* state = of.state + i * Vec::width;
    const Vec decay = exp(load(of.rate + i * Vec::width, Vec::width) * step);
    const Vec s = fma(load(state, Vec::width), decay, given * Vec(keys[i]));
    store(state, s, Vec::width);
    y = fma(s, Vec(queries[i]), y);
  }
  y = fma(of.skip, x, y);
  if (a.gate) y = y * activated<Act::silu, float>(row(a.gate, a.gate_b, a.gate_t));
  store(static_cast<T*>(a.y) + (b * a.tokens + t) * a.channels + of.c, y, count);
}

// Channels [first, last) of one batch row: as many as fit into the buffers.
template <class T, class W>
void scan_channels(const SelectiveArgs& a, int64_t b, int64_t first, int64_t last) {
  constexpr int kMostLanes = int(kScanChannels) / Vec::width;
  alignas(64) float rates[kScanFloats], states[kScanFloats], keys[kMostStates], queries[kMostStates];
  ScanLanes lanes[kMostLanes];
  const int64_t N = a.states;
  int registers = 0;
  for (int64_t c = first; c < last; c += Vec::width, ++registers) {
    const int64_t at = registers * N * Vec::width;
    lanes[registers] = {c, int(std::min<int64_t>(Vec::width, last - c)), rates + at, states + at, Vec(), Vec()};
    begin_lanes<W>(a, b, lanes[registers]);
  }
  for (int64_t t = 0; t < a.tokens; ++t) {
    const T *key = static_cast<const T*>(a.keys) + b * a.keys_b + t * a.keys_t,
            *query = static_cast<const T*>(a.queries) + b * a.queries_b + t * a.queries_t;
    for (int64_t i = 0; i < N; i += Vec::width) {
      const int n = int(std::min<int64_t>(Vec::width, N - i));
      store(keys + i, load(key + i, n), n), store(queries + i, load(query + i, n), n);
    }
    for (int r = 0; r < registers; ++r) {
      const int count = lanes[r].count;
      count == Vec::width ? scan_token<T>(a, b, t, lanes[r], keys, queries, Vec::width)
                          : scan_token<T>(a, b, t, lanes[r], keys, queries, count);
    }
  }
  for (int r = 0; r < registers; ++r) {
    by_channel(lanes[r].state, N, lanes[r].count, a.after + (b * a.channels + lanes[r].c) * N);
  }
}

inline void selective(const SelectiveArgs& a, int64_t begin, int64_t end) {
  const int64_t tiles = tiles_in(a.channels, kScanChannels);
  const int64_t step = std::min(kScanChannels, kScanFloats / a.states / Vec::width * Vec::width);
  with_type(a.type, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / tiles, first = i % tiles * kScanChannels, last = std::min(first + kScanChannels, a.channels);
      for (int64_t c = first; c < last; c += step) {
        const int64_t stop = std::min(c + step, last);
        a.weight_type == Type::f32 ? scan_channels<T, float>(a, b, c, stop) : scan_channels<T, T>(a, b, c, stop);
      }
    }
  });
}

}  // namespace INFUSE_ISA
}  // namespace infuse
