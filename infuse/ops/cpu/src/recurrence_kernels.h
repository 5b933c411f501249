// Arguments and table of what recurrent mixers compute: a causal convolution, linear attention with a state, and a norm
// with a gate (recurrence.h); a selective scan (selective_scan.h).
#pragma once

#include "types.h"

namespace infuse {

constexpr int64_t kMostTaps = 16;
constexpr int64_t kMostKeyWidth = 256;  // of linear attention
constexpr int64_t kMostStates = 256;    // of a channel, in a selective scan

// y[t, c] = act(bias[c] + sum of weight[c, j] * seen[t + j + 1 - taps, c]) * out_gate[t, c], with seen = x * gate. What
// came before the first token are the rows of `before` [B, taps, C], zeros if it is null. x and gates have rows
// `*_b` and `*_t` apart; y [B, T, C] and weight [C, taps] are contiguous.
struct ConvArgs {
  const void *x, *gate, *out_gate;  // gates or null
  int64_t x_b, x_t, gate_b, gate_t, out_b, out_t;
  const void *weight, *bias, *before;  // bias, before: or null
  void *y, *after;                     // after [B, taps, C]: the last rows of `seen`; may be `before`
  int64_t batch, tokens, channels, taps;
  bool silu;
  Type type, weight_type;  // weight_type: that of bias, too; `type` or f32
};

// A convolution is computed in tiles of these sizes, by channels, then by tokens, then by batch rows: long enough that
// the taps - 1 rows that a tile reads again cost little, and wide enough that its rows are whole pages of memory.
constexpr int64_t kConvTokens = 32, kConvChannels = 1024;
constexpr int64_t tiles_in(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// For each head, with a state S [D, V] in float32: S = exp(decay) S + k d', where d = beta (v - S' k) if `delta`, with S
// after the decay, else d = beta v; out = S' q + skip v. Heads share q and k in groups of heads / groups. `normalise`:
// q and k become x / sqrt(|x|^2 + 1e-6); q is then multiplied by `scale`. q, k [B, T, G, D] and v [B, T, H, V] have
// tokens *_t and rows *_b apart; decay [B, T, H], or [B, T, H, D] if `by_key`, beta [B, T, H], out and the states
// [B, H, D, V] are contiguous.
struct ScanArgs {
  const void *q, *k, *v;
  int64_t q_b, q_t, k_b, k_t, v_b, v_t;
  const float *decay, *beta, *skip;  // skip [H] or null
  const float* before;               // or null: zeros
  float* after;                      // may be `before`
  void* out;
  int64_t batch, tokens, groups, heads, key_width, value_width;
  float scale;
  bool normalise, by_key, delta;
  Type type;
};

// y = norm(x) * act(gate), or norm(x * act(gate)) if `gate_first`, in rows of `width` columns: x / rms(x) * weight. The
// weight has `weight_rows` rows, which rows of x take in turn; null: no norm. `each` rows of x and of gate are of one
// token; tokens of gate are gate_t apart.
struct GatedNormArgs {
  const void *x, *gate, *weight;
  void* y;
  int64_t width, each, gate_t, weight_rows;
  float eps;
  bool gate_first, sigmoid;
  Type type;
};

// The logarithms of decays by channel [tokens, H, D] in float32: -rate softplus(made + bias), or, if they are bounded,
// bound sigmoid(rate (made + bias)), `rounded` to `type` or not. Tokens of made [tokens, H D] are `made_t` apart; rates
// [H] and biases [H D].
struct ChannelDecayArgs {
  const void* made;
  const float *rate, *bias;
  float* decay;
  int64_t made_t, heads, width;
  float bound;
  bool bounded, rounded;
  Type type;
};

// For each channel, with N states S in float32 and step = softplus(dt + dt_bias): S = exp(-exp(a_log) step) S + step x
// keys, y = (S queries + skip x) silu(gate). x, dt, gate [B, T, C] and keys, queries [B, T, N] have tokens *_t and rows
// *_b apart; y [B, T, C], a_log [C, N] and the states [B, C, N] are contiguous.
struct SelectiveArgs {
  const void *x, *dt, *keys, *queries, *gate;  // gate: or null
  int64_t x_b, x_t, dt_b, dt_t, keys_b, keys_t, queries_b, queries_t, gate_b, gate_t;
  const void *a_log, *dt_bias, *skip;
  const float* before;  // or null: zeros
  float* after;         // may be `before`
  void* y;
  int64_t batch, tokens, channels, states;
  Type type, weight_type;  // weight_type: that of a_log, dt_bias and skip; `type` or f32
};

// A selective scan is computed in tiles of this many channels. A tile of 16 states each has 16 KB of rates and states,
// and its rows of bf16 are whole cache lines.
constexpr int64_t kScanChannels = 128;

struct RecurrenceKernels {
  void (*convolve)(const ConvArgs&, int64_t begin, int64_t end);         // tiles; `after` is not written
  void (*scan)(const ScanArgs&, int64_t begin, int64_t end);             // batch rows x heads
  void (*gated_norm)(const GatedNormArgs&, int64_t begin, int64_t end);  // rows
  void (*selective)(const SelectiveArgs&, int64_t begin, int64_t end);   // batch rows x tiles
  void (*channel_decay)(const ChannelDecayArgs&, int64_t begin, int64_t end);  // tokens x heads
};

}  // namespace infuse
