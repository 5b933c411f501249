// Layers over a few new tokens in one call, with the kernels that layers/program.py calls part by part. Small
// products, which ops/cpu/linear.py leaves to PyTorch, use our kernels too. While weights stream through the caches,
// calling a part from Python costs 15 to 30 us, of which 3 are computation; so a decoder's embedding, last norm and head
// may be in the program too, and one that runs many steps is held between them.
#include "binding_layer.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {
namespace {

void multiply(const LinearPart& part, const Tensor& x, Tensor& y, bool once) {
  LinearArgs a{};
  a.x = x.const_data_ptr(), a.y = y.mutable_data_ptr();
  a.bias = part.bias ? part.bias->const_data_ptr() : nullptr;
  a.type = type_of(x);
  a.rows = y.numel() / part.outputs;
  a.once = once;
  if (part.code < 0) return stream_linear(a, *part.weight);
  stream_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs);
}

// Normalises heads [first, first + count) of each token in place.
void norm_heads(const std::optional<NormPart>& part, Tensor& qkv, int64_t first, int64_t count) {
  if (!part) return;
  const int64_t width = qkv.size(3), all = qkv.size(2) * width, tokens = qkv.size(0) * qkv.size(1);
  const bool together = at_once(*part, count, width);
  NormArgs a{};
  a.weight = part->weight ? part->weight->const_data_ptr() : nullptr;
  a.bias = part->bias ? part->bias->const_data_ptr() : nullptr;
  a.rows = together ? 1 : count, a.columns = together ? count * width : width;
  a.eps = float(part->eps), a.offset = float(part->offset), a.centred = part->centred;
  a.type = type_of(qkv);
  const int64_t element_bytes = a.type == Type::f32 ? 4 : 2;
  for (int64_t t = 0; t < tokens; ++t) {
    a.y = static_cast<char*>(qkv.mutable_data_ptr()) + (t * all + first * width) * element_bytes;
    a.x = a.y;
    kernels().norm(a, 0, a.rows);
  }
}

// The arguments of a decoding step: each layer's keys and values [B, K, S, D] receive the new tokens at `start`.
struct Given {
  const Maybe &cos, &sin, &mask, &bias;
  const std::vector<Tensor>&keys, &values;
  int64_t start;
  const Maybe &index, &weights;  // of a router that has run already
  bool before_experts;
  const Tensor& like;  // [B, T, C] of the type of the results
  bool once;  // as in LinearArgs
};

struct StepMachine {
  const Given& given;
  Maybe x, y = x, branch;
  bool last = false;
  size_t layer = 0;  // counted from 1
  int64_t window = 0;

  void begin(const LayerPart& part) { ++layer, window = part.window; }
  bool before_experts() const { return given.before_experts; }
  Maybe norm(const NormPart& part, const Maybe& of) const {
    if (part.rounded) return rounded_norm(*of, *part.weight, part.eps);
    return infuse::norm(*of, part.weight, part.bias, part.eps, part.offset, part.centred);
  }
  void add_norm(const NormPart& part, const Maybe& made) {
    std::tie(x, y) = infuse::add_norm(*made, *x, part.weight, part.bias, part.eps, part.offset, part.centred);
  }
  Maybe sum(const Maybe& a, const Maybe& b) const {
    Tensor to = empty_as(*a);
    const void* from[] = {a->const_data_ptr(), b->const_data_ptr()};
    kernels().sum_arrays({from, to.mutable_data_ptr(), 2, type_of(to)}, 0, to.numel());
    return to;
  }
  Maybe attention(const AttentionPart& a) const {
    const int64_t batch = x->size(0), tokens = x->size(1);
    Tensor qkv = empty({batch, tokens, a.all_heads(), a.width}, *x);
    multiply(a.qkv, *y, qkv, given.once);
    norm_heads(a.q_norm, qkv, 0, a.heads);
    norm_heads(a.k_norm, qkv, a.heads, a.kv_heads);
    const Tensor &keys = given.keys.at(layer - 1), &values = given.values.at(layer - 1);
    const Maybe q = rotary_append(qkv, given.cos, given.sin, keys, values, given.start, a.heads, a.interleaved);
    if (!q) return std::nullopt;
    const bool causal = !given.mask || window > 0;
    const Maybe attended = attend(*q, keys, values, given.start + tokens, given.mask, given.bias, a.scale, causal,
                                  window, a.softcap, a.sinks);
    return attended ? times(a.out, *attended) : std::nullopt;
  }
  Maybe mlp(const MlpPart& a) const {
    Tensor inner = empty_rows(*x, a.up.outputs);
    multiply(a.up, *y, inner, given.once);
    const Maybe active = a.gated ? gated_activation(inner, a.act) : activation(inner, a.act);
    return active ? times(a.down, *active) : std::nullopt;
  }
  Maybe moe(const MoePart& a) const {
    const int64_t columns = x->size(2), tokens = x->numel() / columns;
    const bool routed = given.index && given.weights;
    const Routes routes = routed ? Routes{*y, *given.weights, *given.index} : route(a.router, *y, tokens);
    std::vector<float> weights(size_t(routes.weights.numel()));
    widen(routes.weights, weights.data());
    for (float& weight : weights) weight *= float(a.scale);
    Tensor made = empty_as(*x);
    const auto* index = static_cast<const int64_t*>(routes.index.const_data_ptr());
    if (!sum_experts(a.experts, *y, tokens, routes.index.size(1), index, weights.data(), made, given.once)) {
      return std::nullopt;
    }
    if (!a.shared) return made;
    const Maybe shared = mlp(*a.shared);
    if (!shared) return std::nullopt;
    std::vector<float> gates(size_t(tokens), 1.0f);
    if (a.shared_gate) gates = sigmoids(*a.shared_gate, tokens);
    const float share = a.averages ? 0.5f : 1.0f;
    const int64_t row_bytes = columns * int64_t(made.element_size());
    for (int64_t t = 0; t < tokens; ++t) {
      char* to = static_cast<char*>(made.mutable_data_ptr()) + t * row_bytes;
      const void* from[] = {to, static_cast<const char*>(shared->const_data_ptr()) + t * row_bytes};
      const float factors[] = {share, share * gates[size_t(t)]};
      kernels().experts.weigh({from, factors, 2, to, type_of(made)}, 0, columns);
    }
    return made;
  }
  // The rows of a table for token ids [B, T]; nullopt for ids that it does not have.
  Maybe embed(const LinearPart& table, const Maybe& ids) const {
    const auto* index = static_cast<const int64_t*>(ids->const_data_ptr());
    const int64_t tokens = ids->numel();
    if (std::any_of(index, index + tokens, [&](int64_t id) { return id < 0 || id >= table.outputs; })) {
      return std::nullopt;
    }
    Tensor rows = empty_as(given.like);
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
  Maybe head(const LinearPart& part, const Maybe& of) const {
    Tensor logits = empty_rows(*of, part.outputs);
    multiply(part, *of, logits, given.once);
    return logits;
  }
  // sigmoid(y . gate) of each token, not rounded.
  std::vector<float> sigmoids(const Tensor& gate, int64_t tokens) const {
    const int64_t columns = gate.size(1);
    const Type type = type_of(gate);
    std::vector<float> wide(size_t(tokens * columns)), gates(static_cast<size_t>(tokens));
    widen(*y, wide.data());
    kernels().router.logits({wide.data(), gate.const_data_ptr(), nullptr, gates.data(), tokens, columns, 1, type, type,
                             Type::f32}, 0, 1);
    for (float& g : gates) g = 1 / (1 + std::exp(-g));
    return gates;
  }
  static void widen(const Tensor& from, float* to) {
    kernels().router.convert(from.const_data_ptr(), type_of(from), to, Type::f32, from.numel());
  }
  Maybe times(const Maybe& of, double scale) const {
    Tensor made = empty_as(*of);
    const void* from[] = {of->const_data_ptr()};
    const float factor = float(scale);
    kernels().experts.weigh({from, &factor, 1, made.mutable_data_ptr(), type_of(made)}, 0, made.numel());
    return made;
  }
  Maybe times(const LinearPart& part, const Tensor& by) const {
    Tensor made = empty_as(*x);
    multiply(part, by, made, given.once);
    return made;
  }
};

Maybe run_on_team(const Program& program, const Given& given, const Tensor& x) {
  Maybe y;
  Team::together([&] {
    StepMachine machine{given, x};
    if (run(program, machine)) y = machine.x;
  });
  return y;
}

// Weights of a program that may stay in a processor's caches from step to step.
constexpr int64_t kMostCachedBytes = 1 << 26;

// A program with its tensors, for steps of one shape.
struct Held {
  Program program;
  std::vector<Tensor> keys, values;
  Tensor like;  // [B, T, C], of a step
  bool once;    // as in LinearArgs

  // Whether x are token ids, or values for a program that does not look them up.
  bool takes_step(const Tensor& x) const {
    const bool embeds = program.front().does == Does::embed;
    if (x.dim() != (embeds ? 2 : 3) || x.size(0) != like.size(0) || x.size(1) != like.size(1)) return false;
    if (!x.is_contiguous()) return false;
    if (embeds) return x.scalar_type() == ScalarType::Long;
    return x.scalar_type() == like.scalar_type() && x.size(2) == like.size(2);
  }
};

// The result of one or several layers for x [B, T, C], or the input of the first mixture if `before_experts`.
// `index` [tokens, k] int64 and `weights` [tokens, k], if given, take the place of a router's. None if a kernel does not
// support the arguments; the step then counts as not done.
Maybe layers_step(Tensor x, std::vector<Tensor> tensors, Maybe cos, Maybe sin, Maybe mask, Maybe bias,
                  std::vector<Tensor> keys, std::vector<Tensor> values, int64_t start, Maybe index, Maybe weights,
                  bool before_experts, Tensor integers, Tensor reals) {
  const Program program = program_of(tensors, integers, reals);
  if (!takes(program, x)) return std::nullopt;
  return run_on_team(program, {cos, sin, mask, bias, keys, values, start, index, weights, before_experts, x, false}, x);
}

// Holds a program for steps whose values are like `like` [B, T, C]; 0 if a kernel does not support it.
int64_t hold_layers(Tensor like, std::vector<Tensor> tensors, std::vector<Tensor> keys, std::vector<Tensor> values,
                    Tensor integers, Tensor reals) {
  const auto bytes_of = [](const Tensor& t) { return t.numel() * int64_t(t.element_size()); };
  Program program = program_of(tensors, integers, reals);
  int64_t bytes = 0;
  for (const Tensor& each : tensors) bytes += bytes_of(each);
  // of a table, few rows are read
  if (program.front().does == Does::embed) bytes -= bytes_of(*std::get<LinearPart>(program.front().part).weight);
  const bool once = bytes > kMostCachedBytes && reads_past_caches();
  auto held = std::make_unique<Held>(Held{std::move(program), keys, values, like, once});
  return takes(held->program, like) ? reinterpret_cast<int64_t>(held.release()) : 0;
}
void drop_layers(int64_t held) { delete reinterpret_cast<Held*>(held); }

// A step of a held program, without a mask; x are token ids [B, T] if it begins with a table.
Maybe held_step(int64_t held, Tensor x, Maybe cos, Maybe sin, int64_t start) {
  const Held& of = *reinterpret_cast<const Held*>(held);
  if (!of.takes_step(x)) return std::nullopt;
  const Maybe none;
  const Given given{cos, sin, none, none, of.keys, of.values, start, none, none, false, of.like, of.once};
  return run_on_team(of.program, given, x);
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"layers_step(Tensor x, Tensor[] tensors, Tensor? cos, Tensor? sin, Tensor? mask, Tensor? bias, Tensor(a!)[] "
     "keys, Tensor(b!)[] values, int start, Tensor? index, Tensor? weights, bool before_experts, Tensor integers, "
     "Tensor reals) -> Tensor?",
     TORCH_BOX(&layers_step)},
    {"hold_layers(Tensor like, Tensor[] tensors, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor integers, Tensor "
     "reals) -> int",
     TORCH_BOX(&hold_layers)},
    {"held_step(int held, Tensor x, Tensor? cos, Tensor? sin, int start) -> Tensor?", TORCH_BOX(&held_step)})
INFUSE_OPERATORS(CompositeExplicitAutograd, {"drop_layers(int held) -> ()", TORCH_BOX(&drop_layers)})

}  // namespace infuse
