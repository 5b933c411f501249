// Arguments and table of rotary + append (rotary.h), attention over a cache (attention.h, latent.h) and activations
// (activation.h). Strides are in elements and named tensor_axis: b batch, n head, t token or key. The last axis is
// contiguous.
#pragma once

#include "types.h"

namespace infuse {

// Keys that few queries attend to at once: with 128, keys and values evict each other from the L1 cache.
constexpr int kKeyBlock = 64;
constexpr int kMostKeys = 128;  // the same of many queries

// Heads [0, heads) of x go to q, the next kv_heads to keys and the last kv_heads to values, both at tokens start + t.
// If cos is given, the first `turned` of the `width` columns of queries and keys are rotated.
struct RotaryArgs {
  const void* x;
  const void* cos;  // or null
  const void* sin;
  void* q;
  void* keys;
  void* values;
  int64_t x_b, x_t, x_n, cos_b, cos_t, sin_b, sin_t, q_b, q_t, q_n;
  int64_t keys_b, keys_n, keys_t, values_b, values_n, values_t;
  int64_t tokens, heads, kv_heads, width, turned, start;
  bool interleaved, wide_turns;  // wide: cos and sin are float32, whatever the type of x
  bool to_int8;                  // keys and values are rows of int8_rows.h
  Type type;
};

// y = act(x), or if gated act(gate) * up over rows [gate | up] of 2 * columns.
struct ActivationArgs {
  const void* x;
  void* y;
  int64_t columns;
  Act act;
  bool gated;
  Type type;
};

// A mask or bias, broadcast to [B, H, T, L] through strides of 0. A bool mask hides keys where it is false; others are
// added to the scores.
struct Scored {
  const void* data;  // or null
  int64_t b, n, t, l;
  bool is_bool;
  Type type;  // unless is_bool
};

// Attention of T queries over keys and values of one length, all heads of one key head together.
// The work is cut into blocks of keys, numbered over (batch, key head, block). A part is a range of blocks, so that all
// parts have the same work for any shape. If a part begins or ends inside a head, its result there is partial and
// `combine` sums the parts. With `of_int8`, keys and values are rows of int8_rows.h, and their strides are in bytes.
// Few queries may have `more_width` further columns, after their `width`, that are multiplied with further keys `more_k`.
struct AttentionArgs {
  const void* q;
  const void* k;
  const void* v;
  void* out;  // [B, T, H, D] contiguous
  Scored mask, bias, sinks;  // sinks: one logit for each head, strided by n, that joins the softmax
  int64_t q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t;
  int64_t batch, heads, kv_heads, tokens, length, width;
  int64_t first_key;  // keys before it are hidden from every query; where a block begins
  int64_t ahead;      // with tiles: distance to the next tile that the same thread is likely to take
  int64_t window;     // or 0
  float scale, softcap;
  bool causal, of_int8;
  Type type;
  int64_t parts;
  float* scratch;  // parts * attention_scratch floats, aligned to 64 bytes
  const void* more_k;  // [B, L, more width], shared by all heads
  int64_t more_b, more_t, more_width;
};

// What comes before and after attention over latents. `expand` [H (plain + value), rank] has rows of keys and then rows of
// values for each head. Queries [B, H, T, rank + turned] are made of q and turned; out [B, T, H, value] of sums
// [B, T, H, rank]. All are contiguous but q and turned.
struct LatentArgs {
  const void* q;
  const void* turned;
  const void* expand;
  const void* sums;
  void* queries;
  void* out;
  int64_t q_b, q_t, q_n, turned_b, turned_t, turned_n;
  int64_t batch, tokens, heads, plain, turned_width, rank, value;
  Type type;
};

struct AttentionKernels {
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);          // tokens [begin, end) of B * T
  void (*activation)(const ActivationArgs&, int64_t begin, int64_t end);  // elements of y
  void (*attention)(const AttentionArgs&, int64_t begin, int64_t end);    // parts
  void (*combine)(const AttentionArgs&);                                  // after all parts
  int64_t (*attention_blocks)(const AttentionArgs&);                      // in total
  int64_t (*attention_scratch)(const AttentionArgs&);                     // floats for each part
  void (*absorb)(const LatentArgs&, int64_t begin, int64_t end);          // heads: makes queries
  void (*expand)(const LatentArgs&, int64_t begin, int64_t end);          // heads: makes out
  // One tile of many queries, in scratch of `tile_bytes`.
  void (*tile)(const AttentionArgs&, int64_t index, void* scratch);
  int64_t (*tiles)(const AttentionArgs&);
  int64_t (*tile_bytes)(const AttentionArgs&);
  bool tiles_in_pairs;  // whether tiles multiply bf16 by its own instructions
};

}  // namespace infuse
