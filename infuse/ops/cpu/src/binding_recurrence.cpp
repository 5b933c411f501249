// What recurrent mixers compute as PyTorch operators; ops/cpu/recurrence.py checks shapes and dtypes.
#include "binding.h"
#include "binding_ops.h"

namespace infuse {

namespace {

// Channels [begin, end) of the last rows of what the convolution saw. Rows that move up inside `after` are read before
// they are written.
void keep_last(const ConvArgs& a, int64_t b, int64_t begin, int64_t end) {
  const int64_t element = a.type == Type::f32 ? 4 : 2, from_call = std::min(a.tokens, a.taps), kept = a.taps - from_call;
  const size_t bytes = size_t((end - begin) * element);
  const auto row_of = [&](const void* rows, int64_t row) {
    return static_cast<const char*>(rows) + ((b * a.taps + row) * a.channels + begin) * element;
  };
  const auto to = [&](int64_t row) { return const_cast<char*>(row_of(a.after, row)); };
  for (int64_t row = 0; row < kept; ++row) {
    if (a.before) {
      std::memmove(to(row), row_of(a.before, row + from_call), bytes);
    } else {
      std::memset(to(row), 0, bytes);
    }
  }
  for (int64_t j = 0; j < from_call; ++j) {
    const int64_t t = a.tokens - from_call + j;
    const char* x = static_cast<const char*>(a.x) + (b * a.x_b + t * a.x_t + begin) * element;
    if (!a.gate) {
      std::memcpy(to(kept + j), x, bytes);
      continue;
    }
    NormArgs product{};
    product.x = x, product.y = to(kept + j), product.rows = 1, product.columns = end - begin, product.scales = true;
    product.weight = static_cast<const char*>(a.gate) + (b * a.gate_b + t * a.gate_t + begin) * element;
    product.type = a.type;
    kernels().norm(product, 0, 1);
  }
}

}  // namespace

void convolve(const ConvArgs& a) {
  const int64_t across = tiles_in(a.channels, kConvChannels), along = tiles_in(a.tokens, kConvTokens);
  const int64_t each = std::min(a.tokens, kConvTokens) * std::min(a.channels, kConvChannels) * a.taps;
  const auto some = kernels().recurrence.convolve;
  const auto keep = [&](int64_t tile) {
    const int64_t c = tile % across * kConvChannels;
    keep_last(a, tile / across, c, std::min(c + kConvChannels, a.channels));
  };
  if (along == 1) {  // no other tile sees these rows
    over_rows(a.batch * across, each, [&](int64_t begin, int64_t end) {
      some(a, begin, end);
      for (int64_t tile = begin; tile < end; ++tile) keep(tile);
    });
    return;
  }
  over_rows(a.batch * across * along, each, [&](int64_t begin, int64_t end) { some(a, begin, end); });
  for (int64_t tile = 0; tile < a.batch * across; ++tile) keep(tile);
}

void scan(const ScanArgs& a) {
  const auto heads = kernels().recurrence.scan;
  over_rows(a.batch * a.heads, a.key_width * a.value_width * a.tokens,
            [&](int64_t begin, int64_t end) { heads(a, begin, end); });
}

void gated_norm(const GatedNormArgs& a, int64_t rows) {
  const auto some = kernels().recurrence.gated_norm;
  over_rows(rows, a.width, [&](int64_t begin, int64_t end) { some(a, begin, end); });
}

void channel_decay(const ChannelDecayArgs& a, int64_t tokens) {
  const auto heads = kernels().recurrence.channel_decay;
  over_rows(tokens * a.heads, 4 * a.width, [&](int64_t begin, int64_t end) { heads(a, begin, end); });
}

namespace {

const float* floats_of(const MaybeTensor& t) { return static_cast<const float*>(data_of(t)); }

std::tuple<Tensor, Tensor> causal_conv(Tensor x, Tensor weight, MaybeTensor bias, MaybeTensor state, MaybeTensor gate,
                                       MaybeTensor out_gate, bool silu) {
  ConvArgs a{};
  a.batch = x.size(0), a.tokens = x.size(1), a.channels = x.size(2), a.taps = weight.size(1);
  Tensor y = empty({a.batch, a.tokens, a.channels}, x), after = empty({a.batch, a.taps, a.channels}, x);
  a.x = x.const_data_ptr(), a.x_b = x.stride(0), a.x_t = x.stride(1);
  a.gate = data_of(gate), a.out_gate = data_of(out_gate);
  if (gate) a.gate_b = gate->stride(0), a.gate_t = gate->stride(1);
  if (out_gate) a.out_b = out_gate->stride(0), a.out_t = out_gate->stride(1);
  a.weight = weight.const_data_ptr(), a.bias = data_of(bias), a.before = data_of(state);
  a.y = y.mutable_data_ptr(), a.after = after.mutable_data_ptr();
  a.silu = silu, a.type = type_of(x), a.weight_type = type_of(weight);
  convolve(a);
  return {y, after};
}

std::tuple<Tensor, Tensor> linear_attention(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, MaybeTensor skip,
                                            MaybeTensor state, double scale, bool normalise, bool delta) {
  ScanArgs a{};
  a.batch = v.size(0), a.tokens = v.size(1), a.heads = v.size(2), a.value_width = v.size(3);
  a.groups = k.size(2), a.key_width = k.size(3);
  Tensor out = empty({a.batch, a.tokens, a.heads, a.value_width}, v);
  Tensor after = empty({a.batch, a.heads, a.key_width, a.value_width}, decay);
  a.q = q.const_data_ptr(), a.q_b = q.stride(0), a.q_t = q.stride(1);
  a.k = k.const_data_ptr(), a.k_b = k.stride(0), a.k_t = k.stride(1);
  a.v = v.const_data_ptr(), a.v_b = v.stride(0), a.v_t = v.stride(1);
  a.decay = floats_of(decay), a.beta = floats_of(beta), a.skip = floats_of(skip), a.before = floats_of(state);
  a.after = static_cast<float*>(after.mutable_data_ptr()), a.out = out.mutable_data_ptr();
  a.scale = float(scale), a.normalise = normalise, a.by_key = decay.dim() == 4, a.delta = delta;
  a.type = type_of(v);
  scan(a);
  return {out, after};
}

Tensor gated_norm_of(Tensor x, Tensor gate, MaybeTensor weight, int64_t width, double eps, bool gate_first,
                     bool sigmoid) {
  const int64_t columns = x.size(2), rows = x.numel() / width;
  Tensor y = empty_as(x);
  GatedNormArgs a{};
  a.x = x.const_data_ptr(), a.gate = gate.const_data_ptr(), a.weight = data_of(weight), a.y = y.mutable_data_ptr();
  a.width = width, a.each = columns / width, a.gate_t = gate.stride(1);
  a.weight_rows = weight ? weight->numel() / width : 1;
  a.eps = float(eps), a.gate_first = gate_first, a.sigmoid = sigmoid, a.type = type_of(x);
  gated_norm(a, rows);
  return y;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? gate, Tensor? out_gate, bool silu) -> "
     "(Tensor, Tensor)", TORCH_BOX(&causal_conv)},
    {"linear_attention(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor? skip, Tensor? state, "
     "float scale, bool normalise, bool delta) -> (Tensor, Tensor)", TORCH_BOX(&linear_attention)},
    {"gated_norm(Tensor x, Tensor gate, Tensor? weight, int width, float eps, bool gate_first, bool sigmoid) -> Tensor",
     TORCH_BOX(&gated_norm_of)})

}  // namespace infuse
