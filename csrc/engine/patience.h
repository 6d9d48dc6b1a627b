// The number of looks and yields for which a waiting rank keeps its core. engine/wait.h uses it.
#pragma once

#include <climits>

namespace ringreduce {

struct Patience {
  int looks = 50;        // before it yields its core to other threads
  int yields = INT_MAX;  // before it sleeps; after a millisecond it sleeps in any case
  // Whether in small calls the looks depend on the other ranks of the core instead: see Placement.
  bool looks_by_mates = false;
};

}  // namespace ringreduce
