// What a rank that has waited for long tells its user about the ranks that it waits for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "core/clock.h"
#include "transport/team.h"

namespace ringreduce {

// When a wait is told: `first` after it began, then when it has doubled, but at most ten times `first` later. The waits
// of Python have the same rule (coordination/wait.py).
class Reminder {
 public:
  bool due(Nanoseconds waited, Nanoseconds first) {
    if (waited < (told_ == 0 ? first : told_ + std::min(told_, 10 * first))) return false;
    told_ = waited;
    return true;
  }

 private:
  Nanoseconds told_ = 0;
};

// The rank that another is seen to wait for, by what that one tells; -1 if it has not said so for `lately`.
inline int seen_to_wait_for(const std::atomic<std::int32_t>& waiting_for, const std::atomic<Nanoseconds>& heartbeat,
                            int ranks, Nanoseconds lately) {
  const bool waits = now() - heartbeat.load(std::memory_order_acquire) < lately;
  const int peer = waiting_for.load(std::memory_order_acquire);
  return waits && peer >= 0 && peer < ranks ? peer : -1;
}

// "Rank 3", where it begins a sentence.
inline std::string begins_with(const Team& team, int rank) { return "R" + team.fate().number(rank).substr(1); }

// `rank 0 has waited 60.0 s for rank 1, and will wait 1740.0 s more`. `whom`: those who are waited for, in words.
std::string still_waits(const Team& team, Nanoseconds waited, const std::string& whom, Nanoseconds left);

// ` of group "tp" (4 ranks)`
std::string of_group(const Team& team);

// What this process sees of a rank that does not come: whether its process is stopped, and the other call that it is
// in, if this process is in the group of that call too. Sentences after a space, or nothing.
std::string doings(const Team& team, int rank);

}  // namespace ringreduce
