// Whether the kernels support a program and its parts for values of a type.
#pragma once

#include "binding_layer.h"
#include "binding_ops.h"

namespace infuse {

inline bool alike(const Maybe& t, ScalarType type, int64_t size) {
  return !t || (t->scalar_type() == type && t->dim() == 1 && t->size(0) == size && t->is_contiguous());
}

inline bool takes(const NormPart& norm, ScalarType type, int64_t columns) {
  if (norm.kind == NormKind::factor) return norm.weight && alike(norm.weight, type, 1);
  return alike(norm.weight, type, columns) && alike(norm.bias, type, columns);
}

// True if the norm spans all heads at once, false if it is per head.
inline bool at_once(const NormPart& norm, int64_t heads, int64_t width) {
  return norm.weight && norm.weight->dim() == 1 && norm.weight->size(0) == heads * width;
}
inline bool takes(const std::optional<NormPart>& norm, ScalarType type, int64_t heads, int64_t width) {
  return !norm || takes(*norm, type, at_once(*norm, heads, width) ? heads * width : width);
}

inline bool takes(const LinearPart& linear, ScalarType type, int64_t inputs, int64_t outputs) {
  const Array& weight = *linear.weight;
  if (linear.outputs != outputs || !weight.is_contiguous() || !alike(linear.bias, type, outputs)) return false;
  if (linear.code < 0) {
    return weight.scalar_type() == type && weight.dim() == 2 && weight.size(0) == outputs &&
           weight.size(1) == inputs;
  }
  const int64_t input_bits = inputs * bits_of(format_of(linear.code).code);
  const bool panels = weight.dim() == 3 && weight.size(1) * 32 == input_bits && weight.size(0) * 16 >= outputs;
  const Array& scale = *linear.scale;
  return panels && are_scales(scale, format_of(linear.code)) && scale.is_contiguous() &&
         (!linear.zero || linear.zero->is_contiguous());
}

inline bool takes(const ProductPart& product, ScalarType type, int64_t inputs, int64_t outputs) {
  if (const auto* whole = std::get_if<LinearPart>(&product)) return takes(*whole, type, inputs, outputs);
  const auto* joined = std::get_if<JoinedPart>(&product);
  if (!joined) return false;
  int64_t made = 0;
  for (const LinearPart& part : joined->parts) {
    if (!takes(part, type, inputs, part.outputs)) return false;
    made += part.outputs;
  }
  return made == joined->outputs && made == outputs;
}

inline bool takes_gate(const std::optional<LinearPart>& gate, ScalarType type, int64_t columns, int64_t heads,
                       int64_t width) {
  return !gate || (takes(*gate, type, columns, gate->outputs) &&
                   (gate->outputs == heads || gate->outputs == heads * width));
}

inline bool takes(const AttentionPart& a, ScalarType type, int64_t columns) {
  return takes(a.qkv, type, columns, a.all_heads() * a.width) && takes(a.out, type, a.heads * a.width, columns) &&
         takes(a.q_norm, type, a.heads, a.width) && takes(a.k_norm, type, a.kv_heads, a.width) &&
         takes(a.v_norm, type, a.kv_heads, a.width) &&
         takes_gate(a.gate, type, columns, a.heads, a.width) &&
         (!a.out_norm || takes(*a.out_norm, type, a.heads * a.width));
}

inline bool takes(const CrossAttentionPart& a, ScalarType type, int64_t columns) {
  return takes(a.q, type, columns, a.heads * a.width) && takes(a.out, type, a.heads * a.width, columns);
}

inline bool takes_conv(const Maybe& weight, const Maybe& bias, ScalarType type, int64_t channels, int64_t taps) {
  const ScalarType own = weight->scalar_type();
  return (own == type || own == ScalarType::Float) && weight->numel() == channels * taps && weight->is_contiguous() &&
         taps <= kMostTaps && alike(bias, own, channels);
}
inline bool takes(const ShortConvPart& a, ScalarType type, int64_t columns) {
  return takes(a.into, type, columns, 3 * a.channels()) && takes(a.out, type, a.channels(), columns) &&
         takes_conv(a.conv, a.conv_bias, type, a.channels(), a.taps);
}
inline bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}
inline bool takes(const LinearAttentionPart& a, ScalarType type, int64_t columns) {
  const auto of_heads = [&](const Maybe& t) {
    return !t || (is_float(t->scalar_type()) && t->numel() == a.heads && t->is_contiguous());
  };
  const bool normed = !a.norm || (a.norm->scalar_type() == type && a.norm->is_contiguous() &&
                                  a.norm->numel() % a.norm_width == 0);
  return takes(a.into, type, columns, outputs_of(a.into)) && takes(a.out, type, a.values(), columns) &&
         takes_conv(a.conv, a.conv_bias, type, a.channels(), a.taps) && of_heads(a.A_log) && of_heads(a.dt_bias) &&
         of_heads(a.D) && normed && a.key_width <= kMostKeyWidth;
}

inline bool takes(const SelectiveScanPart& a, ScalarType type, int64_t columns) {
  const ScalarType own = a.A_log->scalar_type();
  const auto of_channels = [&](const Maybe& t, int64_t each) {
    return t && t->scalar_type() == own && t->numel() == a.channels * each && t->is_contiguous();
  };
  return takes(a.into, type, columns, 2 * a.channels) && takes(a.x, type, a.channels, a.rank + 2 * a.states) &&
         takes(a.dt, type, a.rank, a.channels) && takes(a.out, type, a.channels, columns) &&
         takes_conv(a.conv, a.conv_bias, type, a.channels, a.taps) && (own == type || own == ScalarType::Float) &&
         of_channels(a.A_log, a.states) && of_channels(a.dt_bias, 1) && of_channels(a.D, 1) &&
         (!a.dt_norm || takes(*a.dt_norm, type, a.rank)) && (!a.key_norm || takes(*a.key_norm, type, a.states)) &&
         (!a.query_norm || takes(*a.query_norm, type, a.states)) && a.states <= kMostStates;
}

inline bool takes(const LatentAttentionPart& a, ScalarType type, int64_t columns) {
  const int64_t from = a.q_a ? a.q_a->outputs : columns;
  const bool low = !a.q_a || (a.q_norm && takes(*a.q_a, type, columns, from) && takes(*a.q_norm, type, from));
  return low && takes(a.q, type, from, a.heads * (a.plain + a.turned)) &&
         takes(a.kv_a, type, columns, a.latent + a.turned) && a.kv_norm && takes(*a.kv_norm, type, a.latent) &&
         a.kv_b.code < 0 && !a.kv_b.bias && takes(a.kv_b, type, a.latent, a.heads * (a.plain + a.value)) &&
         takes(a.out, type, a.heads * a.value, columns) && takes_gate(a.gate, type, columns, a.heads, a.value) &&
         a.turned > 0 && a.turned % 2 == 0 && are_latents(a.heads, a.latent);
}

inline bool takes(const ChannelDeltaPart& a, ScalarType type, int64_t columns) {
  const auto has = [&](const Maybe& t, int64_t size) {
    return t && is_float(t->scalar_type()) && t->numel() == size && t->is_contiguous();
  };
  const auto second = [&](const std::optional<LinearPart>& linear, int64_t rank) {
    return linear ? takes(*linear, type, rank, a.values()) : rank == 0;
  };
  const bool low = a.low ? takes(*a.low, type, columns, a.low_columns()) : a.low_columns() == 0;
  return low && second(a.decay, a.decay_rank) && second(a.gate, a.gate_rank) && takes(a.into, type, columns, a.all()) &&
         takes(a.out, type, a.values(), columns) && takes_conv(a.conv, a.conv_bias, type, a.channels(), a.taps) &&
         has(a.A_log, a.heads) && has(a.dt_bias, a.values()) && has(a.norm, a.width) && a.norm->scalar_type() == type &&
         a.width <= kMostKeyWidth;
}

inline bool takes(const MlpPart& mlp, ScalarType type, int64_t columns) {
  return takes(mlp.up, type, columns, outputs_of(mlp.up)) && takes(mlp.down, type, mlp.inner(), columns) &&
         (!mlp.norm || takes(*mlp.norm, type, mlp.inner()));
}

inline bool takes(const RouterPart& router, ScalarType type, int64_t columns) {
  const Array& weight = *router.weight;
  const bool exact = weight.scalar_type() == type || weight.scalar_type() == ScalarType::Float;
  if (!is_float(weight.scalar_type()) || !(exact || router.logits == LogitsIn::float32)) return false;
  if (weight.dim() != 2 || weight.size(1) != columns || !weight.is_contiguous()) return false;
  const int64_t experts = weight.size(0);
  const Maybe& correction = router.correction;
  const bool corrects = !correction || (is_float(correction->scalar_type()) && correction->numel() == experts &&
                                        correction->is_contiguous());
  const bool normed = (!router.norm || (router.gain && takes(*router.norm, type, columns))) &&
                      alike(router.gain, type, columns) && alike(router.gains, type, experts);
  return corrects && normed && alike(router.bias, weight.scalar_type(), experts) && router.top_k >= 1 &&
         router.top_k <= experts;
}

inline bool takes(const ExpertsPart& experts, ScalarType type, int64_t columns) {
  const LinearPart &up = experts.up, &down = experts.down;
  return takes(up, type, columns, up.outputs) && takes(down, type, experts.inner, down.outputs);
}

inline bool takes(const MoePart& moe, ScalarType type, int64_t columns) {
  if (moe.shared && !takes(*moe.shared, type, columns)) return false;
  const Maybe& gate = moe.shared_gate;
  const bool gated = !gate || (gate->scalar_type() == type && gate->dim() == 2 && gate->size(0) == 1 &&
                               gate->size(1) == columns && gate->is_contiguous());
  const bool normed = (!moe.norm || takes(*moe.norm, type, columns)) && (!moe.post || takes(*moe.post, type, columns));
  const int64_t width = moe.latent_in ? moe.latent_in->outputs : columns;
  const bool narrowed = !moe.latent_in || (takes(*moe.latent_in, type, columns, width) &&
                                           takes(*moe.latent_out, type, width, columns));
  return gated && normed && narrowed && takes(moe.router, type, columns) && takes(moe.experts, type, width);
}

inline bool takes(const LayerInputPart& part, ScalarType type, int64_t columns) {
  return takes(part.gate, type, columns, part.gate.outputs) &&
         takes(part.projection, type, part.gate.outputs, columns);
}

inline bool takes(const TablePart& table, ScalarType type, int64_t columns) {
  return takes(table.rows, type, columns, table.rows.outputs);
}
inline bool takes(const PlacePart& part, ScalarType type, int64_t columns) {
  const Array& table = *part.table;
  return table.scalar_type() == type && table.dim() == 2 && table.size(1) == columns && table.is_contiguous();
}
inline bool takes(const HeadPart& head, ScalarType type, int64_t columns) {
  const Maybe& shift = head.shift;
  const bool shifts = !shift || (shift->scalar_type() == type && shift->numel() == head.product.outputs &&
                                 shift->is_contiguous());
  return shifts && takes(head.product, type, columns, head.product.outputs);
}
inline bool takes(const std::monostate&, ScalarType, int64_t) { return true; }

inline bool takes(const Program& program, const Values& values) {
  return is_float(values.type) && std::all_of(program.steps.begin(), program.steps.end(), [&](const Step& step) {
    return std::visit([&](const auto& part) { return takes(part, values.type, values.columns); }, step.part);
  });
}

}  // namespace infuse
