// The arguments of the interpreter kernel: one rank's program, its tensors, and the places of its peers' regions. Then
// functions that kernel and host share: rounds, slots, and the words that a batch waits for.
#pragma once

#include "core/partition.h"
#include "engine/gpu/region.h"
#include "kernels/gpu/job.h"

namespace ringreduce::gpu {

// engine/program.h's Program as flat arrays (FlatProgram). Names mean the same there.
struct FlatSource {
  std::uint32_t peer;
  std::uint32_t send_index;  // among the peer's sends of a round of the FlatChannel
  std::uint32_t step;        // of the batch, which takes it
  float weight;              // of the operand, if the call weighs
};

// A set of ranks, a bit for each.
using Ranks = std::uint64_t;
static_assert(kMostRanks <= 64);

RINGREDUCE_BOTH bool is_in(Ranks ranks, std::uint32_t rank) { return (ranks >> rank & 1) != 0; }

struct FlatStep {
  std::uint32_t stripe;  // of the FlatChannel
  std::uint32_t number;  // in the program of the stripe's channel
  std::uint32_t chunk;
  std::int32_t input_position, output_position;  // of the local chunk's block, in the input or the output; -1: not read
  std::int32_t write_position;                   // -1: not written
  std::uint32_t local_position;                  // of the local chunk among the operands
  std::uint32_t send_index;                      // among the rank's sends of a round of the FlatChannel
  std::uint32_t first_source, sources;
  Ranks destinations;
  Ranks readers;       // of what the slot that the step sends from held before
  float local_weight;  // of the local chunk, if the call weighs; and what it divides by then
  float mean_divisor;
  bool completes;

  RINGREDUCE_BOTH bool reads() const { return input_position >= 0 || output_position >= 0; }
  RINGREDUCE_BOTH bool writes() const { return write_position >= 0; }
  RINGREDUCE_BOTH bool sends() const { return destinations != 0; }
};

// Steps that are taken at once (batches.h). Their sources lie one after the other.
struct FlatBatch {
  std::uint32_t first_step, steps;
  std::uint32_t first_source, sources;
};

// The part of every block that a channel of the plan has.
struct FlatStripe {
  Share share;
  std::uint32_t chunks;  // per block
  std::uint32_t channel;
};

// The work of a lane in a round: one channel's program, or the programs of all channels, one after the other.
struct FlatChannel {
  std::uint32_t first_stripe, stripes;
  std::uint32_t first_batch, batches;
  std::uint32_t first_sends;
};

struct FlatArrays {
  const FlatChannel* channels;
  const FlatStripe* stripes;
  const FlatBatch* batches;
  const FlatStep* steps;
  const FlatSource* sources;
  const std::uint32_t* sends;  // per FlatChannel, of every rank: slots it sends per round
};

struct Tensors {
  char* data[kMostRanks];
  std::uint64_t count[kMostRanks];  // elements
};

// The most threads of a block that the kernels are compiled for, and what they are launched with. With more of them no
// two sources of a narrow dtype would fit their registers at once.
inline constexpr unsigned kBlockThreads = 384;
// The most steps of a batch: a block lays them out in its shared memory, a bit more than 0.8 KB each.
inline constexpr std::uint32_t kMostSteps = 16;

// How the kernel takes the batches.
//
// run: all of them, one block a lane, which waits for its peers and goes on by itself. A block that waits holds on to
// its multiprocessor, so blocks that wait for one another must all be on their GPUs at once: one rank on each GPU, and
// a grid of no more blocks than the GPU holds at a time. What else occupies the GPU must end without this kernel. What
// waits for other ranks as well, calls of other groups or of NCCL, does so if all ranks make the calls of all groups in
// the same order, each after the one before it has ended: as NCCL demands of several communicators.
//
// step: one, for ranks that share a GPU. The stream does the waiting, which occupies nothing: for the words that
// for_each_wait names. Any number of blocks take the batch together, and the one that ends last publishes. A launch of
// a batch never waits. Run::lanes must be 1.
enum class Mode : std::uint32_t { run, step };

enum class GaveUp : std::uint32_t { no, timeout, mismatch, wrong_size, aborted };

// In memory of the host that the GPU can access.
//
// To abort a call, the host stores `abort`. If streams wait for words, the host then stores the values that they wait
// for. Each launch looks at `abort` first; in Mode::run it looks while it waits, too.
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
  std::uint32_t* arrived;  // Mode::step: how many blocks of a launch are done; 0 between launches
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
  std::uint32_t round, batch;  // which one Mode::step takes; 0, 0 for Mode::run
  bool weighs;                 // averages are made of means: see Average in engine/program.h
  bool scaled;                 // what is read of the input is multiplied by `factor` first (premul_sum)
};
static_assert(sizeof(Run) <= 4096, "arguments of a kernel");

// How many rounds a lane of the channel has.
RINGREDUCE_BOTH std::uint32_t rounds_of(const Run& run, const FlatChannel& channel) {
  const std::size_t unit = unit_of(run.element);
  std::size_t rounds = 1;  // ranks meet even over nothing
  for (std::uint32_t i = 0; i < channel.stripes; ++i) {
    const FlatStripe& of = run.program.stripes[channel.first_stripe + i];
    const std::size_t chunk = largest_chunk(stripe(run.largest, of.share, unit), of.chunks, unit);
    const std::size_t needed = ceil_div(largest_chunk({0, chunk}, run.lanes, unit), run.slice);
    if (needed > rounds) rounds = needed;
  }
  return static_cast<std::uint32_t>(rounds);
}

// A batch as a lane takes it in a round. Numbers are those of the channel, and of the lane in it.
struct LaneBatch {
  const FlatChannel& channel;
  const FlatBatch& batch;
  std::uint32_t channel_number, lane, round;
};

RINGREDUCE_BOTH LaneBatch lane_batch(const Run& run, std::uint32_t channel_number, std::uint32_t lane,
                                     std::uint32_t round, std::uint32_t batch) {
  const FlatChannel& channel = run.program.channels[channel_number];
  return {channel, run.program.batches[channel.first_batch + batch], channel_number, lane, round};
}

RINGREDUCE_BOTH const FlatStep& step_of(const Run& run, const LaneBatch& at, std::uint32_t i) {
  return run.program.steps[at.batch.first_step + i];
}

RINGREDUCE_BOTH const FlatStripe& stripe_of(const Run& run, const LaneBatch& at, const FlatStep& step) {
  return run.program.stripes[at.channel.first_stripe + step.stripe];
}

// The lane's number in the regions.
RINGREDUCE_BOTH std::uint32_t lane_of(const Run& run, const LaneBatch& at) {
  return at.channel_number * run.lanes + at.lane;
}

// How many slots a rank has sent since the call began, when it sends that one. They take the outbox's in turn.
RINGREDUCE_BOTH std::uint64_t sent_before(const Run& run, const LaneBatch& at, std::uint32_t rank,
                                          std::uint32_t send_index) {
  return std::uint64_t{at.round} * run.program.sends[at.channel.first_sends + rank] + send_index;
}

RINGREDUCE_BOTH std::uint32_t slot_of(const Run& run, const LaneBatch& at, std::uint32_t rank,
                                      std::uint32_t send_index) {
  return static_cast<std::uint32_t>(sent_before(run, at, rank, send_index)) & (run.shape.depth - 1);
}

RINGREDUCE_BOTH std::uint32_t source_slot(const Run& run, const LaneBatch& at, const FlatSource& from) {
  return slot_of(run, at, from.peer, from.send_index);
}

RINGREDUCE_BOTH std::uint32_t own_slot(const Run& run, const LaneBatch& at, const FlatStep& step) {
  return slot_of(run, at, run.rank, step.send_index);
}

// The ranks that may still read the slot that a step sends from. A call ends for a rank before its peers have read its
// last slots, and a call does not know the call before it. So the first use of a slot waits until no rank reads it.
RINGREDUCE_BOTH Ranks may_read(const Run& run, const LaneBatch& at, const FlatStep& step) {
  if (!step.sends()) return 0;
  if (sent_before(run, at, run.rank, step.send_index) >= run.shape.depth) return step.readers;
  return (~Ranks{0} >> (64 - run.shape.ranks)) & ~(Ranks{1} << run.rank);
}

// One wait of a batch: until a word of this rank has the value that `peer` stores there.
struct Wait {
  std::uint64_t offset;  // of the word among this rank's, bytes
  std::uint64_t value;
  std::uint32_t peer;
  std::uint32_t step;  // of the batch, which needs it
};

// The notices of the batch's sources come first; then, for each step, a place for every rank.
RINGREDUCE_BOTH std::uint32_t waits_of(const Run& run, const LaneBatch& at) {
  return at.batch.sources + at.batch.steps * run.shape.ranks;
}

RINGREDUCE_BOTH Wait wait_for_source(const Run& run, const LaneBatch& at, std::uint32_t i) {
  const FlatSource& from = run.program.sources[at.batch.first_source + i];
  return {run.shape.notice(lane_of(run, at), from.peer, source_slot(run, at, from)), 1, from.peer, from.step};
}

// The i-th wait; false if there is none at its place.
RINGREDUCE_BOTH bool wait_of(const Run& run, const LaneBatch& at, std::uint32_t i, Wait& wait) {
  if (i < at.batch.sources) {
    wait = wait_for_source(run, at, i);
    return true;
  }
  const std::uint32_t number = (i - at.batch.sources) / run.shape.ranks;
  const std::uint32_t reader = (i - at.batch.sources) % run.shape.ranks;
  const FlatStep& step = step_of(run, at, number);
  if (!is_in(may_read(run, at, step), reader)) return false;
  wait = {run.shape.taken(lane_of(run, at), reader, own_slot(run, at, step)), 0, reader, number};
  return true;
}

// f(Wait) for all that must be before a batch may be launched by itself: `run.program` must be readable here.
template <class F>
RINGREDUCE_BOTH void for_each_wait(const Run& run, const LaneBatch& at, F f) {
  Wait wait;
  for (std::uint32_t i = 0; i < waits_of(run, at); ++i)
    if (wait_of(run, at, i, wait)) f(wait);
}

}  // namespace ringreduce::gpu
