// Programs that are held between calls, for a few new tokens, with the kernels that layers/program.py calls part by
// part. Small products, which ops/cpu/linear.py leaves to PyTorch, use our kernels too. While weights stream through the
// caches, calling a part from Python costs 15 to 30 us, of which 3 are computation; so a decoder's embedding, last norm
// and head may be in the program too.
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "binding_steps.h"

namespace infuse {
namespace {

// Callers make a step again that a machine cannot make. Where it has already overwritten a state, that would be wrong.
void refuse_half_done(bool half_done) {
  STD_TORCH_CHECK(!half_done, "a step failed after it had overwritten a state; begin again with a new cache");
}

std::optional<Tensor> run_on_team(const Program& program, const Given& given, const Array& x) {
  std::optional<Tensor> result;
  bool half_done = false;
  Team::together([&] {
    StepMachine machine{given, x};
    if (!run(program, machine)) {
      half_done = machine.wrote_state;
      return;
    }
    if (program.has_head()) {
      result = machine.logits;
      return;
    }
    const Array& y = *machine.x;
    const int64_t sizes[] = {y.size(0), y.size(1), y.size(2)};
    result = empty(sizes, 3, dtype_of(type_of(y)));
    std::memcpy(result->mutable_data_ptr(), y.const_data_ptr(), size_t(y.numel()) * y.element_size());
  });
  refuse_half_done(half_done);
  return result;
}

// Weights of a program that may stay in a processor's caches from step to step.
constexpr int64_t kMostCachedBytes = 1 << 26;

bool same(const Array& a, const Array& b) {
  if (a.const_data_ptr() != b.const_data_ptr() || a.scalar_type() != b.scalar_type()) return false;
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i) || a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

// A program as it was read, with pointers into the memory of its tensors.
struct Parsed {
  Program program;
  std::vector<Array> arrays;  // its tensors
  bool once;                  // as in LinearArgs
};

// A program between its calls: its text and its tensors. If somebody gives a tensor other memory, it is read again.
class Held {
 public:
  Held(std::string text, std::vector<Tensor> tensors, std::vector<Tensor> storages, std::vector<double> reals)
      : text_(std::move(text)), tensors_(std::move(tensors)), storages_(std::move(storages)), reals_(std::move(reals)),
        parsed_(read()) {}

  // The program, if the kernels support it for x: values, or token ids if it begins with a table.
  std::shared_ptr<const Parsed> parsed_for(const Array& x) {
    const std::lock_guard<std::mutex> lock(mutex_);  // calls in several threads
    if (!parsed_->program.whole && !are_in_place()) parsed_ = read(), values_.reset();
    const TablePart* table = parsed_->program.table();
    if (!x.is_contiguous() || x.numel() == 0 || x.dim() != (table ? 2 : 3)) return nullptr;
    if (table && x.scalar_type() != ScalarType::Long) return nullptr;
    const Values values = table ? Values{table->type, table->width}
                                : Values{parsed_->program.type_for(x.scalar_type()), x.size(2)};
    if (values != values_) taken_ = takes(parsed_->program, values), values_ = values;
    return taken_ ? parsed_ : nullptr;
  }

 private:
  std::shared_ptr<const Parsed> read() const {
    std::string_view rest = text_;
    const Field all{"program", Program::kKind, fields_of(rest)};
    Program program = Reader(tensors_, storages_, reals_).part<Program>(all);
    STD_TORCH_CHECK(!program.steps.empty(), "a program has no steps");
    const bool once = program.whole && weight_bytes(program) > kMostCachedBytes && reads_past_caches();
    return std::make_shared<const Parsed>(Parsed{std::move(program), {tensors_.begin(), tensors_.end()}, once});
  }
  // Of all tensors but a table, of which few rows are read.
  int64_t weight_bytes(const Program& program) const {
    const auto bytes_of = [](const auto& t) { return t.numel() * int64_t(t.element_size()); };
    int64_t bytes = program.table() ? -bytes_of(*program.table()->rows.weight) : 0;
    for (const Tensor& each : tensors_) bytes += bytes_of(each);
    return bytes;
  }
  bool are_in_place() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!same(tensors_[i], parsed_->arrays[i])) return false;
    }
    return true;
  }

  const std::string text_;
  const std::vector<Tensor> tensors_, storages_;
  const std::vector<double> reals_;
  std::mutex mutex_;
  std::shared_ptr<const Parsed> parsed_;
  std::optional<Values> values_;  // that were last asked for
  bool taken_ = false;            // whether the kernels support these
};


// The words of the steps that `hold` understands.
std::vector<int64_t> step_words() {
  std::string words;
  for (const auto& [word, does] : Words<Does>::all) words += std::string(word) + " ";
  return numbers_of(words);
}

// Holds a program, whose text layers/native/part.py writes. An error if the text does not fit the structs in
// binding_layer.h.
int64_t hold(Tensor text, std::vector<Tensor> tensors, std::vector<Tensor> storages, std::vector<double> reals) {
  const auto* bytes = static_cast<const char*>(text.const_data_ptr());
  STD_TORCH_CHECK(bytes && text.is_contiguous() && text.scalar_type() == ScalarType::Byte,
                  "a program's text is a contiguous tensor of bytes on the CPU");
  auto held = std::make_unique<Held>(std::string(bytes, size_t(text.numel())), std::move(tensors),
                                     std::move(storages), std::move(reals));
  return reinterpret_cast<int64_t>(held.release());
}
void drop(int64_t held) { delete reinterpret_cast<Held*>(held); }

// The turns of one token in a table [1 or B, tokens, D].
Maybe turned(const Maybe& table, int64_t token) { return table ? Maybe(table->at(1, token)) : Maybe(); }

// The part of a mask [B, 1, 1, tokens or more] for so many tokens.
Maybe over(const Maybe& mask, int64_t tokens) {
  const int64_t axis = mask ? mask->dim() - 1 : 0;
  return mask && mask->size(axis) > tokens ? Maybe(mask->first(axis, tokens)) : mask;
}

Maybe array_of(const MaybeTensor& tensor) { return tensor ? Maybe(*tensor) : Maybe(); }
Maybe written(const MaybeTensor& tensor) { return tensor ? Maybe(Array::written(*tensor)) : Maybe(); }

// The result of a held program for x [B, T, C], or for token ids [B, T] if it begins with a table. A program that holds
// its storages takes a mask of more tokens than there are, too. cos and sin are the tokens' own; or, if `turn` is not negative, [1 or B, tokens, D] with the step's only token at this index. None if a
// kernel does not support the arguments; a step then counts as not done.
MaybeTensor run_held(int64_t held, Tensor x, MaybeTensor cos, MaybeTensor sin, int64_t turn, MaybeTensor mask,
                     MaybeTensor bias, MaybeTensor keys, MaybeTensor values, int64_t start, MaybeTensor value,
                     MaybeTensor state_keys, MaybeTensor state_values, MaybeTensor states_mask) {
  const Array from = x;
  const auto parsed = reinterpret_cast<Held*>(held)->parsed_for(from);
  if (!parsed) return std::nullopt;
  if (parsed->program.machine == Machine::encoder) return run_encoder(parsed->program, x, mask);
  Given given{array_of(cos), array_of(sin), array_of(mask), array_of(bias), written(keys), written(values),
              array_of(value), written(state_keys), written(state_values), array_of(states_mask), start, parsed->once};
  if (parsed->program.whole) given.mask = over(given.mask, start + from.size(1));
  if (turn >= 0) given.cos = turned(given.cos, turn), given.sin = turned(given.sin, turn);
  return run_on_team(parsed->program, given, from);
}

// Up to `count` steps of a held program from a table to a head: the likeliest tokens [B, steps], of which each but the
// last is the input of the next step; the mask is for all of them. The step that gives one of `ends` is the last one. cos and sin [1 or B, tokens,
// D] have the first step's token at index `turn`.
MaybeTensor run_tokens(int64_t held, Tensor ids, MaybeTensor cos, MaybeTensor sin, int64_t turn, MaybeTensor mask,
                       int64_t start, int64_t count, std::vector<int64_t> ends, MaybeTensor states_mask) {
  const Array first = ids;
  const auto parsed = reinterpret_cast<Held*>(held)->parsed_for(first);
  if (!parsed || first.size(1) != 1) return std::nullopt;
  const Program& program = parsed->program;
  if (!program.table() || !program.has_head()) return std::nullopt;
  const Maybe cosines = array_of(cos), sines = array_of(sin), hides = array_of(states_mask), all = array_of(mask);
  const int64_t rows = first.size(0), row_sizes[] = {rows, 1};
  std::vector<int64_t> chosen;  // [steps, rows]
  bool half_done = false;
  Team::together([&] {
    Array x = first;
    for (int64_t step = 0; step < count; ++step) {
      const Given given{turned(cosines, turn + step), turned(sines, turn + step), over(all, start + step + 1), {}, {}, {}, {},
                        {}, {}, hides, start + step, parsed->once};
      StepMachine machine{given, x};
      if (!run(program, machine)) {
        half_done = machine.wrote_state;
        return;
      }
      const Array tokens(row_sizes, 2, ScalarType::Long);
      auto* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
      largest(*machine.x, to);
      chosen.insert(chosen.end(), to, to + rows);
      if (std::find_first_of(to, to + rows, ends.begin(), ends.end()) != to + rows) return;
      x = tokens;
    }
  });
  refuse_half_done(half_done);
  if (chosen.empty()) return std::nullopt;
  const int64_t steps = int64_t(chosen.size()) / rows, sizes[] = {rows, steps};
  Tensor tokens = empty(sizes, 2, aoti_torch_dtype_int64());
  auto* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t step = 0; step < steps; ++step) *to++ = chosen[size_t(step * rows + row)];
  }
  return tokens;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"run(int held, Tensor x, Tensor? cos, Tensor? sin, int turn, Tensor? mask, Tensor? bias, Tensor(a!)? keys, "
     "Tensor(b!)? values, int start, Tensor? value, Tensor(c!)? state_keys, Tensor(d!)? state_values, "
     "Tensor? states_mask) -> Tensor?",
     TORCH_BOX(&run_held)},
    {"run_tokens(int held, Tensor ids, Tensor? cos, Tensor? sin, int turn, Tensor? mask, int start, int count, "
     "int[] ends, Tensor? states_mask) -> Tensor?", TORCH_BOX(&run_tokens)})
INFUSE_OPERATORS(CompositeExplicitAutograd,
    {"hold(Tensor text, Tensor[] tensors, Tensor(a!)[] storages, float[] reals) -> int", TORCH_BOX(&hold)},
    {"drop(int held) -> ()", TORCH_BOX(&drop)},
    {"step_words() -> int[]", TORCH_BOX(&step_words)})

}  // namespace infuse
