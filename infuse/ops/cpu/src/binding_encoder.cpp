// An encoder layer over many tokens in one call, with the kernels that layers/program.py calls part by part. If there
// are enough sequences for all threads, each thread runs some of them through the whole layer: intermediate results
// stay in its core's caches, and no thread waits at the end of a part.
#include <atomic>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"
#include "limits.h"

namespace infuse {
namespace {

// Tokens that a thread runs through the layer at once. With fewer, tiles of weights are filled too often; with more,
// the results of a part leave the cache before the next part reads them (2 to 8 sequences of 128 tokens over 384
// columns take equally long, 32 take 14 % more).
constexpr int64_t kChunkTokens = 512;
constexpr int64_t kLeastTokens = 128;  // per thread; with fewer, the threads share each part

const void* data_of(const Maybe& t) { return t ? t->const_data_ptr() : nullptr; }

// Buffers besides the result: enough for x, y, branch and the next value.
constexpr int64_t kBuffers = 3;

// The sizes that a program needs, and whether the kernels for many tokens support it.
struct Demand {
  int64_t read, inner = 0, heads = 1;  // read, inner: values per token, of the widest input and between matrices
  bool codes = false, taken = true;

  Demand(const Program& program, int64_t columns) : read(columns) {
    for (const Step& step : program) {
      if (const auto* a = std::get_if<AttentionPart>(&step.part)) {
        heads = a->heads;
        read = std::max(read, heads * a->width), inner = std::max(inner, (a->all_heads() + heads) * a->width);
        codes |= a->qkv.code >= 0 || a->out.code >= 0;
        taken &= !a->q_norm && !a->k_norm && !a->sinks && heads * a->width % 2 == 0 && tiles_take(a->width, heads, a->kv_heads);
      } else if (const auto* mlp = std::get_if<MlpPart>(&step.part)) {
        read = std::max(read, mlp->inner()), inner = std::max(inner, mlp->inner());
        codes |= mlp->up.code >= 0 || mlp->down.code >= 0;
        const int64_t unit = mlp->gated && mlp->up.code >= 0 ? 16 : 2;  // no panel may hold both gates and up values
        taken &= mlp->inner() % unit == 0;
      }
    }
    taken &= columns % 2 == 0 && kernels().linear.tiles.multiply && !left_to_pytorch();
  }
};

// Runs `batch` sequences through the layer. Values are bf16, [batch, tokens, columns].
struct EncoderMachine {
  uint16_t *x, *result, *room;  // the initial x is only read
  int64_t columns, batch, tokens, threads;
  Scored mask;
  uint16_t *y = x, *branch = nullptr;
  bool last = false;
  int64_t rows = batch * tokens, size = rows * columns;
  uint16_t* inner = room + kBuffers * size;

  uint16_t* norm(const NormPart& part, const uint16_t* of) const {
    return normalise(part, of, nullptr, nullptr, fresh());
  }

  void add_norm(const NormPart& part, uint16_t* made) {
    const uint16_t* residual = std::exchange(x, made);  // the sum overwrites `made`
    y = x;
    y = normalise(part, made, residual, x, fresh());
  }

  uint16_t* sum(const uint16_t* a, const uint16_t* b) const {
    uint16_t* to = fresh();
    over_rows(rows, columns, [&](int64_t begin, int64_t end) {
      const void* from[] = {a, b};
      kernels().sum_arrays({from, to, 2, Type::bf16}, begin * columns, end * columns);
    });
    return to;
  }

  uint16_t* attention(const AttentionPart& part) const {
    const int64_t width = part.width;
    uint16_t *qkv = inner, *attended = qkv + rows * part.all_heads() * width, *made = fresh();
    multiply(part.qkv, y, qkv);
    AttentionArgs a{};
    a.type = Type::bf16;
    a.batch = batch, a.heads = part.heads, a.kv_heads = part.kv_heads, a.tokens = a.length = tokens, a.width = width;
    a.q = qkv, a.k = qkv + part.heads * width, a.v = qkv + (part.heads + part.kv_heads) * width;
    a.q_n = a.k_n = a.v_n = width;
    a.q_t = a.k_t = a.v_t = part.all_heads() * width;
    a.q_b = a.k_b = a.v_b = tokens * a.q_t;
    a.mask = mask, a.out = attended, a.scale = float(part.scale), a.softcap = float(part.softcap);
    attend_tiles(a, threads);
    multiply(part.out, attended, made);
    return made;
  }

  uint16_t* mlp(const MlpPart& part) const {
    uint16_t* made = fresh();
    multiply(part.up, y, inner, part.act, part.gated);
    multiply(part.down, inner, made);
    return made;
  }

  void begin(const LayerPart&) const {}
  // Mixtures and scaled sums run part by part.
  bool before_experts() const { return false; }
  uint16_t* moe(const MoePart&) const { return nullptr; }
  uint16_t* times(const uint16_t*, double) const { return nullptr; }

  // A buffer that holds no value.
  uint16_t* fresh() const {
    if (last) return result;
    for (uint16_t* free : {room, room + size, result}) {
      if (free != x && free != y && free != branch) return free;
    }
    return room + 2 * size;
  }

  // The norm of `of`, or of `of` + residual, which is written to `sum`; `sum` may be `of`.
  uint16_t* normalise(const NormPart& part, const uint16_t* of, const uint16_t* residual, uint16_t* sum,
                      uint16_t* to) const {
    NormArgs a{};
    a.x = of, a.residual = residual, a.sum = sum, a.y = to;
    a.weight = data_of(part.weight), a.bias = data_of(part.bias);
    a.rows = rows, a.columns = columns, a.type = Type::bf16;
    a.eps = float(part.eps), a.offset = float(part.offset), a.centred = part.centred;
    over_rows(rows, columns, [&](int64_t begin, int64_t end) { kernels().norm(a, begin, end); });
    return to;
  }

  // to = act(from w + bias); without an activation if act < 0.
  void multiply(const LinearPart& part, const uint16_t* from, uint16_t* to, int64_t act = -1,
                bool gated = false) const {
    LinearArgs a{};
    a.x = from, a.y = to, a.bias = data_of(part.bias);
    a.rows = rows, a.type = Type::bf16;
    a.activates = act >= 0, a.gated = gated;
    if (a.activates) a.act = Act(act);
    if (part.code < 0) return tile_linear(a, *part.weight, threads);
    tile_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs, threads);
  }
};

}  // namespace

// The layer's result [B, T, C] for x [B, T, C], with bidirectional attention under `mask`. None if not supported.
Maybe encoder_layer(Tensor x, std::vector<Tensor> tensors, Maybe mask, Tensor integers, Tensor reals) {
  const Program program = program_of(tensors, integers, reals);
  if (x.scalar_type() != ScalarType::BFloat16 || !takes(program, x)) return std::nullopt;
  const Demand demand(program, x.size(2));
  const int64_t batch = x.size(0), tokens = x.size(1), C = x.size(2), all = batch * tokens;
  AttentionArgs seen{};
  seen.batch = batch, seen.heads = demand.heads, seen.tokens = seen.length = tokens;
  if (!demand.taken || !set_scored(seen.mask, mask, seen, true)) return std::nullopt;
  const int64_t threads = torch::stable::get_num_threads();
  int64_t chunks = std::min((all + kChunkTokens - 1) / kChunkTokens, batch);
  chunks = std::min((chunks + threads - 1) / threads * threads, batch);
  const int64_t sequences = (batch + chunks - 1) / chunks;  // in the largest chunk
  const bool alone = threads == 1 || (chunks % threads == 0 && all >= threads * kLeastTokens) || chunks >= 4 * threads;
  // With few rows, weights stream, which runs part by part.
  if (all <= (demand.codes ? kFewRows : kFewPlainRows)) return std::nullopt;
  if (!alone && all * demand.read > kMostTiled) return std::nullopt;
  const int64_t room_tokens = alone ? std::min(threads, chunks) * sequences * tokens : all;
  const int64_t width = kBuffers * C + demand.inner;
  Tensor y = empty_as(x), room = empty({room_tokens, width}, x);
  auto* from = static_cast<uint16_t*>(const_cast<void*>(x.const_data_ptr()));
  auto *to = static_cast<uint16_t*>(y.mutable_data_ptr()), *between = static_cast<uint16_t*>(room.mutable_data_ptr());
  if (!alone) {
    EncoderMachine machine{from, to, between, C, batch, tokens, threads, seen.mask};
    run(program, machine);
    return y;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, chunks), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint16_t* own = between + t * sequences * tokens * width;
      for (int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        const int64_t first = batch * c / chunks, count = batch * (c + 1) / chunks - first, at = first * tokens * C;
        EncoderMachine machine{from + at, to + at, own, C, count, tokens, 1, from_row(seen.mask, first)};
        run(program, machine);
      }
    }
  });
  return y;
}

INFUSE_OPERATORS(CPU,
    {"encoder_layer(Tensor x, Tensor[] tensors, Tensor? mask, Tensor integers, Tensor reals) -> Tensor?",
     TORCH_BOX(&encoder_layer)})

}  // namespace infuse
