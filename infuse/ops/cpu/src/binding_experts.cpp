// A mixture's experts as one PyTorch operator: all products of all experts in one parallel region.
//
//   routes grouped by expert → up: pieces of all experts' rows → gate, by the thread that finishes an expert's last
//   piece → down: pieces of all experts' rows → each token's weighted sum
//
// Each thread walks one stretch of the experts' rows in both products, so it seldom waits for another's gate. Products
// are those of linear.h: an expert with few tokens streams its rows, one with many uses tiles. No result depends on the
// number of threads. ops/cpu/experts.py checks shapes, dtypes and layouts.
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "binding_layer.h"
#include "binding_linear.h"
#include "binding_ops.h"
#include "region.h"

namespace infuse {
namespace {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kStreamBytes = 1 << 16;     // of a piece that streams: 4 us of one thread
constexpr int64_t kRoomBytes = 1 << 28;       // of intermediate results; more tokens are processed in chunks
constexpr size_t kKeptBytes = 1 << 26;        // of them that a thread keeps between calls
constexpr int64_t kManyTokens = 32;           // from which on threads take whole jobs
constexpr int64_t kSumElements = 1 << 15;     // that a thread adds at once
constexpr int64_t kWaitUs = 50;               // of polling, before other processes may run

template <class Ready>
void wait_until(const Ready& ready) {
  Patience patience(kWaitUs, std::numeric_limits<int64_t>::max());
  while (!ready()) patience.wait();
}

int64_t element_bytes(Type type) { return type == Type::f32 ? 4 : 2; }

// A pointer's bytes from `at` on.
template <class T>
const T* beyond(const T* at, int64_t count) {
  return at ? at + count : nullptr;
}
const void* beyond(const void* at, int64_t bytes) { return beyond(static_cast<const char*>(at), bytes); }

// One of the two matrices of all experts.
struct Tall {
  LinearArgs all{};  // without x and y
  int64_t code = -1;  // -1: plain
  int64_t rows = 0;   // of each expert

  // Outputs before the first one of an expert: rows of the expert before it, in the same panel.
  int64_t lead(int64_t expert) const { return code < 0 ? 0 : expert * rows % kPanelRows; }
  // The products of one expert, `lead` outputs first.
  LinearArgs of(int64_t expert) const {
    const int64_t first = expert * rows - lead(expert);
    LinearArgs a = all;
    a.outputs = lead(expert) + rows;
    a.weight = beyond(a.weight, first * a.row_bytes);
    a.bias = beyond(a.bias, first * element_bytes(a.type));
    a.scale = beyond(a.scale, first * a.scale_bytes), a.zero = beyond(a.zero, first * a.groups);
    a.offset = beyond(a.offset, first * a.groups);
    return a;
  }
};

// Memory that is handed out from `base` on; without a base it only counts.
struct Room {
  char* base;
  size_t used = 0;

  void* take(int64_t bytes) {
    void* taken = base ? base + used : nullptr;
    used += (size_t(bytes) + 63) / 64 * 64;
    return taken;
  }
};

enum class Way { stream, tiles, integers };

// One product of one expert.
struct Product {
  LinearArgs args{};
  int64_t code = -1, lead = 0;
  Way way = Way::stream;
  bool finite = true;

  Product() = default;
  Product(const Tall& tall, int64_t expert, int64_t count, bool may_round)
      : args(tall.of(expert)), code(tall.code), lead(tall.lead(expert)) {
    args.rows = count;
    way = may_round && code >= 0 && takes_integers(args, code) ? Way::integers : exact_way();
  }

  Way exact_way() const {
    if (args.type != Type::bf16 || args.inputs % 2 || !tiles_of(Way::tiles).multiply) return Way::stream;
    return args.rows > most_streamed() ? Way::tiles : Way::stream;
  }
  int64_t most_streamed() const {
    if (code < 0) return few_plain_rows();
    if (!amx_multiplies() || left_to_pytorch(Type::bf16)) return kFewRows;
    return args.code == Code::int8 ? kFewRowsAmxBytes : kFewRowsAmx;
  }
  const TileKernels& tiles_of(Way of) const {
    if (code < 0) return kernels().linear.tiles.bf16;
    return of == Way::integers ? kernels().panels.integer_tiles : kernels().panels.tiles.bf16;
  }
  const TileKernels& tiles() const { return tiles_of(way); }

  int64_t columns() const { return args.gated ? args.outputs / 2 : args.outputs; }
  // Columns of y that a thread computes at once.
  int64_t piece() const {
    if (way == Way::stream) {
      const int64_t unit = code < 0 ? 12 : kPanelRows;
      return std::max<int64_t>(kStreamBytes / std::max<int64_t>(args.row_bytes, 1) / unit, 1) * unit;
    }
    return tiles().most_tiles(args) * tiles().tile_columns(args);
  }

  int64_t arranged_bytes() const {
    if (way != Way::stream) return int64_t(tiles().x_bytes(args)) + (way == Way::integers ? exact_bytes() : 0);
    return stream_bytes();
  }
  int64_t stream_bytes() const {
    return int64_t(code < 0 ? kernels().linear.scratch_bytes(args) : kernels().panels.scratch_bytes(args));
  }
  int64_t exact_bytes() const {
    const int64_t stream = stream_bytes();
    return exact_way() == Way::stream ? stream : std::max(stream, int64_t(tiles_of(Way::tiles).x_bytes(args)));
  }

  void arrange() {
    if (way == Way::integers) args.finite = &finite;
    if (way == Way::stream && code < 0) return kernels().linear.arrange(args);
    if (way == Way::stream) {
      const int64_t most = kernels().panels.few_rows;
      return kernels().panels.arrange(args, most, 0, (args.rows + most - 1) / most);
    }
    tiles().arrange(args, 0, (args.rows + tiles().block_rows - 1) / tiles().block_rows);
    args.finite = nullptr;
    if (!finite) finite = true, way = exact_way(), arrange();  // again, from the unrounded x
  }
  void multiply(int64_t begin, int64_t end) const {
    if (way == Way::stream) return (code < 0 ? kernels().linear.rows : kernels().panels.few)(args, begin, end);
    const int64_t width = tiles().tile_columns(args), count = (end - begin + width - 1) / width;
    auto* room = static_cast<uint32_t*>(scratch_of<Scratch::tile>(size_t(count) * tiles().tile_bytes(args)));
    tiles().multiply(args, begin, end, room);
  }
  void multiply() const {
    const int64_t size = piece(), end = columns();
    for (int64_t begin = 0; begin < end; begin += size) multiply(begin, std::min(begin + size, end));
  }
};

// One expert and some tokens that use it. `up` gives `products`, or directly `inner` if its kernel applies the gate.
struct Job {
  int64_t count = 0;
  const int64_t* tokens = nullptr;  // [count]
  Job* arranger = this;             // the job that arranges x for `up`
  Product up, down;
  void *products = nullptr, *inner = nullptr, *gathered = nullptr;
  std::atomic<int> arranged{0};   // x for `up`: 1 while a thread arranges it, then 2
  std::atomic<int64_t> left{0};   // pieces of `up` that are not finished
  std::atomic<bool> ready{false};  // x for `down`
};
struct Piece {
  Job* job;
  int64_t begin, end;
};

// What is the same for all tokens.
struct Experts {
  Tall up, down;
  ExpertGateArgs gate{};  // without rows
  int64_t count, routes, first;
  bool may_round;  // x is finite: products of x rounded to 8 bits may be used
  Type type;

  int64_t width() const { return up.all.inputs; }
  int64_t inner() const { return down.all.inputs; }
  bool unlimited() const { return gate.gate_limit == INFINITY && gate.act_limit == INFINITY && !gate.up_offset; }
};

// The products and sums of some tokens.
class Run {
 public:
  Run(const Experts& experts, const char* x, char* y, const int64_t* index, const float* weights, int64_t tokens)
      : e_(experts), x_(x), y_(y), tokens_(tokens) {
    group(index, weights);
    share();
    Room counted{nullptr};
    place(counted);
    Room room{memory(counted.used)};
    place(room);
    cut(&Job::up, ups_), cut(&Job::down, downs_);
    point(index);
  }

  void run() {
    int64_t bytes = 0;
    for (const Job& job : jobs_) {
      for (const Product* p : {&job.up, &job.down}) bytes += p->args.outputs * p->args.row_bytes;
    }
    const int64_t threads = bytes <= kOneThreadBytes ? 1 : most_threads();
    const int64_t at_once = std::max<int64_t>(1, kSumElements / std::max<int64_t>(1, e_.routes * e_.width()));
    const int64_t sums = (tokens_ + at_once - 1) / at_once;
    Stretches ups(int64_t(ups_.size()), threads), downs(int64_t(downs_.size()), threads), adds(sums, threads);
    std::atomic<int64_t> left{int64_t(alone_ + downs_.size())}, next{0};
    const auto add = [&](int64_t i) { weigh(i * at_once, std::min((i + 1) * at_once, tokens_)); };
    const auto work = [&](int64_t t) {
      bool last = false;
      for (size_t j; (j = size_t(next.fetch_add(1, std::memory_order_relaxed))) < alone_;) {
        finish(jobs_[j]);
        last = left.fetch_sub(1, std::memory_order_acq_rel) == 1;
      }
      ups.work(t, [&](int64_t p) { multiply_up(ups_[size_t(p)]); });
      downs.work(t, [&](int64_t p) {
        const Piece& piece = downs_[size_t(p)];
        wait_until([&] { return piece.job->ready.load(std::memory_order_acquire); });
        piece.job->down.multiply(piece.begin, piece.end);
        last = left.fetch_sub(1, std::memory_order_acq_rel) == 1;
      });
      if (sums == 1 && !jobs_.empty()) {
        if (last) add(0);
        return;
      }
      wait_until([&] { return left.load(std::memory_order_acquire) == 0; });
      adds.work(t, add);
    };
    parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) work(t);
    });
  }

 private:
  static int64_t most_threads() { return std::min<int64_t>(thread_count(), Stretches::kMost); }

  // Chooses the jobs that one thread finishes: its intermediate results stay in its core's cache. The others, which all
  // threads share, are as much as the other threads may have to wait for the last of those.
  void share() {
    int64_t largest = 0, rest = 0;
    for (const Job& job : jobs_) largest = std::max(largest, job.count);
    size_t shared = 0;
    while (shared < jobs_.size() && rest < most_threads() * largest) rest += jobs_[jobs_.size() - ++shared].count;
    alone_ = tokens_ < kManyTokens ? 0 : jobs_.size() - shared;
  }

  // Computes a job, alone.
  void finish(Job& job) const {
    Room counted{nullptr};
    place_job(job, counted);
    Room room{static_cast<char*>(scratch_of<Scratch::job>(counted.used))};
    place_job(job, room);
    gather(job);
    job.up.arrange();
    job.up.multiply();
    apply_gate(job);
    job.down.arrange();
    job.down.multiply();
  }

  // Memory for intermediate results. What is too large to keep is on large pages, which are faster to get.
  char* memory(size_t bytes) {
    if (bytes <= kKeptBytes) return static_cast<char*>(scratch_of<Scratch::experts>(bytes));
    constexpr size_t kPage = 1 << 21;
    bytes = (bytes + kPage - 1) / kPage * kPage;
    own_.reset(std::aligned_alloc(kPage, bytes));
#if defined(MADV_HUGEPAGE)
    madvise(own_.get(), bytes, MADV_HUGEPAGE);  // only a hint
#endif
    return static_cast<char*>(own_.get());
  }

  // Groups the routes by expert, in the order of experts, then of tokens.
  void group(const int64_t* index, const float* weights) {
    const int64_t routes = tokens_ * e_.routes;
    std::vector<int64_t> ends(size_t(e_.count) + 1, 0);
    place_.assign(size_t(routes), -1);
    for (int64_t r = 0; r < routes; ++r) {
      const int64_t expert = index[r] - e_.first;
      if (expert >= 0 && expert < e_.count) ++ends[size_t(expert) + 1];
    }
    for (int64_t expert = 0; expert < e_.count; ++expert) ends[size_t(expert) + 1] += ends[size_t(expert)];
    token_of_.resize(size_t(ends.back()));
    for (int64_t expert = 0; expert < e_.count; ++expert) {
      const int64_t begin = ends[size_t(expert)], count = ends[size_t(expert) + 1] - begin;
      if (count) add_jobs(expert, token_of_.data() + begin, count);
    }
    for (int64_t r = 0; r < routes; ++r) {
      const int64_t expert = index[r] - e_.first;
      if (expert < 0 || expert >= e_.count) continue;
      place_[size_t(r)] = ends[size_t(expert)]++;
      token_of_[size_t(place_[size_t(r)])] = r / e_.routes;
    }
    weights_ = weights;
  }

  // Splits an expert with more tokens than the cores' caches hold into jobs of nearly the same size.
  void add_jobs(int64_t expert, const int64_t* tokens, int64_t count) {
    const Product whole(e_.up, expert, count, e_.may_round);
    const int64_t most = whole.way == Way::stream ? count : 2 * whole.tiles().chunk_rows(whole.args);
    const int64_t parts = (count + most - 1) / most;
    for (int64_t p = 0; p < parts; ++p) {
      Job& job = jobs_.emplace_back();
      job.tokens = tokens + count * p / parts, job.count = count * (p + 1) / parts - count * p / parts;
      job.up = Product(e_.up, expert, job.count, e_.may_round);
      job.down = Product(e_.down, expert, job.count, e_.may_round);
    }
  }

  // Gives each job its memory; a job that one thread finishes, only that of its result.
  void place(Room& room) {
    Job* shared = nullptr;
    for (size_t j = 0; j < jobs_.size(); ++j) {
      Job& job = jobs_[j];
      if (tokens_ == 1 && job.count == 1) {  // all read the same x, arranged once
        if (!shared) shared = &job;
        job.arranger = shared;
      }
      if (j >= alone_) place_job(job, room);
      job.down.args.y = room.take(job.count * job.down.args.outputs * element_bytes(e_.type));
    }
  }
  void place_job(Job& job, Room& room) const {
    const int64_t bytes = element_bytes(e_.type);
    Product &up = job.up, &down = job.down;
    const bool one = tokens_ == 1 && job.count == 1;
    job.gathered = one ? nullptr : room.take(job.count * e_.width() * bytes);
    up.args.x = one ? static_cast<const void*>(x_) : job.gathered;
    job.inner = room.take(job.count * e_.inner() * bytes);
    fuse(up);
    job.products = up.args.activates ? nullptr : room.take(job.count * up.args.outputs * bytes);
    up.args.y = up.args.activates ? job.inner : job.products;
    up.args.scratch = job.arranger == &job ? room.take(up.arranged_bytes()) : job.arranger->up.args.scratch;
    down.args.x = job.inner;
    down.args.scratch = room.take(down.arranged_bytes());
    for (Product* p : {&up, &down}) p->args.ahead = p->way == Way::stream ? 0 : p->piece();
  }

  // Lets a product by tiles apply the gate, if its kernel can.
  void fuse(Product& up) const {
    if (up.way == Way::stream || up.lead || !e_.unlimited()) return;
    if (e_.gate.gated && up.code >= 0 && e_.inner() % kPanelRows) return;
    up.args.activates = true, up.args.gated = e_.gate.gated, up.args.act = e_.gate.act;
  }

  void cut(Product Job::* which, std::vector<Piece>& pieces) {
    for (size_t j = alone_; j < jobs_.size(); ++j) {
      Job& job = jobs_[j];
      const Product& product = job.*which;
      const int64_t size = product.piece(), columns = product.columns();
      if (which == &Job::up) job.left.store((columns + size - 1) / size, std::memory_order_relaxed);
      for (int64_t begin = 0; begin < columns; begin += size) {
        pieces.push_back({&job, begin, std::min(begin + size, columns)});
      }
    }
  }

  // Notes for each token the results of its experts and their weights.
  void point(const int64_t* index) {
    std::vector<const char*> rows(token_of_.size());
    const int64_t bytes = element_bytes(e_.type);
    size_t at = 0;
    for (const Job& job : jobs_) {
      const char* y = static_cast<const char*>(job.down.args.y) + job.down.lead * bytes;
      for (int64_t r = 0; r < job.count; ++r) rows[at++] = y + r * job.down.args.outputs * bytes;
    }
    from_.reserve(token_of_.size()), factors_.reserve(token_of_.size());
    ends_.reserve(size_t(tokens_) + 1);
    ends_.push_back(0);
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t r = t * e_.routes; r < (t + 1) * e_.routes; ++r) {
        if (place_[size_t(r)] < 0) continue;
        from_.push_back(rows[size_t(place_[size_t(r)])]), factors_.push_back(weights_[r]);
      }
      ends_.push_back(int64_t(from_.size()));
    }
  }

  void multiply_up(const Piece& piece) {
    Job& job = *piece.job;
    arrange(*job.arranger);
    job.up.multiply(piece.begin, piece.end);
    if (job.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    apply_gate(job);
    job.down.arrange();
    job.ready.store(true, std::memory_order_release);
  }

  // Arranges x for `up`, once.
  void arrange(Job& job) {
    int found = 0;
    if (job.arranged.load(std::memory_order_acquire) == 2) return;
    if (!job.arranged.compare_exchange_strong(found, 1, std::memory_order_acquire)) {
      return wait_until([&] { return job.arranged.load(std::memory_order_acquire) == 2; });
    }
    gather(job);
    job.up.arrange();
    job.arranged.store(2, std::memory_order_release);
  }

  void gather(const Job& job) const {
    const int64_t bytes = e_.width() * element_bytes(e_.type);
    for (int64_t r = 0; job.gathered && r < job.count; ++r) {
      std::memcpy(static_cast<char*>(job.gathered) + r * bytes, x_ + job.tokens[r] * bytes, size_t(bytes));
    }
  }

  // Computes `inner` from the products of `up`, unless their kernel did.
  void apply_gate(const Job& job) const {
    if (job.up.args.activates) return;
    ExpertGateArgs gate = e_.gate;
    gate.products = static_cast<const char*>(job.products) + job.up.lead * element_bytes(e_.type);
    gate.to = job.inner, gate.rows = job.count, gate.stride = job.up.args.outputs;
    kernels().experts.gate(gate);
  }

  void weigh(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = ends_[size_t(t)], count = ends_[size_t(t) + 1] - first;
      const WeighArgs a{reinterpret_cast<const void* const*>(from_.data()) + first, factors_.data() + first, count,
                        y_ + t * e_.width() * element_bytes(e_.type), e_.type};
      kernels().experts.weigh(a, 0, e_.width());
    }
  }

  const Experts& e_;
  const char* x_;
  char* y_;
  int64_t tokens_;
  const float* weights_ = nullptr;
  std::vector<int64_t> place_, token_of_, ends_;  // of a route among the grouped ones; its token; of a token's routes
  std::vector<const char*> from_;
  std::vector<float> factors_;
  std::deque<Job> jobs_;
  size_t alone_ = 0;  // jobs that one thread finishes, the first ones
  std::unique_ptr<void, Free> own_;
  std::vector<Piece> ups_, downs_;
};

Tall tall(const LinearPart& part, int64_t rows, Type type, bool once) {
  Tall made;
  made.code = part.code, made.rows = rows;
  LinearArgs& a = made.all;
  if (part.code < 0) {
    a.weight = part.weight->const_data_ptr();
    a.inputs = part.weight->size(1);
    a.row_bytes = a.inputs * int64_t(part.weight->element_size());
  } else {
    take_panels(a, *part.weight, *part.scale, part.zero, part.code, 0);
    a.row_bytes = a.inputs * bits_of(a.code) / 8;
  }
  a.bias = part.bias ? part.bias->const_data_ptr() : nullptr;
  a.type = type, a.once = once;
  return made;
}

// Whether all values are numbers: their exponents are not all ones.
bool all_finite(const Array& x) {
  const int64_t n = x.numel();
  if (type_of(x) == Type::f32) {
    const auto* bits = static_cast<const uint32_t*>(x.const_data_ptr());
    return std::none_of(bits, bits + n, [](uint32_t b) { return (b & 0x7f800000) == 0x7f800000; });
  }
  const auto* bits = static_cast<const uint16_t*>(x.const_data_ptr());
  const uint16_t ones = type_of(x) == Type::bf16 ? 0x7f80 : 0x7c00;
  return std::none_of(bits, bits + n, [ones](uint16_t b) { return (b & ones) == ones; });
}

void set_gate(ExpertGateArgs& gate, double limit, bool after) {
  const float most = limit > 0 ? float(limit) : INFINITY;
  gate.gate_limit = after ? INFINITY : most, gate.act_limit = after ? most : INFINITY, gate.up_limit = most;
}

// Whether many tokens of plain weights stream, which PyTorch's product does faster.
bool streams_many(const Experts& e) {
  constexpr int64_t kMany = 1 << 10;
  return e.up.code < 0 && Product(e.up, 0, kMany, false).way == Way::stream;
}

}  // namespace

bool sum_experts(const ExpertsPart& part, const Array& x, int64_t tokens, int64_t routes, const int64_t* index,
                 const float* weights, const Array& y, bool once) {
  const int64_t width = x.size(x.dim() - 1), rows = part.up_rows(), inner = part.inner;
  Experts e;
  e.type = type_of(x), e.routes = routes, e.first = part.first;
  e.up = tall(part.up, rows, e.type, once);
  e.down = tall(part.down, width, e.type, once);
  e.count = std::min(rows ? part.up.outputs / rows : 0, width ? part.down.outputs / width : 0);
  set_gate(e.gate, part.gated ? part.limit : 0, part.limit_after);
  e.gate.columns = inner, e.gate.act = Act(part.act), e.gate.gated = part.gated, e.gate.type = e.type;
  e.gate.up_offset = float(part.up_offset);
  e.may_round = part.up.code >= 0 && ((part.up.code | part.down.code) & kShortX) && all_finite(x);
  if (e.count && tokens * routes > kFewExpertRows * e.count && streams_many(e)) return false;
  const int64_t bytes = element_bytes(e.type);
  const int64_t of_token = (3 * width + rows + 3 * inner) * bytes * routes;
  const int64_t chunk = std::max<int64_t>(1, kRoomBytes / std::max<int64_t>(1, of_token));
  for (int64_t t = 0; t < tokens; t += chunk) {
    Run run(e, static_cast<const char*>(x.const_data_ptr()) + t * width * bytes,
            static_cast<char*>(y.mutable_data_ptr()) + t * width * bytes, index + t * routes, weights + t * routes,
            std::min(chunk, tokens - t));
    run.run();
  }
  return true;
}

namespace {

// A plain matrix alone, or the buffers of a quantized one in panels.
LinearPart matrix_of(const std::vector<Tensor>& buffers, const std::optional<Tensor>& bias, int64_t code) {
  // Panels may have missing rows; those of a missing expert, of fewer than 16 rows, are zero.
  const int64_t rows = buffers[0].size(0) * (code < 0 ? 1 : kPanelRows);
  const auto at = [&](size_t i) { return i < buffers.size() ? Maybe(buffers[i]) : std::nullopt; };
  return {code, rows, at(0), at(1), at(2), bias ? Maybe(*bias) : std::nullopt};
}

// x [T, H], index [T, k] int64, weights [T, k] float32; matrices and biases as in ops/experts.py, quantized ones in
// panels, with codes as in quantized_linear, -1 for plain ones. A limit of 0 is none. None if PyTorch multiplies so
// many tokens faster.
std::optional<Tensor> experts(Tensor x, Tensor index, Tensor weights, std::vector<Tensor> up,
                              std::optional<Tensor> up_bias, std::vector<Tensor> down, std::optional<Tensor> down_bias,
                              int64_t inner, int64_t up_code, int64_t down_code, int64_t act, bool gated, double limit,
                              bool limit_after, double up_offset, int64_t first) {
  const ExpertsPart part{inner, act, gated, limit_after, first, limit, up_offset,
                         matrix_of(up, up_bias, up_code), matrix_of(down, down_bias, down_code)};
  Tensor y = empty_as(x);
  const bool done = sum_experts(part, x, x.size(0), index.size(1), static_cast<const int64_t*>(index.const_data_ptr()),
                                static_cast<const float*>(weights.const_data_ptr()), Array::written(y), false);
  return done ? std::optional(y) : std::nullopt;
}

}  // namespace

INFUSE_OPERATORS(CPU,
    {"experts(Tensor x, Tensor index, Tensor weights, Tensor[] up, Tensor? up_bias, Tensor[] down, Tensor? down_bias,"
     " int inner, int up_code, int down_code, int act, bool gated, float limit, bool limit_after, float up_offset,"
     " int first) -> Tensor?",
     TORCH_BOX(&experts)})

}  // namespace infuse
