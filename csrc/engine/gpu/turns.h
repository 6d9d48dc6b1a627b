// The order in which ranks take the steps of a plan where one stream takes them for several: one of a plan's many
// orders that work, the same on all ranks.
//
// Ranks that share a GPU must not wait for one another in kernels, which may not find room side by side, nor in streams
// of their own, of which the driver may put several in one hardware queue. So there is one stream for all ranks of a
// process on a GPU, which takes their steps in this order, and waits only for ranks of other processes. As all
// processes take their ranks' steps in the same order of the whole group, no circle of streams can wait for itself: the
// earliest step that has not been taken waits for none.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/program.h"

namespace ringreduce {

struct Turn {
  int rank;
  std::uint32_t channel, step;
};

// All steps of one round of a plan, whose parts `programs` has for every rank, with `depth` slots an outbox. Every step
// comes after those that send what it takes and after those that take what its slot held. Rounds may follow each other:
// none leaves anything in a slot. Throws invalid_argument if there is no such order.
std::vector<Turn> order_of_steps(const std::vector<Program>& programs, std::uint32_t depth);

}  // namespace ringreduce
