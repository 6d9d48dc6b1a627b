// The GPU's interpreter on a CPU: all ranks of a group in one process, a thread for every block. For the stress program
// and, by way of ctypes, for tests/unit/test_gpu_interpreter.py.
#pragma once

#include "engine/gpu/run.h"

namespace ringreduce::gpu {

extern "C" {

// One call by all ranks. Arrays are per rank.
struct GroupCall {
  const std::int32_t* lowered;  // the plan
  std::uint64_t words;
  const char* kernel;  // a row of the table
  std::int32_t operation, size, root, channels;
  std::uint32_t element, parts, lanes, depth, slot_bytes;
  std::uint32_t stepwise;  // 1: as ranks do that share a GPU
  std::uint32_t launches;  // how often the call is made
  std::uint32_t scaled;
  std::uint64_t slice, largest, timeout;
  double divisor;
  const double* factors;
  const std::uint64_t* fingerprints;
  const std::int32_t* absent;  // 1: this rank never makes the call
  const Tensors *inputs, *outputs;
  Report* reports;
};

// Returns 0, or 1 if the plan is malformed.
int run_plan(const GroupCall* call);

}  // extern "C"

}  // namespace ringreduce::gpu
