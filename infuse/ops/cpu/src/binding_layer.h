// Blocks as programs of steps over tensors, as in layers/program.py, which layers/native/part.py writes, and the
// interpreter shared by decode steps (binding_steps.h) and encoders (binding_encoder.cpp).
#pragma once

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "binding.h"
#include "binding_ops.h"
#include "record.h"

namespace infuse {

// rounded and torch: as in binding_ops.h; scale: x * weight; factor: x times the only number of the weight.
enum class NormKind { rms, layer, rounded_rms, torch_rms, scale, factor };
template <>
struct Words<NormKind> {
  static constexpr std::pair<std::string_view, NormKind> all[] = {
      {"rms", NormKind::rms}, {"layer", NormKind::layer}, {"rounded_rms", NormKind::rounded_rms},
      {"torch_rms", NormKind::torch_rms}, {"scale", NormKind::scale}, {"factor", NormKind::factor}};
};
struct NormPart {
  static constexpr std::string_view kKind = "norm";
  NormKind kind;
  Maybe weight, bias;
  double eps, offset;
  INFUSE_FIELDS(kind, weight, bias, eps, offset)

  bool centred() const { return kind == NormKind::layer; }
  bool scales() const { return kind == NormKind::scale; }
  NormRule rule() const { return {weight, bias, eps, offset, centred(), scales()}; }
};
struct LinearPart {
  static constexpr std::string_view kKind = "linear";
  int64_t code, outputs;  // code -1: plain
  Maybe weight, scale, zero, bias;
  INFUSE_FIELDS(code, outputs, weight, scale, zero, bias)
};
// A product by a matrix whose parts are in different formats: their outputs one after another. Of few rows.
struct JoinedPart {
  static constexpr std::string_view kKind = "joined";
  int64_t outputs;
  std::vector<LinearPart> parts;
  INFUSE_FIELDS(outputs, parts)
};
using ProductPart = std::variant<std::monostate, LinearPart, JoinedPart>;
inline int64_t outputs_of(const ProductPart& product) {
  const auto* joined = std::get_if<JoinedPart>(&product);
  return joined ? joined->outputs : std::get<LinearPart>(product).outputs;
}
// Multipliers of a part's input, of sections of its first product, and of its result, each rounded; if they are
// `rounded`, those of sections themselves, too.
struct SectionPart {
  static constexpr std::string_view kKind = "section";
  int64_t columns;
  double factor;
  INFUSE_FIELDS(columns, factor)
};
struct FactorsPart {
  static constexpr std::string_view kKind = "factors";
  double before, after;
  bool rounded;
  std::vector<SectionPart> sections;
  INFUSE_FIELDS(before, after, rounded, sections)
};
// Keys and values, if the program holds them, [B, K, S, D]; else each step gives them. If they are `borrowed`, qkv makes
// queries alone, and nothing is appended. The sigmoid of a gate multiplies the heads: if it is `gated`, that of the last
// rows of qkv, else that of `gate`, if there is one, with one row for each feature or head. The window is as in
// ops.attention. `bias` [1, H, 1, S], if the program holds it, is that of the last of S tokens: one's before it has the
// last columns. Columns [turns_at, turns_at + turns) of the step's cos and sin are this part's: none if `turns` is 0, all
// if it is -1.
struct AttentionPart {
  static constexpr std::string_view kKind = "attention";
  int64_t heads, kv_heads, width, window, turns_at, turns;
  bool interleaved, borrowed, gated;
  double scale, softcap;
  Maybe sinks;
  ProductPart qkv;
  LinearPart out;
  std::optional<LinearPart> gate;
  std::optional<NormPart> q_norm, k_norm, v_norm, out_norm;
  std::optional<FactorsPart> factors;
  Storage keys, values, bias;
  INFUSE_FIELDS(heads, kv_heads, width, window, turns_at, turns, interleaved, borrowed, gated, scale, softcap, sinks,
                qkv, out, gate, q_norm, k_norm, v_norm, out_norm, factors, keys, values, bias)

  int64_t all_heads() const { return (borrowed ? heads : heads + 2 * kv_heads) + (gated ? heads : 0); }
};
// Attention to all keys and values of an encoder's states, [R, K, L, D], if the program holds them; else each step gives
// them. Each row of theirs is for B / R consecutive rows of the step, such as beams of one text.
struct CrossAttentionPart {
  static constexpr std::string_view kKind = "cross_attention";
  int64_t heads, width;
  double scale, softcap;
  LinearPart q, out;
  Storage keys, values;
  INFUSE_FIELDS(heads, width, scale, softcap, q, out, keys, values)
};
// out(c * conv(b * x)) of [b | c | x] = into(y). States of these mixers are changed in place: the program's own, or a
// step's keys (of the convolution, [B, taps, C]) and values (of the recurrence, [B, H, D, V] in float32).
struct ShortConvPart {
  static constexpr std::string_view kKind = "short_conv";
  int64_t taps;
  Maybe conv, conv_bias;
  ProductPart into;
  LinearPart out;
  Storage convolved;
  INFUSE_FIELDS(taps, conv, conv_bias, into, out, convolved)

  int64_t channels() const { return outputs_of(into) / 3; }
};
// The sections of `into` begin at *_at; queries, keys and values are next to each other. beta_at is -1 for state spaces,
// whose dt, between `least` and `most`, takes its place. One `beside` attention is given its states where others have
// those of an encoder.
struct LinearAttentionPart {
  static constexpr std::string_view kKind = "linear_attention";
  int64_t heads, key_heads, key_width, value_width, q_at, k_at, v_at, gate_at, beta_at, step_at, norm_width, taps;
  bool delta, gate_first, sigmoid, beside;
  double scale, beta_factor, least, most, eps;
  Maybe conv, conv_bias, A_log, dt_bias, D, norm;
  ProductPart into;
  LinearPart out;
  std::optional<FactorsPart> factors;
  Storage convolved, state;
  INFUSE_FIELDS(heads, key_heads, key_width, value_width, q_at, k_at, v_at, gate_at, beta_at, step_at, norm_width, taps,
                delta, gate_first, sigmoid, beside, scale, beta_factor, least, most, eps, conv, conv_bias, A_log,
                dt_bias, D, norm, into, out, factors, convolved, state)

  int64_t channels() const { return 2 * key_heads * key_width + values(); }
  int64_t values() const { return heads * value_width; }
  int64_t conv_at() const { return std::min({q_at, k_at, v_at}); }
};
// [x | gate] = into(y); x is convolved, and `x` of it makes dt's input of `rank` columns, keys and queries of `states`
// columns, each with a norm, if there is one. Several tokens on one state begin with none, as in the originals.
struct SelectiveScanPart {
  static constexpr std::string_view kKind = "selective_scan";
  int64_t channels, states, rank, taps;
  Maybe conv, conv_bias, A_log, dt_bias, D;
  ProductPart into;
  LinearPart x, dt, out;
  std::optional<NormPart> dt_norm, key_norm, query_norm;
  Storage convolved, state;
  INFUSE_FIELDS(channels, states, rank, taps, conv, conv_bias, A_log, dt_bias, D, into, x, dt, out, dt_norm, key_norm,
                query_norm, convolved, state)
};
// Attention to latents, which each head expands to its key and value by its rows of kv_b: keys [B, 1, S, latent] and
// values [B, 1, S, turned] of the cache are the latents and a part of the keys that all heads share. If they are `pairs`,
// columns (2i, 2i + 1) move to (i, i + turned / 2) before they are turned. `turns_at`, `turns` and the sigmoid of `gate`
// as in AttentionPart.
struct LatentAttentionPart {
  static constexpr std::string_view kKind = "latent_attention";
  int64_t heads, plain, turned, latent, value, turns_at, turns;
  bool interleaved, pairs;
  double scale;
  LinearPart q, kv_a, kv_b, out;
  std::optional<LinearPart> q_a, gate;
  std::optional<NormPart> q_norm, kv_norm;
  Storage keys, values;
  INFUSE_FIELDS(heads, plain, turned, latent, value, turns_at, turns, interleaved, pairs, scale, q, kv_a, kv_b, out,
                q_a, gate, q_norm, kv_norm, keys, values)
};
// The gated delta rule with a decay for each channel of the keys: the rows of `into` are queries, keys, values and beta,
// then those of decay and gate. One that has a rank is made by its own matrix instead, of so many columns of `low`, the
// decay's first. A channel's logarithm of the decay is as in ChannelDecayArgs.
struct ChannelDeltaPart {
  static constexpr std::string_view kKind = "channel_delta";
  int64_t heads, width, taps, decay_rank, gate_rank;
  bool bounded, rounded;
  double scale, bound, eps;
  Maybe conv, conv_bias, A_log, dt_bias, norm;
  ProductPart into;
  LinearPart out;
  std::optional<LinearPart> low, decay, gate;
  Storage convolved, state;
  INFUSE_FIELDS(heads, width, taps, decay_rank, gate_rank, bounded, rounded, scale, bound, eps, conv, conv_bias, A_log,
                dt_bias, norm, into, out, low, decay, gate, convolved, state)

  int64_t values() const { return heads * width; }
  int64_t channels() const { return 3 * values(); }
  int64_t beta_at() const { return channels(); }
  int64_t decay_at() const { return beta_at() + heads; }  // in `into`, if there is no `decay`
  int64_t gate_at() const { return decay_at() + (decay ? 0 : values()); }
  int64_t all() const { return gate_at() + (gate ? 0 : values()); }
  int64_t low_columns() const { return decay_rank + gate_rank; }
};
struct MlpPart {
  static constexpr std::string_view kKind = "mlp";
  int64_t act;
  bool gated;
  ProductPart up;
  LinearPart down;
  std::optional<NormPart> norm;  // of the inner values
  std::optional<FactorsPart> factors;
  INFUSE_FIELDS(act, gated, up, down, norm, factors)

  int64_t inner() const { return outputs_of(up) / (gated ? 2 : 1); }
};

// The words of infuse/ground/routing.py in the order of ops/cpu/router.py.
enum class LogitsIn : int64_t { rounded, widened, float32 };
enum class Score : int64_t { none, softmax, sigmoid };
enum class RouteWeight : int64_t { score, picked, softmax, sigmoid };
enum class CastTo : int64_t { none, activations, logits };
struct RouterPart {
  static constexpr std::string_view kKind = "router";
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
  Maybe fed_index, fed_weights;  // [tokens, K] in place of the router's own, unless empty
  std::optional<NormPart> norm;  // logits are of norm(x) * gain * factor
  Maybe gain, gains;             // [H]; [E], by which the weights are multiplied
  double factor;
  INFUSE_FIELDS(top_k, logits, score, rounded_score, weights, normalise, cast, in_order, groups, kept, by_best, eps,
                least, scale, fill, weight, bias, correction, fed_index, fed_weights, norm, gain, gains, factor)
};
// Both matrices hold all experts, one after another.
struct ExpertsPart {
  static constexpr std::string_view kKind = "experts";
  int64_t inner, act;
  bool gated, limit_after;
  int64_t first;
  double limit, up_offset;
  LinearPart up, down;
  INFUSE_FIELDS(inner, act, gated, limit_after, first, limit, up_offset, up, down)

  int64_t up_rows() const { return gated ? 2 * inner : inner; }
};
struct MoePart {
  static constexpr std::string_view kKind = "moe";
  RouterPart router;
  bool averages;  // the experts' sum and the shared expert
  double scale;   // of that sum
  ExpertsPart experts;
  std::optional<MlpPart> shared;
  Maybe shared_gate;
  std::optional<NormPart> norm, post;  // of the input, which the router sees without it; of the result
  std::optional<LinearPart> latent_in, latent_out;  // before and after the experts, which are narrower
  INFUSE_FIELDS(router, averages, scale, experts, shared, shared_gate, norm, post, latent_in, latent_out)
};
// projection(act(gate(x)) * the call's value).
struct LayerInputPart {
  static constexpr std::string_view kKind = "layer_input";
  int64_t act;
  LinearPart gate, projection;
  INFUSE_FIELDS(act, gate, projection)
};
// A decoder's table of tokens, for values of `width` columns of this type; and its product after the last block.
template <>
struct Words<ScalarType> {
  static constexpr std::pair<std::string_view, ScalarType> all[] = {
      {"float32", ScalarType::Float}, {"bfloat16", ScalarType::BFloat16}, {"float16", ScalarType::Half}};
};
struct TablePart {
  static constexpr std::string_view kKind = "table";
  int64_t width;
  ScalarType type;
  LinearPart rows;
  INFUSE_FIELDS(width, type, rows)
};
// Adds the row start + `offset` of a table of places [P, C] to all rows of a step of one token.
struct PlacePart {
  static constexpr std::string_view kKind = "place";
  int64_t offset;
  Maybe table;
  INFUSE_FIELDS(offset, table)
};
// `shift` is added to the rounded product.
struct HeadPart {
  static constexpr std::string_view kKind = "head";
  LinearPart product;
  Maybe shift;
  INFUSE_FIELDS(product, shift)
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

// The steps of architectures/program.py that C++ can run, and those around a decoder's blocks. A branch is the result
// of attention, of an MLP or of a mixture: the part's kind says which.
// scale and divide change x, what a table or a head has made, by a number, in place. norm_narrowed rounds x to the type
// of the norm's weight, in which all parts are; add_wide adds in float32, in which x is from then on; norm_of_wide
// computes in float32 and rounds the result to the weight's type.
enum class Does {
  norm, norm_stream, norm_branch, norm_narrowed, norm_of_wide, branch, add, add_wide, add_norm, add_norm_stream, embed,
  place, head, scale, divide
};
template <>
struct Words<Does> {
  static constexpr std::pair<std::string_view, Does> all[] = {
      {"norm", Does::norm},
      {"norm_stream", Does::norm_stream},
      {"norm_branch", Does::norm_branch},
      {"norm_narrowed", Does::norm_narrowed},
      {"norm_of_wide", Does::norm_of_wide},
      {"attention", Does::branch},
      {"mlp", Does::branch},
      {"add", Does::add},
      {"add_wide", Does::add_wide},
      {"add_norm", Does::add_norm},
      {"add_norm_stream", Does::add_norm_stream},
      {"embed", Does::embed},
      {"place", Does::place},
      {"head", Does::head},
      {"scale", Does::scale},
      {"divide", Does::divide}};
};
struct Step {
  static constexpr std::string_view kKind = "step";
  Does does;
  double scale;  // of the branch that is added, or of x
  std::variant<std::monostate, NormPart, AttentionPart, CrossAttentionPart, ShortConvPart, LinearAttentionPart,
               SelectiveScanPart, LatentAttentionPart, ChannelDeltaPart, MlpPart, MoePart, LayerInputPart, TablePart,
               PlacePart, HeadPart> part;
  INFUSE_FIELDS(does, scale, part)
};
// Few tokens of a decoder, or many of an encoder.
enum class Machine { steps, encoder };
template <>
struct Words<Machine> {
  static constexpr std::pair<std::string_view, Machine> all[] = {
      {"steps", Machine::steps}, {"encoder", Machine::encoder}};
};
// `whole`: the weights are all that a step of the model reads, and nobody else has these tensors.
struct Program {
  static constexpr std::string_view kKind = "program";
  Machine machine;
  bool whole;
  std::vector<Step> steps;
  INFUSE_FIELDS(machine, whole, steps)

  const TablePart* table() const { return std::get_if<TablePart>(&steps.front().part); }
  bool has_head() const {
    return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.does == Does::head; });
  }
  // The type of its parts for values of this type.
  ScalarType type_for(ScalarType type) const {
    for (const Step& step : steps) {
      const auto* norm = std::get_if<NormPart>(&step.part);
      if (step.does == Does::norm_narrowed && norm && norm->weight && type == ScalarType::Float) {
        return norm->weight->scalar_type();
      }
    }
    return type;
  }
};

// The values that a program works on: their type, and columns.
struct Values {
  ScalarType type;
  int64_t columns;
  bool operator==(const Values&) const = default;
};

// binding_encoder.cpp: the layer's result [B, T, C] for x [B, T, C], with bidirectional attention under `mask`. None if
// not supported.
std::optional<Tensor> run_encoder(const Program& program, const Tensor& x, const std::optional<Tensor>& mask);

// ---- the interpreter ----

// Runs a program on a machine with three values: `x`, the residual stream; `y`, the input of the next part and of the
// head; `branch`, the sum of the parts' results since the last addition. A missing value is false. `last` tells the
// machine that the next value is the result. `m.apply(part, y)` is the result of a part, missing if the machine cannot
// compute it. Returns false if a result is missing.
template <class M>
bool run(const Program& program, M& m) {
  using Value = decltype(m.x);
  for (const Step& step : program.steps) {
    m.last = &step == &program.steps.back();
    const auto* norm = std::get_if<NormPart>(&step.part);
    const bool makes = step.does == Does::embed || step.does == Does::place || step.does == Does::head;
    if (step.does == Does::branch || makes) {
      const Value& from = step.does == Does::branch || step.does == Does::head ? m.y : m.x;
      Value made = std::visit([&](const auto& part) { return m.apply(part, from); }, step.part);
      if (!made) return false;
      if (step.does == Does::branch) {
        const Value before = std::exchange(m.branch, Value());
        m.branch = before ? m.sum(before, made) : std::move(made);
      } else {
        m.x = m.y = std::move(made);
      }
      continue;
    }
    if (step.does == Does::scale || step.does == Does::divide) {
      m.x = m.y = m.scaled(m.x, step.scale, step.does == Does::divide);
      if (!m.x) return false;
      continue;
    }
    if (step.does != Does::norm_branch) m.y = m.x;  // the old y is no longer needed
    if (step.does == Does::norm_narrowed || step.does == Does::norm_of_wide) {
      m.y = step.does == Does::norm_narrowed ? m.narrowed(*norm, m.x) : m.of_wide(*norm, m.x);
      if (!m.y) return false;
      continue;
    }
    if (step.does == Does::norm || step.does == Does::norm_stream) {
      if (!norm) continue;  // y = x
      m.y = m.norm(*norm, m.x);
      if (step.does == Does::norm_stream) m.x = m.y;
      continue;
    }
    Value branch = std::exchange(m.branch, Value());
    if (step.scale != 1 && !(branch = m.times(branch, step.scale))) return false;
    switch (step.does) {
      case Does::norm_branch: m.branch = m.norm(*norm, branch); break;
      case Does::add: m.x = m.y = m.sum(branch, m.x); break;
      case Does::add_wide:
        if (!(m.x = m.y = m.wide_sum(branch, m.x))) return false;
        break;
      case Does::add_norm: m.add_norm(*norm, branch); break;  // x becomes the sum, y its norm
      default: m.add_norm(*norm, branch), m.x = m.y;
    }
  }
  return true;
}

}  // namespace infuse
