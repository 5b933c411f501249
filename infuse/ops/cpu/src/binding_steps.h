// The machine of a program's steps for a few new tokens; binding_layer.cpp holds the programs.
#pragma once

#include "binding_state_steps.h"
#include "binding_takes.h"

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

struct StepMachine : StateSteps {
  Maybe x, y, branch;
  std::optional<Tensor> logits;  // the memory of x after a head
  bool last = false;

  StepMachine(const Given& given, const Array& x) : StateSteps{{given}}, x(x), y(x) {}
  using StateSteps::apply;

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
  // The part's own columns of cos or sin, [1 or B, T, columns of all kinds].
  template <class Part>
  static Maybe turns_of(const Part& part, const Maybe& all) {
    if (!all || part.turns < 0) return all;
    if (part.turns == 0) return std::nullopt;
    const int64_t end = part.turns_at + part.turns;
    STD_TORCH_CHECK(all->dim() == 3 && end <= all->size(2), "cos and sin have fewer than ", end, " columns");
    return all->first(2, end).last(2, part.turns);
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
    const Maybe cos = turns_of(a, given.cos), sin = turns_of(a, given.sin);
    const bool turned = a.borrowed ? rotated(qkv, cos, sin, a.interleaved, q)
                                   : rotary_append(qkv, cos, sin, *keys, *values, given.start, a.heads, a.interleaved, q);
    if (!turned) return std::nullopt;
    const bool causal = !given.mask || a.window > 0;
    const int64_t length = given.start + tokens;
    const Maybe held = a.bias.array && a.bias.array->size(3) >= length ? a.bias.array->last(3, length) : Maybe();
    if (a.bias.array && !held) return std::nullopt;
    const bool done = attend(q, *keys, *values, length, given.mask, held ? held : given.bias, a.scale, causal, a.window,
                             a.softcap, a.sinks, attended);
    if (!done) return std::nullopt;
    if (a.gated) multiply_by_sigmoids(attended, qkv, (a.all_heads() - a.heads) * a.width);
    multiply_by_gate(a.gate, *into, attended);
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
  Maybe apply(const LatentAttentionPart& a, const Maybe& from) const {
    const Maybe& latents = a.keys.array ? a.keys.array : given.keys;
    const Maybe& keys = a.values.array ? a.values.array : given.values;
    const int64_t batch = from->size(0), tokens = from->size(1), width = a.plain + a.turned;
    const int64_t shared = a.latent + a.turned;
    const size_t bytes = from->element_size();
    const auto has_room = [&](const Maybe& rows, int64_t columns) {
      return rows && rows->scalar_type() == from->scalar_type() && rows->dim() == 4 && rows->size(0) == batch &&
             rows->size(1) == 1 && rows->size(2) >= given.start + tokens && rows->size(3) == columns &&
             rows->stride(3) == 1;
    };
    if (!has_room(latents, a.latent) || !has_room(keys, a.turned) || given.start < 0) return std::nullopt;
    if (!are_latents(a.heads * tokens, a.latent)) return std::nullopt;
    const Array q = array({batch, tokens, a.heads, width}, *from), kv = array_rows(*from, shared);
    multiply(a.q, a.q_a ? *norm(*a.q_norm, *made_by(*a.q_a, *from)) : *from, q, given.once);
    multiply(a.kv_a, *from, kv, given.once);
    const Array latent = section(kv, 0, a.latent, a.kv_norm);
    // What is turned of each head's query, and after them of the key that all heads share.
    const Array plain = array({batch, tokens, a.heads + 1, a.turned}, *from);
    const Array turned = array({batch, a.heads + 1, tokens, a.turned}, *from);
    for (int64_t row = 0; row < batch * tokens; ++row) {
      for (int64_t head = 0; head <= a.heads; ++head) {
        const char* some = head < a.heads ? bytes_at(q, (row * a.heads + head) * width + a.plain)
                                          : bytes_at(kv, row * shared + a.latent);
        copy_turned(some, bytes_at(plain, (row * (a.heads + 1) + head) * a.turned), a.turned, bytes, a.pairs);
      }
    }
    if (!rotated(plain, turns_of(a, given.cos), turns_of(a, given.sin), a.interleaved, turned)) return std::nullopt;
    for (int64_t row = 0; row < batch * tokens; ++row) {
      const int64_t b = row / tokens, t = row % tokens, at = given.start + t;
      const char* key = bytes_at(turned, ((b * (a.heads + 1) + a.heads) * tokens + t) * a.turned);
      std::memcpy(bytes_at(*latents, b * latents->stride(0) + at * latents->stride(2)), bytes_at(latent, row * a.latent),
                  size_t(a.latent) * bytes);
      std::memcpy(bytes_at(*keys, b * keys->stride(0) + at * keys->stride(2)), key, size_t(a.turned) * bytes);
    }
    const Array attended = array({batch, tokens, a.heads, a.value}, *from);
    LatentArgs of{};
    of.q = q.const_data_ptr(), of.q_n = width, of.q_t = a.heads * width, of.q_b = tokens * of.q_t;
    of.turned = turned.const_data_ptr(), of.turned_t = a.turned, of.turned_n = tokens * a.turned;
    of.turned_b = (a.heads + 1) * of.turned_n;
    of.expand = a.kv_b.weight->const_data_ptr(), of.out = attended.mutable_data_ptr(), of.type = type_of(*from);
    of.batch = batch, of.tokens = tokens, of.heads = a.heads, of.plain = a.plain, of.turned_width = a.turned;
    of.rank = a.latent, of.value = a.value;
    const Latents seen{latents->const_data_ptr(), keys->const_data_ptr(), latents->stride(0), latents->stride(2),
                       keys->stride(0), keys->stride(2), given.start + tokens};
    if (!attend_to_latents(of, seen, given.mask, a.scale, !given.mask, *from)) return std::nullopt;
    multiply_by_gate(a.gate, *from, attended);
    return times(a.out, attended, *from);
  }
  // `count` values, those at even places before the others if they are `pairs`.
  static void copy_turned(const char* from, char* to, int64_t count, size_t bytes, bool pairs) {
    if (!pairs) {
      std::memcpy(to, from, size_t(count) * bytes);
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + size_t(i % 2 * (count / 2) + i / 2) * bytes, from + size_t(i) * bytes, bytes);
    }
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
  // Heads [B, T, H, D] times the sigmoids of a product of `from`, if there is one.
  void multiply_by_gate(const std::optional<LinearPart>& gate, const Array& from, const Array& heads) const {
    if (!gate) return;
    const Array gates = *made_by(*gate, from);
    gate->outputs == heads.size(2) ? multiply_heads(heads, gates) : multiply_by_sigmoids(heads, gates, 0);
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
};

}  // namespace infuse
