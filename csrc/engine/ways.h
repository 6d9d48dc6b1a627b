// The ways in which a rank passes a value to ranks of its host, and which of them is the fastest now. That depends on
// which caches the cores share, and both the operating system and a hypervisor move ranks from core to core. So all are
// tried from time to time, by all ranks in the same calls, and each rank goes on with what was the fastest for it.
// Ranks need not agree: a slot says where its value is.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "core/clock.h"
#include "engine/call.h"

namespace ringreduce {

// Values of fewer bytes are not worth the choice.
inline constexpr std::size_t kLeastStreamed = 4096;

enum class Way : std::uint8_t {
  lend,    // the peers read it where it is
  copy,    // it is copied to a slot, and stays in this core's caches
  stream,  // it is copied to a slot past the caches
};

class Ways {
 public:
  struct Next {
    Way way;
    bool timed;  // note() wants to hear of it
  };
  // Of the next call of `operation` over values of `bytes`. All ranks make the same calls in the same order, so they
  // count alike.
  Next next(Operation operation, std::size_t bytes) {
    Kind& it = kinds_[{operation, std::bit_width(bytes)}];
    const std::uint64_t call = it.calls++;
    if (call < kFirstTrials || call % kTrialEvery < kWays) return {static_cast<Way>(call % kWays), true};
    const auto best = std::ranges::min_element(it.spent, {}, &Latest::least) - it.spent.begin();
    if (it.chosen != best) it.since = call;
    it.chosen = best;
    // What was fast in a trial need not be so in the calls after it, which find its own values in the caches.
    return {static_cast<Way>(best), call - it.since < kKept || call % kTimedEvery == 0};
  }

  // How long a call has taken.
  void note(Operation operation, std::size_t bytes, Way way, Nanoseconds spent) {
    kinds_[{operation, std::bit_width(bytes)}].spent[static_cast<std::size_t>(way)].add(spent);
  }

 private:
  static constexpr std::size_t kWays = 3;
  // The first calls are trials, of which the very first ones bring in memory that nobody has used before. Then a few of
  // so many are: the slowest way may take five times as long. Both are multiples of the number of ways.
  static constexpr std::uint64_t kFirstTrials = 6, kTrialEvery = 384, kTimedEvery = 8;
  // The least of the latest calls counts: a rank may lose its core in the others.
  static constexpr std::size_t kKept = 3;

  class Latest {
   public:
    Latest() { spent_.fill(kForever); }
    void add(Nanoseconds spent) { spent_[next_++ % kKept] = spent; }
    Nanoseconds least() const { return *std::ranges::min_element(spent_); }

   private:
    std::array<Nanoseconds, kKept> spent_;
    std::size_t next_ = 0;
  };
  struct Kind {
    std::uint64_t calls = 0, since = 0;  // since: the call from which on the chosen way is used
    std::ptrdiff_t chosen = -1;
    std::array<Latest, kWays> spent;
  };

  std::map<std::pair<Operation, int>, Kind> kinds_;  // by the operation, and the size up to a factor of two
};

}  // namespace ringreduce
