// Shared by products by tiles: the outputs per tile, the prefetch of its weights, and the write of its sums.
#pragma once

#include "activation.h"
#include "panels.h"

namespace infuse {
namespace INFUSE_ISA {

constexpr int kTileOutputs = 2 * kPanelRows;

#if defined(__AVX512F__)

// Outputs, or gates, per tile.
inline int64_t tile_columns(const LinearArgs& a) { return a.gated ? kPanelRows : kTileOutputs; }

// The tile that the same thread is likely to take after the one at o, of those in [begin, end); o if there is none.
inline int64_t next_tile(const LinearArgs& a, int64_t o, int64_t begin, int64_t end) {
  const int64_t width = tile_columns(a), columns = a.gated ? a.outputs / 2 : a.outputs;
  const int64_t next = o + width < end ? o + width : begin + a.ahead;
  return next + width <= columns ? next : o;
}

// Prefetches the weights of a later tile, a little at each call of fetch(): all lines at once would keep the products
// waiting for lines of the present tile.
class TileAhead {
 public:
  TileAhead() = default;
  // The tile at o, in `parts` parts; each is fetched in `times` calls.
  TileAhead(const LinearArgs& a, int64_t o, int64_t parts, int64_t times) {
    const int64_t half = kPanelRows * a.row_bytes;
    at_ = static_cast<const char*>(a.weight) + o * a.row_bytes;
    turn_ = half / kLineBytes, lines_ = 2 * turn_;
    // the second half follows the first one, unless the product is gated
    jump_ = a.gated ? a.outputs / 2 * a.row_bytes - half : 0;
    of_part_ = parts > 0 ? (lines_ + parts - 1) / parts : 0;
    each_ = times > 0 ? (of_part_ + times - 1) / times : of_part_;
  }
  // Divides nothing: with a few divisions for each block of x, products of 384 inputs took 3 % longer.
  TileAhead part(int64_t i) const {
    TileAhead found = *this;
    const int64_t first = i * of_part_, rest = lines_ - first;
    found.left_ = of_part_ < rest ? of_part_ : rest;
    found.turn_ -= first;
    found.at_ += kLineBytes * first + (found.turn_ < 0 ? jump_ : 0);
    return found;
  }
  [[gnu::always_inline]] void fetch() {
    for (int64_t n = each_ < left_ ? each_ : left_; n > 0; --n, --left_, at_ += kLineBytes) {
      if (turn_-- == 0) at_ += jump_;
      prefetch(at_);
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  const char* at_ = nullptr;
  int64_t turn_ = 0, jump_ = 0, left_ = 0, each_ = 0;  // turn_: lines before the second half
  int64_t lines_ = 0, of_part_ = 0;
};

// Prefetches the outputs from o on of `count` rows, which a later block writes: a store that waits for memory keeps all
// later ones waiting, also those of sums.
template <class T>
void prefetch_output(const LinearArgs& a, int64_t first_row, int64_t count, int64_t o) {
  const int64_t columns = a.gated ? a.outputs / 2 : a.outputs;
  const T* y = static_cast<const T*>(a.y) + o;
  for (int64_t r = first_row; r < first_row + count && r < a.rows; ++r) prefetch(y + r * columns);
}

// Stores the first `left` values of two registers of 16.
template <class T>
void store_both(T* to, Vec low, Vec high, int left) {
  store(to, low, left);
  if (left > kPanelRows) store(to + kPanelRows, high, left - kPanelRows);
}
#if defined(__AVX512BF16__)
inline void store_both(bf16* to, Vec low, Vec high, int left) {
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
  left >= kTileOutputs ? _mm512_storeu_si512(to, both)
      : _mm512_mask_storeu_epi16(to, Elements<bf16>::first_words(left), both);
}
#endif

// Where rows from `first_row` on of a tile are written without passing through memory: null if only a part of the tile
// is there, or an activation follows.
template <class T>
T* whole_output(const LinearArgs& a, int64_t first_row, int64_t o) {
  const bool whole = !a.activates && !a.gated && o + kTileOutputs <= a.outputs;
  return whole ? static_cast<T*>(a.y) + first_row * a.outputs + o : nullptr;
}
// Writes sums [R][2] there.
template <int R, class T, class V>
[[gnu::always_inline]] inline void write_whole(const LinearArgs& a, const V (&sums)[R][2], int64_t o, T* to) {
  const T* bias = static_cast<const T*>(a.bias);
  const Vec low = bias ? load(bias + o, Vec::width) : Vec(),
            high = bias ? load(bias + o + kPanelRows, Vec::width) : Vec();
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r, to += a.outputs) {
    store_both(to, Vec(sums[r][0]) + low, Vec(sums[r][1]) + high, kTileOutputs);
  }
}

// Writes the sums of one tile: outputs from o on, or act(gate) * up for gates from o on; up values follow all gates.
template <class T, bool GATED, class Activate>
void write_rows(const LinearArgs& a, const float* sums, int64_t rows, int64_t o, int64_t first_row,
                const Activate& act) {
  constexpr int most = GATED ? kPanelRows : kTileOutputs;
  const int64_t columns = GATED ? a.outputs / 2 : a.outputs;
  const T* bias = static_cast<const T*>(a.bias);
  T* to = static_cast<T*>(a.y) + first_row * columns + o;
  const int left = int(columns - o < most ? columns - o : most), beyond = GATED ? left : left - kPanelRows;
  const Vec low_bias = bias ? load(bias + o, left) : Vec();
  const Vec high_bias = bias && beyond > 0 ? load(bias + (GATED ? columns : kPanelRows) + o, beyond) : Vec();
  const auto write = [&](auto whole) {  // a constant count needs no masks
    const int n = decltype(whole)::value ? most : left;
    for (int64_t r = 0; r < rows; ++r, sums += kTileOutputs, to += columns) {
      const Vec low = act(load(sums, Vec::width) + low_bias), high = load(sums + kPanelRows, Vec::width) + high_bias;
      if constexpr (GATED) {
        store_coarse(to, low * high, n);
      } else {
        store_both(to, low, act(high), n);
      }
    }
  };
  left == most ? write(std::true_type()) : write(std::false_type());
}
template <class T>
void write_sums(const LinearArgs& a, const float* sums, int64_t rows, int64_t o, int64_t first_row) {
  const auto write = [&](const auto& act) {
    a.gated ? write_rows<T, true>(a, sums, rows, o, first_row, act)
        : write_rows<T, false>(a, sums, rows, o, first_row, act);
  };
  if (!a.activates) return write([](Vec x) { return x; });
  with_activation(a.act, [&](auto act) { write([](Vec x) { return activated<decltype(act)::value, T>(x); }); });
}

#endif

}  // namespace INFUSE_ISA
}  // namespace infuse
