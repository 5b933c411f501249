// Collectives of ranks on one host through shared memory, as PyTorch operators. region.h describes how ranks meet. An
// operation returns Outcome::waiting when its time slice is over and continues when called again, so that the caller
// can check for signals, ended processes and timeouts. Tensors must be contiguous and on the CPU, which
// parallel/shared_memory.py ensures.
#include <string>
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

Operation operation_of(Kind kind, const Tensor& x, int64_t tag) {
  Operation o{};
  o.kind = kind, o.type = int64_t(x.scalar_type()), o.tag = tag, o.dims = x.dim(), o.rest = x.numel();
  for (int64_t i = 0; i < std::min<int64_t>(o.dims, kDims); ++i) o.sizes[i] = x.size(i);
  return o;
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

// One chunk of a long array, `elements` at x: each rank sums its share of all buffers and writes the sum to its own
// buffer for the others.
Outcome sum_chunk(const Meeting& ranks, const Operation& operation, uint64_t signature, char* x, int64_t elements,
                  const Tensor& like) {
  const int64_t element = int64_t(like.element_size()), rank = ranks.rank();
  const Share mine = share_of(elements, rank, ranks.ranks());
  char* buffer = ranks.buffer(rank);
  Place& place = ranks.place();
  if (place.stage == 0) {
    copy(buffer, x, mine.begin * element);  // no other rank reads this rank's share before it is summed
    copy(buffer + mine.end * element, x + mine.end * element, (elements - mine.end) * element);
    ranks.publish(operation, signature);
    place.stage = 1;
  }
  if (place.stage == 1) {
    const Outcome outcome = ranks.gather();
    if (outcome != Outcome::done) return outcome;
    add_up(ranks, x, x, mine.begin, mine.end, like);
    copy(buffer + mine.begin * element, x + mine.begin * element, (mine.end - mine.begin) * element);
    ranks.publish(operation, signature);
    place.stage = 2;
  }
  const Outcome outcome = ranks.gather();
  if (outcome != Outcome::done) return outcome;
  for (int64_t r = 0; r < ranks.ranks(); ++r) {
    const Share share = share_of(elements, r, ranks.ranks());
    const int64_t begin = share.begin * element, bytes = (share.end - share.begin) * element;
    if (r != rank) copy(x + begin, ranks.buffer(r) + begin, bytes);
  }
  ranks.next_turn();
  return Outcome::done;
}

int64_t all_reduce(Tensor region, int64_t rank, Tensor x, int64_t tag, int64_t slice_us) {
  const Meeting ranks = meeting_of(region, rank, slice_us);
  const Operation operation = operation_of(Kind::sum, x, tag);
  const uint64_t signature = operation.signature();
  const int64_t bytes = bytes_of(x), buffer_bytes = ranks.buffer_bytes();
  char* data = static_cast<char*>(x.mutable_data_ptr());
  Place& place = ranks.place();
  if (bytes <= std::min(kTogetherBytes, buffer_bytes)) {
    if (place.stage == 0) {
      if (bytes) std::memcpy(ranks.buffer(rank), data, size_t(bytes));
      ranks.publish(operation, signature);
      place.stage = 1;
    }
    const Outcome outcome = ranks.gather();
    if (outcome != Outcome::done) return int64_t(outcome);
    add_up(ranks, data, data, 0, x.numel(), x);
    ranks.next_turn();
  } else {
    for (int64_t at = place.chunk * buffer_bytes; at < bytes; at = place.chunk * buffer_bytes) {
      const int64_t elements = std::min(buffer_bytes, bytes - at) / int64_t(x.element_size());
      const Outcome outcome = sum_chunk(ranks, operation, signature, data + at, elements, x);
      if (outcome != Outcome::done) return int64_t(outcome);
    }
  }
  place.chunk = 0;
  return int64_t(Outcome::done);
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
  Operation operation = operation_of(Kind::gather, whole, tag);
  std::vector<Columns> places;
  int64_t whole_bytes = 0, most = 0;
  for (const int64_t bytes : columns) {
    places.push_back({whole_bytes, bytes, 0});
    whole_bytes += bytes, most = std::max(most, rows * bytes);
    operation.rest = int64_t(uint64_t(operation.rest) * 1000003 + uint64_t(bytes));  // a hash: it may wrap
  }
  STD_TORCH_CHECK(bytes_of(whole) == rows * whole_bytes, "columns do not fit");
  for (Columns& place : places) place.whole_bytes = whole_bytes;
  const uint64_t signature = operation.signature();
  const char* data = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(whole.mutable_data_ptr());
  const int64_t buffer_bytes = ranks.buffer_bytes();
  Place& place = ranks.place();
  do {
    const int64_t at = place.chunk * buffer_bytes;
    const auto end = [&](int64_t r) { return std::max(at, std::min(at + buffer_bytes, rows * columns[size_t(r)])); };
    if (place.stage == 0) {
      copy(ranks.buffer(rank), data + std::min(at, bytes_of(x)), end(rank) - at);
      ranks.publish(operation, signature);
      place_piece(to, places[size_t(rank)], data + std::min(at, bytes_of(x)), at, end(rank));
      place.stage = 1;
    }
    const Outcome outcome = ranks.gather();
    if (outcome != Outcome::done) return int64_t(outcome);
    for (int64_t r = 0; r < ranks.ranks(); ++r) {
      if (r != rank) place_piece(to, places[size_t(r)], ranks.buffer(r), at, end(r));
    }
    ranks.next_turn();
  } while (place.chunk * buffer_bytes < most);
  place.chunk = 0;
  return int64_t(Outcome::done);
}

// Copies rank 0's x to all ranks.
int64_t broadcast(Tensor region, int64_t rank, Tensor x, int64_t tag, int64_t slice_us) {
  const Meeting ranks = meeting_of(region, rank, slice_us);
  const Operation operation = operation_of(Kind::broadcast, x, tag);
  const uint64_t signature = operation.signature();
  const int64_t bytes = bytes_of(x), buffer_bytes = ranks.buffer_bytes();
  char* data = static_cast<char*>(x.mutable_data_ptr());
  Place& place = ranks.place();
  do {
    const int64_t at = place.chunk * buffer_bytes, count = std::min(buffer_bytes, bytes - at);
    if (place.stage == 0) {
      if (rank == 0) copy(ranks.buffer(0), data + at, count);
      ranks.publish(operation, signature);
      place.stage = 1;
    }
    const Outcome outcome = ranks.gather();
    if (outcome != Outcome::done) return int64_t(outcome);
    if (rank != 0) copy(data + at, ranks.buffer(0), count);
    ranks.next_turn();
  } while (place.chunk * buffer_bytes < bytes);
  place.chunk = 0;
  return int64_t(Outcome::done);
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
  const uint64_t mine = ranks.operation(rank).signature();
  std::vector<int64_t> found;
  for (int64_t r = 0; r < ranks.ranks(); ++r) {
    const bool absent = ranks.absent(r);
    found.push_back(absent ? 1 : ranks.operation(r).signature() != mine ? 2 : 0);
  }
  return found;
}

std::string operation_in_words(Tensor region, int64_t rank, int64_t of) {
  static constexpr const char* kKinds[] = {"sum", "gather", "broadcast"};
  const Operation& o = meeting_of(region, rank).operation(of);
  const char* type = "another type";
  switch (ScalarType(o.type)) {
    case ScalarType::Float: type = "float32"; break;
    case ScalarType::Double: type = "float64"; break;
    case ScalarType::BFloat16: type = "bfloat16"; break;
    case ScalarType::Half: type = "float16"; break;
    case ScalarType::Long: type = "int64"; break;
    case ScalarType::Int: type = "int32"; break;
    case ScalarType::Byte: type = "uint8"; break;
    case ScalarType::Bool: type = "bool"; break;
    default: break;
  }
  std::string text = std::string(kKinds[int64_t(o.kind)]) + " of " + type + " [";
  for (int64_t i = 0; i < std::min<int64_t>(o.dims, kDims); ++i) text += (i ? ", " : "") + std::to_string(o.sizes[i]);
  return text + (o.dims > kDims ? ", ...]" : "]");
}

// Records that this rank has left, and why.
void leave(Tensor region, int64_t rank, std::string words) {
  Post& mine = meeting_of(region, rank).post(rank);
  if (mine.word_bytes.load(std::memory_order_relaxed)) return;
  const size_t bytes = std::min(words.size(), size_t(kWords));
  std::memcpy(mine.words, words.data(), bytes);
  mine.word_bytes.store(int64_t(bytes), std::memory_order_release);
}

// Why a rank left; empty if it has not.
std::string last_words(Tensor region, int64_t rank) {
  const Post& post = meeting_of(region, rank).post(rank);
  return std::string(post.words, size_t(std::min<int64_t>(post.word_bytes.load(std::memory_order_acquire), kWords)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(infuse_cpu, m) {
  m.def("shared_all_reduce(Tensor region, int rank, Tensor(a!) x, int tag, int slice_us) -> int");
  m.def(
      "shared_all_gather(Tensor region, int rank, Tensor x, Tensor(a!) whole, int[] columns, int rows, int tag,"
      " int slice_us) -> int");
  m.def("shared_broadcast(Tensor region, int rank, Tensor(a!) x, int tag, int slice_us) -> int");
  m.def("shared_bytes(int ranks, int buffer_bytes) -> int");
  m.def("shared_begin(Tensor(a!) region, int ranks, int buffer_bytes, int spin_us) -> ()");
  m.def("shared_states(Tensor region, int rank) -> int[]");
  m.def("shared_operation(Tensor region, int rank, int of) -> str");
  m.def("shared_leave(Tensor region, int rank, str words) -> ()");
  m.def("shared_last_words(Tensor region, int rank) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(infuse_cpu, CompositeExplicitAutograd, m) {
  m.impl("shared_all_reduce", TORCH_BOX(&all_reduce));
  m.impl("shared_all_gather", TORCH_BOX(&all_gather));
  m.impl("shared_broadcast", TORCH_BOX(&broadcast));
  m.impl("shared_bytes", TORCH_BOX(&bytes_of_region));
  m.impl("shared_begin", TORCH_BOX(&begin));
  m.impl("shared_states", TORCH_BOX(&states));
  m.impl("shared_operation", TORCH_BOX(&operation_in_words));
  m.impl("shared_leave", TORCH_BOX(&leave));
  m.impl("shared_last_words", TORCH_BOX(&last_words));
}

}  // namespace infuse
