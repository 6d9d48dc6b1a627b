// The ways in which a rank passes a value to ranks of its host, and stores what it takes, and which of them is the
// fastest now. All ranks try them in the same calls, and each rank goes on with what was the fastest for it. Ranks need
// not agree: a slot says where its value is.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

#include "core/clock.h"
#include "core/fastest.h"
#include "engine/call.h"
#include "engine/operator.h"

namespace ringreduce {

enum class Way : std::uint8_t {
  lend,        // the peers read it where it is
  copy,        // it is copied to a slot, and stays in this core's caches
  stream,      // it is copied to a slot past the caches
  stream_out,  // as `copy`, but outputs are stored past the caches; only in calls that do not reduce
};

class Ways {
 public:
  // The way for the next call like this one, over `bytes`, and whether its time is to be reported to note(). All ranks
  // make the same calls in the same order, so they count alike.
  std::pair<Way, bool> next(const Call& call, std::size_t bytes) {
    if (choices_.size() > kMost) choices_.clear();  // on all ranks, as the calls are the same
    const auto [number, timed, trial] = of(call, bytes).next();
    const auto way = static_cast<Way>(number);
    // A rank that lends spends no time itself; its readers do. So lending is timed only in trials, in which all ranks
    // lend at once.
    return {way, way == Way::lend ? trial : timed};
  }
  // For how long that call has moved data on this rank, and has waited for others to read what it lent.
  void note(const Call& call, std::size_t bytes, Way way, Nanoseconds spent) {
    of(call, bytes).note(static_cast<std::size_t>(way), spent * 1000 / static_cast<std::int64_t>(bytes));
  }

 private:
  static constexpr std::size_t kMost = 1000;  // more only by operators that are made anew all the time
  using Choice = Fastest<4>;

  Choice& of(const Call& call, std::size_t bytes) {
    return choices_[{call.operation, std::bit_width(bytes), call.op == nullptr ? 0 : call.op->digest}];
  }

  // By the operation, the size up to a factor of two, and the user's operator.
  std::map<std::tuple<Operation, int, std::uint64_t>, Choice> choices_;
};

}  // namespace ringreduce
