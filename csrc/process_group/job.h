// A job: one call of the engine with the tensors of a collective, laid out for it in blocks.
//
// The engine moves blocks of memory, one for each rank or one in all, in c10d's order; flat tensors are cut into them.
// Tensors that are not contiguous are staged: their values are copied to memory that is, and results are copied back
// when the job has run. Copied are also inputs that an output would overwrite before they are read.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "engine/engine.h"
#include "process_group/arguments.h"

namespace ringreduce {

// What a collective is, apart from its tensors.
struct Collective {
  Operation operation;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  int root = 0;
  const c10d::ReduceOp* op = nullptr;            // of those that reduce
  bool flat_input = false, flat_output = false;  // that side is one tensor, to be cut in a block for each rank
};

// One side of a call: data[i] points to count[i] elements.
struct Blocks {
  std::vector<std::byte*> data;
  std::vector<std::size_t> count;
};

// A contiguous tensor as blocks of these sizes, one after the other.
Blocks cut(const at::Tensor& flat, std::vector<std::size_t> counts);

struct Job {
  // On rank `rank` of `size`. Throws invalid_argument for tensors that do not suit the collective or each other.
  Job(const Collective& collective, const TensorList& from, const TensorList& to, int rank, int size);

  // Makes the call, in the calling thread, and fills the user's outputs.
  Tally run(Engine& engine);

  Call call;
  TensorList inputs, outputs;  // contiguous
  TensorList targets;          // the user's outputs; those that are not outputs[i] itself are filled at the end
  Blocks input, output;
  std::vector<std::size_t> splits;  // see Buffers::splits
  bool agreed = true;               // whether ranks know the sizes of each other's blocks
};

}  // namespace ringreduce
