// Shared by the bindings of the matrix products: memory, threads, results.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>

#include "binding.h"
#include "limits.h"

namespace infuse {

// For smaller weights, waking a second thread does not pay.
constexpr int64_t kOneThreadBytes = 1 << 17;
// Threads take pieces of this size until none is left, so that a slow thread does not delay the others.
constexpr int64_t kPieceBytes = 1 << 18;

// Memory that a thread keeps between calls, since allocating it costs more than filling it.
enum class Scratch { x, tile, experts, job };
struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <Scratch purpose>
void* scratch_of(size_t bytes) {
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = (bytes + 4095) / 4096 * 4096;
    buffer.reset(std::aligned_alloc(64, size));
  }
  return buffer.get();
}

// Pieces of work that threads take. Each thread first processes its own stretch sequentially, since memory is fastest
// for one sequential stream, and then takes pieces of unfinished stretches.
class Stretches {
 public:
  static constexpr int64_t kMost = 256;

  Stretches(int64_t pieces, int64_t threads) : threads_(threads) {
    for (int64_t t = 0; t < threads; ++t) new (&at(t)) Stretch{{pieces * t / threads}, pieces * (t + 1) / threads};
  }
  // Calls run(piece) for the pieces that thread t takes, until none is left.
  template <class F>
  void work(int64_t t, const F& run) {
    for (int64_t i = 0; i < threads_; ++i) {
      Stretch& s = at((t + i) % threads_);
      for (int64_t p; (p = s.next.fetch_add(1, std::memory_order_relaxed)) < s.end;) run(p);
    }
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Stretch& at(int64_t t) { return reinterpret_cast<Stretch*>(room_)[t]; }

  int64_t threads_;
  alignas(64) unsigned char room_[kMost * sizeof(Stretch)];  // only as many as there are threads are initialised
};

// Calls run(begin, end) over all outputs on PyTorch's threads, in pieces of a multiple of `unit`.
template <class F>
void over_outputs(int64_t outputs, int64_t row_bytes, int64_t unit, const F& run) {
  const int64_t threads = std::min<int64_t>(thread_count(), Stretches::kMost);
  const int64_t bytes = outputs * row_bytes;
  if (threads == 1 || bytes <= kOneThreadBytes) {
    run(0, outputs);
    return;
  }
  const int64_t rows = std::min(kPieceBytes, bytes / threads / 2) / std::max<int64_t>(row_bytes, 1);
  const int64_t piece = std::max<int64_t>(1, rows / unit) * unit, pieces = (outputs + piece - 1) / piece;
  Stretches stretches(pieces, threads);
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      stretches.work(t, [&](int64_t p) { run(p * piece, std::min((p + 1) * piece, outputs)); });
    }
  });
}

// Sets x, bias and a new y [..., columns] of a product; the weight's sizes must be set. Returns y.
inline Tensor begin_product(LinearArgs& a, const Tensor& x, const std::optional<Tensor>& bias, int64_t columns) {
  Tensor y = empty_rows(x, columns);
  a.x = x.const_data_ptr();
  a.bias = bias ? bias->const_data_ptr() : nullptr;
  a.y = y.mutable_data_ptr();
  a.rows = a.inputs ? x.numel() / a.inputs : y.numel() / std::max<int64_t>(columns, 1);
  a.type = type_of(x);
  return y;
}

inline int64_t few_plain_rows() { return amx_multiplies() ? kFewPlainRowsAmx : kFewPlainRows; }

// Up to this many values, one thread arranges x.
constexpr int64_t kOneThreadX = 1 << 15;

template <class F>
void over_blocks(const LinearArgs& a, int64_t one_thread, int64_t blocks, const F& arrange) {
  if (a.rows * a.inputs <= one_thread) return arrange(0, blocks);
  parallel_for(0, blocks, 1, arrange);
}

// The kernels for many rows of this type; null if there are none or PyTorch is faster.
inline const TileKernels* tiles_of(const TilesByType& tiles, Type type) {
  return left_to_pytorch(type) ? nullptr : tiles.of(type);
}

// For more rows than the cores' caches hold: each thread takes chunks of rows and computes all outputs (or gates).
inline void multiply_chunks(const LinearArgs& a, int64_t outputs, int64_t chunks, const TileKernels& kernel) {
  const int64_t element_bytes = a.type == Type::f32 ? 4 : 2;
  std::atomic<int64_t> next{0};
  parallel_for(0, thread_count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        LinearArgs part = a;
        const int64_t first = a.rows * c / chunks;
        part.rows = a.rows * (c + 1) / chunks - first;
        part.x = static_cast<const char*>(a.x) + first * a.inputs * element_bytes;
        part.y = static_cast<char*>(a.y) + first * outputs * element_bytes;
        part.scratch = scratch_of<Scratch::x>(kernel.x_bytes(part));
        kernel.arrange(part, 0, (part.rows + kernel.block_rows - 1) / kernel.block_rows);
        const size_t bytes = size_t(kernel.most_tiles(part)) * kernel.tile_bytes(part);
        kernel.multiply(part, 0, outputs, static_cast<uint32_t*>(scratch_of<Scratch::tile>(bytes)));
      }
    }
  });
}

// Many rows: arranges x, then computes all outputs (or gates) tile by tile, each thread with its own tiles. If
// `threads` is 1, the caller may itself be one of many threads that process other rows.
inline void multiply_by_tiles(LinearArgs& a, int64_t outputs, const TileKernels& kernel,
                              int64_t threads = thread_count()) {
  const int64_t columns = kernel.tile_columns(a), chunk = kernel.chunk_rows(a);
  if (a.rows >= 2 * threads * chunk) {
    a.ahead = 0;  // the next chunk begins with the first tile
    return multiply_chunks(a, outputs, ((a.rows + chunk - 1) / chunk + threads - 1) / threads * threads, kernel);
  }
  a.scratch = scratch_of<Scratch::x>(kernel.x_bytes(a));
  const int64_t blocks = (a.rows + kernel.block_rows - 1) / kernel.block_rows;
  over_blocks(a, kOneThreadX, blocks, [&](int64_t begin, int64_t end) { kernel.arrange(a, begin, end); });
  // At least two turns per thread, so that a slow thread does not delay the others.
  const int64_t tiles = std::clamp<int64_t>(outputs / columns / threads / 2, 1, kernel.most_tiles(a));
  int64_t unit = tiles * columns;
  // Two tiles of gates fill a cache line of 16-bit y, which should stay with one core.
  if (a.gated && kernel.most_tiles(a) == 1 && outputs >= 16 * threads * unit) unit *= 2;
  a.ahead = threads * unit;
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    auto* room = static_cast<uint32_t*>(scratch_of<Scratch::tile>(size_t(tiles) * kernel.tile_bytes(a)));
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t o; (o = next.fetch_add(unit, std::memory_order_relaxed)) < outputs;) {
        kernel.multiply(a, o, std::min(o + unit, outputs), room);
      }
    }
  });
}

}  // namespace infuse
