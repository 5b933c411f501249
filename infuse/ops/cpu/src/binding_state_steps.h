// The steps of mixers that keep states, which they change in place.
#pragma once

#include <array>

#include "binding_step_values.h"

namespace infuse {

struct StateSteps : StepValues {
  Maybe apply(const ShortConvPart& a, const Maybe& from) const {
    const Maybe& state = a.convolved.array ? a.convolved.array : given.keys;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels();
    const int64_t turns = turns_of(state, tokens, {batch, a.taps, channels}, from->scalar_type());
    if (!turns) return std::nullopt;
    const Array rows = array_rows(*from, outputs_of(a.into)), y = array_rows(*from, channels);
    multiply(a.into, *from, rows, given.once);
    wrote_state = true;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t row = turn * outputs_of(a.into);
      ConvArgs conv = conv_of(a, rows, row + 2 * channels, channels, *state, y, turn, turns);
      conv.gate = bytes_at(rows, row), conv.out_gate = bytes_at(rows, row + channels);
      conv.gate_b = conv.out_b = conv.x_b, conv.gate_t = conv.out_t = conv.x_t;
      convolve(conv);
    }
    return times(a.out, y, *from);
  }
  Maybe apply(const LinearAttentionPart& a, const Maybe& from) const {
    const Maybe& seen = a.convolved.array ? a.convolved.array : a.beside ? given.state_keys : given.keys;
    const Maybe& state = a.state.array ? a.state.array : a.beside ? given.state_values : given.values;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels(), width = outputs_of(a.into);
    const int64_t turns = turns_of(seen, tokens, {batch, a.taps, channels}, from->scalar_type());
    const int64_t same = turns_of(state, tokens, {batch, a.heads, a.key_width, a.value_width}, ScalarType::Float);
    if (!turns || same != turns) return std::nullopt;
    const Array rows = array_rows(*from, width), y = array_rows(*from, a.values());
    multiply(a.into, *before(a.factors, from), rows, given.once);
    times_sections(a.factors, rows, width);
    const std::vector<float> decay_and_beta = decays(a, rows, batch * tokens, tokens / turns);
    std::vector<float> skip(a.D ? size_t(a.heads) : 0);
    if (a.D) widen(*a.D, skip.data());
    ScanArgs scanned{};
    scanned.decay = decay_and_beta.data(), scanned.beta = scanned.decay + batch * tokens * a.heads;
    scanned.skip = a.D ? skip.data() : nullptr;
    scanned.groups = a.key_heads, scanned.heads = a.heads;
    scanned.key_width = a.key_width, scanned.value_width = a.value_width;
    scanned.scale = float(a.scale), scanned.normalise = scanned.delta = a.delta;
    over_states(a, rows, a.conv_at(), {a.q_at, a.k_at, a.v_at}, *seen, *state, turns, scanned, y);
    GatedNormArgs gated{};
    gated.x = y.const_data_ptr(), gated.y = y.mutable_data_ptr(), gated.gate = bytes_at(rows, a.gate_at);
    gated.weight = a.norm ? a.norm->const_data_ptr() : nullptr;
    gated.width = a.norm_width, gated.each = a.values() / a.norm_width, gated.gate_t = width;
    gated.weight_rows = a.norm ? a.norm->numel() / a.norm_width : 1;
    gated.eps = float(a.eps), gated.gate_first = a.gate_first, gated.sigmoid = a.sigmoid, gated.type = type_of(y);
    gated_norm(gated, batch * tokens * gated.each);
    return after(a.factors, times(a.out, y, *from));
  }
  Maybe apply(const ChannelDeltaPart& a, const Maybe& from) const {
    const Maybe& seen = a.convolved.array ? a.convolved.array : given.keys;
    const Maybe& state = a.state.array ? a.state.array : given.values;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels();
    const int64_t width = a.all(), all = batch * tokens;
    const int64_t turns = turns_of(seen, tokens, {batch, a.taps, channels}, from->scalar_type());
    const int64_t same = turns_of(state, tokens, {batch, a.heads, a.width, a.width}, ScalarType::Float);
    if (!turns || same != turns) return std::nullopt;
    const Array rows = array_rows(*from, width), y = array_rows(*from, a.values());
    multiply(a.into, *from, rows, given.once);
    const Maybe low = a.low ? made_by(*a.low, *from) : Maybe();
    const auto second = [&](const std::optional<LinearPart>& linear, int64_t at, int64_t rank) {
      return linear ? made_by(*linear, section(*low, at, rank, {})) : Maybe();
    };
    const Maybe decay_rows = second(a.decay, 0, a.decay_rank), gate_rows = second(a.gate, a.decay_rank, a.gate_rank);
    std::vector<float> decay(size_t(all * a.values())), beta(size_t(all * a.heads)), rate(size_t(a.heads)),
        bias(size_t(a.values()));
    widen(*a.A_log, rate.data()), widen(*a.dt_bias, bias.data());
    for (float& each : rate) each = std::exp(each);
    ChannelDecayArgs decays{};
    decays.made = decay_rows ? decay_rows->const_data_ptr() : bytes_at(rows, a.decay_at());
    decays.made_t = decay_rows ? a.values() : width;
    decays.rate = rate.data(), decays.bias = bias.data(), decays.decay = decay.data();
    decays.heads = a.heads, decays.width = a.width, decays.bound = float(a.bound), decays.bounded = a.bounded;
    decays.rounded = a.rounded, decays.type = type_of(rows);
    channel_decay(decays, all);
    for (int64_t t = 0; t < all; ++t) {
      float* row = beta.data() + t * a.heads;
      kernels().router.convert(bytes_at(rows, t * width + a.beta_at()), type_of(rows), row, Type::f32, a.heads);
      for (int64_t h = 0; h < a.heads; ++h) row[h] = 1 / (1 + std::exp(-row[h]));
    }
    ScanArgs scanned{};
    scanned.decay = decay.data(), scanned.beta = beta.data();
    scanned.groups = scanned.heads = a.heads, scanned.key_width = scanned.value_width = a.width;
    scanned.scale = float(a.scale), scanned.normalise = scanned.delta = scanned.by_key = true;
    over_states(a, rows, 0, {0, a.values(), 2 * a.values()}, *seen, *state, turns, scanned, y);
    GatedNormArgs gated{};
    gated.x = y.const_data_ptr(), gated.y = y.mutable_data_ptr(), gated.weight = a.norm->const_data_ptr();
    gated.gate = gate_rows ? gate_rows->const_data_ptr() : bytes_at(rows, a.gate_at());
    gated.gate_t = gate_rows ? a.values() : width;
    gated.width = a.width, gated.each = a.heads, gated.weight_rows = 1;
    gated.eps = float(a.eps), gated.sigmoid = true, gated.type = type_of(y);
    gated_norm(gated, all * a.heads);
    return times(a.out, y, *from);
  }
  Maybe apply(const SelectiveScanPart& a, const Maybe& from) const {
    const Maybe& seen = a.convolved.array ? a.convolved.array : given.keys;
    const Maybe& state = a.state.array ? a.state.array : given.values;
    const int64_t batch = from->size(0), tokens = from->size(1), channels = a.channels, made = a.rank + 2 * a.states;
    const int64_t turns = turns_of(seen, tokens, {batch, a.taps, channels}, from->scalar_type());
    const int64_t same = turns_of(state, tokens, {batch, channels, a.states}, ScalarType::Float);
    if (!turns || same != turns) return std::nullopt;
    const Array rows = array_rows(*from, 2 * channels), x = array_rows(*from, channels), of_x = array_rows(*from, made);
    multiply(a.into, *from, rows, given.once);
    wrote_state = true;
    for (int64_t turn = 0; turn < turns; ++turn) {
      ConvArgs conv = conv_of(a, rows, turn * 2 * channels, channels, *seen, x, turn, turns);
      conv.silu = true;
      convolve(conv);
    }
    multiply(a.x, x, of_x, given.once);
    const Array dt = array_rows(*from, channels), y = array_rows(*from, channels);
    multiply(a.dt, section(of_x, 0, a.rank, a.dt_norm), dt, given.once);
    const Array keys = section(of_x, a.rank, a.states, a.key_norm);
    const Array queries = section(of_x, a.rank + a.states, a.states, a.query_norm);
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t each = turns > 1 ? state->numel() / (turns + 1) : 0;
      SelectiveArgs scanned{};
      scanned.x = bytes_at(x, turn * channels), scanned.dt = bytes_at(dt, turn * channels);
      scanned.gate = bytes_at(rows, turn * 2 * channels + channels), scanned.y = bytes_at(y, turn * channels);
      scanned.keys = bytes_at(keys, turn * a.states), scanned.queries = bytes_at(queries, turn * a.states);
      scanned.x_t = scanned.dt_t = channels, scanned.gate_t = 2 * channels;
      scanned.keys_t = scanned.queries_t = a.states;
      scanned.x_b = scanned.dt_b = channels * tokens, scanned.gate_b = 2 * channels * tokens;
      scanned.keys_b = scanned.queries_b = a.states * tokens;
      scanned.a_log = a.A_log->const_data_ptr(), scanned.dt_bias = a.dt_bias->const_data_ptr();
      scanned.skip = a.D->const_data_ptr();
      const bool goes_on = tokens == turns;
      scanned.before = goes_on ? static_cast<const float*>(state->const_data_ptr()) + turn * each : nullptr;
      scanned.after = static_cast<float*>(state->mutable_data_ptr()) + turn * each + each;
      scanned.batch = batch, scanned.tokens = tokens / turns, scanned.channels = channels, scanned.states = a.states;
      scanned.type = type_of(x), scanned.weight_type = type_of(*a.A_log);
      selective(scanned);
    }
    return times(a.out, y, *from);
  }
  // Convolves a.channels() columns of rows [B, T, ...] from `conv_at` on, of which queries, keys and values begin `at`
  // these columns of rows, and takes them over the states, to y [B, T, V]. `scanned` has decays and sizes of heads.
  template <class Part>
  void over_states(const Part& a, const Array& rows, int64_t conv_at, std::array<int64_t, 3> at, const Array& seen,
                   const Array& state, int64_t turns, ScanArgs scanned, const Array& y) const {
    const int64_t channels = a.channels(), tokens = rows.size(1), each = turns > 1 ? state.numel() / (turns + 1) : 0;
    const int64_t of_token = scanned.by_key ? scanned.heads * scanned.key_width : scanned.heads;
    const Array qkv = array_rows(rows, channels);
    const float *decay = scanned.decay, *beta = scanned.beta;
    scanned.q_t = scanned.k_t = scanned.v_t = channels;
    scanned.q_b = scanned.k_b = scanned.v_b = channels * tokens;
    scanned.batch = rows.size(0), scanned.tokens = tokens / turns, scanned.type = type_of(y);
    wrote_state = true;
    for (int64_t turn = 0; turn < turns; ++turn) {
      ConvArgs conv = conv_of(a, rows, turn * rows.size(2) + conv_at, channels, seen, qkv, turn, turns);
      conv.silu = true;
      convolve(conv);
      const auto section = [&](int64_t begin) { return bytes_at(qkv, turn * channels + begin - conv_at); };
      scanned.q = section(at[0]), scanned.k = section(at[1]), scanned.v = section(at[2]);
      scanned.decay = decay + turn * of_token, scanned.beta = beta + turn * scanned.heads;
      scanned.before = static_cast<const float*>(state.const_data_ptr()) + turn * each;
      scanned.after = static_cast<float*>(state.mutable_data_ptr()) + turn * each + each;
      scanned.out = bytes_at(y, turn * y.size(2));
      scan(scanned);
    }
  }
  // The logarithms of decays [tokens, heads], and then beta or dt. One token alone is a step, whose dt has no limits.
  static std::vector<float> decays(const LinearAttentionPart& a, const Array& rows, int64_t tokens, int64_t new_tokens) {
    const size_t heads = size_t(a.heads), count = size_t(tokens) * heads;
    std::vector<float> made(2 * count), rate(heads), bias(heads), row(heads);
    widen(*a.A_log, rate.data()), widen(*a.dt_bias, bias.data());
    for (float& each : rate) each = std::exp(each);
    const Type type = type_of(rows);
    for (int64_t t = 0; t < tokens; ++t) {
      float *decay = made.data() + size_t(t) * heads, *beta = decay + count;
      kernels().router.convert(bytes_at(rows, t * outputs_of(a.into) + a.step_at), type, row.data(), Type::f32, a.heads);
      for (size_t h = 0; h < heads; ++h) {
        const float x = row[h] + bias[h];
        float step = x > 20 ? x : std::log1p(std::exp(x));
        if (!a.delta && new_tokens > 1) step = std::min(std::max(step, float(a.least)), float(a.most));
        decay[h] = -rate[h] * step, beta[h] = step;
      }
      if (a.beta_at < 0) continue;
      kernels().router.convert(bytes_at(rows, t * outputs_of(a.into) + a.beta_at), type, row.data(), Type::f32, a.heads);
      for (size_t h = 0; h < heads; ++h) beta[h] = float(a.beta_factor) / (1 + std::exp(-row[h]));
    }
    return made;
  }
  // Channels from element `at` of rows [B, T, ...] on, convolved on the state of this turn.
  template <class Part>
  static ConvArgs conv_of(const Part& a, const Array& rows, int64_t at, int64_t channels, const Array& state,
                          const Array& y, int64_t turn, int64_t turns) {
    const int64_t each = turns > 1 ? state.numel() / (turns + 1) : 0;
    ConvArgs conv{};
    conv.x = bytes_at(rows, at), conv.x_t = rows.size(2), conv.x_b = rows.size(1) * rows.size(2);
    conv.weight = a.conv->const_data_ptr(), conv.bias = a.conv_bias ? a.conv_bias->const_data_ptr() : nullptr;
    conv.before = bytes_at(state, turn * each), conv.after = bytes_at(state, turn * each + each);
    conv.y = bytes_at(y, turn * channels);
    conv.batch = rows.size(0), conv.tokens = rows.size(1) / turns, conv.channels = channels, conv.taps = a.taps;
    conv.type = type_of(rows), conv.weight_type = type_of(*a.conv);
    return conv;
  }
  // In how many turns the tokens go over a state of these sizes: in one, which overwrites it. Or, over states
  // [tokens + 1, ...] of one batch row, each token in its own: from the state before it to the next. 0: in none.
  static int64_t turns_of(const Maybe& state, int64_t tokens, std::initializer_list<int64_t> sizes, ScalarType type) {
    if (!state || state->scalar_type() != type || !state->is_contiguous()) return 0;
    const int64_t more = state->dim() - int64_t(sizes.size());
    if (more < 0 || more > 1 || (more && (tokens < 2 || state->size(0) != tokens + 1 || *sizes.begin() != 1))) return 0;
    int64_t axis = more;
    for (int64_t size : sizes) {
      if (state->size(axis++) != size) return 0;
    }
    return more ? tokens : 1;
  }
};

}  // namespace infuse
