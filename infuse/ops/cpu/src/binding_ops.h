// Operators that other operators call, as functions. Each is described by its schema, in the file that defines it.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "binding.h"

namespace infuse {

// binding.cpp
// y = norm(x); with a residual, sum = x + residual, y = norm(sum).
struct NormRule {
  const Maybe &weight, &bias;
  double eps, offset;
  bool centred, scales = false;
};
void norm(const NormRule& rule, const Array& x, const Array& y);
void add_norm(const NormRule& rule, const Array& x, const Array& residual, const Array& sum, const Array& y);
// RMSNorm as transformers writes it, to the same bits, since PyTorch sums the squares: x / rms(x) is multiplied with
// weight + offset; if it `rounds`, it is rounded before. x and weight of one type, contiguous.
void rounded_norm(const Array& x, const Array& weight, double eps, double offset, bool rounds, const Array& y);

// binding_recurrence.cpp, binding_selective_scan.cpp: the whole of each, on the threads that are there; `rows` of x.
void convolve(const ConvArgs& a);
void scan(const ScanArgs& a);
void selective(const SelectiveArgs& a);
void gated_norm(const GatedNormArgs& a, int64_t rows);
void channel_decay(const ChannelDecayArgs& a, int64_t tokens);

// binding_largest.cpp: for each row of x [..., V], contiguous, the index of its largest value: the first of equals, and
// the first NaN if there is one, as torch.argmax.
void largest(const Array& x, int64_t* to);

// binding_linear.cpp, binding_panels.cpp: few rows. x, y, bias, rows and type must be set; weights as in the schema.
void stream_linear(LinearArgs& a, const Array& weight);
void stream_panels(LinearArgs& a, const Array& data, const Array& scale, const Maybe& zero, int64_t code,
                   int64_t outputs);

// The same for many rows, by tiles on `threads` threads; act and activates must be set too.
void tile_linear(LinearArgs& a, const Array& weight, int64_t threads);
void tile_panels(LinearArgs& a, const Array& data, const Array& scale, const Maybe& zero, int64_t code,
                 int64_t outputs, int64_t threads);

// binding_panels.cpp: sets the weight of `a` from panels and all that describes it; the buffers of a format in order.
void take_panels(LinearArgs& a, const Array& data, const Array& scale, const Maybe& zero, int64_t code,
                 int64_t outputs);
void take_panels(LinearArgs& a, const std::vector<Tensor>& buffers, int64_t code, int64_t outputs);
// Whether kernels read scales of this type for a format: float32 is passed as int32, which casting a model leaves alone.
inline bool are_scales(const Array& scale, const Format& format) {
  const ScalarType type = scale.scalar_type();
  if (format.blocks) return type == ScalarType::Byte;
  if (type == ScalarType::Int) return has_wide_scales(format.code);
  if (type == ScalarType::Half) return has_half_scales(format.code);
  return type == ScalarType::BFloat16 && format.code != Code::real4;
}
// Whether to round x to 8 bits: if the code allows it and there is no AMX, which multiplies bf16 faster.
bool takes_integers(const LinearArgs& a, int64_t code);

// binding_attention.cpp. They return false, with nothing written, for unsupported arguments.
// q [B, heads, T, D] from qkv [B, T, heads + 2 kv_heads + others, D]; appends keys and values.
bool rotary_append(const Array& qkv, const Maybe& cos, const Maybe& sin, const Array& keys, const Array& values,
                   int64_t start, int64_t heads, bool interleaved, const Array& q);
// q [B, heads, T, D] from x [B, T, heads + others, D].
bool rotated(const Array& x, const Maybe& cos, const Maybe& sin, bool interleaved, const Array& q);
bool activation(const Array& x, int64_t act, const Array& y);
bool gated_activation(const Array& x, int64_t act, const Array& y);
// out [B, T, heads, D]: attention over the first `length` keys and values.
bool attend(const Array& q, const Array& k, const Array& v, int64_t length, const Maybe& mask, const Maybe& bias,
            double scale, bool causal, int64_t window, double softcap, const Maybe& sinks, const Array& out);
// Whether latents of this width are attended to by so many heads. Latents [B, L, rank] and the heads' shared part of the
// keys [B, L, turned] of a cache, whose rows lie *_b and *_t apart; out of `of`, whose other fields but queries and sums
// are set, is the attention to the first `length` of them. `like`: an array of their type.
bool are_latents(int64_t heads, int64_t rank);
struct Latents {
  const void *latents, *keys;
  int64_t latents_b, latents_t, keys_b, keys_t, length;
};
bool attend_to_latents(LatentArgs& of, const Latents& seen, const Maybe& mask, double scale, bool causal,
                       const Array& like);
// Sets `s` from `t` if it can be broadcast to [B, H, T, L], with up to four axes; and the same `s` from batch row b on.
bool set_scored(Scored& s, const Maybe& t, const AttentionArgs& a, bool may_be_bool);
// Sets `s` from sinks [H] of any floating type.
bool set_sinks(Scored& s, const Maybe& t, int64_t heads);
Scored from_row(Scored s, int64_t b);
// Many queries on `threads` threads; and whether they are as fast as an encoder wants: in float32, or by bf16's own
// instructions.
void attend_tiles(AttentionArgs& a, int64_t threads);
bool tiles_take(Type type, int64_t width, int64_t heads, int64_t kv_heads);

}  // namespace infuse
