// The machine of a program's steps for a few new tokens, with what a step is given beside its values; binding_layer.cpp
// holds the programs.
#pragma once

#include <cmath>
#include <cstring>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"
#include "binding_product.h"

namespace infuse {

// Normalises heads [first, first + count) of each token in place.
inline void norm_heads(const std::optional<NormPart>& part, const Array& qkv, int64_t first, int64_t count) {
  if (!part) return;
  const int64_t width = qkv.size(3), all = qkv.size(2) * width, tokens = qkv.size(0) * qkv.size(1);
  const bool together = at_once(*part, count, width);
  NormArgs a{};
  a.weight = part->weight ? part->weight->const_data_ptr() : nullptr;
  a.bias = part->bias ? part->bias->const_data_ptr() : nullptr;
  a.rows = together ? 1 : count, a.columns = together ? count * width : width;
  a.eps = float(part->eps), a.offset = float(part->offset), a.centred = part->centred();
  a.type = type_of(qkv);
  const int64_t element_bytes = a.type == Type::f32 ? 4 : 2;
  for (int64_t t = 0; t < tokens; ++t) {
    a.y = static_cast<char*>(qkv.mutable_data_ptr()) + (t * all + first * width) * element_bytes;
    a.x = a.y;
    kernels().norm(a, 0, a.rows);
  }
}

// What a step is given beside its values. The new tokens are appended at `start` to keys and values [B, K, S, D], which
// a program of several blocks holds itself; states, which are given in their place, are overwritten (turns_of). `value`: what a
// LayerInputPart multiplies with. Those of states are a CrossAttentionPart's; its mask [R, 1 or H, 1, L] hides states.
struct Given {
  Maybe cos, sin, mask, bias, keys, values, value, state_keys, state_values, states_mask;
  int64_t start;
  bool once;  // as in LinearArgs
};

struct StepMachine {
  const Given& given;
  Maybe x, y = x, branch;
  std::optional<Tensor> logits;  // the memory of x after a head
  bool last = false;
  mutable bool wrote_state = false;

  Maybe norm(const NormPart& part, const Maybe& of) const {
    if (part.kind == NormKind::factor) return times(of, first_of(*part.weight));
    Maybe made = array_as(*of);
    if (part.kind == NormKind::rounded_rms || part.kind == NormKind::torch_rms) {
      rounded_norm(*of, *part.weight, part.eps, part.offset, part.kind == NormKind::rounded_rms, *made);
    } else {
      infuse::norm(part.rule(), *of, *made);
    }
    return made;
  }
  void add_norm(const NormPart& part, const Maybe& made) {
    if (part.kind == NormKind::factor) {
      x = this->sum(made, x);
      y = norm(part, x);
      return;
    }
    const Array sum = array_as(*x);
    y = array_as(*x);
    infuse::add_norm(part.rule(), *made, *x, sum, *y);
    x = sum;
  }
  Maybe narrowed(const NormPart& part, const Maybe& of) const {
    return norm(part, part.weight ? in_type(*of, part.weight->scalar_type()) : *of);
  }
  Maybe of_wide(const NormPart& part, const Maybe& of) const {
    if (!part.weight || part.bias) return std::nullopt;
    NormPart wide = part;
    const int64_t sizes[] = {part.weight->numel()};
    wide.weight = Array(sizes, 1, ScalarType::Float);
    widen(*part.weight, static_cast<float*>(wide.weight->mutable_data_ptr()));
    return in_type(*norm(wide, in_type(*of, ScalarType::Float)), part.weight->scalar_type());
  }
  Maybe wide_sum(const Maybe& a, const Maybe& b) const {
    return sum(in_type(*a, ScalarType::Float), in_type(*b, ScalarType::Float));
  }
  static Array in_type(const Array& from, ScalarType type) {
    if (from.scalar_type() == type) return from;
    const int64_t sizes[] = {from.size(0), from.size(1), from.size(2)};
    const Array to(sizes, 3, type);
    kernels().router.convert(from.const_data_ptr(), type_of(from), to.mutable_data_ptr(), type_of(to), from.numel());
    return to;
  }
  Maybe sum(const Maybe& a, const Maybe& b) const {
    Array to = array_as(*a);
    const void* from[] = {a->const_data_ptr(), b->const_data_ptr()};
    kernels().sum_arrays({from, to.mutable_data_ptr(), 2, type_of(to)}, 0, to.numel());
    return to;
  }
  Maybe apply(const AttentionPart& a, const Maybe& from) const {
    const Maybe& keys = a.keys.array ? a.keys.array : given.keys;
    const Maybe& values = a.values.array ? a.values.array : given.values;
    if (!keys || !values) return std::nullopt;
    const int64_t batch = from->size(0), tokens = from->size(1);
    const Array qkv = array({batch, tokens, a.all_heads(), a.width}, *from);
    const Maybe into = before(a.factors, from);
    multiply(a.qkv, *into, qkv, given.once);
    times_sections(a.factors, qkv, a.all_heads() * a.width);
    norm_heads(a.q_norm, qkv, 0, a.heads);
    if (!a.borrowed) {
      norm_heads(a.k_norm, qkv, a.heads, a.kv_heads);
      norm_heads(a.v_norm, qkv, a.heads + a.kv_heads, a.kv_heads);
    }
    const Array q = array({batch, a.heads, tokens, a.width}, *from);
    const Array attended = array({batch, tokens, a.heads, a.width}, *from);
    const bool turned = a.borrowed ? rotated(qkv, given.cos, given.sin, a.interleaved, q)
                                   : rotary_append(qkv, given.cos, given.sin, *keys, *values, given.start, a.heads,
                                                   a.interleaved, q);
    if (!turned) return std::nullopt;
    const bool causal = !given.mask || a.window > 0;
    const int64_t length = given.start + tokens;
    const Maybe held = a.bias.array && a.bias.array->size(3) >= length ? a.bias.array->last(3, length) : Maybe();
    if (a.bias.array && !held) return std::nullopt;
    const bool done = attend(q, *keys, *values, length, given.mask, held ? held : given.bias, a.scale, causal, a.window,
                             a.softcap, a.sinks, attended);
    if (!done) return std::nullopt;
    if (a.gated) multiply_by_sigmoids(attended, qkv, (a.all_heads() - a.heads) * a.width);
    if (a.gate) {
      const Array gates = array({batch, tokens, a.gate->outputs}, *from);
      multiply(*a.gate, *into, gates, given.once);
      a.gate->outputs == a.heads ? multiply_heads(attended, gates) : multiply_by_sigmoids(attended, gates, 0);
    }
    if (!a.out_norm) return after(a.factors, times(a.out, attended, *from));
    const Array rows = array({batch, tokens, a.heads * a.width}, *from);
    std::memcpy(rows.mutable_data_ptr(), attended.const_data_ptr(), size_t(rows.numel()) * rows.element_size());
    return after(a.factors, times(a.out, *norm(*a.out_norm, rows), *from));
  }
  Maybe apply(const CrossAttentionPart& a, const Maybe& from) const {
    const Maybe& keys = a.keys.array ? a.keys.array : given.state_keys;
    const Maybe& values = a.values.array ? a.values.array : given.state_values;
    const int64_t batch = from->size(0), all = batch * from->size(1);
    if (!keys || !values || keys->dim() != 4 || keys->size(0) == 0 || batch % keys->size(0)) return std::nullopt;
    const int64_t each = all / keys->size(0);  // tokens that attend to one row of states, in no order
    const Array rows = array({keys->size(0), each, a.heads, a.width}, *from);
    const Array q = array({keys->size(0), a.heads, each, a.width}, *from);
    multiply(a.q, *from, rows, given.once);
    if (!rotated(rows, {}, {}, false, q)) return std::nullopt;
    const bool done = attend(q, *keys, *values, keys->size(2), given.states_mask, {}, a.scale, false, 0, a.softcap, {},
                             rows);
    return done ? times(a.out, rows, *from) : Maybe();
  }
  Maybe apply(const ShortConvPart& a, const Maybe& from) const {
    const Maybe& state = a.convolved.array ? a.convolved.array : given.keys;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels();
    const int64_t turns = turns_of(state, tokens, {batch, a.taps, channels}, from->scalar_type());
    if (!turns) return std::nullopt;
    const Array rows = array_rows(*from, outputs_of(a.into)), y = array_rows(*from, channels);
    multiply(a.into, *from, rows, given.once);
    wrote_state = true;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t row = turn * outputs_of(a.into);
      ConvArgs conv = conv_of(a, rows, row + 2 * channels, channels, *state, y, turn, turns);
      conv.gate = bytes_at(rows, row), conv.out_gate = bytes_at(rows, row + channels);
      conv.gate_b = conv.out_b = conv.x_b, conv.gate_t = conv.out_t = conv.x_t;
      convolve(conv);
    }
    return times(a.out, y, *from);
  }
  Maybe apply(const LinearAttentionPart& a, const Maybe& from) const {
    const Maybe& seen = a.convolved.array ? a.convolved.array : a.beside ? given.state_keys : given.keys;
    const Maybe& state = a.state.array ? a.state.array : a.beside ? given.state_values : given.values;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels(), width = outputs_of(a.into);
    const int64_t turns = turns_of(seen, tokens, {batch, a.taps, channels}, from->scalar_type());
    const int64_t same = turns_of(state, tokens, {batch, a.heads, a.key_width, a.value_width}, ScalarType::Float);
    if (!turns || same != turns) return std::nullopt;
    const Array rows = array_rows(*from, width), qkv = array_rows(*from, channels), y = array_rows(*from, a.values());
    multiply(a.into, *before(a.factors, from), rows, given.once);
    times_sections(a.factors, rows, width);
    const std::vector<float> decay_and_beta = decays(a, rows, batch * tokens, tokens / turns);
    std::vector<float> skip(a.D ? size_t(a.heads) : 0);
    if (a.D) widen(*a.D, skip.data());
    wrote_state = true;
    for (int64_t turn = 0; turn < turns; ++turn) {
      ConvArgs conv = conv_of(a, rows, turn * width + a.conv_at(), channels, *seen, qkv, turn, turns);
      conv.silu = true;
      convolve(conv);
      ScanArgs scanned{};
      const auto section = [&](int64_t at) { return bytes_at(qkv, turn * channels + at - a.conv_at()); };
      scanned.q = section(a.q_at), scanned.k = section(a.k_at), scanned.v = section(a.v_at);
      scanned.q_t = scanned.k_t = scanned.v_t = channels;
      scanned.q_b = scanned.k_b = scanned.v_b = channels * tokens;
      scanned.decay = decay_and_beta.data() + turn * a.heads, scanned.beta = scanned.decay + batch * tokens * a.heads;
      scanned.skip = a.D ? skip.data() : nullptr;
      const int64_t each = turns > 1 ? state->numel() / (turns + 1) : 0;
      scanned.before = static_cast<const float*>(state->const_data_ptr()) + turn * each;
      scanned.after = static_cast<float*>(state->mutable_data_ptr()) + turn * each + each;
      scanned.out = bytes_at(y, turn * a.values()), scanned.batch = batch, scanned.tokens = tokens / turns;
      scanned.groups = a.key_heads, scanned.heads = a.heads;
      scanned.key_width = a.key_width, scanned.value_width = a.value_width;
      scanned.scale = float(a.scale), scanned.normalise = scanned.delta = a.delta, scanned.type = type_of(y);
      scan(scanned);
    }
    GatedNormArgs gated{};
    gated.x = y.const_data_ptr(), gated.y = y.mutable_data_ptr(), gated.gate = bytes_at(rows, a.gate_at);
    gated.weight = a.norm ? a.norm->const_data_ptr() : nullptr;
    gated.width = a.norm_width, gated.each = a.values() / a.norm_width, gated.gate_t = width;
    gated.weight_rows = a.norm ? a.norm->numel() / a.norm_width : 1;
    gated.eps = float(a.eps), gated.gate_first = a.gate_first, gated.sigmoid = a.sigmoid, gated.type = type_of(y);
    gated_norm(gated, batch * tokens * gated.each);
    return after(a.factors, times(a.out, y, *from));
  }
  // ---- multipliers
  Maybe before(const std::optional<FactorsPart>& factors, const Maybe& x) const {
    return factors && factors->before != 1 ? times(x, factors->before) : x;
  }
  Maybe after(const std::optional<FactorsPart>& factors, const Maybe& y) const {
    return factors && factors->after != 1 ? times(y, factors->after) : y;
  }
  // Rows of so many columns, in place.
  static void times_sections(const std::optional<FactorsPart>& factors, const Array& rows, int64_t columns) {
    if (!factors) return;
    int64_t at = 0;
    for (const SectionPart& section : factors->sections) {
      float factor = float(section.factor);
      if (factors->rounded && type_of(rows) != Type::f32) {
        uint16_t rounded;
        kernels().router.convert(&factor, Type::f32, &rounded, type_of(rows), 1);
        kernels().router.convert(&rounded, type_of(rows), &factor, Type::f32, 1);
      }
      for (int64_t row = at; factor != 1 && row < rows.numel(); row += columns) {
        void* some = bytes_at(rows, row);
        const void* from[] = {some};
        kernels().experts.weigh({from, &factor, 1, some, type_of(rows)}, 0, section.columns);
      }
      at += section.columns;
    }
  }
  Maybe apply(const SelectiveScanPart& a, const Maybe& from) const {
    const Maybe& seen = a.convolved.array ? a.convolved.array : given.keys;
    const Maybe& state = a.state.array ? a.state.array : given.values;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels, made = a.rank + 2 * a.states;
    const int64_t turns = turns_of(seen, tokens, {batch, a.taps, channels}, from->scalar_type());
    const int64_t same = turns_of(state, tokens, {batch, channels, a.states}, ScalarType::Float);
    if (!turns || same != turns) return std::nullopt;
    const Array rows = array_rows(*from, 2 * channels), x = array_rows(*from, channels), of_x = array_rows(*from, made);
    multiply(a.into, *from, rows, given.once);
    wrote_state = true;
    for (int64_t turn = 0; turn < turns; ++turn) {
      ConvArgs conv = conv_of(a, rows, turn * 2 * channels, channels, *seen, x, turn, turns);
      conv.silu = true;
      convolve(conv);
    }
    multiply(a.x, x, of_x, given.once);
    const Array dt = array_rows(*from, channels), y = array_rows(*from, channels);
    multiply(a.dt, section(of_x, 0, a.rank, a.dt_norm), dt, given.once);
    const Array keys = section(of_x, a.rank, a.states, a.key_norm);
    const Array queries = section(of_x, a.rank + a.states, a.states, a.query_norm);
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t each = turns > 1 ? state->numel() / (turns + 1) : 0;
      SelectiveArgs scanned{};
      scanned.x = bytes_at(x, turn * channels), scanned.dt = bytes_at(dt, turn * channels);
      scanned.gate = bytes_at(rows, turn * 2 * channels + channels), scanned.y = bytes_at(y, turn * channels);
      scanned.keys = bytes_at(keys, turn * a.states), scanned.queries = bytes_at(queries, turn * a.states);
      scanned.x_t = scanned.dt_t = channels, scanned.gate_t = 2 * channels;
      scanned.keys_t = scanned.queries_t = a.states;
      scanned.x_b = scanned.dt_b = channels * tokens, scanned.gate_b = 2 * channels * tokens;
      scanned.keys_b = scanned.queries_b = a.states * tokens;
      scanned.a_log = a.A_log->const_data_ptr(), scanned.dt_bias = a.dt_bias->const_data_ptr();
      scanned.skip = a.D->const_data_ptr();
      const bool goes_on = tokens == turns;
      scanned.before = goes_on ? static_cast<const float*>(state->const_data_ptr()) + turn * each : nullptr;
      scanned.after = static_cast<float*>(state->mutable_data_ptr()) + turn * each + each;
      scanned.batch = batch, scanned.tokens = tokens / turns, scanned.channels = channels, scanned.states = a.states;
      scanned.type = type_of(x), scanned.weight_type = type_of(*a.A_log);
      selective(scanned);
    }
    return times(a.out, y, *from);
  }
  // Columns [at, at + width) of rows [B, T, ...], normalised if there is a norm.
  Array section(const Array& rows, int64_t at, int64_t width, const std::optional<NormPart>& part) const {
    const Array some = array_rows(rows, width);
    const size_t row_bytes = size_t(width) * rows.element_size();
    for (int64_t row = 0; row < rows.numel() / rows.size(2); ++row) {
      std::memcpy(bytes_at(some, row * width), bytes_at(rows, row * rows.size(2) + at), row_bytes);
    }
    return part ? *norm(*part, some) : some;
  }
  // The logarithms of decays [tokens, heads], and then beta or dt. One token alone is a step, whose dt has no limits.
  static std::vector<float> decays(const LinearAttentionPart& a, const Array& rows, int64_t tokens, int64_t new_tokens) {
    const size_t heads = size_t(a.heads), count = size_t(tokens) * heads;
    std::vector<float> made(2 * count), rate(heads), bias(heads), row(heads);
    widen(*a.A_log, rate.data()), widen(*a.dt_bias, bias.data());
    for (float& each : rate) each = std::exp(each);
    const Type type = type_of(rows);
    for (int64_t t = 0; t < tokens; ++t) {
      float *decay = made.data() + size_t(t) * heads, *beta = decay + count;
      kernels().router.convert(bytes_at(rows, t * outputs_of(a.into) + a.step_at), type, row.data(), Type::f32, a.heads);
      for (size_t h = 0; h < heads; ++h) {
        const float x = row[h] + bias[h];
        float step = x > 20 ? x : std::log1p(std::exp(x));
        if (!a.delta && new_tokens > 1) step = std::min(std::max(step, float(a.least)), float(a.most));
        decay[h] = -rate[h] * step, beta[h] = step;
      }
      if (a.beta_at < 0) continue;
      kernels().router.convert(bytes_at(rows, t * outputs_of(a.into) + a.beta_at), type, row.data(), Type::f32, a.heads);
      for (size_t h = 0; h < heads; ++h) beta[h] = float(a.beta_factor) / (1 + std::exp(-row[h]));
    }
    return made;
  }
  // Channels from element `at` of rows [B, T, ...] on, convolved on the state of this turn.
  template <class Part>
  static ConvArgs conv_of(const Part& a, const Array& rows, int64_t at, int64_t channels, const Array& state,
                          const Array& y, int64_t turn, int64_t turns) {
    const int64_t each = turns > 1 ? state.numel() / (turns + 1) : 0;
    ConvArgs conv{};
    conv.x = bytes_at(rows, at), conv.x_t = rows.size(2), conv.x_b = rows.size(1) * rows.size(2);
    conv.weight = a.conv->const_data_ptr(), conv.bias = a.conv_bias ? a.conv_bias->const_data_ptr() : nullptr;
    conv.before = bytes_at(state, turn * each), conv.after = bytes_at(state, turn * each + each);
    conv.y = bytes_at(y, turn * channels);
    conv.batch = rows.size(0), conv.tokens = rows.size(1) / turns, conv.channels = channels, conv.taps = a.taps;
    conv.type = type_of(rows), conv.weight_type = type_of(*a.conv);
    return conv;
  }
  // In how many turns the tokens go over a state of these sizes: in one, which overwrites it. Or, over states
  // [tokens + 1, ...] of one batch row, each token in its own: from the state before it to the next. 0: in none.
  static int64_t turns_of(const Maybe& state, int64_t tokens, std::initializer_list<int64_t> sizes, ScalarType type) {
    if (!state || state->scalar_type() != type || !state->is_contiguous()) return 0;
    const int64_t more = state->dim() - int64_t(sizes.size());
    if (more < 0 || more > 1 || (more && (tokens < 2 || state->size(0) != tokens + 1 || *sizes.begin() != 1))) return 0;
    int64_t axis = more;
    for (int64_t size : sizes) {
      if (state->size(axis++) != size) return 0;
    }
    return more ? tokens : 1;
  }
  static char* bytes_at(const Array& of, int64_t element) {
    return static_cast<char*>(of.mutable_data_ptr()) + element * int64_t(of.element_size());
  }
  // Heads [B, T, H, D] times the sigmoids of columns [at, at + H D) of `gates` [B, T, ...], in place.
  static void multiply_by_sigmoids(const Array& heads, const Array& gates, int64_t at) {
    GatedNormArgs a{};
    const int64_t tokens = heads.size(0) * heads.size(1);
    a.x = heads.const_data_ptr(), a.y = heads.mutable_data_ptr(), a.gate = bytes_at(gates, at);
    a.width = heads.size(2) * heads.size(3), a.each = a.weight_rows = 1, a.gate_t = gates.numel() / tokens;
    a.sigmoid = true, a.type = type_of(heads);
    gated_norm(a, tokens);
  }
  // The same with one gate for each head.
  static void multiply_heads(const Array& heads, const Array& gates) {
    std::vector<float> factors(size_t(gates.numel()));
    widen(gates, factors.data());
    const int64_t width = heads.size(3);
    for (int64_t i = 0; i < gates.numel(); ++i) {
      const float factor = 1 / (1 + std::exp(-factors[size_t(i)]));
      void* head = bytes_at(heads, i * width);
      const void* from[] = {head};
      kernels().experts.weigh({from, &factor, 1, head, type_of(heads)}, 0, width);
    }
  }
  Maybe apply(const MlpPart& a, const Maybe& from) const {
    const Array inner = array_rows(*from, outputs_of(a.up)), active = array_rows(*from, a.inner());
    multiply(a.up, *before(a.factors, from), inner, given.once);
    times_sections(a.factors, inner, outputs_of(a.up));
    const bool done = a.gated ? gated_activation(inner, a.act, active) : activation(inner, a.act, active);
    if (!done) return std::nullopt;
    return after(a.factors, times(a.down, a.norm ? *norm(*a.norm, active) : active, *from));
  }
  Maybe apply(const LayerInputPart& a, const Maybe& from) const {
    const int64_t width = a.gate.outputs, rows = from->numel() / from->size(2);
    const Maybe& value = given.value;
    if (!value || value->numel() != rows * width || value->size(value->dim() - 1) != width) return std::nullopt;
    if (!value->is_contiguous() || value->scalar_type() != from->scalar_type()) return std::nullopt;
    const Array gates = array_rows(*from, width), active = array_rows(*from, width), scaled = array_rows(*from, width);
    multiply(a.gate, *from, gates, given.once);
    if (!activation(gates, a.act, active)) return std::nullopt;
    NormArgs product{};  // of each row with its value
    product.rows = 1, product.columns = width, product.scales = true, product.type = type_of(active);
    const int64_t row_bytes = width * int64_t(active.element_size());
    for (int64_t row = 0; row < rows; ++row) {
      product.x = static_cast<const char*>(active.const_data_ptr()) + row * row_bytes;
      product.weight = static_cast<const char*>(value->const_data_ptr()) + row * row_bytes;
      product.y = static_cast<char*>(scaled.mutable_data_ptr()) + row * row_bytes;
      kernels().norm(product, 0, 1);
    }
    return times(a.projection, scaled, *from);
  }
  Maybe apply(const MoePart& a, const Maybe& of) const {
    const int64_t columns = of->size(2), tokens = of->numel() / columns;
    Routes routes = route(a.router, *of, tokens);
    const Maybe from = a.norm ? norm(*a.norm, of) : of;
    for (float& weight : routes.weights) weight *= float(a.scale);
    const Array made = array_as(*from);
    const int64_t each = int64_t(routes.index.size()) / tokens;
    const Array inner = a.latent_in ? array_rows(*from, a.latent_in->outputs) : *from;
    if (a.latent_in) multiply(*a.latent_in, *from, inner, given.once);
    const Array sum = a.latent_in ? array_as(inner) : made;
    if (!sum_experts(a.experts, inner, tokens, each, routes.index.data(), routes.weights.data(), sum, given.once)) {
      return std::nullopt;
    }
    if (a.latent_out) multiply(*a.latent_out, sum, made, given.once);
    if (!a.shared) return a.post ? norm(*a.post, made) : Maybe(made);
    const Maybe shared = this->apply(*a.shared, from);
    if (!shared) return std::nullopt;
    std::vector<float> gates(size_t(tokens), 1.0f);
    if (a.shared_gate) gates = sigmoids(*a.shared_gate, *from, tokens);
    const float share = a.averages ? 0.5f : 1.0f;
    const int64_t row_bytes = columns * int64_t(made.element_size());
    for (int64_t t = 0; t < tokens; ++t) {
      char* to = static_cast<char*>(made.mutable_data_ptr()) + t * row_bytes;
      const void* from_both[] = {to, static_cast<const char*>(shared->const_data_ptr()) + t * row_bytes};
      const float factors[] = {share, share * gates[size_t(t)]};
      kernels().experts.weigh({from_both, factors, 2, to, type_of(made)}, 0, columns);
    }
    return a.post ? norm(*a.post, made) : Maybe(made);
  }
  // The rows of a table for token ids [B, T]; nullopt for ids that it does not have.
  Maybe apply(const TablePart& part, const Maybe& ids) const {
    const LinearPart& table = part.rows;
    const auto* index = static_cast<const int64_t*>(ids->const_data_ptr());
    const int64_t tokens = ids->numel(), sizes[] = {ids->size(0), ids->size(1), part.width};
    if (std::any_of(index, index + tokens, [&](int64_t id) { return id < 0 || id >= table.outputs; })) {
      return std::nullopt;
    }
    const Array rows(sizes, 3, part.type);
    char* to = static_cast<char*>(rows.mutable_data_ptr());
    if (table.code < 0) {
      const int64_t row_bytes = rows.size(2) * int64_t(rows.element_size());
      const auto* from = static_cast<const char*>(table.weight->const_data_ptr());
      for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(to + t * row_bytes, from + index[t] * row_bytes, size_t(row_bytes));
      }
      return rows;
    }
    LinearArgs a{};
    take_panels(a, *table.weight, *table.scale, table.zero, table.code, table.outputs);
    a.index = index, a.y = to, a.type = type_of(rows);
    kernels().panels.gather(a, 0, tokens);
    return rows;
  }
  Maybe apply(const PlacePart& part, const Maybe& of) const {
    const int64_t place = given.start + part.offset;
    if (of->size(1) != 1 || place < 0 || place >= part.table->size(0)) return std::nullopt;
    const Array made = array_as(*of);
    add_row(*of, part.table->at(0, place), made);
    return made;
  }
  // Rows [B, T, C] with the same row added to each.
  static void add_row(const Array& rows, const Array& row, const Array& to) {
    const int64_t width = rows.size(2);
    for (int64_t begin = 0; begin < rows.numel(); begin += width) {
      const void* from[] = {bytes_at(rows, begin), row.const_data_ptr()};
      kernels().sum_arrays({from, bytes_at(to, begin), 2, type_of(to)}, 0, width);
    }
  }
  Maybe apply(const HeadPart& part, const Maybe& of) {
    int64_t sizes[] = {of->size(0), of->size(1), part.product.outputs};
    logits = empty(sizes, 3, dtype_of(type_of(*of)));
    const Array made = Array::written(*logits);
    multiply(part.product, *of, made, given.once);
    if (part.shift) add_row(made, *part.shift, made);
    return made;
  }
  // x times or divided by a number, in its own memory, which for logits is the result's.
  Maybe scaled(const Maybe& of, double scale, bool divides) const {
    const float factor = float(scale);
    if (divides) {
      std::vector<float> wide(size_t(of->numel()));
      widen(*of, wide.data());
      for (float& each : wide) each /= factor;
      kernels().router.convert(wide.data(), Type::f32, of->mutable_data_ptr(), type_of(*of), of->numel());
      return of;
    }
    const void* from[] = {of->const_data_ptr()};
    kernels().experts.weigh({from, &factor, 1, of->mutable_data_ptr(), type_of(*of)}, 0, of->numel());
    return of;
  }
  // Norms are steps of their own.
  template <class Part>
  Maybe apply(const Part&, const Maybe&) const { return std::nullopt; }
  // sigmoid(y . gate) of each token, not rounded.
  std::vector<float> sigmoids(const Array& gate, const Array& y, int64_t tokens) const {
    const int64_t columns = gate.size(1);
    const Type type = type_of(gate);
    std::vector<float> wide(size_t(tokens * columns)), gates(static_cast<size_t>(tokens));
    widen(y, wide.data());
    kernels().router.logits({wide.data(), gate.const_data_ptr(), nullptr, gates.data(), tokens, columns, 1, type, type,
                             Type::f32}, 0, 1);
    for (float& g : gates) g = 1 / (1 + std::exp(-g));
    return gates;
  }
  static double first_of(const Array& t) {
    float first = 0;
    kernels().router.convert(t.const_data_ptr(), type_of(t), &first, Type::f32, 1);
    return first;
  }
  static void widen(const Array& from, float* to) {
    kernels().router.convert(from.const_data_ptr(), type_of(from), to, Type::f32, from.numel());
  }
  Maybe times(const Maybe& of, double scale) const {
    const Array made = array_as(*of);
    const void* from[] = {of->const_data_ptr()};
    const float factor = float(scale);
    kernels().experts.weigh({from, &factor, 1, made.mutable_data_ptr(), type_of(made)}, 0, made.numel());
    return made;
  }
  // A product [B, T, C], like `like`.
  Maybe times(const LinearPart& part, const Array& by, const Array& like) const {
    const Array made = array_as(like);
    multiply(part, by, made, given.once);
    return made;
  }
};

}  // namespace infuse
