// A layer of an encoder over many tokens in one call, by the kernels that layers/program.py calls part by part. Where there
// are enough sequences for all threads, each takes some of them through the whole layer: what passes between the parts stays
// in its core's caches, and nobody waits at the end of a part.
#include <atomic>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"
#include "limits.h"

namespace infuse {
namespace {

// Tokens that a thread takes through the layer at once: with fewer the weights' tiles are filled too often, with more the
// results of a part leave the cache before the next one reads them (2 to 8 sequences of 128 tokens over 384 columns take as
// long, 32 take 14 % more).
constexpr int64_t kChunkTokens = 512;
constexpr int64_t kLeastTokens = 128;  // for each thread; below, the threads share each part

const void* data_of(const Maybe& t) { return t ? t->const_data_ptr() : nullptr; }

// Values of one token: of x, between the matrices of a part (`inner` at most), and the widest that a matrix reads.
struct Widths {
  int64_t columns, inner = 0, read;

  Widths(const Program& program, int64_t columns) : columns(columns), read(columns) {
    for (const Step& step : program) {
      if (const auto* a = std::get_if<AttentionPart>(&step.part)) {
        inner = std::max(inner, (a->all_heads() + a->heads) * a->width), read = std::max(read, a->heads * a->width);
      } else if (const auto* mlp = std::get_if<MlpPart>(&step.part)) {
        inner = std::max(inner, mlp->inner()), read = std::max(read, mlp->inner());
      }
    }
  }
  int64_t room() const { return kBuffers * columns + inner; }
  static constexpr int64_t kBuffers = 3;  // with the result's own memory enough for x, y, branch and what is made next
};

// Takes `batch` sequences through the layer. Values are bf16, [batch, tokens, columns].
class EncoderMachine {
 public:
  uint16_t *x, *y = x, *branch = nullptr;
  bool last = false;

  EncoderMachine(const uint16_t* from, uint16_t* result, uint16_t* room, const Widths& widths, int64_t batch,
                 int64_t tokens, int64_t threads, const Scored& mask)
      : x(const_cast<uint16_t*>(from)),  // which is only read: it is none of the buffers
        batch_(batch),
        tokens_(tokens),
        rows_(batch * tokens),
        columns_(widths.columns),
        threads_(threads),
        mask_(mask),
        result_(result),
        inner_(room + Widths::kBuffers * rows_ * columns_) {
    uint16_t* rooms[] = {room, room + rows_ * columns_, result, room + 2 * rows_ * columns_};
    std::copy(std::begin(rooms), std::end(rooms), buffers_);
  }

  uint16_t* norm(const NormPart& part, const uint16_t* of) const { return normalise(part, of, nullptr, nullptr, fresh()); }

  void add_norm(const NormPart& part, uint16_t* made) {
    const uint16_t* residual = std::exchange(x, made);  // the sum takes the place of what was made
    y = x;
    y = normalise(part, made, residual, x, fresh());
  }

  uint16_t* sum(const uint16_t* a, const uint16_t* b) const {
    uint16_t* to = fresh();
    over_tokens([&](int64_t begin, int64_t end) {
      const void* from[] = {a, b};
      kernels().sum_arrays({from, to, 2, Type::bf16}, begin * columns_, end * columns_);
    });
    return to;
  }

  uint16_t* attention(const AttentionPart& part) const {
    const int64_t width = part.width;
    uint16_t *qkv = inner_, *attended = qkv + rows_ * part.all_heads() * width, *made = fresh();
    multiply(part.qkv, y, qkv);
    AttentionArgs a{};
    a.type = Type::bf16;
    a.batch = batch_, a.heads = part.heads, a.kv_heads = part.kv_heads, a.tokens = a.length = tokens_, a.width = width;
    a.q = qkv, a.k = qkv + part.heads * width, a.v = qkv + (part.heads + part.kv_heads) * width;
    a.q_n = a.k_n = a.v_n = width;
    a.q_t = a.k_t = a.v_t = part.all_heads() * width;
    a.q_b = a.k_b = a.v_b = tokens_ * a.q_t;
    a.mask = mask_, a.out = attended, a.scale = float(part.scale), a.softcap = float(part.softcap);
    attend_tiles(a, threads_);
    multiply(part.out, attended, made);
    return made;
  }

  uint16_t* mlp(const MlpPart& part) const {
    uint16_t* made = fresh();
    multiply(part.up, y, inner_, part.act, part.gated);
    multiply(part.down, inner_, made);
    return made;
  }

 private:
  // Memory that holds no value.
  uint16_t* fresh() const {
    if (last) return result_;
    return *std::find_if(std::begin(buffers_), std::end(buffers_), [&](const uint16_t* b) { return b != x && b != y && b != branch; });
  }

  template <class F>
  void over_tokens(const F& run) const {
    constexpr int64_t kGrainElements = 16384;
    torch::stable::parallel_for(0, rows_, kGrainElements / columns_ + 1, run);
  }

  // The norm of `of`, or of `of` + residual, which `sum` receives; it may be `of`.
  uint16_t* normalise(const NormPart& part, const uint16_t* of, const uint16_t* residual, uint16_t* sum, uint16_t* to) const {
    NormArgs a{};
    a.x = of, a.residual = residual, a.sum = sum, a.y = to;
    a.weight = data_of(part.weight), a.bias = data_of(part.bias);
    a.rows = rows_, a.columns = columns_, a.type = Type::bf16;
    a.eps = float(part.eps), a.offset = float(part.offset), a.centred = part.centred;
    over_tokens([&](int64_t begin, int64_t end) { kernels().norm(a, begin, end); });
    return to;
  }

  // to = act(from w + bias), with an activation where act >= 0.
  void multiply(const LinearPart& part, const uint16_t* from, uint16_t* to, int64_t act = -1, bool gated = false) const {
    LinearArgs a{};
    a.x = from, a.y = to, a.bias = data_of(part.bias);
    a.rows = rows_, a.type = Type::bf16;
    a.activates = act >= 0, a.gated = gated;
    if (a.activates) a.act = Act(act);
    if (part.code < 0) return tile_linear(a, *part.weight, threads_);
    tile_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs, threads_);
  }

  int64_t batch_, tokens_, rows_, columns_, threads_;
  Scored mask_;
  uint16_t *result_, *inner_, *buffers_[Widths::kBuffers + 1];
};

// Whether the kernels that tokens come by in numbers take these parts.
bool takes_many(const AttentionPart& a) {
  return !a.q_norm && !a.k_norm && a.heads * a.width % 2 == 0 && tiles_take(a.width, a.heads, a.kv_heads);
}
bool takes_many(const MlpPart& mlp) {
  const bool split = mlp.gated && mlp.up.code >= 0 && mlp.inner() % 16;  // a panel would hold gates and what they gate
  return mlp.inner() % 2 == 0 && !split;
}
template <class Other>
bool takes_many(const Other&) {
  return true;
}

bool takes_many(const Program& program, const Tensor& x) {
  if (x.scalar_type() != ScalarType::BFloat16 || !takes(program, x) || x.size(2) % 2) return false;
  if (!kernels().linear.tiles.multiply || left_to_pytorch()) return false;
  return std::all_of(program.begin(), program.end(), [](const Step& step) {
    return std::visit([](const auto& part) { return takes_many(part); }, step.part);
  });
}

bool has_codes(const Step& step) {
  if (const auto* a = std::get_if<AttentionPart>(&step.part)) return a->qkv.code >= 0 || a->out.code >= 0;
  const auto* mlp = std::get_if<MlpPart>(&step.part);
  return mlp && (mlp->up.code >= 0 || mlp->down.code >= 0);
}

int64_t heads_of(const Program& program) {
  for (const Step& step : program) {
    if (const auto* a = std::get_if<AttentionPart>(&step.part)) return a->heads;
  }
  return 1;
}

}  // namespace

// The layer's result [B, T, C] for x [B, T, C], in which every token looks at all of its sequence, less what `mask` hides.
// None where the kernels do not take it.
Maybe encoder_layer(Tensor x, std::vector<Tensor> tensors, Maybe mask, Tensor integers, Tensor reals) {
  const Program program = Reader(tensors, integers, reals).program();
  if (!takes_many(program, x)) return std::nullopt;
  const int64_t batch = x.size(0), tokens = x.size(1), C = x.size(2), all = batch * tokens;
  AttentionArgs seen{};
  seen.batch = batch, seen.heads = heads_of(program), seen.tokens = seen.length = tokens;
  if (!set_scored(seen.mask, mask, seen, true)) return std::nullopt;
  const int64_t threads = torch::stable::get_num_threads();
  int64_t chunks = std::min((all + kChunkTokens - 1) / kChunkTokens, batch);
  chunks = std::min((chunks + threads - 1) / threads * threads, batch);
  const int64_t sequences = (batch + chunks - 1) / chunks;  // of the largest
  const bool alone = threads == 1 || (chunks % threads == 0 && all >= threads * kLeastTokens) || chunks >= 4 * threads;
  const Widths widths(program, C);
  // Few rows are multiplied as weights stream, which goes part by part.
  if (all <= (std::any_of(program.begin(), program.end(), has_codes) ? kFewRows : kFewPlainRows)) return std::nullopt;
  if (!alone && all * widths.read > kMostTiled) return std::nullopt;
  const int64_t room_tokens = alone ? std::min(threads, chunks) * sequences * tokens : all, width = widths.room();
  Tensor y = empty_as(x), room = empty({room_tokens, width}, x);
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  auto *to = static_cast<uint16_t*>(y.mutable_data_ptr()), *between = static_cast<uint16_t*>(room.mutable_data_ptr());
  if (!alone) {
    EncoderMachine machine(from, to, between, widths, batch, tokens, threads, seen.mask);
    run(program, machine);
    return y;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, chunks), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        const int64_t first = batch * c / chunks, count = batch * (c + 1) / chunks - first, at = first * tokens * C;
        EncoderMachine machine(from + at, to + at, between + t * sequences * tokens * width, widths, count, tokens, 1,
                               from_row(seen.mask, first));
        run(program, machine);
      }
    }
  });
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) {
  m.def("encoder_layer(Tensor x, Tensor[] tensors, Tensor? mask, Tensor integers, Tensor reals) -> Tensor?");
}

STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, CPU, m) { m.impl("encoder_layer", TORCH_BOX(&encoder_layer)); }

}  // namespace infuse
