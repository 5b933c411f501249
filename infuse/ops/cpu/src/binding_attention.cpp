// Rotary + append, attention and activations as PyTorch operators. They return None for unsupported arguments, and the
// caller uses another body: the checks are cheaper here than in Python.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "binding_ops.h"
#include "limits.h"

namespace infuse {

namespace {

std::optional<Type> known_type(const Array& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Half: return Type::f16;
    default: return std::nullopt;
  }
}

constexpr int64_t kScaleBytes = 4, kMostQuantized = 1024;

// Whether `rows` are those of an int8 cache for heads of this width (ops/cache_rows.py).
bool are_int8(const Array& rows, int64_t width) {
  return rows.scalar_type() == ScalarType::Char && rows.dim() == 4 && rows.size(3) == width + kScaleBytes;
}

bool rows_contiguous(const Array& t) { return t.stride(t.dim() - 1) == 1 || t.size(t.dim() - 1) == 1; }

// ---- rotary ----

bool set_turns(RotaryArgs& a, const Array& x, const Array& cos, const Array& sin) {
  if (cos.dim() != 3 || sin.dim() != 3 || cos.scalar_type() != sin.scalar_type()) return false;
  if (cos.scalar_type() != x.scalar_type() && cos.scalar_type() != ScalarType::Float) return false;
  if (!rows_contiguous(cos) || !rows_contiguous(sin) || cos.size(2) > x.size(3) || cos.size(2) % 2) return false;
  for (int64_t axis = 0; axis < 3; ++axis) {
    if (cos.size(axis) != sin.size(axis)) return false;
    if (axis < 2 && cos.size(axis) != x.size(axis) && cos.size(axis) != 1) return false;
  }
  a.cos = cos.const_data_ptr(), a.sin = sin.const_data_ptr();
  const bool rows = cos.size(0) > 1, tokens = cos.size(1) > 1;
  a.cos_b = rows ? cos.stride(0) : 0, a.cos_t = tokens ? cos.stride(1) : 0;
  a.sin_b = rows ? sin.stride(0) : 0, a.sin_t = tokens ? sin.stride(1) : 0;
  a.turned = cos.size(2);
  a.wide_turns = cos.scalar_type() == ScalarType::Float;
  return true;
}

bool set_rotated(RotaryArgs& a, const Array& x, bool interleaved) {
  const std::optional<Type> type = known_type(x);
  if (!type || x.dim() != 4 || !rows_contiguous(x)) return false;
  a.type = *type, a.interleaved = interleaved;
  a.x = x.const_data_ptr();
  a.x_b = x.stride(0), a.x_t = x.stride(1), a.x_n = x.stride(2);
  a.tokens = x.size(1), a.width = x.size(3);
  return true;
}

void run_rotary(const RotaryArgs& a, int64_t batch) {
  const auto run = kernels().attention.rotary;
  const int64_t elements = (a.heads + 2 * a.kv_heads) * a.width;
  over_rows(batch * a.tokens, elements, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

std::optional<Tensor> rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved) {
  RotaryArgs a{};
  if (!set_rotated(a, x, interleaved) || !set_turns(a, x, cos, sin)) return std::nullopt;
  a.heads = x.size(2);
  Tensor y = empty({x.size(0), a.tokens, a.heads, a.width}, x);
  a.q = y.mutable_data_ptr();
  a.q_b = a.tokens * a.heads * a.width, a.q_t = a.heads * a.width, a.q_n = a.width;
  run_rotary(a, x.size(0));
  return y;
}

// Whether `storage` [B, K, S, D] has room for the new tokens.
bool has_room(const RotaryArgs& a, const Array& x, const Array& storage) {
  if (storage.dim() != 4 || !rows_contiguous(storage)) return false;
  const bool fits = a.to_int8 ? are_int8(storage, a.width) && a.width <= kMostQuantized
                              : storage.scalar_type() == x.scalar_type() && storage.size(3) == a.width;
  return fits && storage.size(0) == x.size(0) && storage.size(1) == a.kv_heads && a.start >= 0 &&
         a.start + a.tokens <= storage.size(2);
}

}  // namespace

bool rotated(const Array& x, const Maybe& cos, const Maybe& sin, bool interleaved, const Array& q) {
  RotaryArgs a{};
  if (!set_rotated(a, x, interleaved)) return false;
  if (cos && sin && !set_turns(a, x, *cos, *sin)) return false;
  a.heads = q.size(1);
  if (x.size(2) < a.heads) return false;
  a.q = q.mutable_data_ptr();
  a.q_b = a.heads * a.tokens * a.width, a.q_t = a.width, a.q_n = a.tokens * a.width;
  run_rotary(a, x.size(0));
  return true;
}

bool rotary_append(const Array& qkv, const Maybe& cos, const Maybe& sin, const Array& keys, const Array& values,
                   int64_t start, int64_t heads, bool interleaved, const Array& q) {
  RotaryArgs a{};
  if (!set_rotated(a, qkv, interleaved) || keys.dim() != 4) return false;
  if (cos && sin && !set_turns(a, qkv, *cos, *sin)) return false;
  a.heads = heads, a.kv_heads = keys.size(1), a.start = start;
  a.to_int8 = keys.scalar_type() == ScalarType::Char;
  if (qkv.size(2) < heads + 2 * a.kv_heads) return false;
  if (!has_room(a, qkv, keys) || !has_room(a, qkv, values)) return false;
  a.q = q.mutable_data_ptr(), a.keys = keys.mutable_data_ptr(), a.values = values.mutable_data_ptr();
  a.q_b = heads * a.tokens * a.width, a.q_t = a.width, a.q_n = a.tokens * a.width;
  a.keys_b = keys.stride(0), a.keys_n = keys.stride(1), a.keys_t = keys.stride(2);
  a.values_b = values.stride(0), a.values_n = values.stride(1), a.values_t = values.stride(2);
  run_rotary(a, qkv.size(0));
  return true;
}

// ---- activations ----

namespace {

void run_activation(ActivationArgs& a, const Array& x, const Array& y, int64_t act) {
  a.x = x.const_data_ptr(), a.y = y.mutable_data_ptr(), a.act = Act(act);
  const auto run = kernels().attention.activation;
  const int64_t elements = y.numel();
  if (elements <= kGrainElements) return run(a, 0, elements);
  parallel_for(0, elements, kGrainElements / 2, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

}  // namespace

bool activation(const Array& x, int64_t act, const Array& y) {
  const std::optional<Type> type = known_type(x);
  if (!type || !x.is_contiguous()) return false;
  ActivationArgs a{};
  a.type = *type;
  run_activation(a, x, y, act);
  return true;
}

bool gated_activation(const Array& x, int64_t act, const Array& y) {
  const std::optional<Type> type = known_type(x);
  const int64_t columns = x.size(x.dim() - 1);
  if (!type || !x.is_contiguous() || columns % 2) return false;
  ActivationArgs a{};
  a.type = *type, a.gated = true, a.columns = columns / 2;
  run_activation(a, x, y, act);
  return true;
}

// ---- attention ----

namespace {

constexpr int64_t kMaxRows = 512, kMaxWidth = 1024;
constexpr int64_t kMaxTileWidth = 512, kMaxTileGroup = 128;
// Minimum size of the keys and values that one thread reads.
constexpr int64_t kGrainBytes = 1 << 17;

// The calling thread keeps this buffer from call to call, since a fresh allocation of this size would cost page faults.
float* scratch_of(int64_t floats) {
  static thread_local std::vector<float> held;
  constexpr size_t line = 64;
  if (int64_t(held.size()) < floats + int64_t(line / sizeof(float))) held.resize(size_t(floats) + line / sizeof(float));
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(held.data()) + line - 1) / line * line);
}

}  // namespace

bool set_scored(Scored& s, const Maybe& t, const AttentionArgs& a, bool may_be_bool) {
  if (!t) return true;
  const int64_t sizes[4] = {a.batch, a.heads, a.tokens, a.length}, missing = 4 - t->dim();
  int64_t* const strides[4] = {&s.b, &s.n, &s.t, &s.l};
  if (missing < 0) return false;
  for (int64_t axis = missing; axis < 4; ++axis) {
    const int64_t size = t->size(axis - missing);
    if (size != sizes[axis] && size != 1) return false;
    *strides[axis] = size == 1 ? 0 : t->stride(axis - missing);
  }
  s.is_bool = t->scalar_type() == ScalarType::Bool;
  const std::optional<Type> type = known_type(*t);
  if (s.is_bool ? !may_be_bool : !type) return false;
  s.type = type.value_or(Type::f32);
  s.data = t->const_data_ptr();
  return true;
}

bool set_sinks(Scored& s, const Maybe& t, int64_t heads) {
  if (!t) return true;
  const std::optional<Type> type = known_type(*t);
  if (!type || t->dim() != 1 || t->size(0) != heads) return false;
  s.n = t->stride(0), s.type = *type, s.data = t->const_data_ptr();
  return true;
}

Scored from_row(Scored s, int64_t b) {
  const int64_t element_bytes = s.is_bool ? 1 : s.type == Type::f32 ? 4 : 2;
  if (s.data) s.data = static_cast<const char*>(s.data) + b * s.b * element_bytes;
  return s;
}

void attend_tiles(AttentionArgs& a, int64_t threads) {
  const auto& run = kernels().attention;
  const int64_t tiles = run.tiles(a), floats = (run.tile_bytes(a) + 3) / 4;
  threads = std::min(threads, tiles);
  a.ahead = threads;
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      void* scratch = scratch_of(floats);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tiles;) run.tile(a, i, scratch);
    }
  });
}

bool tiles_take(Type type, int64_t width, int64_t heads, int64_t kv_heads) {
  return (type == Type::f32 || kernels().attention.tiles_in_pairs) && width <= kMaxTileWidth && heads <= kMaxTileGroup * kv_heads;
}

namespace {

bool by_tiles(const AttentionArgs& a) { return a.tokens > kFewTokens && !a.more_width; }

bool set_attended(AttentionArgs& a, const Array& q, const Array& k, const Array& v) {
  const std::optional<Type> type = known_type(q);
  if (!type || q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return false;
  a.of_int8 = are_int8(k, q.size(3)) && are_int8(v, q.size(3));
  const bool alike = k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type();
  if (!a.of_int8 && (!alike || k.size(3) != q.size(3) || v.size(3) != q.size(3))) return false;
  if (!rows_contiguous(q) || !rows_contiguous(k) || !rows_contiguous(v)) return false;
  a.type = *type;
  a.batch = q.size(0), a.heads = q.size(1), a.tokens = q.size(2), a.width = q.size(3);
  a.kv_heads = k.size(1), a.length = k.size(2);
  if (a.batch * a.heads * a.tokens * a.length * a.width * a.kv_heads == 0 || a.heads % a.kv_heads) return false;
  const int64_t group = a.heads / a.kv_heads;
  if (by_tiles(a)) {
    if (a.width > kMaxTileWidth || group > kMaxTileGroup) return false;
  } else if (a.width > kMaxWidth || group * a.tokens > kMaxRows) {
    return false;
  }
  if (k.size(0) != a.batch || v.size(0) != a.batch || v.size(1) != a.kv_heads) return false;
  if (v.size(2) != a.length) return false;
  a.q = q.const_data_ptr(), a.k = k.const_data_ptr(), a.v = v.const_data_ptr();
  a.q_b = q.stride(0), a.q_n = q.stride(1), a.q_t = q.stride(2);
  a.k_b = k.stride(0), a.k_n = k.stride(1), a.k_t = k.stride(2);
  a.v_b = v.stride(0), a.v_n = v.stride(1), a.v_t = v.stride(2);
  return true;
}

// Whether a bool mask, one for all heads, hides from each query just the keys after it. Models pass the causal order of
// a prompt's later parts as such a mask. Known as causal, it is not read for each head, and hidden tiles are left out.
bool masks_causally(const AttentionArgs& a) {
  const Scored& m = a.mask;
  const int64_t before = a.length - a.tokens;
  if (!m.data || !m.is_bool || m.n != 0 || m.l != 1 || before < 0 || a.window) return false;
  const auto in_order = [&](int64_t i) {
    const auto* row = static_cast<const uint8_t*>(m.data) + i / a.tokens * m.b + i % a.tokens * m.t;
    const size_t shown = size_t(before + i % a.tokens + 1), hidden = size_t(a.length) - shown;
    if (std::memchr(row, 0, shown)) return false;
    return hidden == 0 || (row[shown] == 0 && std::memcmp(row + shown, row + shown + 1, hidden - 1) == 0);
  };
  if (!in_order(0)) return false;
  std::atomic<bool> all{true};
  parallel_for(0, a.batch * a.tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && all.load(std::memory_order_relaxed); ++i) {
      if (!in_order(i)) all.store(false, std::memory_order_relaxed);
    }
  });
  return all;
}

void run_attention(AttentionArgs& a) {
  if (by_tiles(a)) {
    if (masks_causally(a)) a.mask = {}, a.causal = true;
    return attend_tiles(a, thread_count());
  }
  const auto& run = kernels().attention;
  const int64_t element_bytes = a.of_int8 ? 1 : a.type == Type::f32 ? 4 : 2;
  const int64_t bytes = 2 * a.batch * a.kv_heads * (a.length - a.first_key) * a.width * element_bytes;
  a.parts = std::min({thread_count(), bytes / kGrainBytes + 1, run.attention_blocks(a)});
  a.scratch = scratch_of(a.parts * run.attention_scratch(a));
  if (a.parts == 1) return run.attention(a, 0, 1);
  parallel_for(0, a.parts, 1, [&](int64_t begin, int64_t end) { run.attention(a, begin, end); });
  run.combine(a);
}

}  // namespace

bool attend(const Array& q, const Array& k, const Array& v, int64_t length, const Maybe& mask, const Maybe& bias,
            double scale, bool causal, int64_t window, double softcap, const Maybe& sinks, const Array& out) {
  AttentionArgs a{};
  if (!set_attended(a, q, k, v) || length < 1 || length > k.size(2)) return false;
  a.length = length;
  if (!set_scored(a.mask, mask, a, true) || !set_scored(a.bias, bias, a, false)) return false;
  if (!set_sinks(a.sinks, sinks, a.heads)) return false;
  a.scale = float(scale), a.softcap = float(softcap), a.causal = causal, a.window = window;
  // At a whole block: so the sums of a query are the same whether it comes alone or with others.
  a.first_key = window > 0 ? std::max<int64_t>(0, a.length - a.tokens - window + 1) / kKeyBlock * kKeyBlock : 0;
  a.out = out.mutable_data_ptr();
  run_attention(a);
  return true;
}

namespace {

std::optional<Tensor> rotary_append_op(Tensor qkv, std::optional<Tensor> cos, std::optional<Tensor> sin, Tensor keys,
                                       Tensor values, int64_t start, int64_t heads, bool interleaved) {
  if (qkv.dim() != 4 || keys.dim() != 4 || qkv.size(2) != heads + 2 * keys.size(1)) return std::nullopt;
  Tensor q = empty({qkv.size(0), heads, qkv.size(1), qkv.size(3)}, qkv);
  const bool done = rotary_append(qkv, cos, sin, Array::written(keys), Array::written(values), start, heads,
                                  interleaved, Array::written(q));
  return done ? std::optional(q) : std::nullopt;
}

std::optional<Tensor> activation_op(Tensor x, int64_t act) {
  if (x.dim() < 1 || x.dim() > kMostAxes) return std::nullopt;
  Tensor y = empty_as(x);
  return activation(x, act, Array::written(y)) ? std::optional(y) : std::nullopt;
}

std::optional<Tensor> gated_activation_op(Tensor x, int64_t act) {
  if (x.dim() < 1 || x.dim() > kMostAxes) return std::nullopt;
  Tensor y = empty_rows(x, x.size(x.dim() - 1) / 2);
  return gated_activation(x, act, Array::written(y)) ? std::optional(y) : std::nullopt;
}

std::optional<Tensor> attention(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, std::optional<Tensor> bias,
                                double scale, bool causal, int64_t window, double softcap,
                                std::optional<Tensor> sinks) {
  if (q.dim() != 4 || k.dim() != 4) return std::nullopt;
  Tensor out = empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q);
  const bool done = attend(q, k, v, k.size(2), mask, bias, scale, causal, window, softcap, sinks, Array::written(out));
  return done ? std::optional(out) : std::nullopt;
}

}  // namespace

namespace {

// Sets the strides of q or turned [B, T, H, D].
bool set_rows(const Array& t, const Array& q, int64_t& b, int64_t& time, int64_t& n) {
  if (t.dim() != 4 || t.scalar_type() != q.scalar_type() || !rows_contiguous(t)) return false;
  for (int64_t axis = 0; axis < 3; ++axis) {
    if (t.size(axis) != q.size(axis)) return false;
  }
  b = t.stride(0), time = t.stride(1), n = t.stride(2);
  return true;
}

bool set_latent(LatentArgs& a, const Array& q, const Array& turned, const Array& expand) {
  const std::optional<Type> type = known_type(q);
  if (!type || q.dim() != 4 || expand.dim() != 2 || expand.scalar_type() != q.scalar_type()) return false;
  if (!set_rows(q, q, a.q_b, a.q_t, a.q_n)) return false;
  if (!set_rows(turned, q, a.turned_b, a.turned_t, a.turned_n) || !expand.is_contiguous()) return false;
  a.type = *type;
  a.batch = q.size(0), a.tokens = q.size(1), a.heads = q.size(2), a.plain = q.size(3);
  a.turned_width = turned.size(3), a.rank = expand.size(1);
  if (a.batch * a.tokens * a.heads * a.plain * a.turned_width == 0 || expand.size(0) % a.heads) return false;
  a.value = expand.size(0) / a.heads - a.plain;
  a.q = q.const_data_ptr(), a.turned = turned.const_data_ptr(), a.expand = expand.const_data_ptr();
  return a.value > 0;
}

// Whether these are latents, and keys beside them, for the queries of `of`.
bool set_seen(Latents& seen, const LatentArgs& of, const Array& latents, const Array& keys) {
  if (known_type(latents) != of.type || known_type(keys) != of.type) return false;
  if (latents.dim() != 3 || keys.dim() != 3 || !rows_contiguous(latents) || !rows_contiguous(keys)) return false;
  if (latents.size(0) != of.batch || keys.size(0) != of.batch || latents.size(1) != keys.size(1)) return false;
  if (latents.size(2) != of.rank || keys.size(2) != of.turned_width || latents.size(1) == 0) return false;
  seen = {latents.const_data_ptr(), keys.const_data_ptr(), latents.stride(0), latents.stride(1), keys.stride(0),
          keys.stride(1), latents.size(1)};
  return true;
}

}  // namespace

bool are_latents(int64_t heads, int64_t rank) { return heads <= kMaxRows && rank <= kMaxWidth && rank > 0; }

bool attend_to_latents(LatentArgs& of, const Latents& seen, const Maybe& mask, double scale, bool causal,
                       const Array& like) {
  if (!are_latents(of.heads * of.tokens, of.rank)) return false;
  AttentionArgs a{};
  a.type = of.type;
  // Latents are keys and values of one head for all queries, the other keys are further columns.
  a.batch = of.batch, a.heads = of.heads, a.kv_heads = 1, a.tokens = of.tokens;
  a.length = seen.length, a.width = of.rank, a.more_width = of.turned_width;
  a.q_t = a.width + a.more_width, a.q_n = a.tokens * a.q_t, a.q_b = a.heads * a.q_n;
  a.k = a.v = seen.latents, a.more_k = seen.keys;
  a.k_b = a.v_b = seen.latents_b, a.k_t = a.v_t = seen.latents_t;
  a.more_b = seen.keys_b, a.more_t = seen.keys_t;
  if (!set_scored(a.mask, mask, a, true)) return false;
  a.scale = float(scale), a.causal = causal;
  const Array queries = array({of.batch, of.heads, of.tokens, of.rank + of.turned_width}, like);
  const Array sums = array({of.batch, of.tokens, of.heads, of.rank}, like);
  a.q = of.queries = queries.mutable_data_ptr(), of.sums = a.out = sums.mutable_data_ptr();
  const auto& run = kernels().attention;
  const int64_t grain = kGrainBytes / (of.rank * std::max(of.plain, of.value)) + 1;
  parallel_for(0, of.heads, grain, [&](int64_t begin, int64_t end) { run.absorb(of, begin, end); });
  run_attention(a);
  parallel_for(0, of.heads, grain, [&](int64_t begin, int64_t end) { run.expand(of, begin, end); });
  return true;
}

namespace {

std::optional<Tensor> latent_attention(Tensor q, Tensor turned, Tensor latents, Tensor keys, Tensor expand,
                                       std::optional<Tensor> mask, double scale, bool causal) {
  LatentArgs of{};
  Latents seen{};
  if (!set_latent(of, q, turned, expand) || !set_seen(seen, of, latents, keys)) return std::nullopt;
  Tensor out = empty({of.batch, of.tokens, of.heads, of.value}, q);
  of.out = out.mutable_data_ptr();
  const Maybe given = mask ? Maybe(*mask) : Maybe();
  return attend_to_latents(of, seen, given, scale, causal, q) ? std::optional(out) : std::nullopt;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor?", TORCH_BOX(&rotary)},
    {"rotary_append(Tensor qkv, Tensor? cos, Tensor? sin, Tensor(a!) keys, Tensor(b!) values, int start, int "
     "heads, bool interleaved) -> Tensor?", TORCH_BOX(&rotary_append_op)},
    {"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, float scale, bool causal, int window, "
     "float softcap, Tensor? sinks=None) -> Tensor?", TORCH_BOX(&attention)},
    {"latent_attention(Tensor q, Tensor turned, Tensor latents, Tensor keys, Tensor expand, Tensor? mask, float scale, "
     "bool causal) -> Tensor?", TORCH_BOX(&latent_attention)},
    {"activation(Tensor x, int act) -> Tensor?", TORCH_BOX(&activation_op)},
    {"gated_activation(Tensor x, int act) -> Tensor?", TORCH_BOX(&gated_activation_op)})

}  // namespace infuse
