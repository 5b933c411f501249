// What a layer is made of, as ops/cpu/layer.py tells it to the operators that go through a whole layer; and whether their kernels take it.
#pragma once

#include <optional>
#include <vector>

#include "binding.h"

namespace infuse {

// The orders in which ops/cpu/layer.py gives what a layer is made of.
enum NormPlace { kNorm1, kNorm2, kPost1, kPost2, kQNorm, kKNorm, kNorms };
enum LinearPlace { kQkv, kOut, kUp, kDown, kLinears };
constexpr int64_t kIntegers = 7 + 4 * kNorms + 6 * kLinears, kReals = 2 + 2 * kNorms;  // that describe a layer
enum Residual { kPre, kPost, kParallel, kSandwich };

using Maybe = std::optional<Tensor>;

struct NormPart {
  bool there, centred;
  Maybe weight, bias;
  double eps, offset;
};
struct LinearPart {
  int64_t code, outputs;  // code -1: plain
  Maybe weight, scale, zero, bias;
};
struct Layer {
  Residual residual;
  int64_t heads, kv_heads, width, act;
  bool interleaved, gated;
  double scale, softcap;
  NormPart norms[kNorms];
  LinearPart linears[kLinears];
};

inline Layer layer_of(const std::vector<Tensor>& tensors, const Tensor& integers, const Tensor& reals) {
  const auto* next_integer = static_cast<const int64_t*>(integers.const_data_ptr());
  const auto* next_real = static_cast<const double*>(reals.const_data_ptr());
  STD_TORCH_CHECK(integers.numel() == kIntegers && reals.numel() == kReals, "a layer of ", integers.numel(), " and ", reals.numel(), " numbers");
  const auto integer = [&] { return *next_integer++; };
  const auto tensor = [&]() -> Maybe {
    const int64_t place = integer();
    return place < 0 ? Maybe() : Maybe(tensors.at(size_t(place)));
  };
  Layer a{};
  a.residual = Residual(integer());
  a.heads = integer(), a.kv_heads = integer(), a.width = integer(), a.act = integer();
  a.interleaved = integer() != 0, a.gated = integer() != 0;
  a.scale = *next_real++, a.softcap = *next_real++;
  for (NormPart& norm : a.norms) {
    norm.there = integer() != 0, norm.centred = integer() != 0;
    norm.weight = tensor(), norm.bias = tensor();
    norm.eps = *next_real++, norm.offset = *next_real++;
  }
  for (LinearPart& linear : a.linears) {
    linear.code = integer(), linear.outputs = integer();
    linear.weight = tensor(), linear.scale = tensor(), linear.zero = tensor(), linear.bias = tensor();
  }
  return a;
}

// ---- what the kernels take ----

inline bool alike(const Maybe& t, const Tensor& x, int64_t size) {
  return !t || (t->scalar_type() == x.scalar_type() && t->dim() == 1 && t->size(0) == size && t->is_contiguous());
}

inline bool takes(const NormPart& norm, const Tensor& x, int64_t columns) {
  return !norm.there || (alike(norm.weight, x, columns) && alike(norm.bias, x, columns));
}

inline bool takes(const LinearPart& linear, const Tensor& x, int64_t inputs) {
  const Tensor& weight = *linear.weight;
  if (!weight.is_contiguous() || !alike(linear.bias, x, linear.outputs)) return false;
  if (linear.code < 0) {
    return weight.scalar_type() == x.scalar_type() && weight.dim() == 2 && weight.size(0) == linear.outputs && weight.size(1) == inputs;
  }
  const bool panels = weight.dim() == 3 && weight.size(1) * 32 == inputs * bits_of(code_of(linear.code)) && weight.size(0) * 16 >= linear.outputs;
  const Tensor& scale = *linear.scale;
  return panels && scale.scalar_type() == ScalarType::BFloat16 && scale.is_contiguous() && (!linear.zero || linear.zero->is_contiguous());
}

inline bool takes(const Layer& a, const Tensor& x) {
  const ScalarType type = x.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Half) return false;
  if (x.dim() != 3 || !x.is_contiguous() || x.numel() == 0) return false;
  const int64_t columns = x.size(2), inner = a.linears[kUp].outputs / (a.gated ? 2 : 1);
  const auto head_columns = [&](int place, int64_t heads) {  // over each head, or over all at once
    const Maybe& weight = a.norms[place].weight;
    return weight && weight->dim() == 1 && weight->size(0) == heads * a.width ? heads * a.width : a.width;
  };
  for (int place : {kNorm1, kNorm2, kPost1, kPost2}) {
    if (!takes(a.norms[place], x, columns)) return false;
  }
  if (!takes(a.norms[kQNorm], x, head_columns(kQNorm, a.heads)) || !takes(a.norms[kKNorm], x, head_columns(kKNorm, a.kv_heads))) return false;
  return takes(a.linears[kQkv], x, columns) && takes(a.linears[kOut], x, a.heads * a.width) && takes(a.linears[kUp], x, columns) &&
         takes(a.linears[kDown], x, inner) && a.linears[kQkv].outputs == (a.heads + 2 * a.kv_heads) * a.width &&
         a.linears[kOut].outputs == columns && a.linears[kDown].outputs == columns;
}

}  // namespace infuse
