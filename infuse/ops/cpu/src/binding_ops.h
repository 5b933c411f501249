// Operators that other operators call, as functions. Each is described by its schema, in the file that defines it.
#pragma once

#include <optional>
#include <tuple>

#include "binding.h"

namespace infuse {

// binding.cpp
Tensor norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, double offset,
            bool centred);
std::tuple<Tensor, Tensor> add_norm(Tensor x, Tensor residual, std::optional<Tensor> weight, std::optional<Tensor> bias,
                                    double eps, double offset, bool centred);
// RMSNorm as transformers writes it: x / rms(x) is rounded before it is multiplied with the weight. To the same bits,
// since PyTorch sums the squares. x and weight of one type, contiguous.
Tensor rounded_norm(Tensor x, Tensor weight, double eps);

// binding_linear.cpp, binding_panels.cpp: few rows. x, y, bias, rows and type must be set; weights as in the schema.
void stream_linear(LinearArgs& a, const Tensor& weight);
void stream_panels(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero,
                   int64_t code, int64_t outputs);

// The same for many rows, by tiles on `threads` threads; act and activates must be set too.
void tile_linear(LinearArgs& a, const Tensor& weight, int64_t threads);
void tile_panels(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero,
                 int64_t code, int64_t outputs, int64_t threads);

// binding_panels.cpp: sets the weight of `a` from panels and all that describes it.
void take_panels(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero,
                 int64_t code, int64_t outputs);
// Whether to round x to 8 bits: if the code allows it and there is no AMX, which multiplies bf16 faster.
bool takes_integers(const LinearArgs& a, int64_t code);

// binding_attention.cpp
std::optional<Tensor> rotary_append(Tensor qkv, std::optional<Tensor> cos, std::optional<Tensor> sin, Tensor keys,
                                    Tensor values, int64_t start, int64_t heads, bool interleaved);
std::optional<Tensor> activation(Tensor x, int64_t act);
std::optional<Tensor> gated_activation(Tensor x, int64_t act);
// Attention over the first `length` keys and values.
std::optional<Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, int64_t length,
                             const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, double scale,
                             bool causal, int64_t window, double softcap, const std::optional<Tensor>& sinks);
// Sets `s` from `t` if it can be broadcast to [B, H, T, L], with up to four axes; and the same `s` from batch row b on.
bool set_scored(Scored& s, const std::optional<Tensor>& t, const AttentionArgs& a, bool may_be_bool);
// Sets `s` from sinks [H] of any floating type.
bool set_sinks(Scored& s, const std::optional<Tensor>& t, int64_t heads);
Scored from_row(Scored s, int64_t b);
// Many queries on `threads` threads; and whether they are as fast as an encoder wants: in float32, or by bf16's own
// instructions.
void attend_tiles(AttentionArgs& a, int64_t threads);
bool tiles_take(Type type, int64_t width, int64_t heads, int64_t kv_heads);

}  // namespace infuse
