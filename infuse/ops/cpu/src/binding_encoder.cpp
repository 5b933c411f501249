// A layer of an encoder over many tokens in one call: what layers/block.py does part by part, by the same kernels. Where there are enough
// sequences for all threads, each takes some of them through the whole layer: what passes between the parts stays in its core's caches,
// and nobody waits at the end of a part.
#include <atomic>
#include <vector>

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"

namespace infuse {
namespace {

// Tokens that a thread takes through the layer at once: with fewer the weights' tiles are filled too often, with more the results of a
// part leave the cache before the next one reads them (2 to 8 sequences of 128 tokens over 384 columns take as long, 32 take 14 % more).
constexpr int64_t kChunkTokens = 512;
// Up to so many tokens weights are multiplied as they stream, which goes part by part: codes as in binding_panels.cpp, plain ones as in
// ops/cpu/linear.py.
constexpr int64_t kFewRows = 28, kFewPlainRows = 8;
constexpr int64_t kMostTiled = 1 << 21;  // values of an input that all threads share, as in ops/cpu/linear.py
constexpr int64_t kLeastTokens = 128;  // for each thread; below, the threads share each part

// Sequences of x, [batch, tokens, columns], what they become, and room for what lies between. Values are bf16.
struct Sequences {
  const uint16_t* x;
  uint16_t* y;
  uint16_t* room;
  int64_t batch, tokens, threads;
  Scored mask;
};

// Values of one token in the room: what a part reads and writes, see `encode`.
struct Widths {
  int64_t columns, qkv, attended, inner;

  explicit Widths(const Layer& a)
      : columns(a.linears[kOut].outputs),
        qkv(a.linears[kQkv].outputs),
        attended(a.heads * a.width),
        inner(a.linears[kUp].outputs / (a.gated ? 2 : 1)) {}
  int64_t all() const { return std::max(qkv + attended, inner) + 2 * columns; }
};

const void* data_of(const Maybe& t) { return t ? t->const_data_ptr() : nullptr; }

// y = act(x w + bias), with an activation where act >= 0.
void multiply(const LinearPart& part, const Sequences& s, const uint16_t* x, uint16_t* y, int64_t act = -1, bool gated = false) {
  LinearArgs a{};
  a.x = x, a.y = y, a.bias = data_of(part.bias);
  a.rows = s.batch * s.tokens, a.type = Type::bf16;
  a.activates = act >= 0, a.gated = gated;
  if (a.activates) a.act = Act(act);
  if (part.code < 0) return tile_linear(a, *part.weight, s.threads);
  tile_panels(a, *part.weight, *part.scale, part.zero, part.code, part.outputs, s.threads);
}

template <class F>
void over_tokens(const Sequences& s, int64_t columns, const F& run) {
  constexpr int64_t kGrainElements = 16384;
  torch::stable::parallel_for(0, s.batch * s.tokens, kGrainElements / columns + 1, run);
}

// y = norm(x), or of x + residual, which `sum` receives; it may be x.
void normalise(const NormPart& part, const Sequences& s, int64_t columns, const uint16_t* x, const uint16_t* residual, uint16_t* sum,
               uint16_t* y) {
  NormArgs a{};
  a.x = x, a.residual = residual, a.sum = sum, a.y = y;
  a.weight = data_of(part.weight), a.bias = data_of(part.bias);
  a.rows = s.batch * s.tokens, a.columns = columns, a.type = Type::bf16;
  a.eps = float(part.eps), a.offset = float(part.offset), a.centred = part.centred;
  over_tokens(s, columns, [&](int64_t begin, int64_t end) { kernels().norm(a, begin, end); });
}

void attend(const Layer& layer, const Sequences& s, const uint16_t* qkv, uint16_t* out) {
  AttentionArgs a{};
  a.type = Type::bf16;
  a.batch = s.batch, a.heads = layer.heads, a.kv_heads = layer.kv_heads, a.tokens = a.length = s.tokens, a.width = layer.width;
  a.q = qkv, a.k = qkv + layer.heads * layer.width, a.v = qkv + (layer.heads + layer.kv_heads) * layer.width;
  a.q_n = a.k_n = a.v_n = layer.width;
  a.q_t = a.k_t = a.v_t = (layer.heads + 2 * layer.kv_heads) * layer.width;
  a.q_b = a.k_b = a.v_b = s.tokens * a.q_t;
  a.mask = s.mask, a.out = out, a.scale = float(layer.scale), a.softcap = float(layer.softcap);
  attend_tiles(a, s.threads);
}

void encode(const Layer& a, const Sequences& s) {
  const Widths widths(a);
  const int64_t rows = s.batch * s.tokens, C = widths.columns;
  uint16_t *branch = s.room, *middle = branch + rows * C, *qkv = middle + rows * C, *attended = qkv + rows * widths.qkv, *inner = qkv;
  const bool post = a.residual == kPost;
  const uint16_t* into_attention = s.x;
  if (!post && a.norms[kNorm1].there) normalise(a.norms[kNorm1], s, C, s.x, nullptr, nullptr, middle), into_attention = middle;
  multiply(a.linears[kQkv], s, into_attention, qkv);
  attend(a, s, qkv, attended);
  multiply(a.linears[kOut], s, attended, branch);
  normalise(a.norms[post ? kNorm1 : kNorm2], s, C, branch, s.x, branch, middle);
  multiply(a.linears[kUp], s, middle, inner, a.act, a.gated);
  if (post) {
    multiply(a.linears[kDown], s, inner, branch);
    return normalise(a.norms[kNorm2], s, C, branch, middle, branch, s.y);
  }
  multiply(a.linears[kDown], s, inner, middle);
  over_tokens(s, C, [&](int64_t begin, int64_t end) {
    const void* from[] = {branch, middle};
    kernels().sum_arrays({from, s.y, 2, Type::bf16}, begin * C, end * C);
  });
}

// Whether the kernels that tokens come by in numbers take this layer.
bool takes_many(const Layer& a, const Tensor& x) {
  if (x.scalar_type() != ScalarType::BFloat16 || !takes(a, x) || !kernels().linear.tiles.multiply || left_to_pytorch()) return false;
  if (a.residual == kPost ? !a.norms[kNorm1].there || !a.norms[kNorm2].there : a.residual != kPre || !a.norms[kNorm2].there) return false;
  const Widths widths(a);
  for (int64_t inputs : {widths.columns, widths.attended, widths.inner}) {
    if (inputs % 2) return false;
  }
  if (a.gated && a.linears[kUp].code >= 0 && widths.inner % 16) return false;  // a panel would hold gates and what they gate
  return !a.norms[kQNorm].there && !a.norms[kKNorm].there && tiles_take(a.width, a.heads, a.kv_heads);
}

}  // namespace

// The layer's result [B, T, C] for x [B, T, C], in which every token looks at all of its sequence, less what `mask` hides. None where the
// kernels do not take it.
std::optional<Tensor> encoder_layer(Tensor x, std::vector<Tensor> tensors, Maybe mask, Tensor integers, Tensor reals) {
  const Layer a = layer_of(tensors, integers, reals);
  if (!takes_many(a, x)) return std::nullopt;
  const int64_t batch = x.size(0), tokens = x.size(1), C = x.size(2), width = Widths(a).all();
  AttentionArgs seen{};
  seen.batch = batch, seen.heads = a.heads, seen.tokens = seen.length = tokens;
  if (!set_scored(seen.mask, mask, seen, true)) return std::nullopt;
  const int64_t threads = torch::stable::get_num_threads(), all = batch * tokens;
  int64_t chunks = std::min((all + kChunkTokens - 1) / kChunkTokens, batch);
  chunks = std::min((chunks + threads - 1) / threads * threads, batch);
  const int64_t sequences = (batch + chunks - 1) / chunks;  // of the largest
  const bool alone = threads == 1 || (chunks % threads == 0 && all >= threads * kLeastTokens) || chunks >= 4 * threads;
  const Widths widths(a);
  const bool codes = std::any_of(a.linears, a.linears + kLinears, [](const LinearPart& part) { return part.code >= 0; });
  const int64_t widest = std::max({widths.columns, widths.attended, widths.inner});
  if (all <= (codes ? kFewRows : kFewPlainRows) || (!alone && all * widest > kMostTiled)) return std::nullopt;
  Tensor y = empty_as(x), room = empty({alone ? std::min(threads, chunks) * sequences * tokens : all, width}, x);
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  auto *to = static_cast<uint16_t*>(y.mutable_data_ptr()), *between = static_cast<uint16_t*>(room.mutable_data_ptr());
  if (!alone) {
    encode(a, {from, to, between, batch, tokens, threads, seen.mask});
    return y;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, chunks), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        const int64_t first = batch * c / chunks, count = batch * (c + 1) / chunks - first, at = first * tokens * C;
        encode(a, {from + at, to + at, between + t * sequences * tokens * width, count, tokens, 1, from_row(seen.mask, first)});
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
