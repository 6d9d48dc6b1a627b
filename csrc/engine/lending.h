// Whether ranks lend their tensors, for peers to read where they are, or copy them to their slots. What is faster
// depends on which caches their cores share, and the operating system moves ranks from core to core. So both ways are
// tried from time to time, on all ranks in the same calls, and each rank goes on with what was faster for it. Ranks
// need not agree: a slot says where its value is.
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

class Lending {
 public:
  // Whether the next call of `operation` lends, over values of `bytes`.
  bool lends(Operation operation, std::size_t bytes) {
    const Kind& it = kinds_[{operation, std::bit_width(bytes)}];
    const bool tries = it.calls < kFirstTrials || it.calls % kTrialEvery < 2;
    return tries ? it.calls % 2 == 0 : it.lent.least() <= it.copied.least();
  }

  // For how long that call has moved data on this rank, apart from waiting. All ranks make the same calls in the same
  // order, so they count alike.
  void note(Operation operation, std::size_t bytes, bool lent, Nanoseconds spent) {
    Kind& it = kinds_[{operation, std::bit_width(bytes)}];
    (lent ? it.lent : it.copied).add(spent);
    ++it.calls;
  }

 private:
  // The first calls are trials, of which the very first ones bring in memory that nobody has used before. Then two of
  // so many are: the slower way may take three times as long.
  static constexpr std::uint64_t kFirstTrials = 4, kTrialEvery = 128;
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
    std::uint64_t calls = 0;
    Latest lent, copied;
  };

  std::map<std::pair<Operation, int>, Kind> kinds_;  // by the operation, and the size up to a factor of two
};

}  // namespace ringreduce
