// The order in which ranks take the batches of a plan where one stream takes them for several: one of a plan's many
// orders that work, the same on all ranks.
//
// Ranks that share a GPU must not wait for one another in kernels, which may not find room side by side, nor in streams
// of their own, of which the driver may put several in one hardware queue. So there is one stream for all ranks of a
// process on a GPU, which takes their batches in this order, and waits only for ranks of other processes. As all
// processes take their ranks' batches in the same order of the whole group, no circle of streams can wait for itself:
// the earliest batch that has not been taken waits for none.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/gpu/batches.h"
#include "engine/program.h"

namespace ringreduce {

struct Turn {
  int rank;
  std::uint32_t batch;  // among the rank's of all channels, one channel after the other
};

// All batches of one round of a plan, whose parts `programs` has for every rank, and `batches` for every rank and
// channel, with `depth` slots an outbox. Every batch comes after those that send what it takes and after those that
// take what its slots held. Rounds may follow each other: none leaves anything in a slot. Throws invalid_argument if
// there is no such order.
std::vector<Turn> order_of_turns(const std::vector<Program>& programs, const std::vector<std::vector<Batches>>& batches,
                                 std::uint32_t depth);

}  // namespace ringreduce
