// The selective scan as a PyTorch operator; ops/cpu/selective_scan.py checks shapes and dtypes.
#include "binding.h"
#include "binding_ops.h"

namespace infuse {

void selective(const SelectiveArgs& a) {
  const int64_t each = std::min(a.channels, kScanChannels) * a.states * a.tokens;
  const auto some = kernels().recurrence.selective;
  over_rows(a.batch * tiles_in(a.channels, kScanChannels), each,
            [&](int64_t begin, int64_t end) { some(a, begin, end); });
}

namespace {

std::tuple<Tensor, Tensor> selective_scan(Tensor x, Tensor dt, Tensor keys, Tensor queries, MaybeTensor gate,
                                          Tensor a_log, Tensor dt_bias, Tensor skip, MaybeTensor state) {
  SelectiveArgs a{};
  a.batch = x.size(0), a.tokens = x.size(1), a.channels = x.size(2), a.states = keys.size(2);
  Tensor y = empty({a.batch, a.tokens, a.channels}, x);
  const int64_t sizes[] = {a.batch, a.channels, a.states};
  Tensor after = empty(sizes, 3, dtype_of(Type::f32));
  a.x = x.const_data_ptr(), a.x_b = x.stride(0), a.x_t = x.stride(1);
  a.dt = dt.const_data_ptr(), a.dt_b = dt.stride(0), a.dt_t = dt.stride(1);
  a.keys = keys.const_data_ptr(), a.keys_b = keys.stride(0), a.keys_t = keys.stride(1);
  a.queries = queries.const_data_ptr(), a.queries_b = queries.stride(0), a.queries_t = queries.stride(1);
  a.gate = data_of(gate);
  if (gate) a.gate_b = gate->stride(0), a.gate_t = gate->stride(1);
  a.a_log = a_log.const_data_ptr(), a.dt_bias = dt_bias.const_data_ptr(), a.skip = skip.const_data_ptr();
  a.before = static_cast<const float*>(data_of(state));
  a.after = static_cast<float*>(after.mutable_data_ptr()), a.y = y.mutable_data_ptr();
  a.type = type_of(x), a.weight_type = type_of(a_log);
  selective(a);
  return {y, after};
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"selective_scan(Tensor x, Tensor dt, Tensor keys, Tensor queries, Tensor? gate, Tensor a_log, Tensor dt_bias, "
     "Tensor skip, Tensor? state) -> (Tensor, Tensor)", TORCH_BOX(&selective_scan)})

}  // namespace infuse
