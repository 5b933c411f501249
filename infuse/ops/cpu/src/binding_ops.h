// Operators that another operator calls, as functions: each as its schema says, see where it is defined.
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

// binding_linear.cpp, binding_panels.cpp: few rows, where x, y, bias, rows and type are set; a weight as the schema's
// body takes it.
void stream_linear(LinearArgs& a, const Tensor& weight);
void stream_panels(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero,
                   int64_t code, int64_t outputs);

// The same with many, by tiles on so many threads; act and whether there is one are set, too.
void tile_linear(LinearArgs& a, const Tensor& weight, int64_t threads);
void tile_panels(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero,
                 int64_t code, int64_t outputs, int64_t threads);

// binding_attention.cpp
std::optional<Tensor> rotary_append(Tensor qkv, std::optional<Tensor> cos, std::optional<Tensor> sin, Tensor keys,
                                    Tensor values, int64_t start, int64_t heads, bool interleaved);
std::optional<Tensor> activation(Tensor x, int64_t act);
std::optional<Tensor> gated_activation(Tensor x, int64_t act);
// Over the first `length` keys and values.
std::optional<Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, int64_t length,
                             const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, double scale,
                             bool causal, int64_t window, double softcap);
// Whether `t`, up to four axes on the right of [B, H, T, L], can be broadcast to them; and the same from row b on.
bool set_scored(Scored& s, const std::optional<Tensor>& t, const AttentionArgs& a, bool may_be_bool);
Scored from_row(Scored s, int64_t b);
// Many queries in bf16, on so many threads; and whether the kernels take such heads.
void attend_tiles(AttentionArgs& a, int64_t threads);
bool tiles_take(int64_t width, int64_t heads, int64_t kv_heads);

}  // namespace infuse
