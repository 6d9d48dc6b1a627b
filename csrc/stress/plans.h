// Plans as ringreduce.plan.lower would give them, for groups without Python.
#pragma once

#include <cstdint>
#include <vector>

namespace ringreduce::stress {

using Lowered = std::vector<std::int32_t>;

Lowered one_shot(int size);   // all_reduce in one hop
Lowered two_shot(int size);   // all_reduce as reduce_scatter and all_gather, both direct
Lowered ring(int size);       // all_reduce over a ring
Lowered two_rings(int size);  // the same over a ring and its reverse, two channels, the first with twice the share
Lowered broadcast(int size);  // one hop from rank 0

}  // namespace ringreduce::stress
