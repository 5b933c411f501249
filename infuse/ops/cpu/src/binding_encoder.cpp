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
// the results of a part leave the cache before the next part reads them: over 384 columns in int8:a8, 512 tokens at once
// took 6 % longer on two threads, 128 took 2 to 5 %; in bf16, 256 and 512 take equally long.
constexpr int64_t kChunkTokens = 256;
constexpr int64_t kLeastTokens = 128;  // per thread; with fewer, the threads share each part

// Buffers besides the result: enough for x, y, branch and the next value.
constexpr int64_t kBuffers = 3;

// The sizes that a program needs, and whether the kernels for many tokens support it.
struct Demand {
  int64_t read, inner = 0, heads = 1;  // read, inner: values per token, of the widest input and between matrices
  bool codes = false, taken = true;

  Demand(const Program& program, int64_t columns, Type type) : read(columns) {
    for (const Step& step : program.steps) {
      if (const auto* a = std::get_if<AttentionPart>(&step.part)) {
        heads = a->heads;
        read = std::max(read, heads * a->width), inner = std::max(inner, (a->all_heads() + heads) * a->width);
        const auto* qkv = std::get_if<LinearPart>(&a->qkv);
        taken &= qkv != nullptr;
        codes |= (qkv && qkv->code >= 0) || a->out.code >= 0;
        taken &= !a->q_norm && !a->k_norm && !a->v_norm && !a->out_norm && !a->sinks && heads * a->width % 2 == 0;
        taken &= tiles_take(type, a->width, heads, a->kv_heads);
      } else if (const auto* mlp = std::get_if<MlpPart>(&step.part)) {
        read = std::max(read, mlp->inner()), inner = std::max(inner, mlp->inner());
        const auto* up = std::get_if<LinearPart>(&mlp->up);
        taken &= up != nullptr;
        codes |= (up && up->code >= 0) || mlp->down.code >= 0;
        const int64_t unit = mlp->gated && up && up->code >= 0 ? 16 : 2;  // no panel may hold both gates and up values
        taken &= !mlp->norm && mlp->inner() % unit == 0;
      }
    }
    taken &= columns % 2 == 0 && tiles_of(kernels().linear.tiles, type);
  }
};

template <class T>
constexpr Type kTypeOf = sizeof(T) == 4 ? Type::f32 : Type::bf16;

// Runs `batch` sequences through the layer. Values are float or bf16 (as uint16_t), [batch, tokens, columns].
template <class T>
struct EncoderMachine {
  T *x, *result, *room;  // the initial x is only read
  int64_t columns, batch, tokens, threads;
  Scored mask;
  T *y = x, *branch = nullptr;
  bool last = false;
  int64_t rows = batch * tokens, size = rows * columns;
  T* inner = room + kBuffers * size;

  T* norm(const NormPart& part, const T* of) const { return normalise(part, of, nullptr, nullptr, fresh()); }

  void add_norm(const NormPart& part, T* made) {
    const T* residual = std::exchange(x, made);  // the sum overwrites `made`
    y = x;
    y = normalise(part, made, residual, x, fresh());
  }

  T* sum(const T* a, const T* b) const {
    T* to = fresh();
    over_rows(rows, columns, [&](int64_t begin, int64_t end) {
      const void* from[] = {a, b};
      kernels().sum_arrays({from, to, 2, kTypeOf<T>}, begin * columns, end * columns);
    });
    return to;
  }

  T* apply(const AttentionPart& part, const T* from) const {
    const int64_t width = part.width;
    T *qkv = inner, *attended = qkv + rows * part.all_heads() * width, *made = fresh();
    multiply(std::get<LinearPart>(part.qkv), from, qkv);
    AttentionArgs a{};
    a.type = kTypeOf<T>;
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

  T* apply(const MlpPart& part, const T* from) const {
    T* made = fresh();
    multiply(std::get<LinearPart>(part.up), from, inner, part.act, part.gated);
    multiply(part.down, inner, made);
    return made;
  }

  // Other parts and scaled sums run part by part.
  template <class Part>
  T* apply(const Part&, const T*) const { return nullptr; }
  T* times(const T*, double) const { return nullptr; }
  T* scaled(const T*, double, bool) const { return nullptr; }
  T* narrowed(const NormPart&, const T*) const { return nullptr; }
  T* of_wide(const NormPart&, const T*) const { return nullptr; }
  T* wide_sum(const T*, const T*) const { return nullptr; }

  // A buffer that holds no value.
  T* fresh() const {
    if (last) return result;
    for (T* free : {room, room + size, result}) {
      if (free != x && free != y && free != branch) return free;
    }
    return room + 2 * size;
  }

  // The norm of `of`, or of `of` + residual, which is written to `sum`; `sum` may be `of`.
  T* normalise(const NormPart& part, const T* of, const T* residual, T* sum, T* to) const {
    NormArgs a{};
    a.x = of, a.residual = residual, a.sum = sum, a.y = to;
    a.weight = data_of(part.weight), a.bias = data_of(part.bias);
    a.rows = rows, a.columns = columns, a.type = kTypeOf<T>;
    a.eps = float(part.eps), a.offset = float(part.offset), a.centred = part.centred();
    a.scales = part.scales();
    over_rows(rows, columns, [&](int64_t begin, int64_t end) { kernels().norm(a, begin, end); });
    return to;
  }

  // to = act(from w + bias); without an activation if act < 0.
  void multiply(const LinearPart& part, const T* from, T* to, int64_t act = -1,
                bool gated = false) const {
    LinearArgs a{};
    a.x = from, a.y = to, a.bias = data_of(part.bias);
    a.rows = rows, a.type = kTypeOf<T>;
    a.activates = act >= 0, a.gated = gated;
    if (a.activates) a.act = Act(act);
    if (part.code < 0) return tile_linear(a, *part.weight, threads);
    tile_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs, threads);
  }
};

// What a call runs: the program on `batch` sequences of `tokens`.
struct EncoderCall {
  const Program& program;
  const Demand& demand;
  const Scored& mask;
  int64_t batch, tokens, columns, threads;
};

// Returns false if the layer runs faster part by part.
template <class T>
bool run_layer(const EncoderCall& call, const Tensor& x, const Tensor& y) {
  const auto& [program, demand, mask, batch, tokens, C, threads] = call;
  const int64_t all = batch * tokens;
  int64_t chunks = std::min((all + kChunkTokens - 1) / kChunkTokens, batch);
  chunks = std::min((chunks + threads - 1) / threads * threads, batch);
  const int64_t sequences = (batch + chunks - 1) / chunks;  // in the largest chunk
  const bool alone = threads == 1 || (chunks % threads == 0 && all >= threads * kLeastTokens) || chunks >= 4 * threads;
  if (!alone && kTypeOf<T> == Type::bf16 && all * demand.read > kMostTiled) return false;
  const int64_t room_tokens = alone ? std::min(threads, chunks) * sequences * tokens : all;
  const int64_t width = kBuffers * C + demand.inner;
  Tensor room = empty({room_tokens, width}, x);
  T* from = static_cast<T*>(const_cast<void*>(x.const_data_ptr()));
  T *to = static_cast<T*>(y.mutable_data_ptr()), *between = static_cast<T*>(room.mutable_data_ptr());
  if (!alone) {
    EncoderMachine<T> machine{from, to, between, C, batch, tokens, threads, mask};
    return run(program, machine);
  }
  std::atomic<int64_t> next{0};
  const auto work = [&, C = C, batch = batch, tokens = tokens](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* own = between + t * sequences * tokens * width;
      for (int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        const int64_t first = batch * c / chunks, count = batch * (c + 1) / chunks - first, at = first * tokens * C;
        EncoderMachine<T> machine{from + at, to + at, own, C, count, tokens, 1, from_row(mask, first)};
        run(program, machine);
      }
    }
  };
  torch::stable::parallel_for(0, std::min(threads, chunks), 1, work);
  return true;
}

}  // namespace

std::optional<Tensor> run_encoder(const Program& program, const Tensor& x, const std::optional<Tensor>& mask) {
  const Demand demand(program, x.size(2), type_of(x));
  const int64_t batch = x.size(0), tokens = x.size(1);
  AttentionArgs seen{};
  seen.batch = batch, seen.heads = demand.heads, seen.tokens = seen.length = tokens;
  if (!demand.taken || !set_scored(seen.mask, mask, seen, true)) return std::nullopt;
  // With few rows, weights stream, which runs part by part.
  if (batch * tokens <= (demand.codes ? kFewRows : kFewEncoderRows)) return std::nullopt;
  const int64_t threads = torch::stable::get_num_threads();
  const EncoderCall call = {program, demand, seen.mask, batch, tokens, x.size(2), threads};
  Tensor y = empty_as(x);
  const bool made = type_of(x) == Type::f32 ? run_layer<float>(call, x, y) : run_layer<uint16_t>(call, x, y);
  return made ? std::optional(y) : std::nullopt;
}

}  // namespace infuse
