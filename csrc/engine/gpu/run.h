// What the interpreter kernel is told: one rank's program, its tensors, and where its peers' regions are. Then what
// follows from that for kernel and host alike: rounds, slots, and the words that a step waits for.
#pragma once

#include "core/partition.h"
#include "engine/gpu/region.h"
#include "kernels/gpu/job.h"

namespace ringreduce::gpu {

// engine/program.h's Program as flat arrays (FlatProgram). Names mean the same there.
struct FlatSource {
  std::uint32_t peer, send_index;
};

struct FlatStep {
  std::uint32_t chunk;
  std::int32_t input_position, output_position;  // of the local chunk's block, in the input or the output; -1: not read
  std::int32_t write_position;                   // -1: not written
  std::uint32_t local_position;                  // of the local chunk among the operands
  std::uint32_t send_index;
  std::uint32_t first_source, sources;
  std::uint32_t first_destination, destinations;
  bool completes;

  RINGREDUCE_BOTH bool reads() const { return input_position >= 0 || output_position >= 0; }
  RINGREDUCE_BOTH bool writes() const { return write_position >= 0; }
};

struct FlatChannel {
  Share share;
  std::uint32_t chunks;  // per block
  std::uint32_t first_step, steps;
  std::uint32_t first_sends;
};

struct FlatArrays {
  const FlatChannel* channels;
  const FlatStep* steps;
  const FlatSource* sources;
  const std::uint32_t* destinations;
  const std::uint32_t* sends;  // per channel, of every rank: slots it sends per round
};

struct Tensors {
  char* data[kMostRanks];
  std::uint64_t count[kMostRanks];  // elements
};

// The most threads of a block that the kernels are compiled for, and what they are launched with.
inline constexpr unsigned kBlockThreads = 512;

// How the kernel takes the steps.
//
// run: all of them, one block a lane, which waits for its peers and goes on by itself. A block that waits holds on to
// its multiprocessor, so blocks that wait for one another must all be on their GPUs at once: one rank on each GPU, and
// a grid of no more blocks than the GPU holds at a time. What else occupies the GPU must end without this kernel. What
// waits for other ranks as well, calls of other groups or of NCCL, does so if all ranks make the calls of all groups in
// the same order, each after the one before it has ended: as NCCL demands of several communicators.
//
// compute, publish: one step, for ranks that share a GPU. The stream does the waiting, which occupies nothing: for the
// words that for_each_wait names. Then any number of blocks `compute`, and one block `publish`es. A launch of a step
// never waits. Run::lanes must be 1.
enum class Mode : std::uint32_t { run, compute, publish };

enum class GaveUp : std::uint32_t { no, timeout, mismatch, wrong_size, aborted };

// In memory of the host that the GPU can access.
//
// Who aborts stores `abort`, and where streams wait for words, what they wait for after it: each launch looks at
// `abort` first. Mode::run does so while it waits, too.
struct Report {
  std::uint32_t abort;                       // stored by the host: give up
  std::uint32_t waiting_for;                 // the rank that a block has waited for lately,
  std::uint64_t waited;                      // and for how long, in ns: it changes as long as the block waits
  std::uint64_t fingerprint;                 // of the call that was given up
  std::uint32_t gave_up;                     // a GaveUp, stored last; the others say where
  std::uint32_t peer, channel, round, step;  // peer: the rank itself if it gave up before it looked for one
};

struct Run {
  FlatArrays program;
  RegionShape shape;
  char* words[kMostRanks];    // of all ranks, as this one maps them
  char* regions[kMostRanks];  // the same
  Report* report;
  Tensors input, output;
  std::uint64_t largest;  // elements of the largest block of any rank
  std::uint64_t slice;    // the most elements of a slice: they fit a slot
  std::uint64_t fingerprint;
  std::uint64_t timeout;  // ns, from when a block has looked in vain for some time
  double factor, divisor;
  std::uint32_t element;  // bytes
  std::uint32_t parts;    // the kernel's elements in one
  std::uint32_t rank;
  std::uint32_t lanes;  // of a channel
  Mode mode;
  std::uint32_t channel, round, step;  // the step that `compute` and `publish` take
  bool scaled;                         // what is read of the input is multiplied by `factor` first (premul_sum)
};
static_assert(sizeof(Run) <= 4096, "arguments of a kernel");

// How many rounds a lane of the channel has.
RINGREDUCE_BOTH std::uint32_t rounds_of(const Run& run, const FlatChannel& channel) {
  const std::size_t unit = unit_of(run.element);
  const std::size_t chunk = largest_chunk(stripe(run.largest, channel.share, unit), channel.chunks, unit);
  const std::size_t rounds = ceil_div(largest_chunk({0, chunk}, run.lanes, unit), run.slice);
  return rounds == 0 ? 1 : static_cast<std::uint32_t>(rounds);  // ranks meet even over nothing
}

// Which slot of its outbox `rank` sends from.
RINGREDUCE_BOTH std::uint32_t slot_of(const Run& run, const FlatChannel& channel, std::uint32_t rank,
                                      std::uint32_t round, std::uint32_t send_index) {
  return (round * run.program.sends[channel.first_sends + rank] + send_index) & (run.shape.depth - 1);
}

// A step as a lane takes it in a round. Numbers are those of the channel, of the lane in it, and of the step in it.
struct LaneStep {
  const FlatChannel& channel;
  const FlatStep& step;
  std::uint32_t channel_number, lane, round, step_number;
};

RINGREDUCE_BOTH LaneStep lane_step(const Run& run, std::uint32_t channel_number, std::uint32_t lane,
                                   std::uint32_t round, std::uint32_t step_number) {
  const FlatChannel& channel = run.program.channels[channel_number];
  return {channel, run.program.steps[channel.first_step + step_number], channel_number, lane, round, step_number};
}

// The lane's number in the regions.
RINGREDUCE_BOTH std::uint32_t lane_of(const Run& run, const LaneStep& at) {
  return at.channel_number * run.lanes + at.lane;
}

RINGREDUCE_BOTH const FlatSource& source(const Run& run, const LaneStep& at, std::uint32_t i) {
  return run.program.sources[at.step.first_source + i];
}

RINGREDUCE_BOTH std::uint32_t source_slot(const Run& run, const LaneStep& at, const FlatSource& from) {
  return slot_of(run, at.channel, from.peer, at.round, from.send_index);
}

RINGREDUCE_BOTH std::uint32_t own_slot(const Run& run, const LaneStep& at) {
  return slot_of(run, at.channel, run.rank, at.round, at.step.send_index);
}

// What a step waits for: that a word of this rank has a value, which `peer` gives it.
struct Wait {
  std::uint64_t offset;  // of the word among this rank's, bytes
  std::uint64_t value;
  std::uint32_t peer;
};

// The notices of the step's sources come first; then, if it sends, whoever may still read the slot that it sends from.
RINGREDUCE_BOTH std::uint32_t waits_of(const Run& run, const LaneStep& at) {
  return at.step.sources + (at.step.destinations == 0 ? 0 : run.shape.ranks - 1);
}

RINGREDUCE_BOTH Wait wait_of(const Run& run, const LaneStep& at, std::uint32_t i) {
  if (i < at.step.sources) {
    const FlatSource& from = source(run, at, i);
    return {run.shape.notice(lane_of(run, at), from.peer, source_slot(run, at, from)), 1, from.peer};
  }
  const std::uint32_t other = i - at.step.sources, reader = other < run.rank ? other : other + 1;
  return {run.shape.taken(lane_of(run, at), reader, own_slot(run, at)), 0, reader};
}

// f(Wait) for all that must be before a step may be launched by itself: `run.program` must be readable here.
template <class F>
RINGREDUCE_BOTH void for_each_wait(const Run& run, std::uint32_t channel, std::uint32_t round, std::uint32_t step,
                                   F f) {
  const LaneStep at = lane_step(run, channel, 0, round, step);
  for (std::uint32_t i = 0; i < waits_of(run, at); ++i) f(wait_of(run, at, i));
}

}  // namespace ringreduce::gpu
