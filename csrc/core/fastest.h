// Which of several ways to do the same thing is the fastest now. That depends on which caches the cores share, and both
// the operating system and a hypervisor move threads from core to core. So all ways are tried from time to time, and
// calls in between go the way that was the fastest.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace ringreduce {

template <std::size_t kWays>
class Fastest {
 public:
  struct Next {
    std::size_t way;
    bool timed;  // its cost is to be reported to note()
    bool trial;
  };
  // The way for the next call.
  Next next() {
    const std::uint64_t call = calls_++;
    // The order of the trials turns. In a program whose calls repeat, the same call would have the same way otherwise.
    if (is_trial(call)) return {(call + call / kTrialEvery) % kWays, true, true};
    const auto best = static_cast<std::size_t>(std::ranges::min_element(costs_, {}, &Latest::least) - costs_.begin());
    if (chosen_ != best) since_ = call;
    chosen_ = best;
    // A trial finds the caches as another way has left them. So the calls right after it are timed, too.
    return {best, call - since_ < kKept || call % kTimedEvery == 0, false};
  }

  // What a call cost that went this way: time, or time for each byte.
  void note(std::size_t way, std::int64_t cost) { costs_[way].add(cost); }

 private:
  // The first calls are trials, of which the very first ones bring in memory that nobody has used before. Then a few of
  // so many are: the slowest way may take eight times as long. Two more rounds of trials come early, after a 16th and a
  // quarter of that: the first calls are often slow for other reasons.
  static constexpr std::uint64_t kTrialEvery = 128 * kWays, kTimedEvery = 8;
  static bool is_trial(std::uint64_t call) {
    if (call >= kTrialEvery) return call % kTrialEvery < kWays;
    return call < 2 * kWays || call - kTrialEvery / 16 < kWays || call - kTrialEvery / 4 < kWays;
  }
  // The least of the latest calls counts: a thread may lose its core in the others.
  static constexpr std::size_t kKept = 3;

  class Latest {
   public:
    Latest() { costs_.fill(std::numeric_limits<std::int64_t>::max()); }
    void add(std::int64_t cost) { costs_[next_++ % kKept] = cost; }
    std::int64_t least() const { return *std::ranges::min_element(costs_); }

   private:
    std::array<std::int64_t, kKept> costs_;
    std::size_t next_ = 0;
  };

  std::uint64_t calls_ = 0, since_ = 0;  // since_: the call from which on the chosen way is used
  std::size_t chosen_ = kWays;
  std::array<Latest, kWays> costs_;
};

}  // namespace ringreduce
