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

void multiply(const LinearPart& part, const Array& x, const Array& y, bool once) {
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
void norm_heads(const std::optional<NormPart>& part, const Array& qkv, int64_t first, int64_t count) {
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
  const std::vector<Array>&keys, &values;
  int64_t start;
  const Maybe &index, &weights;  // of a router that has run already
  bool before_experts;
  const Array& like;  // [B, T, C] of the type of the results
  bool once;  // as in LinearArgs
};

struct StepMachine {
  const Given& given;
  Maybe x, y = x, branch;
  std::optional<Tensor> logits;  // the memory of x after a head
  bool last = false;
  size_t layer = 0;  // counted from 1
  int64_t window = 0;

  void begin(const LayerPart& part) { ++layer, window = part.window; }
  bool before_experts() const { return given.before_experts; }
  Maybe norm(const NormPart& part, const Maybe& of) const {
    Maybe made = array_as(*of);
    if (part.rounded) {
      rounded_norm(*of, *part.weight, part.eps, *made);
    } else {
      infuse::norm(part.rule(), *of, *made);
    }
    return made;
  }
  void add_norm(const NormPart& part, const Maybe& made) {
    const Array sum = array_as(*x);
    y = array_as(*x);
    infuse::add_norm(part.rule(), *made, *x, sum, *y);
    x = sum;
  }
  Maybe sum(const Maybe& a, const Maybe& b) const {
    Array to = array_as(*a);
    const void* from[] = {a->const_data_ptr(), b->const_data_ptr()};
    kernels().sum_arrays({from, to.mutable_data_ptr(), 2, type_of(to)}, 0, to.numel());
    return to;
  }
  Maybe attention(const AttentionPart& a) const {
    const int64_t batch = x->size(0), tokens = x->size(1);
    const Array qkv = array({batch, tokens, a.all_heads(), a.width}, *x);
    multiply(a.qkv, *y, qkv, given.once);
    norm_heads(a.q_norm, qkv, 0, a.heads);
    norm_heads(a.k_norm, qkv, a.heads, a.kv_heads);
    const Array &keys = given.keys.at(layer - 1), &values = given.values.at(layer - 1);
    const Array q = array({batch, a.heads, tokens, a.width}, *x);
    const Array attended = array({batch, tokens, a.heads, a.width}, *x);
    if (!rotary_append(qkv, given.cos, given.sin, keys, values, given.start, a.heads, a.interleaved, q)) {
      return std::nullopt;
    }
    const bool causal = !given.mask || window > 0;
    const bool done = attend(q, keys, values, given.start + tokens, given.mask, given.bias, a.scale, causal, window,
                             a.softcap, a.sinks, attended);
    return done ? times(a.out, attended) : std::nullopt;
  }
  Maybe mlp(const MlpPart& a) const {
    const Array inner = array_rows(*x, a.up.outputs), active = array_rows(*x, a.inner());
    multiply(a.up, *y, inner, given.once);
    const bool done = a.gated ? gated_activation(inner, a.act, active) : activation(inner, a.act, active);
    return done ? times(a.down, active) : std::nullopt;
  }
  Maybe moe(const MoePart& a) const {
    const int64_t columns = x->size(2), tokens = x->numel() / columns;
    std::vector<float> weights;
    std::vector<int64_t> chosen;
    const int64_t* index = nullptr;
    if (given.index && given.weights) {
      weights.resize(size_t(given.weights->numel()));
      widen(*given.weights, weights.data());
      index = static_cast<const int64_t*>(given.index->const_data_ptr());
    } else {
      Routes routes = route(a.router, *y, tokens);
      weights = std::move(routes.weights), chosen = std::move(routes.index);
      index = chosen.data();
    }
    for (float& weight : weights) weight *= float(a.scale);
    const Array made = array_as(*x);
    const int64_t each = int64_t(weights.size()) / tokens;
    if (!sum_experts(a.experts, *y, tokens, each, index, weights.data(), made, given.once)) return std::nullopt;
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
    const Array rows = array_as(given.like);
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
  Maybe head(const LinearPart& part, const Maybe& of) {
    int64_t sizes[] = {of->size(0), of->size(1), part.outputs};
    logits = empty(sizes, 3, dtype_of(type_of(*of)));
    const Array made = Array::written(*logits);
    multiply(part, *of, made, given.once);
    return made;
  }
  // sigmoid(y . gate) of each token, not rounded.
  std::vector<float> sigmoids(const Array& gate, int64_t tokens) const {
    const int64_t columns = gate.size(1);
    const Type type = type_of(gate);
    std::vector<float> wide(size_t(tokens * columns)), gates(static_cast<size_t>(tokens));
    widen(*y, wide.data());
    kernels().router.logits({wide.data(), gate.const_data_ptr(), nullptr, gates.data(), tokens, columns, 1, type, type,
                             Type::f32}, 0, 1);
    for (float& g : gates) g = 1 / (1 + std::exp(-g));
    return gates;
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
  Maybe times(const LinearPart& part, const Array& by) const {
    const Array made = array_as(*x);
    multiply(part, by, made, given.once);
    return made;
  }
};

std::optional<Tensor> run_on_team(const Program& program, const Given& given, const Array& x) {
  std::optional<Tensor> result;
  Team::together([&] {
    StepMachine machine{given, x};
    if (!run(program, machine)) return;
    if (program.back().does == Does::head) {
      result = machine.logits;
      return;
    }
    const Array& y = *machine.x;
    const int64_t sizes[] = {y.size(0), y.size(1), y.size(2)};
    result = empty(sizes, 3, dtype_of(type_of(y)));
    std::memcpy(result->mutable_data_ptr(), y.const_data_ptr(), size_t(y.numel()) * y.element_size());
  });
  return result;
}

std::vector<Array> written(const std::vector<Tensor>& tensors) {
  std::vector<Array> arrays;
  for (const Tensor& each : tensors) arrays.push_back(Array::written(each));
  return arrays;
}

// Weights of a program that may stay in a processor's caches from step to step.
constexpr int64_t kMostCachedBytes = 1 << 26;

// A program with its tensors, for steps of one shape.
struct Held {
  std::vector<Tensor> tensors;  // whose memory the others use
  Program program;
  std::vector<Array> keys, values;
  Array like;  // [B, T, C], of a step
  bool once;   // as in LinearArgs
  const Maybe none = std::nullopt;

  // A step without a mask; cos and sin are its tokens'.
  Given given(const Maybe& cos, const Maybe& sin, int64_t start) const {
    return {cos, sin, none, none, keys, values, start, none, none, false, like, once};
  }

  // Whether x are token ids, or values for a program that does not look them up.
  bool takes_step(const Array& x) const {
    const bool embeds = program.front().does == Does::embed;
    if (x.dim() != (embeds ? 2 : 3) || x.size(0) != like.size(0) || x.size(1) != like.size(1)) return false;
    if (!x.is_contiguous()) return false;
    if (embeds) return x.scalar_type() == ScalarType::Long;
    return x.scalar_type() == like.scalar_type() && x.size(2) == like.size(2);
  }
};

using MaybeTensor = std::optional<Tensor>;

// The result of one or several layers for x [B, T, C], or the input of the first mixture if `before_experts`.
// `index` [tokens, k] int64 and `weights` [tokens, k], if given, take the place of a router's. None if a kernel does not
// support the arguments; the step then counts as not done.
MaybeTensor layers_step(Tensor x, std::vector<Tensor> tensors, MaybeTensor cos, MaybeTensor sin, MaybeTensor mask,
                        MaybeTensor bias, std::vector<Tensor> keys, std::vector<Tensor> values, int64_t start,
                        MaybeTensor index, MaybeTensor weights, bool before_experts, Tensor integers, Tensor reals) {
  const Program program = program_of(tensors, integers, reals);
  const Array from = x;
  if (!takes(program, from)) return std::nullopt;
  const Maybe turns[] = {cos, sin}, added[] = {mask, bias}, routed[] = {index, weights};
  const std::vector<Array> to_keys = written(keys), to_values = written(values);
  return run_on_team(program, {turns[0], turns[1], added[0], added[1], to_keys, to_values, start, routed[0], routed[1],
                               before_experts, from, false}, from);
}

// Holds a program for steps whose values are like `like` [B, T, C]; 0 if a kernel does not support it.
int64_t hold_layers(Tensor like, std::vector<Tensor> tensors, std::vector<Tensor> keys, std::vector<Tensor> values,
                    Tensor integers, Tensor reals) {
  const auto bytes_of = [](const auto& t) { return t.numel() * int64_t(t.element_size()); };
  Program program = program_of(tensors, integers, reals);
  int64_t bytes = 0;
  for (const Tensor& each : tensors) bytes += bytes_of(each);
  // of a table, few rows are read
  if (program.front().does == Does::embed) bytes -= bytes_of(*std::get<LinearPart>(program.front().part).weight);
  if (!takes(program, like)) return 0;
  const bool once = bytes > kMostCachedBytes && reads_past_caches();
  auto held = std::make_unique<Held>(
      Held{std::move(tensors), std::move(program), written(keys), written(values), like, once});
  for (auto* each : {&keys, &values}) held->tensors.insert(held->tensors.end(), each->begin(), each->end());
  held->tensors.push_back(like);
  return reinterpret_cast<int64_t>(held.release());
}
void drop_layers(int64_t held) { delete reinterpret_cast<Held*>(held); }

// The turns of one token in a table [1 or B, tokens, D].
Maybe turned(const MaybeTensor& table, int64_t token) { return table ? Maybe(Array(*table).at(1, token)) : Maybe(); }

// A step of a held program, without a mask; x are token ids [B, T] if it begins with a table. cos and sin [1 or B,
// tokens, D] have its token at index `turn`.
MaybeTensor held_step(int64_t held, Tensor x, MaybeTensor cos, MaybeTensor sin, int64_t turn, int64_t start) {
  const Held& of = *reinterpret_cast<const Held*>(held);
  const Array from = x;
  if (!of.takes_step(from)) return std::nullopt;
  const Maybe turns[] = {turned(cos, turn), turned(sin, turn)};
  return run_on_team(of.program, of.given(turns[0], turns[1], start), from);
}

// Up to `count` steps of a held program from a table to a head: the likeliest tokens [B, steps], of which each but the
// last is the input of the next step. The step that gives one of `ends` is the last one.
MaybeTensor held_tokens(int64_t held, Tensor ids, MaybeTensor cos, MaybeTensor sin, int64_t turn, int64_t start,
                        int64_t count, std::vector<int64_t> ends) {
  const Held& of = *reinterpret_cast<const Held*>(held);
  if (of.program.front().does != Does::embed || of.program.back().does != Does::head) return std::nullopt;
  const Array first = ids;
  if (!of.takes_step(first) || first.size(1) != 1) return std::nullopt;
  const int64_t rows = first.size(0), row_sizes[] = {rows, 1};
  std::vector<int64_t> chosen;  // [steps, rows]
  Team::together([&] {
    Array x = first;
    for (int64_t step = 0; step < count; ++step) {
      const Maybe turns[] = {turned(cos, turn + step), turned(sin, turn + step)};
      const Given given = of.given(turns[0], turns[1], start + step);
      StepMachine machine{given, x};
      if (!run(of.program, machine)) return;
      const Array tokens(row_sizes, 2, ScalarType::Long);
      auto* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
      largest(*machine.x, to);
      chosen.insert(chosen.end(), to, to + rows);
      if (std::find_first_of(to, to + rows, ends.begin(), ends.end()) != to + rows) return;
      x = tokens;
    }
  });
  if (chosen.empty()) return std::nullopt;
  const int64_t steps = int64_t(chosen.size()) / rows, sizes[] = {rows, steps};
  Tensor tokens = empty(sizes, 2, aoti_torch_dtype_int64());
  auto* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t step = 0; step < steps; ++step) *to++ = chosen[size_t(step * rows + row)];
  }
  return tokens;
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
    {"held_step(int held, Tensor x, Tensor? cos, Tensor? sin, int turn, int start) -> Tensor?", TORCH_BOX(&held_step)},
    {"held_tokens(int held, Tensor ids, Tensor? cos, Tensor? sin, int turn, int start, int count, int[] ends) -> "
     "Tensor?", TORCH_BOX(&held_tokens)})
INFUSE_OPERATORS(CompositeExplicitAutograd, {"drop_layers(int held) -> ()", TORCH_BOX(&drop_layers)})

}  // namespace infuse
