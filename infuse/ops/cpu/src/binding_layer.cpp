// A layer over a few new tokens in one call: what layers/block.py does part by part, in the same order by the same kernels, and by ours
// where ops/cpu/linear.py leaves small products to PyTorch. While weights stream through the caches, a part that is called from Python
// costs 15 to 30 us of which it computes 3.
#include <utility>
#include <vector>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {
namespace {

// ---- parts ----

Tensor normed(const NormPart& part, const Tensor& x) {
  return part.there ? norm(x, part.weight, part.bias, part.eps, part.offset, part.centred) : x;
}

// x + residual, and its norm.
std::pair<Tensor, Tensor> added(const NormPart& part, const Tensor& x, const Tensor& residual) {
  auto [sum, y] = add_norm(x, residual, part.weight, part.bias, part.eps, part.offset, part.centred);
  return {sum, y};
}

Tensor sum_of(const Tensor& x, const Tensor& y) {
  Tensor to = empty_as(x);
  const void* from[] = {x.const_data_ptr(), y.const_data_ptr()};
  kernels().sum_arrays({from, to.mutable_data_ptr(), 2, type_of(x)}, 0, x.numel());
  return to;
}

void multiply(const LinearPart& part, const Tensor& x, Tensor& y) {
  LinearArgs a{};
  a.x = x.const_data_ptr(), a.y = y.mutable_data_ptr();
  a.bias = part.bias ? part.bias->const_data_ptr() : nullptr;
  a.type = type_of(x);
  a.rows = y.numel() / part.outputs;
  if (part.code < 0) return stream_linear(a, *part.weight);
  stream_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs);
}

// Heads [first, first + count) of each token, in place.
void norm_heads(const NormPart& part, Tensor& qkv, int64_t first, int64_t count) {
  if (!part.there) return;
  const int64_t width = qkv.size(3), all = qkv.size(2) * width, tokens = qkv.size(0) * qkv.size(1);
  const bool at_once = part.weight && part.weight->size(0) == count * width;
  NormArgs a{};
  a.weight = part.weight ? part.weight->const_data_ptr() : nullptr;
  a.bias = part.bias ? part.bias->const_data_ptr() : nullptr;
  a.rows = at_once ? 1 : count, a.columns = at_once ? count * width : width;
  a.eps = float(part.eps), a.offset = float(part.offset), a.centred = part.centred;
  a.type = type_of(qkv);
  const int64_t element_bytes = a.type == Type::f32 ? 4 : 2;
  for (int64_t t = 0; t < tokens; ++t) {
    a.y = static_cast<char*>(qkv.mutable_data_ptr()) + (t * all + first * width) * element_bytes;
    a.x = a.y;
    kernels().norm(a, 0, a.rows);
  }
}

Maybe mlp(const Layer& a, const Tensor& x) {
  const LinearPart &up = a.linears[kUp], &down = a.linears[kDown];
  Tensor inner = empty({x.size(0), x.size(1), up.outputs}, x), y = empty_as(x);
  multiply(up, x, inner);
  const Maybe active = a.gated ? gated_activation(inner, a.act) : activation(inner, a.act);
  if (!active) return std::nullopt;
  multiply(down, *active, y);
  return y;
}

}  // namespace

// The layer's result [B, T, C] for x [B, T, C]; keys and values [B, K, S, D] receive the new tokens at `start`. None, before anything
// counts as done, where one of the kernels does not take what is given.
std::optional<Tensor> layer_step(Tensor x, std::vector<Tensor> tensors, Maybe cos, Maybe sin, Maybe mask, Maybe bias, Tensor keys, Tensor values,
                                 int64_t start, bool causal, int64_t window, Tensor integers, Tensor reals) {
  const Layer a = layer_of(tensors, integers, reals);
  if (!takes(a, x)) return std::nullopt;
  const int64_t batch = x.size(0), tokens = x.size(1), heads = a.heads + 2 * a.kv_heads;
  const Tensor into_attention = a.residual == kPost ? x : normed(a.norms[kNorm1], x);
  Tensor qkv = empty({batch, tokens, heads, a.width}, x);
  multiply(a.linears[kQkv], into_attention, qkv);
  norm_heads(a.norms[kQNorm], qkv, 0, a.heads);
  norm_heads(a.norms[kKNorm], qkv, a.heads, a.kv_heads);
  const Maybe q = rotary_append(qkv, cos, sin, keys, values, start, a.heads, a.interleaved);
  if (!q) return std::nullopt;
  const Maybe attended = attend(*q, keys, values, start + tokens, mask, bias, a.scale, causal, window, a.softcap);
  if (!attended) return std::nullopt;
  Tensor branch = empty_as(x);
  multiply(a.linears[kOut], *attended, branch);
  if (a.residual == kParallel) {
    const Maybe other = mlp(a, a.norms[kNorm2].there ? normed(a.norms[kNorm2], x) : into_attention);
    return other ? Maybe(sum_of(sum_of(branch, *other), x)) : std::nullopt;
  }
  if (a.residual == kSandwich) {
    const Tensor sum = sum_of(x, normed(a.norms[kPost1], branch));
    const Maybe other = mlp(a, normed(a.norms[kNorm2], sum));
    return other ? Maybe(sum_of(sum, normed(a.norms[kPost2], *other))) : std::nullopt;
  }
  if (a.residual == kPost) {
    const Tensor middle = added(a.norms[kNorm1], branch, x).second;
    const Maybe other = mlp(a, middle);
    return other ? Maybe(added(a.norms[kNorm2], *other, middle).second) : std::nullopt;
  }
  if (!a.norms[kNorm2].there) {
    const Tensor sum = sum_of(x, branch);
    const Maybe other = mlp(a, sum);
    return other ? Maybe(sum_of(sum, *other)) : std::nullopt;
  }
  const auto [sum, middle] = added(a.norms[kNorm2], branch, x);
  const Maybe other = mlp(a, middle);
  return other ? Maybe(sum_of(sum, *other)) : std::nullopt;
}

STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) {
  m.def(
      "layer_step(Tensor x, Tensor[] tensors, Tensor? cos, Tensor? sin, Tensor? mask, Tensor? bias, Tensor(a!) keys, Tensor(b!) values,"
      " int start, bool causal, int window, Tensor integers, Tensor reals) -> Tensor?");
}

STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, CPU, m) { m.impl("layer_step", TORCH_BOX(&layer_step)); }

}  // namespace infuse
