// What recurrent mixers compute. A state [D, V] of linear attention is read and written once for a block of R tokens;
// what a token writes, the later ones of its block read from the block itself. All in float32, rounded once.
#pragma once

#include <cstring>
#include <memory>

#include "activation.h"
#include "elements.h"
#include "kernels.h"
#include "vec_math.h"

namespace infuse {
namespace INFUSE_ISA {

template <class F>
[[gnu::always_inline]] inline void over_lanes(int64_t columns, const F& run) {
  int64_t c = 0;
  for (; c + Vec::width <= columns; c += Vec::width) run(c, Vec::width);
  if (c < columns) run(c, int(columns - c));
}

// ---- a causal convolution ----

// x as a value of type T.
template <class T>
inline Vec rounded(Vec x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, bf16>) return nearest_bf16(x);
  T narrow[Vec::width];
  store(narrow, x, Vec::width);
  return load(narrow, Vec::width);
}

// Weights [C, taps] of n channels, by taps.
template <int TAPS, class W>
inline void load_taps(const W* weight, int64_t taps, int n, Vec* to) {
  constexpr int W1 = Vec::width;
  alignas(64) float by_tap[kMostTaps][W1] = {};
  if (TAPS == 4 && n == W1) {
    alignas(64) float halves[4][W1];  // taps 0 and 2, then 1 and 3, of the first channels; of the others
    deinterleave(load(weight, W1), load(weight + W1, W1), halves[0]);
    deinterleave(load(weight + 2 * W1, W1), load(weight + 3 * W1, W1), halves[2]);
    alignas(64) float pairs[2][2][W1];
    for (int odd = 0; odd < 2; ++odd) deinterleave(load(halves[odd], W1), load(halves[2 + odd], W1), pairs[odd][0]);
    for (int j = 0; j < 4; ++j) to[j] = load(pairs[j % 2][j / 2], W1);
    return;
  }
  for (int lane = 0; lane < n; ++lane) {
    for (int64_t j = 0; j < taps; ++j) by_tap[j][lane] = widen(weight[lane * taps + j]);
  }
  for (int j = 0; j < TAPS; ++j) to[j] = load(by_tap[j], W1);
}

// One register of channels of tokens [first, last) of one batch row, n of them. What the convolution sees moves through
// `seen`, a row for each tap; TAPS is `taps`, or kMostTaps for other numbers.
template <class T, class W, int TAPS>
struct ChannelConv {
  const ConvArgs& a;
  int64_t taps, b, c;
  int n;
  Vec weight[TAPS], seen[TAPS], bias;

  [[gnu::always_inline]] ChannelConv(const ConvArgs& a, int64_t b, int64_t first, int64_t c, int n)
      : a(a), taps(TAPS == kMostTaps ? a.taps : TAPS), b(b), c(c), n(n) {
    load_taps<TAPS>(static_cast<const W*>(a.weight) + c * taps, taps, n, weight);
    if (a.bias) bias = load(static_cast<const W*>(a.bias) + c, n);
    for (int64_t j = 1; j < taps; ++j) seen[j] = row(first + j - taps);
  }
  [[gnu::always_inline]] Vec row(int64_t at) const {
    if (at < 0) return a.before ? load(static_cast<const T*>(a.before) + (b * taps + taps + at) * a.channels + c, n) : Vec();
    const Vec x = load(static_cast<const T*>(a.x) + b * a.x_b + at * a.x_t + c, n);
    if (!a.gate) return x;
    return rounded<T>(x * load(static_cast<const T*>(a.gate) + b * a.gate_b + at * a.gate_t + c, n));  // as in the state
  }
  [[gnu::always_inline]] void token(int64_t t) {
    Vec sum = bias;
#pragma GCC unroll 16
    for (int64_t j = 0; j + 1 < taps; ++j) seen[j] = seen[j + 1], sum = fma(weight[j], seen[j], sum);
    seen[taps - 1] = row(t);
    sum = fma(weight[taps - 1], seen[taps - 1], sum);
    if (a.silu) sum = activated<Act::silu, T>(sum);
    if (a.out_gate) sum = rounded<T>(sum) * load(static_cast<const T*>(a.out_gate) + b * a.out_b + t * a.out_t + c, n);
    store_coarse(static_cast<T*>(a.y) + (b * a.tokens + t) * a.channels + c, sum, n);
  }
};

// Channels [c, end) of tokens [first, last). Two registers go together, so that whole cache lines of bf16 are used at once.
template <class T, class W, int TAPS>
void convolve_channels(const ConvArgs& a, int64_t b, int64_t first, int64_t last, int64_t c, int64_t end) {
  for (; c + 2 * Vec::width <= end; c += 2 * Vec::width) {
    ChannelConv<T, W, TAPS> one(a, b, first, c, Vec::width), other(a, b, first, c + Vec::width, Vec::width);
    for (int64_t t = first; t < last; ++t) one.token(t), other.token(t);
  }
  for (; c < end; c += Vec::width) {
    ChannelConv<T, W, TAPS> one(a, b, first, c, int(end - c < Vec::width ? end - c : Vec::width));
    for (int64_t t = first; t < last; ++t) one.token(t);
  }
}

template <class T, class W>
void convolve_tile(const ConvArgs& a, int64_t tile) {
  const int64_t across = tiles_in(a.channels, kConvChannels), along = tiles_in(a.tokens, kConvTokens);
  const int64_t c = tile % across * kConvChannels, first = tile / across % along * kConvTokens, b = tile / across / along;
  const int64_t end = c + kConvChannels < a.channels ? c + kConvChannels : a.channels,
                last = first + kConvTokens < a.tokens ? first + kConvTokens : a.tokens;
  switch (a.taps) {
    case 3: return convolve_channels<T, W, 3>(a, b, first, last, c, end);
    case 4: return convolve_channels<T, W, 4>(a, b, first, last, c, end);
    default: return convolve_channels<T, W, kMostTaps>(a, b, first, last, c, end);
  }
}

inline void convolve(const ConvArgs& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto type) {
    using T = decltype(type);
    for (int64_t tile = begin; tile < end; ++tile) {
      a.weight_type == Type::f32 ? convolve_tile<T, float>(a, tile) : convolve_tile<T, T>(a, tile);
    }
  });
}

// ---- linear attention ----

// Registers of sums that a block has for what its tokens read: R tokens x NC registers of columns, twice.
#if defined(__AVX512F__)
constexpr int kScanRegisters = 8;
#else
constexpr int kScanRegisters = 4;
#endif

// What a block of R tokens of one head needs of keys, queries and decays. `query` and `key` are decayed from the block's
// begin, `last` are keys decayed to its end, `decay` is that of the whole block. met[r][s]: key r times key s, seen[r][s]:
// query r times key s, with the decay between them.
template <int R>
struct ScanBlock {
  alignas(64) float query[R][kMostKeyWidth], key[R][kMostKeyWidth], last[R][kMostKeyWidth], decay[kMostKeyWidth];
  float met[R][R], seen[R][R], beta[R];
};

// A row of queries or keys in float32.
template <class T>
inline void take_row(const T* from, int64_t width, bool normalise, float scale, float* to) {
  Vec squares;
  over_lanes(width, [&](int64_t d, int n) {
    const Vec x = load(from + d, n);
    squares = fma(x, x, squares);
    store(to + d, x, n);
  });
  const Vec factor(normalise ? scale / std::sqrt(squares.sum() + 1e-6f) : scale);
  over_lanes(width, [&](int64_t d, int n) { store(to + d, load(to + d, n) * factor, n); });
}

inline float product(const float* a, const float* b, int64_t width) {
  Vec sum;
  over_lanes(width, [&](int64_t d, int n) { sum = fma(load(a + d, n), load(b + d, n), sum); });
  return sum.sum();
}

template <class T, int R>
void prepare_block(const ScanArgs& a, int64_t b, int64_t head, int64_t first, ScanBlock<R>& block) {
  const int64_t D = a.key_width, group = head / (a.heads / a.groups);
  alignas(64) float q[kMostKeyWidth], each[kMostKeyWidth];
  over_lanes(D, [&](int64_t d, int n) { store(block.decay + d, Vec(1.0f), n); });
  for (int r = 0; r < R; ++r) {
    const int64_t t = first + r, at = (b * a.tokens + t) * a.heads + head;
    float* k = block.last[r];
    take_row(static_cast<const T*>(a.q) + b * a.q_b + t * a.q_t + group * D, D, a.normalise, a.scale, q);
    take_row(static_cast<const T*>(a.k) + b * a.k_b + t * a.k_t + group * D, D, a.normalise, 1.0f, k);
    block.beta[r] = a.beta[at];
    const float same = a.by_key ? 0.0f : std::exp(a.decay[at]);
    over_lanes(D, [&](int64_t d, int n) {
      const Vec factor = a.by_key ? exp(load(a.decay + at * D + d, n)) : Vec(same);
      const Vec whole = load(block.decay + d, n) * factor;
      store(each + d, factor, n);
      store(block.decay + d, whole, n);
      store(block.query[r] + d, load(q + d, n) * whole, n);
      store(block.key[r] + d, load(k + d, n) * whole, n);
    });
    for (int s = 0; s < r; ++s) {
      float* before = block.last[s];
      over_lanes(D, [&](int64_t d, int n) { store(before + d, load(before + d, n) * load(each + d, n), n); });
      block.met[r][s] = a.delta ? product(k, before, D) : 0.0f;
      block.seen[r][s] = product(q, before, D);
    }
    block.seen[r][r] = product(q, k, D);
  }
}

// R tokens of one head, whose values v and results are NC registers of n lanes each. Rows of the state are `step` apart.
template <class T, int R, int NC, bool DELTA>
[[gnu::always_inline]] inline void scan_columns(const ScanArgs& a, const ScanBlock<R>& block, const T* v, T* out,
                                                float skip, float* state, int64_t step, int n) {
  const int64_t D = a.key_width;
  Vec given[R][NC], sums[R][NC];  // what the keys read of the state, then what the tokens write; what the queries read
  const auto values = [&](int r, int j) { return load(v + r * a.v_t + j * Vec::width, n); };
  const auto correct = [&](int r) {
#pragma GCC unroll 8
    for (int j = 0; j < NC; ++j) {
      Vec d = values(r, j);
      if constexpr (DELTA) {
        d = d - given[r][j];
        for (int s = 0; s < r; ++s) d = d - Vec(block.met[r][s]) * given[s][j];
      }
      given[r][j] = d * Vec(block.beta[r]);
    }
  };
  const auto update = [&](float* row, Vec (&s)[NC], int64_t d) {
    const Vec decay(block.decay[d]);
#pragma GCC unroll 8
    for (int j = 0; j < NC; ++j) s[j] = s[j] * decay;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec last(block.last[r][d]);
#pragma GCC unroll 8
      for (int j = 0; j < NC; ++j) s[j] = fma(last, given[r][j], s[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < NC; ++j) store(row + j * Vec::width, s[j], n);
  };
  if constexpr (!DELTA) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) correct(r);
  }
  float* row = state;
  for (int64_t d = 0; d < D; ++d, row += step) {
    Vec s[NC];
#pragma GCC unroll 8
    for (int j = 0; j < NC; ++j) s[j] = load(row + j * Vec::width, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec query(block.query[r][d]);
#pragma GCC unroll 8
      for (int j = 0; j < NC; ++j) sums[r][j] = fma(query, s[j], sums[r][j]);
      if constexpr (DELTA) {
        const Vec key(block.key[r][d]);
#pragma GCC unroll 8
        for (int j = 0; j < NC; ++j) given[r][j] = fma(key, s[j], given[r][j]);
      }
    }
    if constexpr (!DELTA) update(row, s, d);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if constexpr (DELTA) correct(r);
    T* to = out + r * a.heads * a.value_width;
#pragma GCC unroll 8
    for (int j = 0; j < NC; ++j) {
      Vec y = sums[r][j];
      for (int s = 0; s <= r; ++s) y = fma(Vec(block.seen[r][s]), given[s][j], y);
      if (skip != 0.0f) y = fma(Vec(skip), values(r, j), y);
      store(to + j * Vec::width, y, n);
    }
  }
  if constexpr (DELTA) {
    row = state;
    for (int64_t d = 0; d < D; ++d, row += step) {
      Vec s[NC];
#pragma GCC unroll 8
      for (int j = 0; j < NC; ++j) s[j] = load(row + j * Vec::width, n);
      update(row, s, d);
    }
  }
}

// One head of one batch row: where its values, results and state are.
template <class T>
struct ScanHead {
  const T* v;
  T* out;
  float *state, skip;

  ScanHead(const ScanArgs& a, int64_t b, int64_t head)
      : v(static_cast<const T*>(a.v) + b * a.v_b + head * a.value_width),
        out(static_cast<T*>(a.out) + (b * a.tokens * a.heads + head) * a.value_width),
        state(a.after + (b * a.heads + head) * a.key_width * a.value_width), skip(a.skip ? a.skip[head] : 0.0f) {}
};

// Calls run(c, n, registers) for the columns of values: `registers` registers from c on, of n lanes each. A head of 64
// columns is one pass over whole cache lines of its state, not four over a part of each row.
template <int NC, class F>
[[gnu::always_inline]] inline void over_values(int64_t columns, const F& run) {
  int64_t c = 0;
  const auto registers = [&](auto count) {
    constexpr int64_t most = decltype(count)::value * Vec::width;
    for (; c + most <= columns; c += most) run(c, Vec::width, count);
  };
  registers(std::integral_constant<int, NC>());
  if constexpr (NC > 4) registers(std::integral_constant<int, 4>());
  if constexpr (NC > 2) registers(std::integral_constant<int, 2>());
  if constexpr (NC > 1) registers(std::integral_constant<int, 1>());
  if (c < columns) run(c, int(columns - c), std::integral_constant<int, 1>());
}

// R tokens, whose state streams through the caches.
template <class T, int R, bool DELTA>
void scan_few(const ScanArgs& a, const ScanHead<T>& of, int64_t b, int64_t head, int64_t first) {
  ScanBlock<R> block;
  prepare_block<T>(a, b, head, first, block);
  const T* v = of.v + first * a.v_t;
  T* out = of.out + first * a.heads * a.value_width;
  over_values<kScanRegisters / R>(a.value_width, [&](int64_t c, int n, auto registers) {
    constexpr int NC = decltype(registers)::value;
    scan_columns<T, R, NC, DELTA>(a, block, v + c, out + c, of.skip, of.state + c, a.value_width, n);
  });
}

// Many tokens: some columns of the state at a time stay in the nearest cache for kScanBlocks blocks.
constexpr int kScanBlocks = 8, kBlockTokens = 4;
template <class T, bool DELTA>
void scan_many(const ScanArgs& a, const ScanHead<T>& of, int64_t b, int64_t head, int64_t first,
               ScanBlock<kBlockTokens>* blocks) {
  for (int i = 0; i < kScanBlocks; ++i) prepare_block<T>(a, b, head, first + i * kBlockTokens, blocks[i]);
  const int64_t D = a.key_width, V = a.value_width;
  over_values<kScanRegisters / kBlockTokens>(V, [&](int64_t c, int n, auto registers) {
    constexpr int NC = decltype(registers)::value;
    alignas(64) float near[kMostKeyWidth * NC * Vec::width];
    const auto move = [&](const auto& each) {
      for (int64_t d = 0; d < D; ++d) {
        for (int j = 0; j < NC; ++j) each(near + (d * NC + j) * Vec::width, of.state + d * V + c + j * Vec::width);
      }
    };
    move([&](float* own, const float* state) { store(own, load(state, n), Vec::width); });
    for (int i = 0; i < kScanBlocks; ++i) {
      const int64_t t = first + i * kBlockTokens;
      scan_columns<T, kBlockTokens, NC, DELTA>(a, blocks[i], of.v + t * a.v_t + c, of.out + t * a.heads * V + c, of.skip,
                                               near, NC * Vec::width, n);
    }
    move([&](const float* own, float* state) { store(state, load(own, n), n); });
  });
}

template <class T, bool DELTA>
void scan_head(const ScanArgs& a, int64_t b, int64_t head) {
  const ScanHead<T> of(a, b, head);
  const int64_t size = a.key_width * a.value_width;
  if (!a.before) {
    std::memset(of.state, 0, size_t(size) * sizeof(float));
  } else if (a.before != a.after) {
    std::memcpy(of.state, a.before + (b * a.heads + head) * size, size_t(size) * sizeof(float));
  }
  int64_t t = 0;
  constexpr int64_t kMany = kScanBlocks * kBlockTokens;
  if (a.tokens >= kMany) {
    const std::unique_ptr<ScanBlock<kBlockTokens>[]> blocks(new ScanBlock<kBlockTokens>[kScanBlocks]);
    for (; t + kMany <= a.tokens; t += kMany) scan_many<T, DELTA>(a, of, b, head, t, blocks.get());
  }
  for (; t + kBlockTokens <= a.tokens; t += kBlockTokens) scan_few<T, kBlockTokens, DELTA>(a, of, b, head, t);
  for (; t + 2 <= a.tokens; t += 2) scan_few<T, 2, DELTA>(a, of, b, head, t);
  for (; t < a.tokens; ++t) scan_few<T, 1, DELTA>(a, of, b, head, t);
}

inline void scan(const ScanArgs& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i) {
      a.delta ? scan_head<T, true>(a, i / a.heads, i % a.heads) : scan_head<T, false>(a, i / a.heads, i % a.heads);
    }
  });
}

// ---- a decay for each channel ----

template <class T>
void decay_head(const ChannelDecayArgs& a, int64_t token, int64_t head) {
  const T* made = static_cast<const T*>(a.made) + token * a.made_t + head * a.width;
  const float* bias = a.bias + head * a.width;
  float* to = a.decay + (token * a.heads + head) * a.width;
  const Vec rate(a.rate[head]), bound(a.bound), one(1.0f);
  over_lanes(a.width, [&](int64_t d, int n) {
    const Vec y = load(made + d, n) + load(bias + d, n);
    const Vec decay = a.bounded ? bound / (one + exp(Vec(0.0f) - rate * y)) : Vec(0.0f) - rate * softplus(y);
    store(to + d, a.rounded ? rounded<T>(decay) : decay, n);
  });
}

inline void channel_decay(const ChannelDecayArgs& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) decay_head<decltype(type)>(a, i / a.heads, i % a.heads);
  });
}

// ---- a norm with a gate ----

template <class T>
void gated_norm_row(const GatedNormArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.width;
  const T* gate = static_cast<const T*>(a.gate) + row / a.each * a.gate_t + row % a.each * a.width;
  const T* weight = a.weight ? static_cast<const T*>(a.weight) + row % a.weight_rows * a.width : nullptr;
  T* y = static_cast<T*>(a.y) + row * a.width;
  const auto gated = [&](int64_t c, int n) {
    const Vec g = load(gate + c, n);
    return a.sigmoid ? Vec(1.0f) / (Vec(1.0f) + exp(Vec(0.0f) - g)) : activated<Act::silu, T>(g);
  };
  Vec squares;
  if (weight) {
    over_lanes(a.width, [&](int64_t c, int n) {
      const Vec v = a.gate_first ? load(x + c, n) * gated(c, n) : load(x + c, n);
      squares = fma(v, v, squares);
    });
  }
  const Vec factor(weight ? 1 / std::sqrt(squares.sum() / float(a.width) + a.eps) : 1.0f);
  over_lanes(a.width, [&](int64_t c, int n) {
    const Vec made = load(x + c, n) * gated(c, n) * factor;
    store_coarse(y + c, weight ? made * load(weight + c, n) : made, n);
  });
}

inline void gated_norm(const GatedNormArgs& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) gated_norm_row<decltype(type)>(a, row);
  });
}

}  // namespace INFUSE_ISA
}  // namespace infuse
