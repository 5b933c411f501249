// GroupNorm over [batch, channels, positions], channels last or contiguous, with SiLU after it: one pass to measure, one
// to write. Each channel is measured from its first value, so that a large common mean costs no digits.
#pragma once

#include "activation.h"
#include "kernels.h"
#include "panels.h"
#include "vec.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kMeasuredRows = 16;  // summed in registers before the sums go to memory

// Calls run(c, n, registers) for the channels [0, channels): `registers` registers from c on, of n lanes each.
template <class F>
[[gnu::always_inline]] inline void over_channels(int64_t channels, const F& run) {
  int64_t c = 0;
  for (; c + 4 * Vec::width <= channels; c += 4 * Vec::width) run(c, Vec::width, std::integral_constant<int, 4>());
  for (; c + Vec::width <= channels; c += Vec::width) run(c, Vec::width, std::integral_constant<int, 1>());
  if (c < channels) run(c, int(channels - c), std::integral_constant<int, 1>());
}

// Channels last: sums of (x - first row) and of its square over the rows of one chunk, for each channel.
template <class T>
void measure_chunk(const GroupNormArgs& a, int64_t sample, int64_t chunk) {
  const int64_t C = a.channels, begin = a.positions * chunk / a.chunks, end = a.positions * (chunk + 1) / a.chunks;
  const T* first = static_cast<const T*>(a.x) + sample * a.positions * C;
  float* sums = a.sums + (sample * a.chunks + chunk) * 2 * C;
  std::memset(sums, 0, size_t(2 * C) * sizeof(float));
  for (int64_t row = begin; row < end; row += kMeasuredRows) {
    const int64_t rows = end - row < kMeasuredRows ? end - row : kMeasuredRows;
    over_channels(C, [&](int64_t c, int n, auto registers) {
      constexpr int R = decltype(registers)::value;
      Vec base[R], total[R], squares[R];
      for (int r = 0; r < R; ++r) {
        const int64_t at = c + r * Vec::width;
        base[r] = load(first + at, n), total[r] = load(sums + at, n), squares[r] = load(sums + C + at, n);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const T* x = first + (row + i) * C + c;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Vec d = load(x + r * Vec::width, n) - base[r];
          total[r] = total[r] + d, squares[r] = fma(d, d, squares[r]);
        }
      }
      for (int r = 0; r < R; ++r) {
        store(sums + c + r * Vec::width, total[r], n), store(sums + C + c + r * Vec::width, squares[r], n);
      }
    });
  }
}

// Contiguous: the same sums of one channel, in one chunk.
template <class T>
void measure_channel(const GroupNormArgs& a, int64_t sample, int64_t channel) {
  const T* x = static_cast<const T*>(a.x) + (sample * a.channels + channel) * a.positions;
  const Vec base(widen(x[0]));
  Vec total[4], squares[4];
  int64_t p = 0;
  for (; p + 4 * Vec::width <= a.positions; p += 4 * Vec::width) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Vec d = load(x + p + r * Vec::width, Vec::width) - base;
      total[r] = total[r] + d, squares[r] = fma(d, d, squares[r]);
    }
  }
  float rest = 0, rest_squares = 0;
  for (; p < a.positions; ++p) {
    const float d = widen(x[p]) - widen(x[0]);
    rest += d, rest_squares += d * d;
  }
  float* sums = a.sums + sample * 2 * a.channels + channel;
  sums[0] = ((total[0] + total[1]) + (total[2] + total[3])).sum() + rest;
  sums[a.channels] = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum() + rest_squares;
}

inline void measure_groups(const GroupNormArgs& a, int64_t begin, int64_t end) {
  const int64_t each = a.channels_last ? a.chunks : a.channels;
  for (int64_t i = begin; i < end; ++i) {
    with_type(a.type, [&](auto t) {
      using T = decltype(t);
      a.channels_last ? measure_chunk<T>(a, i / each, i % each) : measure_channel<T>(a, i / each, i % each);
    });
  }
}

// From the sums: y = (x - mean) * scale + bias for each channel of one sample. `added` moves the means of its channels.
template <class T>
void solve_sample(const GroupNormArgs& a, int64_t sample) {
  const int64_t C = a.channels, width = C / a.groups;
  const T* x = static_cast<const T*>(a.x) + sample * a.positions * C;
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias),
          *added = a.added ? static_cast<const T*>(a.added) + sample * a.added_step : nullptr;
  float* centre = a.coefficients + sample * kCoefficients * C;
  float *scale = centre + C, *shift = scale + C;
  const double count = double(a.positions);
  for (int64_t g = 0; g < a.groups; ++g) {
    double mean = 0, squares = 0, apart = 0;
    const auto over_group = [&](const auto& run) {
      for (int64_t c = g * width; c < (g + 1) * width; ++c) run(c);
    };
    over_group([&](int64_t c) {
      double total = 0, of_squares = 0;
      for (int64_t k = 0; k < a.chunks; ++k) {
        const float* sums = a.sums + (sample * a.chunks + k) * 2 * C + c;
        total += sums[0], of_squares += sums[C];
      }
      squares += of_squares - total * total / count;
      const double own = total / count + widen(x[a.channels_last ? c : c * a.positions]) + (added ? widen(added[c]) : 0);
      scale[c] = float(own);
      mean += own / double(width);
    });
    over_group([&](int64_t c) { apart += (scale[c] - mean) * (scale[c] - mean); });
    const double variance = (squares / count + apart) / double(width);
    const double inverse = 1 / std::sqrt((variance > 0 ? variance : variance == variance ? 0 : variance) + a.eps);
    over_group([&](int64_t c) {
      centre[c] = float(mean - (added ? widen(added[c]) : 0));
      scale[c] = float(inverse * (weight ? widen(weight[c]) : 1));
      shift[c] = bias ? widen(bias[c]) : 0.0f;
    });
  }
}

inline void solve_groups(const GroupNormArgs& a, int64_t begin, int64_t end) {
  for (int64_t sample = begin; sample < end; ++sample) {
    with_type(a.type, [&](auto t) { solve_sample<decltype(t)>(a, sample); });
  }
}

template <class T, bool SILU>
[[gnu::always_inline]] inline void write_normed(const T* x, Vec centre, Vec scale, Vec shift, T* y, int n) {
  const Vec normed = fma(load(x, n) - centre, scale, shift);
  store_coarse(y, SILU ? activated<Act::silu, T>(normed) : normed, n);
}

// Rows of all samples: of channels (channels last), or of positions (contiguous).
template <class T, bool SILU>
void apply_rows(const GroupNormArgs& a, int64_t begin, int64_t end) {
  const int64_t C = a.channels, columns = a.channels_last ? C : a.positions;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * columns;
    T* y = static_cast<T*>(a.y) + row * columns;
    if (a.channels_last) {
      const float* own = a.coefficients + row / a.positions * kCoefficients * C;
      over_channels(C, [&](int64_t c, int n, auto registers) {
#pragma GCC unroll 4
        for (int r = 0; r < decltype(registers)::value; ++r) {
          const int64_t at = c + r * Vec::width;
          const Vec centre = load(own + at, n), scale = load(own + C + at, n), shift = load(own + 2 * C + at, n);
          write_normed<T, SILU>(x + at, centre, scale, shift, y + at, n);
        }
      });
    } else {
      const float* own = a.coefficients + row / C * kCoefficients * C + row % C;
      const Vec centre(own[0]), scale(own[C]), shift(own[2 * C]);
      over_channels(columns, [&](int64_t p, int n, auto registers) {
#pragma GCC unroll 4
        for (int r = 0; r < decltype(registers)::value; ++r) {
          write_normed<T, SILU>(x + p + r * Vec::width, centre, scale, shift, y + p + r * Vec::width, n);
        }
      });
    }
  }
}

inline void apply_groups(const GroupNormArgs& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto t) {
    using T = decltype(t);
    a.silu ? apply_rows<T, true>(a, begin, end) : apply_rows<T, false>(a, begin, end);
  });
}

}  // namespace INFUSE_ISA
}  // namespace infuse
