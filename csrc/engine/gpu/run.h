// What the interpreter kernel is told: one rank's program, its tensors, and where its peers' regions are.
#pragma once

#include "core/partition.h"
#include "engine/gpu/region.h"
#include "kernels/gpu/job.h"

namespace ringreduce::gpu {

// engine/program.h's Program as flat arrays in device memory. Names mean the same there.
struct Source {
  std::uint32_t peer, send_index;
};

struct Step {
  std::uint32_t chunk;
  std::int32_t input_position, output_position;  // of the local chunk's block, in the input or the output; -1: not read
  std::int32_t write_position;                   // -1: not written
  std::uint32_t local_position;                  // of the local chunk among the operands
  std::uint32_t completes;
  std::uint32_t send_index;
  std::uint32_t first_source, sources;
  std::uint32_t first_destination, destinations;

  RINGREDUCE_BOTH bool reads() const { return input_position >= 0 || output_position >= 0; }
};

struct Channel {
  Share share;
  std::uint32_t chunks;  // per block
  std::uint32_t first_step, steps;
  std::uint32_t first_sends;
};

struct Program {
  const Channel* channels;
  const Step* steps;
  const Source* sources;
  const std::uint32_t* destinations;
  const std::uint32_t* sends;  // per channel, of every rank: slots it sends per round
};

struct Tensors {
  char* data[kMostRanks];
  std::uint64_t count[kMostRanks];  // elements
};

// How the kernel takes the steps. Ranks that have their GPUs to themselves *run*: one block a lane waits for its peers
// and goes on by itself. A block that waits holds on to its multiprocessor, so this is only for groups in which nobody
// can wait for a kernel that finds no room: with one rank on each GPU all of them come to run, as whatever else
// occupies a GPU ends without them. Ranks that share a GPU take one step per launch, and the stream does the waiting,
// which occupies nothing: when the step's sources are there and its slot is free, many blocks `compute`, then one
// `publish`es.
enum class Mode : std::uint32_t { run, compute, publish };

enum class GaveUp : std::uint32_t { no, timeout, mismatch, wrong_size, aborted };

// In memory of the host that the GPU can access.
struct Report {
  std::uint32_t abort;        // stored by the host: give up
  std::uint32_t waiting_for;  // the rank that a block has been waiting for lately,
  std::uint64_t looks;        // and how often it has said so
  std::uint32_t gave_up;      // a GaveUp, stored last; the others say where
  std::uint32_t peer, channel, round, step;
};

struct Run {
  Program program;
  RegionShape shape;
  char* regions[kMostRanks];  // of all ranks, as this one maps them
  Report* report;
  Tensors input, output;
  std::uint64_t largest;  // elements of the largest block of any rank
  std::uint64_t slice;    // the most elements of a slice: they fit a slot
  std::uint64_t fingerprint;
  std::uint64_t timeout;  // ns, from when a block has looked in vain for some time
  double factor, divisor;
  std::uint32_t scaled;   // 1: what is read of the input is multiplied by `factor` first (premul_sum)
  std::uint32_t element;  // bytes
  std::uint32_t parts;    // the kernel's elements in one
  std::uint32_t rank;
  std::uint32_t lanes;  // of a channel
  Mode mode;
  std::uint32_t channel, round, step;  // the step that `compute` and `publish` take
};
static_assert(sizeof(Run) <= 4096, "arguments of a kernel");

// How many rounds a lane of the channel has.
RINGREDUCE_BOTH std::uint32_t rounds_of(const Run& run, const Channel& channel) {
  const std::size_t unit = unit_of(run.element);
  const std::size_t chunk = largest_chunk(stripe(run.largest, channel.share, unit), channel.chunks, unit);
  const std::size_t rounds = ceil_div(largest_chunk({0, chunk}, run.lanes, unit), run.slice);
  return rounds == 0 ? 1 : static_cast<std::uint32_t>(rounds);  // ranks meet even over nothing
}

// Which slot of its outbox `rank` sends from.
RINGREDUCE_BOTH std::uint32_t slot_of(const Run& run, const Channel& channel, std::uint32_t rank, std::uint32_t round,
                                      std::uint32_t send_index) {
  return (round * run.program.sends[channel.first_sends + rank] + send_index) % run.shape.depth;
}

}  // namespace ringreduce::gpu
