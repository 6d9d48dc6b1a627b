// A plan, lowered: what each rank does, as flat arrays that the engine can run without asking anybody.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "core/partition.h"
#include "engine/call.h"

namespace ringreduce {

// A slot to receive: the `send_index`-th that `peer` sends in each round, in that phase of it.
struct Source {
  int peer;
  std::uint32_t send_index;
  std::uint32_t phase = 0;
  std::uint32_t inputs = 1;  // of how many ranks the value has the input
};

enum class Read : std::uint8_t { none, input, output };

// The one step shape. value = combine, in rank order, of [the local chunk] and what each of `recv` sent; the value is
// written to the output chunk and/or sent to every rank in `send`.
struct Step {
  std::uint32_t chunk = 0;  // which chunk of its block
  int block = 0;
  std::uint32_t phase = 0;  // without slots: what is sent in a phase is exchanged at its end, see plan/symbolic.py
  Read read = Read::none;
  std::uint32_t inputs = 1;      // of how many ranks the value has the input
  bool partial = false;          // of all_reduce: its value is a part of a reduction that others complete
  bool completes = false;        // this step finishes the reduction: its value is complete, its operands were not
  int local_position = -1;       // of the local chunk among the operands
  int read_position = -1;        // of the block among the input tensors (or output tensors, as `read` says)
  int write_position = -1;       // of the block among the output tensors; -1: not written
  bool rewritten = false;        // a later step of this rank writes the chunk again (into the output)
  bool returned = false;         // in place: a peer may write the chunk's new value where it found the old one
  std::uint32_t send_index = 0;  // among this rank's sends of a round
  std::span<const Source> recv;  // in rank order
  std::span<const int> send;
  std::span<const float> weights = {};  // of the operands, in rank order, for an average; see average_of()

  std::size_t operands() const { return recv.size() + (read != Read::none); }
  double mean_divisor() const { return static_cast<double>(inputs) / std::bit_ceil(inputs); }
};

struct ChannelProgram {
  Share share;
  std::uint32_t chunks = 1;          // per block
  std::vector<std::uint32_t> sends;  // per rank: slots it sends per round
  std::uint32_t phases = 1;          // that this rank has steps in
  std::vector<Step> steps;
};

// One rank's part of a plan, for one root. Immutable once made. The spans of its steps refer to its vectors, so it may
// be moved but not copied.
struct Program {
  Program() = default;
  Program(Program&&) = default;
  Program& operator=(Program&&) = default;

  Operation operation = Operation::all_reduce;
  std::uint64_t digest = 0;
  bool completed_once = false;  // each chunk's reduction is completed by one rank, not by several of them
  std::vector<ChannelProgram> channels;
  std::vector<Source> sources;
  std::vector<int> destinations;
  std::vector<float> weights;
  std::vector<int> peers;  // of this rank: all of them, once each
};

// A plan as ringreduce.plan.lower gives it: for all ranks and any root.
struct LoweredPlan {
  Operation operation = Operation::all_reduce;
  std::vector<std::int32_t> words;
  std::uint64_t digest = 0;
};

// The rank whose part of a plan this is, and its group: `channels` is the most that a plan may have there.
struct Part {
  int rank = 0, size = 1;
  int root = 0;
  int channels = 1;
};

// Takes a rank's part of a plan, turned so that rank 0 of the plan becomes `root`. Throws invalid_argument where the
// plan is not what it should be.
Program program_of(const LoweredPlan& plan, const Part& part);

// What a step multiplies its operands by, if there are weights, and divides their sum by.
struct Average {
  std::span<const float> weights = {};
  double divisor = 1;
};

// 16-bit and 8-bit floats are rounded by each step that combines. So it makes the mean of the k inputs in its operands,
// which is never too large, and not their sum: it weighs each operand by the number of inputs in it, and divides by k.
// Weights and divisor are both scaled by 1/bit_ceil(k), which is exact and keeps sums of bfloat16 within float32. Wider
// elements are summed, and divided by the step that completes the sum.
Average average_of(const Call& call, const Step& step, int size);

}  // namespace ringreduce
