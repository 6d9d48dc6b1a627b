// The GPU's interpreter on a CPU: all ranks of a group in one process, a thread or more for every block. For the stress
// program and, by way of ctypes, for tests/unit/test_gpu_interpreter.py.
#pragma once

#include "engine/gpu/run.h"

namespace ringreduce::gpu {

#pragma GCC visibility push(default)  // for ctypes
extern "C" {

// The regions of all ranks.
struct Group;
Group* make_group(std::uint32_t ranks, std::uint32_t lanes, std::uint32_t depth, std::uint32_t slot_bytes);
void drop_group(Group* group);

// Words in use: notices that say full, slots taken, ranks that are broken. 0 if all calls have ended well.
std::uint64_t words_in_use(Group* group);
// Among the words of `owner`.
Notice* notice(Group* group, std::uint32_t owner, std::uint32_t lane, std::uint32_t writer, std::uint32_t slot);
std::uint64_t* broken_word(Group* group, std::uint32_t rank);

// One call by all ranks. Arrays are per rank.
struct GroupCall {
  const std::int32_t* lowered;  // the plan
  std::uint64_t words;
  const char* kernel;  // a row of the table
  std::int32_t operation, root, channels;
  std::uint32_t element, parts, lanes;
  std::uint32_t launches;  // how often the call is made
  std::uint64_t slice, largest, timeout;
  double divisor;
  const double* factors;
  const std::uint64_t* fingerprints;
  const bool* absent;            // this rank never makes the call
  const std::uint32_t* batches;  // of each rank, channel and step, the number of its batch; null: those there are
  const Tensors *inputs, *outputs;
  Report* reports;
  std::uint64_t*
      unlike;  // how often a block computed elements one by one, since its operands do not lie alike; or null
  bool weighs;
  bool scaled;
  bool stepwise;  // as ranks do that share a GPU
  bool threaded;  // every thread of a block is one of the CPU
};

// Both return false if the plan is malformed.
bool make_call(Group* group, const GroupCall* call);
// One batch of one rank that shares its GPU, as it is: nobody waits.
bool launch_batch(Group* group, const GroupCall* call, std::uint32_t rank, std::uint32_t round, std::uint32_t batch);
// How many words it waits for.
std::uint32_t waits_of_batch(Group* group, const GroupCall* call, std::uint32_t rank, std::uint32_t round,
                             std::uint32_t batch);

}  // extern "C"
#pragma GCC visibility pop

}  // namespace ringreduce::gpu
