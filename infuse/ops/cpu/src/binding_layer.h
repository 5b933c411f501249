// Layers as a program of steps over tensors, as in layers/program.py and layers/one_call.py; whether the kernels
// support their parts; and the interpreter shared by decoding steps (binding_layer.cpp) and encoders
// (binding_encoder.cpp).
#pragma once

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "binding.h"
#include "binding_ops.h"

namespace infuse {

struct NormPart {
  bool centred;
  Maybe weight, bias;
  double eps, offset;
  bool rounded = false;  // as in binding_ops.h

  NormRule rule() const { return {weight, bias, eps, offset, centred}; }
};
struct LinearPart {
  int64_t code, outputs;  // code -1: plain
  Maybe weight, scale, zero, bias;
};
struct AttentionPart {
  int64_t heads, kv_heads, width;
  bool interleaved;
  double scale, softcap;
  Maybe sinks;
  LinearPart qkv, out;
  std::optional<NormPart> q_norm, k_norm;

  int64_t all_heads() const { return heads + 2 * kv_heads; }
};
struct MlpPart {
  int64_t act;
  bool gated;
  LinearPart up, down;

  int64_t inner() const { return up.outputs / (gated ? 2 : 1); }
};

// The words of infuse/routing.py in the order of ops/cpu/router.py.
enum class LogitsIn : int64_t { rounded, widened, float32 };
enum class Score : int64_t { none, softmax, sigmoid };
enum class RouteWeight : int64_t { score, picked, softmax, sigmoid };
enum class CastTo : int64_t { none, activations, logits };
struct RouterPart {
  int64_t top_k;
  LogitsIn logits;
  Score score;
  bool rounded_score;
  RouteWeight weights;
  bool normalise;
  CastTo cast;
  bool in_order;
  int64_t groups, kept;
  bool by_best;
  double eps, least, scale, fill;
  Maybe weight, bias, correction;
};
// Both matrices hold all experts, one after another.
struct ExpertsPart {
  int64_t inner, act;
  bool gated, limit_after;
  int64_t first;
  double limit, up_offset;
  LinearPart up, down;

  int64_t up_rows() const { return gated ? 2 * inner : inner; }
};
struct MoePart {
  RouterPart router;
  bool averages;  // the experts' sum and the shared expert
  double scale;   // of that sum
  ExpertsPart experts;
  std::optional<MlpPart> shared;
  Maybe shared_gate;
};

// What a router gives, as in ops/router.py: of each token, the values of its experts' weights, already of the type
// `weight_type`, and their indices.
struct Routes {
  Tensor logits;
  std::vector<float> weights;
  Type weight_type;
  std::vector<int64_t> index;
};
// binding_router.cpp: of the `tokens` rows of x.
Routes route(const RouterPart& router, const Array& x, int64_t tokens);
// binding_experts.cpp: y = the weighed sum of each token's experts; index and weights [tokens, routes]. Returns false
// if PyTorch multiplies so many tokens faster. `once` as in LinearArgs.
bool sum_experts(const ExpertsPart& experts, const Array& x, int64_t tokens, int64_t routes, const int64_t* index,
                 const float* weights, const Array& y, bool once);
struct LayerPart {
  int64_t window;  // as in ops.attention
};

// The steps of layers/program.py in the order of ops/cpu/layer.py, and what a decoder computes around its layers.
enum class Does : int64_t { norm, norm_branch, attention, mlp, moe, add, add_norm, add_norm_stream, layer, embed, head };
inline bool adds(Does does) { return does == Does::add || does == Does::add_norm || does == Does::add_norm_stream; }
struct Step {
  Does does;
  double scale;  // of the branch that is added
  std::variant<std::monostate, NormPart, AttentionPart, MlpPart, MoePart, LayerPart, LinearPart> part;
};
using Program = std::vector<Step>;

// Parses the program that OneCall in layers/one_call.py wrote; its tensors must live as long. Braced initializers are
// evaluated from left to right.
inline Program program_of(const std::vector<Tensor>& tensors, const Tensor& integers, const Tensor& reals) {
  const auto* next_integer = static_cast<const int64_t*>(integers.const_data_ptr());
  const auto* next_real = static_cast<const double*>(reals.const_data_ptr());
  const int64_t* const end = next_integer + integers.numel();
  const double* const last = next_real + reals.numel();
  const auto integer = [&] {
    STD_TORCH_CHECK(next_integer != end, "a program ends within a part");
    return *next_integer++;
  };
  const auto real = [&] {
    STD_TORCH_CHECK(next_real != last, "a program has too few reals");
    return *next_real++;
  };
  const auto tensor = [&] {
    const int64_t place = integer();
    return place < 0 ? Maybe() : Maybe(tensors.at(size_t(place)));
  };
  const auto norm = [&] {
    const int64_t kind = integer();
    return NormPart{kind == 1, tensor(), tensor(), real(), real(), kind == 2};
  };
  const auto norm_if_there = [&] { return integer() ? std::optional(norm()) : std::nullopt; };
  const auto linear = [&] { return LinearPart{integer(), integer(), tensor(), tensor(), tensor(), tensor()}; };
  const auto mlp = [&] { return MlpPart{integer(), integer() != 0, linear(), linear()}; };
  const auto router = [&] {
    return RouterPart{integer(),      LogitsIn(integer()), Score(integer()), integer() != 0, RouteWeight(integer()),
                      integer() != 0, CastTo(integer()),   integer() != 0,   integer(),      integer(),
                      integer() != 0, real(),              real(),           real(),         real(),
                      tensor(),       tensor(),            tensor()};
  };
  const auto experts = [&] {
    return ExpertsPart{integer(), integer(), integer() != 0, integer() != 0, integer(), real(), real(), linear(),
                       linear()};
  };
  const auto mlp_if_there = [&] { return integer() ? std::optional(mlp()) : std::nullopt; };
  Program steps;
  steps.reserve(size_t(integers.numel()) / 8);
  while (next_integer != end) {
    Step& step = steps.emplace_back(Step{Does(integer()), 1, {}});
    if (adds(step.does)) step.scale = real();
    if (step.does == Does::attention) {
      step.part = AttentionPart{integer(), integer(), integer(), integer() != 0,  real(),
                                real(),    tensor(),  linear(),  linear(),        norm_if_there(), norm_if_there()};
    } else if (step.does == Does::layer) {
      step.part = LayerPart{integer()};
    } else if (step.does == Does::mlp) {
      step.part = mlp();
    } else if (step.does == Does::moe) {
      step.part = MoePart{router(), integer() != 0, real(), experts(), mlp_if_there(), tensor()};
    } else if (step.does == Does::embed || step.does == Does::head) {
      step.part = linear();
    } else if (step.does != Does::add) {
      step.part = norm();
    }
  }
  return steps;
}

// ---- whether the kernels support a part ----

inline bool alike(const Maybe& t, const Array& x, int64_t size) {
  return !t || (t->scalar_type() == x.scalar_type() && t->dim() == 1 && t->size(0) == size && t->is_contiguous());
}

inline bool takes(const NormPart& norm, const Array& x, int64_t columns) {
  return alike(norm.weight, x, columns) && alike(norm.bias, x, columns);
}

// True if the norm spans all heads at once, false if it is per head.
inline bool at_once(const NormPart& norm, int64_t heads, int64_t width) {
  return norm.weight && norm.weight->dim() == 1 && norm.weight->size(0) == heads * width;
}
inline bool takes(const std::optional<NormPart>& norm, const Array& x, int64_t heads, int64_t width) {
  return !norm || takes(*norm, x, at_once(*norm, heads, width) ? heads * width : width);
}

inline bool takes(const LinearPart& linear, const Array& x, int64_t inputs, int64_t outputs) {
  const Array& weight = *linear.weight;
  if (linear.outputs != outputs || !weight.is_contiguous() || !alike(linear.bias, x, outputs)) return false;
  if (linear.code < 0) {
    return weight.scalar_type() == x.scalar_type() && weight.dim() == 2 && weight.size(0) == outputs &&
           weight.size(1) == inputs;
  }
  const int64_t input_bits = inputs * bits_of(code_of(linear.code));
  const bool panels = weight.dim() == 3 && weight.size(1) * 32 == input_bits && weight.size(0) * 16 >= outputs;
  const Array& scale = *linear.scale;
  return panels && are_scales(scale, code_of(linear.code)) && scale.is_contiguous() &&
         (!linear.zero || linear.zero->is_contiguous());
}

inline bool takes(const AttentionPart& a, const Array& x, int64_t columns) {
  return takes(a.qkv, x, columns, a.all_heads() * a.width) && takes(a.out, x, a.heads * a.width, columns) &&
         takes(a.q_norm, x, a.heads, a.width) && takes(a.k_norm, x, a.kv_heads, a.width);
}

inline bool takes(const MlpPart& mlp, const Array& x, int64_t columns) {
  return takes(mlp.up, x, columns, mlp.up.outputs) && takes(mlp.down, x, mlp.inner(), columns);
}

inline bool is_float(const Array& t) {
  const ScalarType type = t.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

inline bool takes(const RouterPart& router, const Array& x, int64_t columns) {
  const Array& weight = *router.weight;
  const bool exact = weight.scalar_type() == x.scalar_type() || weight.scalar_type() == ScalarType::Float;
  if (!is_float(weight) || !(exact || router.logits == LogitsIn::float32)) return false;
  if (weight.dim() != 2 || weight.size(1) != columns || !weight.is_contiguous()) return false;
  const int64_t experts = weight.size(0);
  const Maybe& correction = router.correction;
  return alike(router.bias, weight, experts) && router.top_k >= 1 && router.top_k <= experts &&
         (!correction || (is_float(*correction) && correction->numel() == experts && correction->is_contiguous()));
}

inline bool takes(const ExpertsPart& experts, const Array& x, int64_t columns) {
  const LinearPart &up = experts.up, &down = experts.down;
  return takes(up, x, columns, up.outputs) && takes(down, x, experts.inner, down.outputs);
}

inline bool takes(const MoePart& moe, const Array& x, int64_t columns) {
  if (moe.shared && !takes(*moe.shared, x, columns)) return false;
  const Maybe& gate = moe.shared_gate;
  const bool gated = !gate || (gate->scalar_type() == x.scalar_type() && gate->dim() == 2 && gate->size(0) == 1 &&
                               gate->size(1) == columns && gate->is_contiguous());
  return gated && takes(moe.router, x, columns) && takes(moe.experts, x, columns);
}

inline bool takes(const std::monostate&, const Array&, int64_t) { return true; }
inline bool takes(const LayerPart&, const Array&, int64_t) { return true; }
inline bool takes(const LinearPart& ends, const Array& x, int64_t columns) {
  return takes(ends, x, columns, ends.outputs);
}

inline bool takes(const Program& program, const Array& x) {
  if (!is_float(x) || x.dim() != 3 || !x.is_contiguous() || x.numel() == 0) return false;
  const int64_t columns = x.size(2);
  return std::all_of(program.begin(), program.end(), [&](const Step& step) {
    return std::visit([&](const auto& part) { return takes(part, x, columns); }, step.part);
  });
}

// ---- the interpreter ----

// Runs a program on a machine with three values: `x`, the residual stream; `y`, the input of attention, MLP and head;
// `branch`, the sum of their results since the last addition. A missing value is false. `last` tells the machine that
// the next value is the result; `m.before_experts()` ends the program before a mixture, whose input is then x.
// Returns false if a part declines.
template <class Machine>
bool run(const Program& program, Machine& m) {
  using Value = decltype(m.x);
  for (const Step& step : program) {
    m.last = &step == &program.back();
    const auto* norm = std::get_if<NormPart>(&step.part);
    if (step.does == Does::layer) {
      m.begin(std::get<LayerPart>(step.part));
      continue;
    }
    if (step.does == Does::embed || step.does == Does::head) {
      const auto& part = std::get<LinearPart>(step.part);
      if (!(m.x = step.does == Does::embed ? m.embed(part, m.x) : m.head(part, m.y))) return false;
      continue;
    }
    if (step.does == Does::moe && m.before_experts()) {
      m.x = m.y;
      return true;
    }
    if (step.does == Does::attention || step.does == Does::mlp || step.does == Does::moe) {
      Value made = step.does == Does::attention ? m.attention(std::get<AttentionPart>(step.part))
          : step.does == Does::mlp              ? m.mlp(std::get<MlpPart>(step.part))
                                                : m.moe(std::get<MoePart>(step.part));
      if (!made) return false;
      const Value before = std::exchange(m.branch, Value());
      m.branch = before ? m.sum(before, made) : std::move(made);
      continue;
    }
    if (step.does != Does::norm_branch) m.y = m.x;  // the old y is no longer needed
    if (step.does == Does::norm) {
      m.y = m.norm(*norm, m.x);
      continue;
    }
    Value branch = std::exchange(m.branch, Value());
    if (step.scale != 1 && !(branch = m.times(branch, step.scale))) return false;
    switch (step.does) {
      case Does::norm_branch: m.branch = m.norm(*norm, branch); break;
      case Does::add: m.x = m.y = m.sum(branch, m.x); break;
      case Does::add_norm: m.add_norm(*norm, branch); break;  // x becomes the sum, y its norm
      default: m.add_norm(*norm, branch), m.x = m.y;
    }
  }
  return true;
}

}  // namespace infuse
