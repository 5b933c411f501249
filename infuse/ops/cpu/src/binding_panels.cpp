// Products over quantized weights in panels (panels.h), as PyTorch operators; and how codes get into panels and out of them.
// Shapes, dtypes and layouts are checked by ops/cpu/quantized_linear.py.
#include <cstring>

#include "binding_linear.h"

namespace infuse {
namespace {

constexpr int64_t kPanelRows = 16;
// Up to so many rows of x, weights are decoded for each block of x anew; beyond, a tile of them is decoded once (where both take
// as long, 8192 x 2048, bf16) or the whole weight (1024 x 1024, float32).
constexpr int64_t kFewRows8 = 48, kFewRows4 = 72, kFewRowsFloat = 24;

void take_panels(LinearArgs& a, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero, int64_t bits, int64_t outputs) {
  a.weight = data.const_data_ptr();
  a.bits = int(bits);
  a.outputs = outputs, a.inputs = data.size(1) * 32 / bits;  // data [panels, units, 16] words
  a.scale = static_cast<const uint16_t*>(scale.const_data_ptr());
  a.zero = zero ? static_cast<const int8_t*>(zero->const_data_ptr()) : nullptr;
  a.groups = scale.size(1);  // scale [panels, groups, 16]
}

// None where there are more rows than these kernels are good at.
std::optional<Tensor> quantized_linear(
    Tensor x, Tensor data, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> bias, int64_t bits, int64_t outputs) {
  LinearArgs a{};
  take_panels(a, data, scale, zero, bits, outputs);
  const PanelKernels& kernel = kernels().panels;
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  const int64_t few = !bf16 ? kFewRowsFloat : bits == 4 ? kFewRows4 : kFewRows8;
  const bool many = x.numel() > few * a.inputs;
  if (many && (!bf16 || !kernel.tiles.multiply || left_to_pytorch())) return std::nullopt;
  Tensor y = begin_product(a, x, bias, a.outputs);
  if (a.rows == 0 || a.outputs == 0) return y;
  if (many) {
    multiply_by_tiles(a, a.outputs, kernel.tiles);
    return y;
  }
  a.scratch = scratch_of<Scratch::x>(kernel.scratch_bytes(a));
  const int64_t most = kernel.few_rows, blocks = (a.rows + most - 1) / most;
  over_blocks(a, blocks, [&](int64_t begin, int64_t end) { kernel.arrange(a, most, begin, end); });
  const int64_t row_bytes = a.inputs * bits / 8 + a.groups * (zero ? 3 : 2);
  over_outputs(a.outputs, row_bytes, kPanelRows, [&](int64_t begin, int64_t end) { kernel.few(a, begin, end); });
  return y;
}

// The values of a quantized weight, into `to` [outputs, inputs].
void dequantize(Tensor data, Tensor scale, std::optional<Tensor> zero, int64_t bits, Tensor to) {
  LinearArgs a{};
  take_panels(a, data, scale, zero, bits, to.size(0));
  a.type = type_of(to);
  a.y = to.mutable_data_ptr();
  const auto run = kernels().panels.dequantize;
  const int64_t row_bytes = a.inputs * int64_t(to.element_size());
  over_outputs(a.outputs, row_bytes, kPanelRows, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

// The values of some rows: to[i] = w[index[i]]; index is int64, contiguous and within the rows.
void gather_rows(Tensor data, Tensor scale, std::optional<Tensor> zero, int64_t bits, Tensor index, Tensor to) {
  LinearArgs a{};
  take_panels(a, data, scale, zero, bits, data.size(0) * kPanelRows);
  a.type = type_of(to);
  a.y = to.mutable_data_ptr();
  a.index = static_cast<const int64_t*>(index.const_data_ptr());
  const auto run = kernels().panels.gather;
  torch::stable::parallel_for(0, index.numel(), 8, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

// Neighbouring codes of a row, as a word holds them (panels.h), and back.
uint32_t word_of_nibbles(uint32_t x) {  // nibble j → bit 4 * (j / 2) + 16 * (j % 2)
  const auto gathered = [](uint32_t even) {
    even &= 0x0f0f0f0f;
    even = (even | even >> 4) & 0x00ff00ff;
    return (even | even >> 8) & 0xffff;
  };
  return gathered(x) | gathered(x >> 4) << 16;
}
uint32_t nibbles_of_word(uint32_t x) {
  const auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00ff00ff;
    return (half | half << 4) & 0x0f0f0f0f;
  };
  return spread(x & 0xffff) | spread(x >> 16) << 4;
}
uint32_t middle_bytes_swapped(uint32_t x) { return (x & 0xff0000ff) | (x & 0xff00) << 8 | (x & 0xff0000) >> 8; }

template <class F>
void over_words(int64_t rows, int64_t units, const F& run) {
  torch::stable::parallel_for(0, (rows + kPanelRows - 1) / kPanelRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t there = std::min(kPanelRows, rows - panel * kPanelRows);
      for (int64_t u = 0; u < units; ++u) {
        for (int64_t r = 0; r < there; ++r) run(((panel * kPanelRows + r) * units + u) * 4, ((panel * units + u) * kPanelRows + r) * 4);
      }
    }
  });
}

void copy_word(const uint8_t* from, uint8_t* to, uint32_t (*change)(uint32_t)) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  word = change(word);
  std::memcpy(to, &word, 4);
}

// Codes as infuse/quant/integer.py stores them, rows of bytes, into panels; `to` is zero where there are no rows.
void pack_panels(Tensor data, int64_t bits, Tensor to) {
  const uint8_t* from = static_cast<const uint8_t*>(data.const_data_ptr());
  uint8_t* into = static_cast<uint8_t*>(to.mutable_data_ptr());
  const auto change = bits == 4 ? word_of_nibbles : middle_bytes_swapped;
  over_words(data.size(0), to.size(1), [&](int64_t row, int64_t panel) { copy_word(from + row, into + panel, change); });
}

void unpack_panels(Tensor data, int64_t bits, Tensor to) {
  const uint8_t* from = static_cast<const uint8_t*>(data.const_data_ptr());
  uint8_t* into = static_cast<uint8_t*>(to.mutable_data_ptr());
  const auto change = bits == 4 ? nibbles_of_word : middle_bytes_swapped;
  over_words(to.size(0), data.size(1), [&](int64_t row, int64_t panel) { copy_word(from + panel, into + row, change); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) {
  m.def("quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int bits, int outputs) -> Tensor?");
  m.def("dequantize(Tensor data, Tensor scale, Tensor? zero, int bits, Tensor(a!) to) -> ()");
  m.def("gather_rows(Tensor data, Tensor scale, Tensor? zero, int bits, Tensor index, Tensor(a!) to) -> ()");
  m.def("pack_panels(Tensor data, int bits, Tensor(a!) to) -> ()");
  m.def("unpack_panels(Tensor data, int bits, Tensor(a!) to) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, CompositeExplicitAutograd, m) {
  m.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("pack_panels", TORCH_BOX(&pack_panels));
  m.impl("unpack_panels", TORCH_BOX(&unpack_panels));
}

}  // namespace infuse
