// A shared-memory region of the ranks of one host, and how they meet in it. No PyTorch and no arithmetic here.
//
//   Header | Post of rank 0, 1, ... | Place of rank 0, 1, ... | two buffers of rank 0, two of rank 1, ...
//
// An operation is one or more turns. In a turn, a rank fills its buffer, posts a sequence number, waits until all ranks
// have posted it, and reads the others' buffers. Turns alternate between the two buffers, so no second meeting is
// needed before a buffer is refilled: a rank in turn t + 2 has seen all ranks post in turn t + 1, which each rank does
// only after it has finished reading in turn t. For the same reason no rank is more than one number ahead of another,
// so two slots are enough for the data posted with a number.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace infuse {

constexpr int kMostRanks = 32;
constexpr int kLine = 128;  // two cache lines: processors fetch the neighbour too
constexpr int kWords = 512;

enum class Outcome : int64_t { done, waiting, differs };

struct alignas(kLine) Header {
  int64_t ranks, buffer_bytes, spin_us;
};

// Written by its rank, read by all.
struct alignas(kLine) Post {
  std::atomic<uint64_t> sequence;
  uint64_t signatures[2];
  alignas(kLine) std::atomic<int64_t> word_bytes;
  char words[kWords];  // why the rank left
};

// A rank's progress within an operation. Only its own rank uses it; it is kept here because an operation returns when
// its time slice is over.
struct alignas(kLine) Place {
  uint64_t sequence, turn;
  int64_t chunk, stage;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline int64_t region_bytes(int64_t ranks, int64_t buffer_bytes) {
  return int64_t(sizeof(Header)) + ranks * int64_t(sizeof(Post) + sizeof(Place) + 2 * size_t(buffer_bytes));
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One wait. It polls often at first, then rarely: the other ranks arrive within microseconds in a decode step, but
// within seconds while a rank reads a prompt.
class Patience {
 public:
  Patience(int64_t spin_us, int64_t slice_us) : spin_us_(spin_us), slice_us_(slice_us) {}
  // Returns false when the time slice is over.
  bool wait() {
    if (spin_us_ > 0 && ++spins_ % 32) {
      relax();
      return true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (start_ == std::chrono::steady_clock::time_point()) start_ = now;
    const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(now - start_).count();
    if (us < spin_us_) {
      relax();
    } else if (us < kYieldUs) {
      spins_ = 31;
      sched_yield();
    } else if (us < slice_us_) {
      spins_ = 31;
      const timespec nap = {0, kNapNs};
      nanosleep(&nap, nullptr);
    } else {
      return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kYieldUs = 2000, kNapNs = 50000;
  int64_t spin_us_, slice_us_;
  uint32_t spins_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// The region as one rank sees it during one call.
class Meeting {
 public:
  Meeting(void* region, int64_t rank, int64_t slice_us) : base_(static_cast<char*>(region)), rank_(rank),
      slice_us_(slice_us) {}

  int64_t ranks() const { return header().ranks; }
  int64_t rank() const { return rank_; }
  int64_t buffer_bytes() const { return header().buffer_bytes; }
  Place& place() const { return places()[rank_]; }
  Post& post(int64_t rank) const { return reinterpret_cast<Post*>(base_ + sizeof(Header))[rank]; }
  char* buffer(int64_t rank) const {
    return reinterpret_cast<char*>(places() + ranks()) + (2 * rank + int64_t(place().turn & 1)) * buffer_bytes();
  }

  // Announces that this rank has reached the next sequence number.
  void publish(uint64_t signature) const {
    Post& mine = post(rank_);
    const uint64_t next = ++place().sequence;
    mine.signatures[next & 1] = signature;
    mine.sequence.store(next, std::memory_order_release);
  }

  // Waits until all ranks have reached this sequence number or the time slice is over.
  Outcome gather() const {
    Patience patience(header().spin_us, slice_us_);
    for (int64_t r = 0; r < ranks(); ++r) {
      while (absent(r)) {
        if (!patience.wait()) return Outcome::waiting;
      }
    }
    for (int64_t r = 0; r < ranks(); ++r) {
      if (differs(r)) return Outcome::differs;
    }
    return Outcome::done;
  }

  bool absent(int64_t rank) const { return post(rank).sequence.load(std::memory_order_acquire) < place().sequence; }
  bool differs(int64_t rank) const {
    const uint64_t slot = place().sequence & 1;
    return post(rank).signatures[slot] != post(rank_).signatures[slot];
  }

  // Ends the turn; the next one uses the other buffers.
  void next_turn() const {
    Place& place = this->place();
    ++place.turn, ++place.chunk, place.stage = 0;
  }

 private:
  const Header& header() const { return *reinterpret_cast<const Header*>(base_); }
  Place* places() const { return reinterpret_cast<Place*>(base_ + sizeof(Header) + size_t(ranks()) * sizeof(Post)); }

  char* base_;
  int64_t rank_, slice_us_;
};

}  // namespace infuse
