// What a process outside of a group can see of its ranks on this host, for `ringreduce top`. Looking costs the ranks
// nothing: they write for their peers what is read here.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"

namespace ringreduce {

struct RankSeen {
  int rank = 0;  // in the group
  int global_rank = 0;
  std::int64_t pid = 0;
  bool left = false;            // it takes no further part
  std::uint64_t entered = 0;    // calls that it has begun
  std::uint64_t completed = 0;  // and ended
  int waits_for = -1;           // the rank that it waits for in a call; -1: it is not seen to wait
  Nanoseconds since_sign = 0;   // how long ago it last said that it waits; of no use while it has never
  std::string call;             // its latest call in words, "" if there is none
  std::uint64_t number = 0;     // of that call, as the program counts
  std::vector<std::pair<std::uint64_t, std::uint64_t>> recent;  // of its latest calls: number, bytes of a block
};

struct GroupSeen {
  std::string name, job;        // see Segment::Title
  int size = 0;                 // ranks, those on other hosts included
  std::vector<RankSeen> ranks;  // that share the memory
};

// The group that has the memory `memfd`, a descriptor that stays the caller's; without ranks if these have not met yet.
// Throws invalid_argument if that is no memory of a group, or one of another version.
GroupSeen observe(int memfd);

}  // namespace ringreduce
