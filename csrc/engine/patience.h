// The number of looks and yields for which a waiting rank keeps its core. engine/wait.h uses it.
#pragma once

#include <climits>

namespace ringreduce {

struct Patience {
  int looks = 50;        // before it yields its core to other threads
  int yields = INT_MAX;  // before it sleeps; after a millisecond it sleeps in any case
  bool by_core = false;  // in small calls, how often it looks depends on the other ranks of its core: see Placement
};

}  // namespace ringreduce
