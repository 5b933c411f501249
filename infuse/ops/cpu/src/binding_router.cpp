// A mixture's router as a PyTorch operator, for few tokens: the rules of ops/router.py.
//
// Equal logits give the same experts and the same weights as the reference, to the last bit. So softmax, sigmoid and
// sums are PyTorch's own operators, values are rounded where PyTorch rounds them, and ties are broken as by torch.topk.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <array>
#include <cstring>
#include <vector>

#include "binding_layer.h"
#include "binding_linear.h"

namespace infuse {
namespace {

template <class... Args>
Tensor called(const char* op, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
Tensor softmax(const Tensor& x) { return called("aten::_softmax", x, int64_t(-1), false); }
Tensor sigmoid(const Tensor& x) { return called("aten::sigmoid", x); }
Tensor sum_of_rows(const Tensor& x) {
  const int64_t last = -1;
  return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(&last, 1), true);
}

Tensor empty_rows_of(int64_t rows, int64_t columns, Type type) {
  const int64_t sizes[] = {rows, columns};
  return empty(sizes, 2, dtype_of(type));
}

using Floats = std::vector<float>;
Floats floats_of(const Array& t) {
  Floats made(size_t(t.numel()));
  kernels().router.convert(t.const_data_ptr(), type_of(t), made.data(), Type::f32, t.numel());
  return made;
}
Tensor tensor_of(const Floats& values, int64_t rows, Type type) {
  Tensor made = empty_rows_of(rows, int64_t(values.size()) / rows, type);
  kernels().router.convert(values.data(), Type::f32, made.mutable_data_ptr(), type, made.numel());
  return made;
}
void round_to(Type type, Floats& values) {
  if (type == Type::f32) return;
  std::vector<uint16_t> narrow(values.size());
  kernels().router.convert(values.data(), Type::f32, narrow.data(), type, int64_t(values.size()));
  kernels().router.convert(narrow.data(), type, values.data(), Type::f32, int64_t(values.size()));
}

Tensor logits_of(const RouterPart& r, const Array& x, int64_t tokens) {
  const Array& weight = *r.weight;
  LogitArgs a{};
  a.tokens = tokens, a.experts = weight.size(0), a.inputs = weight.size(1);
  a.weight = weight.const_data_ptr(), a.bias = r.bias ? r.bias->const_data_ptr() : nullptr;
  a.weight_type = type_of(weight), a.rounded = r.logits == LogitsIn::float32 ? Type::f32 : a.weight_type;
  a.type = r.logits == LogitsIn::rounded ? a.weight_type : Type::f32;
  auto* wide = static_cast<float*>(scratch_of<Scratch::x>(size_t(tokens * a.inputs) * sizeof(float)));
  kernels().router.convert(x.const_data_ptr(), type_of(x), wide, Type::f32, tokens * a.inputs);
  a.x = wide;
  Tensor logits = empty_rows_of(tokens, a.experts, a.type);
  a.logits = logits.mutable_data_ptr();
  over_outputs(a.experts, a.inputs * int64_t(weight.element_size()), 1, [&](int64_t begin, int64_t end) {
    kernels().router.logits(a, begin, end);
  });
  return logits;
}

Tensor scores_of(const RouterPart& r, const Tensor& logits) {
  const bool wide = r.rounded_score || type_of(logits) == Type::f32;
  const Tensor from = wide ? logits : tensor_of(floats_of(logits), logits.size(0), Type::f32);
  switch (r.score) {
    case Score::softmax: return softmax(from);
    case Score::sigmoid: return sigmoid(from);
    default: return from;
  }
}

using Ranked = std::pair<float, int64_t>;  // a value and its place

// Puts the k largest first. torch.topk calls the same algorithms of the standard library, which decide the order of
// equals: tests/ops/cpu/test_router.py compares the two.
void rank(std::vector<Ranked>& values, int64_t k, bool in_order) {
  const auto before = [](const Ranked& a, const Ranked& b) {
    const bool a_is_number = a.first == a.first, b_is_number = b.first == b.first;
    return (!a_is_number && b_is_number) || a.first > b.first;
  };
  const auto begin = values.begin();
  if (k * 64 <= int64_t(values.size())) return std::partial_sort(begin, begin + k, values.end(), before);
  std::nth_element(begin, begin + k - 1, values.end(), before);
  if (in_order) std::sort(begin, begin + k - 1, before);
}

// Sets the values of one token's experts outside the best groups.
void keep_best_groups(const RouterPart& r, std::vector<Ranked>& values, Type type) {
  const int64_t width = int64_t(values.size()) / r.groups, counted = r.by_best ? 1 : 2;
  Floats best;
  for (auto group = values.begin(); group != values.end(); group += width) {
    std::vector<Ranked> inside(group, group + width);
    rank(inside, counted, false);
    best.push_back(r.by_best ? inside[0].first : inside[0].first + inside[1].first);
  }
  round_to(type, best);
  std::vector<Ranked> groups;
  for (float value : best) groups.emplace_back(value, int64_t(groups.size()));
  rank(groups, r.kept, r.in_order);
  for (auto dropped = groups.begin() + r.kept; dropped != groups.end(); ++dropped) {
    for (int64_t e = dropped->second * width; e < (dropped->second + 1) * width; ++e) {
      values[size_t(e)].first = float(r.fill);
    }
  }
}

// Appends the index of each token's experts, and the values that become their weights: the scores, or the values that
// were compared. Returns the type of these.
Type choose(const RouterPart& r, const Tensor& scores, std::vector<int64_t>& index, Floats& picked) {
  const int64_t tokens = scores.size(0), experts = scores.size(1);
  const Floats score = floats_of(scores);
  Floats value = score;
  Type type = type_of(scores);
  if (r.correction) {
    const Floats correction = floats_of(*r.correction);
    for (size_t i = 0; i < value.size(); ++i) value[i] += correction[i % correction.size()];
    if (type_of(*r.correction) != type) type = Type::f32;  // as PyTorch promotes types
    round_to(type, value);
  }
  std::vector<Ranked> ranked(static_cast<size_t>(experts));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) ranked[size_t(e)] = {value[size_t(t * experts + e)], e};
    if (r.groups > r.kept) keep_best_groups(r, ranked, type);
    rank(ranked, r.top_k, r.in_order);
    for (int64_t k = 0; k < r.top_k; ++k) {
      const auto& [compared, expert] = ranked[size_t(k)];
      index.push_back(expert);
      picked.push_back(r.weights == RouteWeight::picked ? compared : score[size_t(t * experts + expert)]);
    }
  }
  return r.weights == RouteWeight::picked ? type : type_of(scores);
}

// The sums of rows of `columns` values. Few values of float32 are added one after another, as PyTorch adds them.
Floats sums_of(const Floats& values, int64_t columns, Type type) {
  constexpr int64_t kOneAfterAnother = 8;
  const int64_t rows = int64_t(values.size()) / columns;
  if (type != Type::f32 || columns > kOneAfterAnother) return floats_of(sum_of_rows(tensor_of(values, rows, type)));
  Floats sums(static_cast<size_t>(rows));
  for (size_t i = 0; i < values.size(); ++i) sums[i / size_t(columns)] += values[i];
  return sums;
}

// Turns picked values of `type` into weights, rounded to `to`.
void weigh(const RouterPart& r, Floats& weight, Type type, Type to) {
  const int64_t tokens = int64_t(weight.size()) / r.top_k;
  if (r.weights == RouteWeight::softmax) weight = floats_of(softmax(tensor_of(weight, tokens, type)));
  if (r.weights == RouteWeight::sigmoid) weight = floats_of(sigmoid(tensor_of(weight, tokens, type)));
  if (r.normalise) {
    Floats total = sums_of(weight, r.top_k, type), least{float(r.least)};
    for (float& sum : total) sum += float(r.eps);
    round_to(type, total), round_to(type, least);
    for (size_t i = 0; i < weight.size(); ++i) {
      const float sum = total[i / size_t(r.top_k)];
      weight[i] /= r.least != 0 && sum < least[0] ? least[0] : sum;
    }
    round_to(type, weight);
  }
  for (float& each : weight) each *= float(r.scale);
  round_to(type, weight), round_to(to, weight);
}

}  // namespace

namespace {

// norm(x) * gain * factor, each rounded.
Array normed(const RouterPart& r, const Array& x) {
  const Array even = array_as(x), gained = array_as(x), made = array_as(x);
  norm(r.norm->rule(), x, even);
  norm({r.gain, {}, 0.0, 0.0, false, true}, even, gained);
  const void* from[] = {gained.const_data_ptr()};
  const float factor = float(r.factor);
  kernels().experts.weigh({from, &factor, 1, made.mutable_data_ptr(), type_of(made)}, 0, made.numel());
  return made;
}

}  // namespace

Routes route(const RouterPart& r, const Array& given, int64_t tokens) {
  const Array x = r.norm ? normed(r, given) : given;
  Routes routes{logits_of(r, x, tokens), {}, Type::f32, {}};
  const Type picked = choose(r, scores_of(r, routes.logits), routes.index, routes.weights);
  routes.weight_type = r.cast == CastTo::none ? picked : type_of(r.cast == CastTo::logits ? Array(routes.logits) : x);
  weigh(r, routes.weights, picked, routes.weight_type);
  if (r.gains) {
    const Floats gains = floats_of(*r.gains);
    for (size_t i = 0; i < routes.weights.size(); ++i) routes.weights[i] *= gains[size_t(routes.index[i])];
  }
  if (r.fed_index && r.fed_index->numel()) {
    const auto* index = static_cast<const int64_t*>(r.fed_index->const_data_ptr());
    STD_TORCH_CHECK(r.fed_index->size(0) == tokens, "routes for ", r.fed_index->size(0), " tokens, not ", tokens);
    routes.index.assign(index, index + r.fed_index->numel());
    routes.weights = floats_of(*r.fed_weights);
    round_to(routes.weight_type, routes.weights);
  }
  return routes;
}

namespace {

// x [T, H]; the numbers of the rule as in ops/cpu/router.py, which checks shapes, dtypes and layouts.
std::tuple<Tensor, Tensor, Tensor> router(Tensor x, Tensor weight, std::optional<Tensor> bias,
                                          std::optional<Tensor> correction, int64_t top_k, int64_t logits,
                                          int64_t score, bool rounded_score, int64_t weights, bool normalise,
                                          int64_t cast, bool in_order, int64_t groups, int64_t kept, bool by_best,
                                          double eps, double least, double scale, double fill) {
  const RouterPart rule{top_k, LogitsIn(logits), Score(score), rounded_score, RouteWeight(weights), normalise,
                        CastTo(cast), in_order, groups, kept, by_best, eps, least, scale, fill,
                        weight, bias, correction};
  const int64_t sizes[] = {x.size(0), top_k};
  const Routes routes = route(rule, x, sizes[0]);
  Tensor index = empty(sizes, 2, aoti_torch_dtype_int64());
  std::memcpy(index.mutable_data_ptr(), routes.index.data(), routes.index.size() * sizeof(int64_t));
  return {routes.logits, tensor_of(routes.weights, sizes[0], routes.weight_type), index};
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"router(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, int top_k, int logits, int score, bool "
     "rounded_score, int weights, bool normalise, int cast, bool in_order, int groups, int kept, bool by_best, float "
     "eps, float least, float scale, float fill) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&router)})

}  // namespace infuse
