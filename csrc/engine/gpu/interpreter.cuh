// Runs one rank's program of one call on a GPU: what engine/execution.h is on a CPU, as the body of a kernel.
//
// A block takes the steps of its lane one after the other, round after round:
//   1. wait    until every source's notice says that its slot is full, and no reader has the slot to send from
//   2. compute all threads combine the local chunk and the sources' slots, in rank order, into the output and the slot
//   3. publish to every destination: taken, then full; to every source: no longer full, then no longer taken
// A plan whose round ends if it runs alone (ringreduce.plan.verify) ends so however many rounds there are.
//
// `Block` is a thread block: DeviceBlock here, or a CPU thread that plays all of its threads (tests). It has
//   index(), blocks()   its number in the grid, of how many
//   every(n, f)         f(i) for all i < n, on several threads; whether all were true. All threads meet here.
//   each(n, f)          f(i) for all i < n, on several threads
//   work(f)             f(thread, threads) for every thread
//   alone(f)            f() on one thread; then all threads meet
//   meet()              all threads do: what one did before, every one sees after
//   job()               an Accumulate that all threads see
#pragma once

#include "engine/gpu/memory.cuh"
#include "engine/gpu/run.h"
#include "kernels/gpu/accumulate.cuh"

namespace ringreduce::gpu {

// A step of a lane in a round.
struct At {
  const Channel& channel;
  const Step& step;
  std::uint32_t number, lane, round, index;  // of the channel, the lane in it, the round, the step
};

RINGREDUCE_BOTH std::uint32_t lane_of(const Run& run, const At& at) { return at.number * run.lanes + at.lane; }

RINGREDUCE_BOTH Notice* notice(const Run& run, const At& at, std::uint32_t owner, std::uint32_t writer,
                               std::uint32_t slot) {
  return reinterpret_cast<Notice*>(run.regions[owner] + run.shape.notice(lane_of(run, at), writer, slot));
}

RINGREDUCE_BOTH std::uint64_t* taken(const Run& run, const At& at, std::uint32_t owner, std::uint32_t reader,
                                     std::uint32_t slot) {
  return reinterpret_cast<std::uint64_t*>(run.regions[owner] + run.shape.taken(lane_of(run, at), reader, slot));
}

RINGREDUCE_BOTH std::uint64_t* broken(const Run& run) {
  return reinterpret_cast<std::uint64_t*>(run.regions[run.rank] + run.shape.broken());
}

// Ends this launch and all later ones, unless another block has done so already.
RINGREDUCE_BOTH bool give_up(const Run& run, const At& at, GaveUp why, std::uint32_t peer) {
  if (!claim(broken(run), 1)) return false;
  Report& report = *run.report;
  store_relaxed(&report.peer, peer);
  store_relaxed(&report.channel, at.number);
  store_relaxed(&report.round, at.round);
  store_relaxed(&report.step, at.index);
  store_release(&report.gave_up, static_cast<std::uint32_t>(why));
  return false;
}

// Looks at a word of this rank's region until it is `wanted`, which `peer` makes it. False if that will not be. What
// makes waiting pointless is looked for now and then only: it lies in the host's memory, a microsecond away.
RINGREDUCE_BOTH bool wait_for(const Run& run, const At& at, const std::uint64_t* word, std::uint64_t wanted,
                              std::uint32_t peer) {
  constexpr std::uint32_t kLooks = 1024;
  std::uint64_t started = 0;
  for (std::uint32_t looks = 1; load_acquire(word) != wanted; ++looks) {
    pause();
    if (looks % kLooks != 0) continue;
    const std::uint64_t now = nanoseconds();
    if (started == 0) started = now;
    if (load_relaxed(broken(run)) != 0) return false;
    if (load_relaxed(&run.report->abort) != 0) return give_up(run, at, GaveUp::aborted, peer);
    if (now - started >= run.timeout) return give_up(run, at, GaveUp::timeout, peer);
    store_relaxed(&run.report->waiting_for, peer);
    store_relaxed(&run.report->looks, std::uint64_t{looks});
  }
  return true;
}

// The elements of the step's slice in a block of `count`.
RINGREDUCE_BOTH Range slice_of(const Run& run, const At& at, std::uint64_t count) {
  const std::size_t unit = unit_of(run.element);
  const Range chunk = split(stripe(count, at.channel.share, unit), at.channel.chunks, at.step.chunk, unit);
  return slice(split(chunk, run.lanes, at.lane, unit), at.round, run.slice);
}

struct Piece {
  char* data;
  std::uint64_t bytes;
};

RINGREDUCE_BOTH Piece piece(const Run& run, const At& at, const Tensors& tensors, std::int32_t position) {
  const Range range = slice_of(run, at, tensors.count[position]);
  return {tensors.data[position] + range.begin * run.element, range.size() * run.element};
}

RINGREDUCE_BOTH Piece local(const Run& run, const At& at) {
  const Step& step = at.step;
  return step.input_position >= 0 ? piece(run, at, run.input, step.input_position)
                                  : piece(run, at, run.output, step.output_position);
}

RINGREDUCE_BOTH const Source& source(const Run& run, const At& at, std::uint32_t i) {
  return run.program.sources[at.step.first_source + i];
}

RINGREDUCE_BOTH std::uint32_t source_slot(const Run& run, const At& at, const Source& from) {
  return slot_of(run, at.channel, from.peer, at.round, from.send_index);
}

RINGREDUCE_BOTH std::uint32_t own_slot(const Run& run, const At& at) {
  return slot_of(run, at.channel, run.rank, at.round, at.step.send_index);
}

// The size of the value. A step that only forwards takes what came.
RINGREDUCE_BOTH std::uint64_t bytes_of(const Run& run, const At& at) {
  if (at.step.reads()) return local(run, at).bytes;
  if (at.step.write_position >= 0) return piece(run, at, run.output, at.step.write_position).bytes;
  const Source& from = source(run, at, 0);
  const std::uint64_t came = notice(run, at, run.rank, from.peer, source_slot(run, at, from))->bytes;
  return lesser(came, run.shape.slot_bytes);  // never trust a peer's numbers
}

// 1. Whether the step can be taken, after it was waited for if it must be.
template <class Block>
RINGREDUCE_APART bool wait(const Run& run, const At& at, Block& block) {
  const Step& step = at.step;
  const std::uint32_t readers = step.destinations == 0 ? 0 : run.shape.ranks;
  const std::uint64_t own_bytes = step.reads() || step.write_position >= 0 ? bytes_of(run, at) : ~std::uint64_t{0};
  return block.every(step.sources + readers, [&](std::uint32_t i) {
    if (i >= step.sources) {
      const std::uint32_t reader = i - step.sources;
      return wait_for(run, at, taken(run, at, run.rank, reader, own_slot(run, at)), 0, reader);
    }
    const Source& from = source(run, at, i);
    const Notice* const came = notice(run, at, run.rank, from.peer, source_slot(run, at, from));
    if (!wait_for(run, at, &came->full, 1, from.peer)) return false;
    if (came->fingerprint != run.fingerprint) return give_up(run, at, GaveUp::mismatch, from.peer);
    const bool fits = own_bytes == ~std::uint64_t{0} || came->bytes == own_bytes;
    return fits || give_up(run, at, GaveUp::wrong_size, from.peer);
  });
}

// Whether the value is an operand as it is, bit by bit.
RINGREDUCE_BOTH bool moves(const Accumulate& job) { return job.n == 1 && job.scaled < 0; }

RINGREDUCE_APART void move(const Accumulate& job, std::uint64_t thread, std::uint64_t threads) {
  accumulate<Bytes, Or>(job, thread, threads);
}

RINGREDUCE_APART void lay_out(const Run& run, const At& at, Accumulate& job) {
  const Step& step = at.step;
  const std::uint64_t bytes = bytes_of(run, at);
  job.n = 0;
  for (std::uint32_t i = 0; i <= step.sources; ++i) {
    if (step.reads() && i == step.local_position) job.srcs[job.n++] = local(run, at).data;
    if (i == step.sources) break;
    const Source& from = source(run, at, i);
    const std::uint32_t lane = lane_of(run, at);
    job.srcs[job.n++] = run.regions[from.peer] + run.shape.payload(lane, source_slot(run, at, from));
  }
  job.scaled = run.scaled == 1 && step.input_position >= 0 ? static_cast<std::int32_t>(step.local_position) : -1;
  job.factor = run.factor;
  job.divisor = step.completes == 1 ? run.divisor : 1;
  job.copies = 0;
  if (step.destinations > 0)
    job.dsts[job.copies++] = run.regions[run.rank] + run.shape.payload(lane_of(run, at), own_slot(run, at));
  if (step.write_position >= 0) {
    char* const output = piece(run, at, run.output, step.write_position).data;
    const bool there_already = job.n == 1 && job.scaled < 0 && output == job.srcs[0];
    if (!there_already) job.dsts[job.copies++] = output;
  }
  job.count = job.copies == 0 ? 0 : moves(job) ? bytes : bytes / run.element * run.parts;
}

// 2. `share` of `shares` blocks does its part.
template <class Format, class Op, class Block>
RINGREDUCE_BOTH void compute(const Run& run, const At& at, Block& block, std::uint32_t share, std::uint32_t shares) {
  Accumulate& job = block.job();
  block.alone([&] { lay_out(run, at, job); });
  block.work([&](std::uint32_t thread, std::uint32_t threads) {
    const std::uint64_t number = std::uint64_t{share} * threads + thread, all = std::uint64_t{shares} * threads;
    if (moves(job))
      move(job, number, all);
    else
      accumulate<Format, Op>(job, number, all);
  });
}

// 3. After all threads have met: the payload is stored, the sources are read.
template <class Block>
RINGREDUCE_APART void publish(const Run& run, const At& at, Block& block) {
  const Step& step = at.step;
  const std::uint64_t bytes = bytes_of(run, at);
  block.each(step.destinations, [&](std::uint32_t i) {
    const std::uint32_t reader = run.program.destinations[step.first_destination + i], slot = own_slot(run, at);
    store_relaxed(taken(run, at, run.rank, reader, slot), std::uint64_t{1});
    Notice* const there = notice(run, at, reader, run.rank, slot);
    there->fingerprint = run.fingerprint;
    there->bytes = bytes;
    store_release(&there->full, std::uint64_t{1});
  });
  block.meet();  // what came, if it is forwarded, says how much: until here
  block.each(step.sources, [&](std::uint32_t i) {
    const Source& from = source(run, at, i);
    const std::uint32_t slot = source_slot(run, at, from);
    store_relaxed(&notice(run, at, run.rank, from.peer, slot)->full, std::uint64_t{0});
    store_release(taken(run, at, from.peer, run.rank, slot), std::uint64_t{0});
  });
}

template <class Format, class Op, class Block>
RINGREDUCE_BOTH void interpret(const Run& run, Block& block) {
  if (load_relaxed(broken(run)) != 0) return;
  if (run.mode != Mode::run) {
    const Channel& channel = run.program.channels[run.channel];
    const At at{channel, run.program.steps[channel.first_step + run.step], run.channel, 0, run.round, run.step};
    if (!wait(run, at, block)) return;  // the stream has waited: this compares the calls
    if (run.mode == Mode::compute) return compute<Format, Op>(run, at, block, block.index(), block.blocks());
    return publish(run, at, block);
  }
  const std::uint32_t number = block.index() / run.lanes, lane = block.index() % run.lanes;
  const Channel& channel = run.program.channels[number];
  const std::uint32_t rounds = rounds_of(run, channel);
  for (std::uint32_t round = 0; round < rounds; ++round)
    for (std::uint32_t s = 0; s < channel.steps; ++s) {
      const At at{channel, run.program.steps[channel.first_step + s], number, lane, round, s};
      if (!wait(run, at, block)) return;
      compute<Format, Op>(run, at, block, 0, 1);
      block.meet();
      publish(run, at, block);
    }
}

#if defined(__CUDACC__)
class DeviceBlock {
 public:
  __device__ explicit DeviceBlock(Accumulate& job) : job_(job) {}

  __device__ std::uint32_t index() const { return blockIdx.x; }
  __device__ std::uint32_t blocks() const { return gridDim.x; }
  __device__ Accumulate& job() const { return job_; }
  __device__ void meet() const { __syncthreads(); }

  template <class F>
  __device__ bool every(std::uint32_t n, F f) const {
    bool all = true;
    for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) all = f(i) && all;
    return __syncthreads_and(all);
  }
  template <class F>
  __device__ void each(std::uint32_t n, F f) const {
    for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void work(F f) const {
    f(threadIdx.x, blockDim.x);
  }
  template <class F>
  __device__ void alone(F f) const {
    if (threadIdx.x == 0) f();
    __syncthreads();
  }

 private:
  Accumulate& job_;
};
#endif

}  // namespace ringreduce::gpu
