// A job: one call of the engine with the tensors of a collective, laid out for it in blocks.
//
// The engine moves blocks of memory, one for each rank or one in all, in c10d's order; flat tensors are cut into them.
// Tensors that are not contiguous, or not on the engine's device, are staged: their values are copied to memory that
// is, and results are copied back when the job has run. Copied are also inputs that an output would overwrite before
// they are read. Copies on a GPU are put in torch's current stream.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "engine/engine.h"
#include "engine/gpu/gpu_engine.h"
#include "process_group/arguments.h"

namespace ringreduce {

// A collective without its tensors.
struct Collective {
  c10d::OpType type = c10d::OpType::UNKNOWN;  // what c10d calls it
  Operation operation;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool async = false;
  int root = 0;
  const c10d::ReduceOp* op = nullptr;            // of those that reduce
  const Operator* own_op = nullptr;              // instead of it: the user's own
  bool flat_input = false, flat_output = false;  // that side is one tensor, to be cut in a block for each rank
  std::vector<std::int64_t> splits = {};         // for the log: see CallLog::Call
};

// One side of a call: data[i] points to count[i] elements.
struct Blocks {
  std::vector<std::byte*> data;
  std::vector<std::size_t> count;
};

// A contiguous tensor as blocks of these sizes, one after the other.
Blocks cut(const at::Tensor& flat, std::vector<std::size_t> counts);

// The device of all tensors of a call. Throws invalid_argument if there are several.
at::Device device_of(const TensorList& inputs, const TensorList& outputs, const char* what);

// Waits for all that is in torch's current stream of a GPU, for a call that goes through the host's memory.
void synchronize(at::Device device, std::string_view what);

struct Job {
  // On rank `rank` of `size`, for an engine that works on `device`. Throws invalid_argument for tensors that do not
  // suit the collective or each other.
  Job(const Collective& collective, const TensorList& from, const TensorList& to, int rank, int size,
      at::Device device);

  // all_to_all with split sizes: ranks tell each other the sizes of their blocks. Nothing otherwise. `host` is an
  // engine on the CPU.
  Tally agree(Engine& host);
  // Has the call read copies of its inputs, which may then be written over.
  void copy_inputs();
  // Makes the call in the calling thread, once sizes are agreed on, and fills the user's outputs.
  Tally run(Engine& engine);
  // Puts the call, and what fills the outputs, in `stream`, which is torch's current one.
  void enqueue(GpuEngine& engine, const cuda::Stream& stream);

  at::Device device;  // of the engine
  Call call;
  TensorList inputs, outputs;  // contiguous
  TensorList targets;          // the user's outputs; those that are not outputs[i] itself are filled at the end
  Blocks input, output;
  std::shared_ptr<Feedback> feedback;  // the call's
  std::vector<std::size_t> splits;     // see Buffers::splits
  bool agreed = true;                  // whether ranks know the sizes of each other's blocks

 private:
  void reduce_by(const Operator& op);
  Buffers buffers() const { return {{input.data, input.count}, {output.data, output.count}, splits}; }
  void fill_targets() const;
};

}  // namespace ringreduce
