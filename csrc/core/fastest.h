// Which of several ways to do the same thing is the fastest now. That depends on which caches the cores share, and both
// the operating system and a hypervisor move threads from core to core. So all ways are tried from time to time, and
// calls in between go the way that was the fastest.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/clock.h"

namespace ringreduce {

template <std::size_t kWays>
class Fastest {
 public:
  struct Next {
    std::size_t way;
    bool timed;  // note() wants to hear of it
  };
  Next next() {
    const std::uint64_t call = calls_++;
    if (call < kFirstTrials || call % kTrialEvery < kWays) return {call % kWays, true};
    const auto best = static_cast<std::size_t>(std::ranges::min_element(spent_, {}, &Latest::least) - spent_.begin());
    if (chosen_ != best) since_ = call;
    chosen_ = best;
    // What was fast in a trial need not be so in the calls after it, which find its own data in the caches.
    return {best, call - since_ < kKept || call % kTimedEvery == 0};
  }

  // How long a call took.
  void note(std::size_t way, Nanoseconds spent) { spent_[way].add(spent); }

 private:
  // The first calls are trials, of which the very first ones bring in memory that nobody has used before. Then a few of
  // so many are: the slowest way may take eight times as long. Both are multiples of the number of ways.
  static constexpr std::uint64_t kFirstTrials = 2 * kWays, kTrialEvery = 128 * kWays, kTimedEvery = 8;
  // The least of the latest calls counts: a thread may lose its core in the others.
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

  std::uint64_t calls_ = 0, since_ = 0;  // since_: the call from which on the chosen way is used
  std::size_t chosen_ = kWays;
  std::array<Latest, kWays> spent_;
};

}  // namespace ringreduce
