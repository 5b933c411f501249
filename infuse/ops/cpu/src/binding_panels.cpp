// Products with quantized weights in panels (panels.h) as PyTorch operators, and the conversion of codes to panels and
// back. ops/cpu/quantized_linear.py checks shapes, dtypes and layouts.
#include <cstring>

#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {

namespace {

Scaling scaling_of(ScalarType type) {
  if (type == ScalarType::Int) return Scaling::f32;
  return type == ScalarType::Half ? Scaling::f16 : Scaling::bf16;
}

}  // namespace

void take_panels(LinearArgs& a, const Array& data, const Array& scale, const Maybe& zero, int64_t code,
                 int64_t outputs) {
  const Format& format = format_of(code);
  a.weight = data.const_data_ptr();
  a.code = format.code, a.values = format.values;
  a.outputs = outputs, a.inputs = data.size(1) * 32 / bits_of(a.code);  // data [panels, words, 16] words
  a.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  a.scaling = format.blocks ? Scaling::blocks : scaling_of(scale.scalar_type());
  a.blocks = format.blocks ? &format.layout : nullptr;
  a.scale_bytes = scale.size(1) * int64_t(scale.element_size());  // scale [panels, groups or bytes of a row, 16]
  const void* third = zero ? zero->const_data_ptr() : nullptr;
  const bool offsets = zero && zero->scalar_type() == ScalarType::Int;  // float32, as their bits
  a.zero = offsets ? nullptr : static_cast<const int8_t*>(third);
  a.offset = offsets ? static_cast<const float*>(third) : nullptr;
  a.groups = format.blocks ? a.inputs / format.layout.group : scale.size(1);
}

void take_panels(LinearArgs& a, const std::vector<Tensor>& buffers, int64_t code, int64_t outputs) {
  take_panels(a, buffers[0], buffers[1], buffers.size() > 2 ? Maybe(buffers[2]) : std::nullopt, code, outputs);
}

bool takes_integers(const LinearArgs& a, int64_t code) {
  if (!(code & kShortX) || a.rows <= kFewRowsInteger || !kernels().panels.integer_tiles.multiply) return false;
  return !(amx_multiplies() && a.type == Type::bf16) && a.inputs / a.groups <= kMostIntegerInputs;
}

namespace {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kOneThreadFew = 1 << 13;  // values of x that one thread arranges: 1 us

void few_rows(LinearArgs& a) {
  const PanelKernels& kernel = kernels().panels;
  a.scratch = scratch_of<Scratch::x>(kernel.scratch_bytes(a));
  over_blocks(a, kOneThreadFew, a.groups, [&](int64_t begin, int64_t end) { kernel.arrange_groups(a, begin, end); });
  const int64_t of_thirds = a.zero ? a.groups : a.offset ? a.groups * int64_t(sizeof(float)) : 0;
  const int64_t row_bytes = a.inputs * bits_of(a.code) / 8 + a.scale_bytes + of_thirds;
  over_outputs(a.outputs, row_bytes, kPanelRows, [&](int64_t begin, int64_t end) { kernel.few(a, begin, end); });
}

// Returns false if x is not finite; the caller must then compute y again from the unrounded x.
bool multiply_integers(LinearArgs& a, int64_t columns, int64_t threads) {
  bool finite = true;
  a.finite = &finite;
  multiply_by_tiles(a, columns, kernels().panels.integer_tiles, threads);
  a.finite = nullptr;
  return finite;
}

// With an activation (act >= 0) as in tiled_linear. None if there are more rows than these kernels are fast for; with
// an activation, also if there are too few rows for tiles, or if a panel would hold both gates and up values.
std::optional<Tensor> quantized_linear(Tensor x, Tensor data, Tensor scale, std::optional<Tensor> zero,
                                       std::optional<Tensor> bias, int64_t code, int64_t outputs, int64_t act,
                                       bool gated) {
  LinearArgs a{};
  take_panels(a, data, scale, zero, code, outputs);  // a list of buffers takes 0.3 us more to pass, a tenth of a call
  a.activates = act >= 0, a.gated = gated;
  if (a.activates) a.act = Act(act);
  const int64_t columns = gated ? outputs / 2 : outputs;
  const PanelKernels& kernel = kernels().panels;
  const bool whole = !gated || columns % kPanelRows == 0;
  const int64_t threads = thread_count();
  a.row_bytes = a.inputs * bits_of(a.code) / 8;
  a.rows = x.numel() / a.inputs, a.type = type_of(x);
  if (whole && columns && takes_integers(a, code)) {
    Tensor y = begin_product(a, x, bias, columns);
    if (multiply_integers(a, columns, threads)) return y;
  }
  const bool bf16 = a.type == Type::bf16, many = a.rows > (bf16 ? kFewRows : kFewRowsFloat);
  const TileKernels* tiles = tiles_of(kernel.tiles, a.type);
  if (many && !tiles) return std::nullopt;
  if (a.activates && (!many || !whole)) return std::nullopt;
  Tensor y = begin_product(a, x, bias, columns);
  if (a.rows == 0 || columns == 0) return y;
  if (many) {
    multiply_by_tiles(a, columns, *tiles, threads);
    return y;
  }
  few_rows(a);
  return y;
}

// Writes the values of a quantized weight to `to` [outputs, inputs].
void dequantize(std::vector<Tensor> buffers, int64_t code, Tensor to) {
  LinearArgs a{};
  take_panels(a, buffers, code, to.size(0));
  a.type = type_of(to);
  a.y = to.mutable_data_ptr();
  const auto run = kernels().panels.dequantize;
  const int64_t row_bytes = a.inputs * int64_t(to.element_size());
  over_outputs(a.outputs, row_bytes, kPanelRows, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

// Writes the values of some rows: to[i] = w[index[i]]; index is int64, contiguous and in range.
void gather_rows(std::vector<Tensor> buffers, int64_t code, Tensor index, Tensor to) {
  LinearArgs a{};
  take_panels(a, buffers, code, buffers[0].size(0) * kPanelRows);
  a.type = type_of(to);
  a.y = to.mutable_data_ptr();
  a.index = static_cast<const int64_t*>(index.const_data_ptr());
  const auto run = kernels().panels.gather;
  parallel_for(0, index.numel(), 8, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

// Consecutive codes of a row → the order in a word (panels.h), and back; for one word or a vector of words.
struct WordOfNibbles {  // nibble j → bit 4 * (j / 2) + 16 * (j % 2)
  template <class W>
  W operator()(W x) const {
    const auto gathered = [](W even) {
      even &= 0x0f0f0f0fu;
      even = (even | even >> 4) & 0x00ff00ffu;
      return (even | even >> 8) & 0xffffu;
    };
    return gathered(x) | gathered(x >> 4) << 16;
  }
};
struct NibblesOfWord {
  template <class W>
  W operator()(W x) const {
    const auto spread = [](W half) {
      half = (half | half << 8) & 0x00ff00ffu;
      return (half | half << 4) & 0x0f0f0f0fu;
    };
    return spread(x & 0xffffu) | spread(x >> 16) << 4;
  }
};
struct WordOfPairs {  // two bits j → bit 2 * (j / 2) + 16 * (j % 2)
  template <class W>
  W operator()(W x) const {
    const auto gathered = [](W even) {
      even &= 0x33333333u;
      even = (even | even >> 2) & 0x0f0f0f0fu;
      even = (even | even >> 4) & 0x00ff00ffu;
      return (even | even >> 8) & 0xffffu;
    };
    return gathered(x) | gathered(x >> 2) << 16;
  }
};
struct PairsOfWord {
  template <class W>
  W operator()(W x) const {
    const auto spread = [](W half) {
      half = (half | half << 8) & 0x00ff00ffu;
      half = (half | half << 4) & 0x0f0f0f0fu;
      return (half | half << 2) & 0x33333333u;
    };
    return spread(x & 0xffffu) | spread(x >> 16) << 2;
  }
};
struct MiddleBytesSwapped {
  template <class W>
  W operator()(W x) const {
    return (x & 0xff0000ffu) | (x & 0xff00u) << 8 | (x & 0xff0000u) >> 8;
  }
};

// Sixteen 6-bit codes, 12 bytes → the three words of a unit (panels.h), and back.
struct Sixes {
  uint64_t lower, upper;  // codes 0 to 7, codes 8 to 15
};
void words_of_sixes(const Sixes& from, uint32_t* words) {
  words[0] = words[1] = words[2] = 0;
  for (int half = 0; half < 2; ++half) {
    const auto of_pair = [&](int pair) {
      return uint32_t((pair < 4 ? from.lower : from.upper) >> (12 * (pair % 4) + 6 * half)) & 63;
    };
    for (int w = 0; w < 3; ++w) words[w] |= (of_pair(2 * w) | of_pair(2 * w + 1) << 6) << 16 * half;
    const uint32_t six = of_pair(6), seven = of_pair(7);
    words[0] |= (six & 15) << (12 + 16 * half), words[1] |= (seven & 15) << (12 + 16 * half);
    words[2] |= (six >> 4 << 12 | seven >> 4 << 14) << 16 * half;
  }
}
Sixes sixes_of_words(const uint32_t* words) {
  Sixes to{};
  for (int half = 0; half < 2; ++half) {
    const uint32_t w[3] = {words[0] >> 16 * half, words[1] >> 16 * half, words[2] >> 16 * half};
    const auto put = [&](int pair, uint32_t code) {
      (pair < 4 ? to.lower : to.upper) |= uint64_t(code) << (12 * (pair % 4) + 6 * half);
    };
    for (int pair = 0; pair < 6; ++pair) put(pair, w[pair / 2] >> 6 * (pair % 2) & 63);
    put(6, (w[0] >> 12 & 15) | (w[2] >> 12 & 3) << 4);
    put(7, (w[1] >> 12 & 15) | (w[2] >> 14 & 3) << 4);
  }
  return to;
}

// Calls run(offset of a unit in the rows, offset of its first word in the panels, row of the panel), in bytes, for all
// rows and all units of `bytes`.
template <int64_t bytes, class F>
void over_units(int64_t rows, int64_t words, const F& run) {
  const int64_t units = words * 4 / bytes;
  parallel_for(0, (rows + kPanelRows - 1) / kPanelRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t there = std::min(kPanelRows, rows - panel * kPanelRows);
      for (int64_t u = 0; u < units; ++u) {
        for (int64_t r = 0; r < there; ++r) {
          run(((panel * kPanelRows + r) * units + u) * bytes, (panel * units + u) * bytes * kPanelRows + 4 * r, r);
        }
      }
    }
  });
}

// The highest bits of 32 codes, code i at bit i → those of pair p at bit p of each half, and back.
uint32_t halves_of_bits(uint32_t bits) {
  uint32_t to = 0;
  for (int i = 0; i < 32; ++i) to |= (bits >> i & 1) << (i / 2 + 16 * (i % 2));
  return to;
}
uint32_t bits_of_halves(uint32_t halves) {
  uint32_t to = 0;
  for (int i = 0; i < 32; ++i) to |= (halves >> (i / 2 + 16 * (i % 2)) & 1) << i;
  return to;
}

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}
void put_word(uint8_t* p, uint32_t word) { std::memcpy(p, &word, 4); }

constexpr int64_t kWordBytes = 4 * kPanelRows;  // of one word for a whole panel

// Four words, in the 16 bytes of a vector on every machine.
typedef uint32_t Four __attribute__((vector_size(16)));

// Four rows of four words at `from`, `stride` bytes apart → four columns at `to`, each word changed by `change`.
template <class F>
void turn(const uint8_t* from, int64_t stride, uint8_t* to, int64_t to_stride, const F& change) {
  const auto lower = [](Four a, Four b) { return Four{a[0], b[0], a[1], b[1]}; };
  const auto upper = [](Four a, Four b) { return Four{a[2], b[2], a[3], b[3]}; };
  Four rows[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&rows[i], from + i * stride, sizeof(Four));
  const Four a = lower(rows[0], rows[2]), b = lower(rows[1], rows[3]);
  const Four c = upper(rows[0], rows[2]), d = upper(rows[1], rows[3]);
  const Four columns[4] = {change(lower(a, b)), change(upper(a, b)), change(lower(c, d)), change(upper(c, d))};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_stride, &columns[i], sizeof(Four));
}

// Units of 5-bit codes: four words of their lower bits, and one of the highest.
void pack_fives(const uint8_t* from, uint8_t* to) {
  for (int w = 0; w < 4; ++w) put_word(to + w * kWordBytes, WordOfNibbles()(word_at(from + 4 * w)));
  put_word(to + 4 * kWordBytes, halves_of_bits(word_at(from + 16)));
}
void unpack_fives(const uint8_t* from, uint8_t* to) {
  for (int w = 0; w < 4; ++w) put_word(to + 4 * w, NibblesOfWord()(word_at(from + w * kWordBytes)));
  put_word(to + 16, bits_of_halves(word_at(from + 4 * kWordBytes)));
}

// Units of 3-bit codes, 6 bytes of a row and a word and two bytes of a panel, for `row` of the panel.
void pack_threes(const uint8_t* from, uint8_t* to, int64_t row) {
  uint64_t codes = 0;
  std::memcpy(&codes, from, 6);
  uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    uint64_t each = codes >> 3 * half & 0x1c71c71c71c7;  // every other code
    each = (each | each >> 3) & 0x03f03f03f03f;
    each = (each | each >> 6) & 0xfff000fff;
    each |= each >> 12;
    word |= uint32_t((each & 0x7fff) | (each >> 8 & 0x8000)) << 16 * half;
    to[kWordBytes - 2 * row + half] = uint8_t(each >> 15);
  }
  put_word(to, word);
}
void unpack_threes(const uint8_t* from, uint8_t* to, int64_t row) {
  uint64_t codes = 0;
  for (int half = 0; half < 2; ++half) {
    const uint64_t word = word_at(from) >> 16 * half & 0xffff, last = from[kWordBytes - 2 * row + half];
    uint64_t each = (word & 0x7fff) | last << 15 | (word & 0x8000) << 8;
    each = (each | each << 12) & 0xfff000fff;
    each = (each | each << 6) & 0x03f03f03f03f;
    codes |= ((each | each << 3) & 0x1c71c71c71c7) << 3 * half;
  }
  std::memcpy(to, &codes, 6);
}

// Moves all words between rows, `row_bytes` long, and panels. TO_PANELS: from the rows; otherwise from the panels.
template <bool TO_PANELS, class F>
void move_words(const uint8_t* from, uint8_t* to, int64_t rows, int64_t words, const F& change) {
  const int64_t row_bytes = 4 * words;
  const auto in_rows = [&](int64_t panel, int64_t r, int64_t w) { return (panel * kPanelRows + r) * row_bytes + 4 * w; };
  const auto in_panels = [&](int64_t panel, int64_t r, int64_t w) { return (panel * words + w) * kWordBytes + 4 * r; };
  torch::stable::parallel_for(0, (rows + kPanelRows - 1) / kPanelRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t there = std::min(kPanelRows, rows - panel * kPanelRows);
      const int64_t turned = there == kPanelRows ? words / 4 * 4 : 0;
      for (int64_t w = 0; w < turned; w += 4) {
        for (int64_t r = 0; r < kPanelRows; r += 4) {
          const int64_t row = in_rows(panel, r, w), in_panel = in_panels(panel, r, w);
          if constexpr (TO_PANELS) {
            turn(from + row, row_bytes, to + in_panel, kWordBytes, change);
          } else {
            turn(from + in_panel, kWordBytes, to + row, row_bytes, change);
          }
        }
      }
      for (int64_t w = turned; w < words; ++w) {
        for (int64_t r = 0; r < there; ++r) {
          const int64_t row = in_rows(panel, r, w), in_panel = in_panels(panel, r, w);
          put_word(to + (TO_PANELS ? in_panel : row), change(word_at(from + (TO_PANELS ? row : in_panel))));
        }
      }
    }
  });
}

// Converts codes as infuse/quant stores them, rows of bytes, to panels; missing rows of `to` must be zero already.
// Returns false if an fp8 code is NaN.
bool pack_panels(Tensor data, int64_t code, Tensor to) {
  const uint8_t* from = static_cast<const uint8_t*>(data.const_data_ptr());
  uint8_t* into = static_cast<uint8_t*>(to.mutable_data_ptr());
  const Code coding = format_of(code).code;
  if (coding == Code::five) {
    over_units<20>(data.size(0), to.size(1), [&](int64_t row, int64_t panel, int64_t) {
      pack_fives(from + row, into + panel);
    });
    return true;
  }
  if (coding == Code::three) {
    over_units<6>(data.size(0), to.size(1), [&](int64_t row, int64_t panel, int64_t r) {
      pack_threes(from + row, into + panel, r);
    });
    return true;
  }
  if (bits_of(coding) == 6) {
    over_units<12>(data.size(0), to.size(1), [&](int64_t row, int64_t panel, int64_t) {
      const uint64_t a = word_at(from + row), b = word_at(from + row + 4), c = word_at(from + row + 8);
      uint32_t words[3];
      words_of_sixes({a | (b & 0xffff) << 32, b >> 16 | c << 16}, words);
      for (int w = 0; w < 3; ++w) put_word(into + panel + w * kWordBytes, words[w]);
    });
    return true;
  }
  const int64_t rows = data.size(0), words = to.size(1);
  if (is_nibble(coding)) {
    move_words<true>(from, into, rows, words, WordOfNibbles());
    return true;
  }
  if (coding == Code::two) {
    move_words<true>(from, into, rows, words, WordOfPairs());
    return true;
  }
  move_words<true>(from, into, rows, words, MiddleBytesSwapped());
  if (coding == Code::int8) return true;
  std::atomic<bool> numbers{true};  // no magnitude is 0x7f, which is NaN
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    uint32_t above = 0;
    for (int64_t w = begin * words; w < end * words; ++w) above |= (word_at(from + 4 * w) & 0x7f7f7f7f) + 0x01010101;
    if (above & 0x80808080) numbers = false;
  });
  return numbers;
}

void unpack_panels(Tensor data, int64_t code, Tensor to) {
  const uint8_t* from = static_cast<const uint8_t*>(data.const_data_ptr());
  uint8_t* into = static_cast<uint8_t*>(to.mutable_data_ptr());
  const Code coding = format_of(code).code;
  if (coding == Code::five) {
    over_units<20>(to.size(0), data.size(1), [&](int64_t row, int64_t panel, int64_t) {
      unpack_fives(from + panel, into + row);
    });
    return;
  }
  if (coding == Code::three) {
    over_units<6>(to.size(0), data.size(1), [&](int64_t row, int64_t panel, int64_t r) {
      unpack_threes(from + panel, into + row, r);
    });
    return;
  }
  if (bits_of(coding) == 6) {
    over_units<12>(to.size(0), data.size(1), [&](int64_t row, int64_t panel, int64_t) {
      uint32_t words[3];
      for (int w = 0; w < 3; ++w) words[w] = word_at(from + panel + w * kWordBytes);
      const Sixes codes = sixes_of_words(words);
      put_word(into + row, uint32_t(codes.lower));
      put_word(into + row + 4, uint32_t(codes.lower >> 32 | codes.upper << 16));
      put_word(into + row + 8, uint32_t(codes.upper >> 16));
    });
    return;
  }
  const int64_t rows = to.size(0), words = data.size(1);
  if (is_nibble(coding)) {
    move_words<false>(from, into, rows, words, NibblesOfWord());
  } else if (coding == Code::two) {
    move_words<false>(from, into, rows, words, PairsOfWord());
  } else {
    move_words<false>(from, into, rows, words, MiddleBytesSwapped());
  }
}

}  // namespace

void stream_panels(LinearArgs& a, const Array& data, const Array& scale, const Maybe& zero, int64_t code,
                   int64_t outputs) {
  take_panels(a, data, scale, zero, code, outputs);
  if (a.rows && a.outputs) few_rows(a);
}

void tile_panels(LinearArgs& a, const Array& data, const Array& scale, const Maybe& zero, int64_t code,
                 int64_t outputs, int64_t threads) {
  take_panels(a, data, scale, zero, code, outputs);
  a.row_bytes = a.inputs * bits_of(a.code) / 8;
  const int64_t columns = a.gated ? outputs / 2 : outputs;
  if (takes_integers(a, code) && multiply_integers(a, columns, threads)) return;
  multiply_by_tiles(a, columns, *kernels().panels.tiles.of(a.type), threads);
}

INFUSE_OPERATORS(CPU,
    {"quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int code, int outputs, int "
     "act, bool gated) -> Tensor?", TORCH_BOX(&quantized_linear)},
    {"dequantize(Tensor[] buffers, int code, Tensor(a!) to) -> ()", TORCH_BOX(&dequantize)},
    {"gather_rows(Tensor[] buffers, int code, Tensor index, Tensor(a!) to) -> ()", TORCH_BOX(&gather_rows)},
    {"pack_panels(Tensor data, int code, Tensor(a!) to) -> bool", TORCH_BOX(&pack_panels)},
    {"unpack_panels(Tensor data, int code, Tensor(a!) to) -> ()", TORCH_BOX(&unpack_panels)})

}  // namespace infuse
