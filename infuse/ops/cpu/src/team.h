// Threads for the loops of one operator. PyTorch's parallel_for wakes its threads for each loop, which takes 3 to 5 us;
// a team wakes them once, and they poll for the loops of the calling thread until its work is finished.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <limits>

#include "region.h"

namespace infuse {

class Team {
 public:
  // The team that the calling thread leads, or null.
  static Team* led() { return leading(); }
  int64_t threads() const { return threads_; }

  // Calls work() on the calling thread. Until it returns, loops by `parallel_for` below run on a team.
  template <class F>
  static void together(const F& work) {
    const int64_t threads = torch::stable::get_num_threads();
    if (threads == 1 || leading()) return work();
    Team team(threads);
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      if (begin == 0) {
        team.lead(work);
      } else {
        team.follow();
      }
    });
  }

  // Calls run(i) for each i below `count`, on all threads; returns when all calls have returned.
  template <class F>
  void loop(int64_t count, const F& run) {
    leading() = nullptr;  // loops inside `run` run on its thread
    run_ = [](const void* f, int64_t i) { (*static_cast<const F*>(f))(i); };
    context_ = &run;
    left_.store(count, std::memory_order_relaxed);
    const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> kLoop) + 1;
    ticket_.store(loop << kLoop | uint64_t(count) << kCount, std::memory_order_release);
    take();
    wait_until([&] { return left_.load(std::memory_order_acquire) == 0; });
    leading() = this;
    if (failed_.exchange(false, std::memory_order_acq_rel)) throw std::runtime_error(failure_);
  }

 private:
  // A ticket is the number of the loop, how many calls it has, and the next one that a thread may take. A thread that
  // takes one keeps the loop open until it has made the call; a late thread finds none.
  static constexpr int kLoop = 32, kCount = 16;
  static constexpr int64_t kWaitUs = 200;  // of polling, before other processes may run

  explicit Team(int64_t threads) : threads_(threads) {}
  static Team*& leading() {
    thread_local Team* team = nullptr;
    return team;
  }
  template <class Ready>
  static void wait_until(const Ready& ready) {
    Patience patience(kWaitUs, std::numeric_limits<int64_t>::max());
    while (!ready()) patience.wait();
  }

  template <class F>
  void lead(const F& work) {
    struct Lead {
      Team& team;
      explicit Lead(Team& t) : team(t) { leading() = &t; }
      ~Lead() {
        leading() = nullptr;
        team.finished_.store(true, std::memory_order_release);
      }
    } lead(*this);
    work();
  }
  void follow() {
    while (!finished_.load(std::memory_order_acquire)) {
      wait_until([&] { return any() || finished_.load(std::memory_order_acquire); });
      take();
    }
  }
  static bool open(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> kCount & 0xffff); }
  bool any() const { return open(ticket_.load(std::memory_order_acquire)); }
  void take() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (open(ticket)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      try {
        run_(context_, int64_t(ticket & 0xffff));
      } catch (const std::exception& failure) {
        if (!failed_.exchange(true, std::memory_order_acq_rel)) failure_ = failure.what();
      } catch (...) {
        if (!failed_.exchange(true, std::memory_order_acq_rel)) failure_ = "a loop of a kernel failed";
      }
      left_.fetch_sub(1, std::memory_order_acq_rel);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  int64_t threads_;
  void (*run_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  std::string failure_;  // not an exception_ptr, whose functions not every C++ runtime exports
  std::atomic<bool> failed_{false};
  alignas(kLine) std::atomic<uint64_t> ticket_{0};
  alignas(kLine) std::atomic<int64_t> left_{0};
  alignas(kLine) std::atomic<bool> finished_{false};
};

// The threads that a loop of the calling thread may use.
inline int64_t thread_count() {
  const Team* team = Team::led();
  return team ? team->threads() : int64_t(torch::stable::get_num_threads());
}

// Calls run(begin, end) for parts of [begin, end) of at least `grain`, on several threads.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& run) {
  Team* team = Team::led();
  if (!team) return torch::stable::parallel_for(begin, end, grain, run);
  const int64_t size = end - begin, parts = std::min((size + grain - 1) / std::max<int64_t>(grain, 1), team->threads());
  if (size <= 0) return;
  if (parts <= 1) return run(begin, end);
  team->loop(parts, [&](int64_t i) { run(begin + size * i / parts, begin + size * (i + 1) / parts); });
}

}  // namespace infuse
