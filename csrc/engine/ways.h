// The ways in which a rank passes a value to ranks of its host, and which of them is the fastest now. All ranks try
// them in the same calls, and each rank goes on with what was the fastest for it. Ranks need not agree: a slot says
// where its value is.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "core/fastest.h"
#include "engine/call.h"

namespace ringreduce {

enum class Way : std::uint8_t {
  lend,    // the peers read it where it is
  copy,    // it is copied to a slot, and stays in this core's caches
  stream,  // it is copied to a slot past the caches
};

// Smaller values are copied.
inline constexpr std::size_t kLeastStreamed = 4096;

class Ways {
 public:
  struct Next {
    Way way;
    bool timed;  // note() wants to hear of it
  };
  // Of the next call of `operation` over values of `bytes`. All ranks make the same calls in the same order, so they
  // count alike.
  Next next(Operation operation, std::size_t bytes) {
    const auto [way, timed] = of(operation, bytes).next();
    return {static_cast<Way>(way), timed};
  }
  // For how long that call has moved data on this rank, apart from waiting.
  void note(Operation operation, std::size_t bytes, Way way, Nanoseconds spent) {
    of(operation, bytes).note(static_cast<std::size_t>(way), spent);
  }

 private:
  Fastest<3>& of(Operation operation, std::size_t bytes) { return kinds_[{operation, std::bit_width(bytes)}]; }

  std::map<std::pair<Operation, int>, Fastest<3>> kinds_;  // by the operation, and the size up to a factor of two
};

}  // namespace ringreduce
