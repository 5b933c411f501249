// The modulated norms, gated sums and joined heads of diffusion transformers as PyTorch operators. ops/cpu/modulated.py
// and ops/cpu/joined.py check shapes and dtypes.
#include <optional>
#include <tuple>

#include "binding.h"

namespace infuse {
namespace {

ModulatedArgs over(const Tensor& x) {
  ModulatedArgs a{};
  a.x = x.const_data_ptr(), a.type = type_of(x);
  a.tokens = x.size(1), a.columns = x.size(2);
  return a;
}

void set_gate(ModulatedArgs& a, const Tensor& gate, const Tensor& residual, Tensor& sum) {
  a.gate = gate.const_data_ptr(), a.gate_b = gate.stride(0), a.wide = type_of(gate) == Type::f32;
  a.residual = residual.const_data_ptr(), a.sum = sum.mutable_data_ptr();
}

void set_norm(ModulatedArgs& a, const Tensor& scale, const Tensor& shift, double eps, bool centred, Tensor& y) {
  a.scale = scale.const_data_ptr(), a.scale_b = scale.stride(0), a.wide = type_of(scale) == Type::f32;
  a.shift = shift.const_data_ptr(), a.shift_b = shift.stride(0);
  a.eps = float(eps), a.centred = centred, a.y = y.mutable_data_ptr();
}

void run(const ModulatedArgs& a, int64_t batch) {
  const auto rows = kernels().modulated;
  over_rows(batch * a.tokens, a.columns, [&](int64_t begin, int64_t end) { rows(a, begin, end); });
}

Tensor modulated_norm(Tensor x, Tensor scale, Tensor shift, double eps, bool centred) {
  Tensor y = empty_as(x);
  ModulatedArgs a = over(x);
  set_norm(a, scale, shift, eps, centred, y);
  run(a, x.size(0));
  return y;
}

Tensor gated_add(Tensor x, Tensor gate, Tensor residual) {
  Tensor sum = empty_as(x);
  ModulatedArgs a = over(x);
  set_gate(a, gate, residual, sum);
  run(a, x.size(0));
  return sum;
}

std::tuple<Tensor, Tensor> gated_add_norm(Tensor x, Tensor gate, Tensor residual, Tensor scale, Tensor shift,
                                          double eps, bool centred) {
  Tensor sum = empty_as(x), y = empty_as(x);
  ModulatedArgs a = over(x);
  set_gate(a, gate, residual, sum);
  set_norm(a, scale, shift, eps, centred, y);
  run(a, x.size(0));
  return {sum, y};
}

Tensor joined_heads(Tensor first, MaybeTensor second, MaybeTensor first_q, MaybeTensor first_k, MaybeTensor second_q, MaybeTensor second_k, MaybeTensor cos,
                    MaybeTensor sin, double eps) {
  JoinedArgs a{};
  a.x[0] = first.const_data_ptr(), a.x[1] = data_of(second);
  a.q[0] = data_of(first_q), a.q[1] = data_of(second_q), a.k[0] = data_of(first_k), a.k[1] = data_of(second_k);
  a.tokens[0] = first.size(1), a.tokens[1] = second ? second->size(1) : 0;
  a.heads = first.size(2) / 3, a.width = first.size(3);
  a.cos = static_cast<const float*>(data_of(cos)), a.sin = static_cast<const float*>(data_of(sin));
  a.eps = float(eps), a.type = type_of(first);
  const int64_t tokens = a.tokens[0] + a.tokens[1];
  Tensor y = empty({first.size(0), tokens, 3 * a.heads, a.width}, first);
  a.y = y.mutable_data_ptr();
  const auto rows = kernels().joined;
  over_rows(first.size(0) * tokens, 3 * a.heads * a.width, [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  return y;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"modulated_norm(Tensor x, Tensor scale, Tensor shift, float eps, bool centred) -> Tensor",
     TORCH_BOX(&modulated_norm)},
    {"gated_add(Tensor x, Tensor gate, Tensor residual) -> Tensor", TORCH_BOX(&gated_add)},
    {"gated_add_norm(Tensor x, Tensor gate, Tensor residual, Tensor scale, Tensor shift, float eps, "
     "bool centred) -> (Tensor, Tensor)", TORCH_BOX(&gated_add_norm)},
    {"joined_heads(Tensor first, Tensor? second, Tensor? first_q, Tensor? first_k, Tensor? second_q, Tensor? second_k, "
     "Tensor? cos, Tensor? sin, float eps) -> Tensor", TORCH_BOX(&joined_heads)})

}  // namespace infuse
