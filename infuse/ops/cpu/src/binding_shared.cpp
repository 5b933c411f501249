// Collectives of ranks on one host through shared memory, as PyTorch operators. region.h describes how ranks meet. An
// operation returns Outcome::waiting when its time slice is over and continues when called again, so that the caller
// can check for signals, ended processes and timeouts. Tensors must be contiguous and on the CPU, which
// parallel/shared_memory.py ensures.
#include <vector>

#include "binding.h"
#include "region.h"

namespace infuse {
namespace {

// Up to this size every rank sums all elements itself, after one meeting. Beyond it each rank sums its share, and they
// meet once more.
constexpr int64_t kTogetherBytes = 16 << 10;
// Minimum number of bytes that a thread copies or sums.
constexpr int64_t kGrainBytes = 64 << 10;
// Shares are multiples of this, so that no two ranks write to the same cache line.
constexpr int64_t kShareElements = 64;

Meeting meeting_of(const Tensor& region, int64_t rank, int64_t slice_us = 0) {
  char* base = static_cast<char*>(region.mutable_data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(base) % kLine == 0 && region.numel() >= int64_t(sizeof(Header)),
                  "not a region");
  const Header& header = *reinterpret_cast<const Header*>(base);
  STD_TORCH_CHECK(header.ranks >= 1 && header.ranks <= kMostRanks && rank >= 0 && rank < header.ranks &&
                      region.numel() >= region_bytes(header.ranks, header.buffer_bytes),
                  "not a region of a rank ", rank);
  return Meeting(base, rank, slice_us);
}

int64_t bytes_of(const Tensor& t) { return t.numel() * int64_t(t.element_size()); }

enum class Kind : int64_t { sum, gather, broadcast };

// A hash of the numbers that describe an operation, which must be equal on all ranks.
uint64_t signature_of(Kind kind, const Tensor& x, int64_t tag, const std::vector<int64_t>& columns = {}) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](int64_t value) { hash = (hash ^ uint64_t(value)) * 0x9e3779b97f4a7c15, hash ^= hash >> 29; };
  add(int64_t(kind)), add(int64_t(x.scalar_type())), add(tag), add(x.dim());
  for (int64_t axis = 0; axis < x.dim(); ++axis) add(x.size(axis));
  for (const int64_t bytes : columns) add(bytes);
  return hash;
}

// Calls work(begin, end) over [0, size), on several threads if it is large.
template <class F>
void in_threads(int64_t size, int64_t element_bytes, const F& work) {
  if (size * element_bytes < 2 * kGrainBytes) {
    work(0, size);
  } else {
    torch::stable::parallel_for(0, size, kGrainBytes / element_bytes, work);
  }
}

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes == 0) return;
  in_threads(bytes, 1, [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, size_t(end - begin)); });
}

// Sums elements [begin, end) of all ranks' arrays into `to`; this rank's own array is at `mine`.
void add_up(const Meeting& ranks, const char* mine, char* to, int64_t begin, int64_t end, const Tensor& x) {
  const int64_t element = int64_t(x.element_size());
  const void* from[kMostRanks];
  for (int64_t r = 0; r < ranks.ranks(); ++r) from[r] = (r == ranks.rank() ? mine : ranks.buffer(r)) + begin * element;
  const SumArgs a{from, to + begin * element, int(ranks.ranks()), type_of(x)};
  const auto run = kernels().sum_arrays;
  in_threads(end - begin, element, [&](int64_t first, int64_t last) { run(a, first, last); });
}

struct Share {
  int64_t begin, end;
};
Share share_of(int64_t elements, int64_t rank, int64_t ranks) {
  const int64_t each = ((elements + ranks - 1) / ranks + kShareElements - 1) / kShareElements * kShareElements;
  return {std::min(elements, rank * each), std::min(elements, (rank + 1) * each)};
}

// Meeting number `meeting` of a turn: fills this rank's buffer and waits for the other ranks, unless an earlier call
// has done so.
template <class F>
Outcome meet(const Meeting& ranks, int64_t meeting, uint64_t signature, const F& fill) {
  Place& place = ranks.place();
  if (place.stage == meeting) {
    fill();
    ranks.publish(signature);
    place.stage = meeting + 1;
  }
  return place.stage == meeting + 1 ? ranks.gather() : Outcome::done;
}

// Calls turn(begin, end) for each stretch of [0, bytes) that fits into a buffer, at least once, and goes on where the
// last call stopped.
template <class F>
int64_t in_turns(const Meeting& ranks, int64_t bytes, const F& turn) {
  const int64_t buffer_bytes = ranks.buffer_bytes();
  Place& place = ranks.place();
  do {
    const int64_t begin = place.chunk * buffer_bytes;
    const Outcome outcome = turn(begin, std::min(begin + buffer_bytes, bytes));
    if (outcome != Outcome::done) return int64_t(outcome);
    ranks.next_turn();
  } while (place.chunk * buffer_bytes < bytes);
  place.chunk = 0;
  return int64_t(Outcome::done);
}

// One turn over a long array, `elements` at x: each rank sums its share of all buffers and writes the sum to its own
// buffer for the others.
Outcome sum_by_shares(const Meeting& ranks, uint64_t signature, char* x, int64_t elements, const Tensor& like) {
  const int64_t element = int64_t(like.element_size()), rank = ranks.rank();
  const Share mine = share_of(elements, rank, ranks.ranks());
  char* buffer = ranks.buffer(rank);
  Outcome outcome = meet(ranks, 0, signature, [&] {
    copy(buffer, x, mine.begin * element);  // no other rank reads this rank's share before it is summed
    copy(buffer + mine.end * element, x + mine.end * element, (elements - mine.end) * element);
  });
  if (outcome != Outcome::done) return outcome;
  outcome = meet(ranks, 1, signature, [&] {
    add_up(ranks, x, x, mine.begin, mine.end, like);
    copy(buffer + mine.begin * element, x + mine.begin * element, (mine.end - mine.begin) * element);
  });
  if (outcome != Outcome::done) return outcome;
  for (int64_t r = 0; r < ranks.ranks(); ++r) {
    const Share share = share_of(elements, r, ranks.ranks());
    const int64_t begin = share.begin * element, bytes = (share.end - share.begin) * element;
    if (r != rank) copy(x + begin, ranks.buffer(r) + begin, bytes);
  }
  return Outcome::done;
}

int64_t all_reduce(Tensor region, int64_t rank, Tensor x, int64_t tag, int64_t slice_us) {
  const Meeting ranks = meeting_of(region, rank, slice_us);
  const uint64_t signature = signature_of(Kind::sum, x, tag);
  const int64_t bytes = bytes_of(x);
  const bool together = bytes <= std::min(kTogetherBytes, ranks.buffer_bytes());
  char* data = static_cast<char*>(x.mutable_data_ptr());
  return in_turns(ranks, bytes, [&](int64_t begin, int64_t end) {
    if (!together) {
      return sum_by_shares(ranks, signature, data + begin, (end - begin) / int64_t(x.element_size()), x);
    }
    const Outcome outcome = meet(ranks, 0, signature, [&] { copy(ranks.buffer(rank), data, bytes); });
    if (outcome == Outcome::done) add_up(ranks, data, data, 0, x.numel(), x);
    return outcome;
  });
}

// The place of a rank's piece in the whole: `bytes` bytes from `begin` on, in each row of `whole_bytes`.
struct Columns {
  int64_t begin, bytes, whole_bytes;
};

// Copies bytes [first, last) of a piece to their places in `whole`; `from` points to the first of them.
void place_piece(char* whole, const Columns& columns, const char* from, int64_t first, int64_t last) {
  in_threads(last - first, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = first + begin; at < first + end;) {
      const int64_t row = at / columns.bytes, column = at % columns.bytes;
      const int64_t count = std::min(columns.bytes - column, first + end - at);
      std::memcpy(whole + row * columns.whole_bytes + columns.begin + column, from + (at - first), size_t(count));
      at += count;
    }
  });
}

// Gathers whole [rows, sum of columns] from each rank's x [rows, columns[rank]]; columns are in bytes.
int64_t all_gather(Tensor region, int64_t rank, Tensor x, Tensor whole, std::vector<int64_t> columns, int64_t rows,
                   int64_t tag, int64_t slice_us) {
  const Meeting ranks = meeting_of(region, rank, slice_us);
  STD_TORCH_CHECK(int64_t(columns.size()) == ranks.ranks() && bytes_of(x) == rows * columns[size_t(rank)],
                  "columns do not fit");
  const uint64_t signature = signature_of(Kind::gather, whole, tag, columns);
  std::vector<Columns> places;
  int64_t whole_bytes = 0, most = 0;
  for (const int64_t bytes : columns) {
    places.push_back({whole_bytes, bytes, 0});
    whole_bytes += bytes, most = std::max(most, rows * bytes);
  }
  STD_TORCH_CHECK(bytes_of(whole) == rows * whole_bytes, "columns do not fit");
  for (Columns& place : places) place.whole_bytes = whole_bytes;
  const char* data = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(whole.mutable_data_ptr());
  return in_turns(ranks, most, [&](int64_t begin, int64_t end) {
    const auto end_of = [&](int64_t r) { return std::clamp(rows * columns[size_t(r)], begin, end); };
    const Outcome outcome = meet(ranks, 0, signature, [&] {
      copy(ranks.buffer(rank), data + std::min(begin, bytes_of(x)), end_of(rank) - begin);
    });
    if (outcome != Outcome::done) return outcome;
    for (int64_t r = 0; r < ranks.ranks(); ++r) {
      place_piece(to, places[size_t(r)], ranks.buffer(r), begin, end_of(r));
    }
    return Outcome::done;
  });
}

// Copies rank 0's x to all ranks.
int64_t broadcast(Tensor region, int64_t rank, Tensor x, int64_t tag, int64_t slice_us) {
  const Meeting ranks = meeting_of(region, rank, slice_us);
  const uint64_t signature = signature_of(Kind::broadcast, x, tag);
  char* data = static_cast<char*>(x.mutable_data_ptr());
  return in_turns(ranks, bytes_of(x), [&](int64_t begin, int64_t end) {
    const Outcome outcome = meet(ranks, 0, signature, [&] {
      if (rank == 0) copy(ranks.buffer(0), data + begin, end - begin);
    });
    if (outcome == Outcome::done && rank != 0) copy(data + begin, ranks.buffer(0), end - begin);
    return outcome;
  });
}

// ---- the region itself, and reports about an operation that did not finish ----

int64_t bytes_of_region(int64_t ranks, int64_t buffer_bytes) {
  STD_TORCH_CHECK(ranks >= 1 && ranks <= kMostRanks, ranks, " ranks: 1 to ", kMostRanks, " can share a region");
  STD_TORCH_CHECK(buffer_bytes > 0 && buffer_bytes % (kShareElements * 8) == 0, "buffers of ", buffer_bytes, " bytes");
  return region_bytes(ranks, buffer_bytes);
}

// Initialises a region in zeroed memory, before any other rank reads it.
void begin(Tensor region, int64_t ranks, int64_t buffer_bytes, int64_t spin_us) {
  STD_TORCH_CHECK(region.numel() >= bytes_of_region(ranks, buffer_bytes), "the region is too small");
  Header& header = *static_cast<Header*>(region.mutable_data_ptr());
  header.ranks = ranks, header.buffer_bytes = buffer_bytes, header.spin_us = spin_us;
}

// For each rank: 0 it runs the same operation, 1 it has not arrived, 2 it runs another operation.
std::vector<int64_t> states(Tensor region, int64_t rank) {
  const Meeting ranks = meeting_of(region, rank);
  std::vector<int64_t> found;
  for (int64_t r = 0; r < ranks.ranks(); ++r) found.push_back(ranks.absent(r) ? 1 : ranks.differs(r) ? 2 : 0);
  return found;
}

// Records that this rank has left, and why.
void leave(Tensor region, int64_t rank, std::vector<int64_t> words) {
  Post& mine = meeting_of(region, rank).post(rank);
  if (mine.word_bytes.load(std::memory_order_relaxed)) return;
  const size_t bytes = std::min(words.size(), size_t(kWords));
  for (size_t i = 0; i < bytes; ++i) mine.words[i] = char(words[i]);
  mine.word_bytes.store(int64_t(bytes), std::memory_order_release);
}

// Why a rank left; empty if it has not.
std::vector<int64_t> last_words(Tensor region, int64_t rank) {
  const Post& post = meeting_of(region, rank).post(rank);
  const auto bytes = std::min<int64_t>(post.word_bytes.load(std::memory_order_acquire), kWords);
  return numbers_of({post.words, size_t(bytes)});
}

}  // namespace

INFUSE_OPERATORS(CompositeExplicitAutograd,
    {"shared_all_reduce(Tensor region, int rank, Tensor(a!) x, int tag, int slice_us) -> int", TORCH_BOX(&all_reduce)},
    {"shared_all_gather(Tensor region, int rank, Tensor x, Tensor(a!) whole, int[] columns, int rows, int tag, int "
     "slice_us) -> int", TORCH_BOX(&all_gather)},
    {"shared_broadcast(Tensor region, int rank, Tensor(a!) x, int tag, int slice_us) -> int", TORCH_BOX(&broadcast)},
    {"shared_bytes(int ranks, int buffer_bytes) -> int", TORCH_BOX(&bytes_of_region)},
    {"shared_begin(Tensor(a!) region, int ranks, int buffer_bytes, int spin_us) -> ()", TORCH_BOX(&begin)},
    {"shared_states(Tensor region, int rank) -> int[]", TORCH_BOX(&states)},
    {"shared_leave(Tensor region, int rank, int[] words) -> ()", TORCH_BOX(&leave)},
    {"shared_last_words(Tensor region, int rank) -> int[]", TORCH_BOX(&last_words)})

}  // namespace infuse
