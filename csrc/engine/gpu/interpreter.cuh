// Runs one rank's program of one call on a GPU: what engine/execution.h is on a CPU, as the body of a kernel.
//
// A block takes the steps of its lane one after the other, round after round:
//   1. lay_out  one thread finds the operands and where the value goes: the local chunk, the sources' slots, its own
//   2. wait     until every source's notice says that its slot is full, and no reader has the slot to send from
//   3. compute  all threads combine the operands, in rank order, into the output and the slot
//   4. publish  to every destination: taken, then full; to every source: no longer full, then no longer taken
// A plan whose round ends if it runs alone (ringreduce.plan.verify) ends so however many rounds there are.
//
// `Block` is a thread block: DeviceBlock here, or those of cpu_block.h for tests. All its threads take the same way.
//   index(), blocks()   its number in the grid, of how many
//   job()               a StepJob that all threads see
//   every(n, f)         f(i) for all i < n, on several threads; whether all were true. All threads meet here.
//   each(n, f)          f(i) for all i < n, on several threads
//   work(f)             f(thread, threads) for every thread
//   alone(f)            f() on one thread; then all threads meet
//   meet()              all threads do: what one did before, every one sees after
#pragma once

#include "engine/gpu/memory.cuh"
#include "engine/gpu/run.h"
#include "kernels/gpu/accumulate.cuh"

namespace ringreduce::gpu {

// A step laid out.
struct StepJob {
  Accumulate accumulate;
  std::uint64_t bytes;  // of the value. What a step only forwards may be of any size: known after the wait
};

template <class Word>
RINGREDUCE_BOTH Word* word_at(const Run& run, std::uint32_t owner, std::uint64_t offset) {
  return reinterpret_cast<Word*>(run.words[owner] + offset);
}

RINGREDUCE_BOTH std::uint64_t* broken(const Run& run) {
  return reinterpret_cast<std::uint64_t*>(run.regions[run.rank] + run.shape.broken());
}

// Ends this launch and all later ones, unless another block has done so already.
RINGREDUCE_BOTH bool give_up(const Run& run, const LaneStep& at, GaveUp why, std::uint32_t peer) {
  if (!claim(broken(run), 1)) return false;
  Report& report = *run.report;
  store_relaxed(&report.fingerprint, run.fingerprint);
  store_relaxed(&report.peer, peer);
  store_relaxed(&report.channel, at.channel_number);
  store_relaxed(&report.round, at.round);
  store_relaxed(&report.step, at.step_number);
  store_release(&report.gave_up, static_cast<std::uint32_t>(why));
  return false;
}

// Looks until the wait is over. False if that will not be. What makes waiting pointless is looked for now and then
// only: it lies in the host's memory, a microsecond away.
RINGREDUCE_BOTH bool wait_for(const Run& run, const LaneStep& at, const Wait& wait) {
  constexpr std::uint32_t kLooks = 1024;
  const auto* const word = word_at<const std::uint64_t>(run, run.rank, wait.offset);
  std::uint64_t started = 0;
  for (std::uint32_t looks = 1; load_acquire(word) != wait.value; ++looks) {
    pause();
    if (looks % kLooks != 0) continue;
    const std::uint64_t now = nanoseconds();
    if (started == 0) started = now;
    if (load_relaxed(broken(run)) != 0) return false;
    if (load_relaxed(&run.report->abort) != 0) return give_up(run, at, GaveUp::aborted, wait.peer);
    if (now - started >= run.timeout) return give_up(run, at, GaveUp::timeout, wait.peer);
    store_relaxed(&run.report->waiting_for, wait.peer);
    store_relaxed(&run.report->waited, now - started);
  }
  return true;
}

// Whether the wait is over. For a launch that never waits: if its stream did not either, the host has given up.
RINGREDUCE_BOTH bool has_come(const Run& run, const LaneStep& at, const Wait& wait) {
  const auto* const word = word_at<const std::uint64_t>(run, run.rank, wait.offset);
  return load_acquire(word) == wait.value || give_up(run, at, GaveUp::aborted, wait.peer);
}

// The elements of the step's slice in a block of `count`.
RINGREDUCE_BOTH Range slice_of(const Run& run, const LaneStep& at, std::uint64_t count) {
  const std::size_t unit = unit_of(run.element);
  const Range chunk = split(stripe(count, at.channel.share, unit), at.channel.chunks, at.step.chunk, unit);
  return slice(split(chunk, run.lanes, at.lane, unit), at.round, run.slice);
}

struct TensorSlice {
  char* data;
  std::uint64_t bytes;
};

RINGREDUCE_BOTH TensorSlice tensor_slice(const Run& run, const LaneStep& at, const Tensors& tensors,
                                         std::int32_t position) {
  const Range range = slice_of(run, at, tensors.count[position]);
  return {tensors.data[position] + range.begin * run.element, range.size() * run.element};
}

RINGREDUCE_BOTH TensorSlice local_slice(const Run& run, const LaneStep& at) {
  const FlatStep& step = at.step;
  return step.input_position >= 0 ? tensor_slice(run, at, run.input, step.input_position)
                                  : tensor_slice(run, at, run.output, step.output_position);
}

RINGREDUCE_BOTH char* payload(const Run& run, const LaneStep& at, std::uint32_t owner, std::uint32_t slot) {
  return run.regions[owner] + run.shape.payload(lane_of(run, at), slot);
}

// Whether the value is an operand as it is, bit by bit.
RINGREDUCE_BOTH bool moves(const Accumulate& job) { return job.n == 1 && job.scaled < 0; }

RINGREDUCE_APART void move(const Accumulate& job, std::uint64_t thread, std::uint64_t threads) {
  move_bytes(job, thread, threads);
}

RINGREDUCE_BOTH void set_bytes(const Run& run, StepJob& job, std::uint64_t bytes) {
  job.bytes = bytes;
  job.accumulate.count = moves(job.accumulate) ? bytes : bytes / run.element * run.parts;
}

RINGREDUCE_BOTH bool only_forwards(const FlatStep& step) { return !step.reads() && !step.writes(); }

// 1. What is there to do, as far as this rank knows.
RINGREDUCE_APART void lay_out(const Run& run, const LaneStep& at, StepJob& job) {
  const FlatStep& step = at.step;
  Accumulate& to_do = job.accumulate;
  TensorSlice local = {};
  to_do.n = 0;
  for (std::uint32_t i = 0; i <= step.sources; ++i) {
    if (step.reads() && i == step.local_position) {
      local = local_slice(run, at);
      to_do.srcs[to_do.n++] = local.data;
    }
    if (i == step.sources) break;
    const FlatSource& from = source(run, at, i);
    to_do.srcs[to_do.n++] = payload(run, at, from.peer, source_slot(run, at, from));
  }
  to_do.scaled = run.scaled && step.input_position >= 0 ? static_cast<std::int32_t>(step.local_position) : -1;
  to_do.factor = run.factor;
  to_do.divisor = step.completes ? run.divisor : 1;

  TensorSlice output = {};
  to_do.copies = 0;
  if (step.destinations > 0) to_do.dsts[to_do.copies++] = payload(run, at, run.rank, own_slot(run, at));
  if (step.writes()) {
    output = tensor_slice(run, at, run.output, step.write_position);
    const bool there_already = moves(to_do) && output.data == to_do.srcs[0];
    if (!there_already) to_do.dsts[to_do.copies++] = output.data;
  }
  set_bytes(run, job, step.reads() ? local.bytes : output.bytes);
}

// 2. Whether the step can be taken, after it was waited for if it must be. No size is taken on trust from a peer.
template <class Block>
RINGREDUCE_APART bool wait(const Run& run, const LaneStep& at, Block& block) {
  StepJob& job = block.job();
  const auto came = [&](const Wait& wait) {
    return run.mode == Mode::run ? wait_for(run, at, wait) : has_come(run, at, wait);
  };
  const auto notice = [&](const Wait& wait) -> const Notice& {
    return *word_at<const Notice>(run, run.rank, wait.offset);
  };
  return block.every(waits_of(run, at), [&](std::uint32_t i) {
    const Wait its = wait_of(run, at, i);
    if (!came(its)) return false;
    if (i >= at.step.sources) return true;
    if (notice(its).fingerprint != run.fingerprint) return give_up(run, at, GaveUp::mismatch, its.peer);

    const std::uint64_t bytes = notice(its).bytes;
    bool right = bytes == job.bytes;
    if (only_forwards(at.step)) {
      const Wait first = i == 0 ? its : wait_of(run, at, 0);
      if (!came(first)) return false;
      right = bytes == notice(first).bytes && bytes <= run.shape.slot_bytes && bytes % run.element == 0;
      if (right && i == 0) set_bytes(run, job, bytes);
    }
    return right || give_up(run, at, GaveUp::wrong_size, its.peer);
  });
}

// 3. `share` of `shares` blocks does its part.
template <class Format, class Op, class Block>
RINGREDUCE_BOTH void compute(Block& block, std::uint32_t share, std::uint32_t shares) {
  const Accumulate& job = block.job().accumulate;
  block.work([&](std::uint32_t thread, std::uint32_t threads) {
    const std::uint64_t number = std::uint64_t{share} * threads + thread, all = std::uint64_t{shares} * threads;
    if (moves(job))
      move(job, number, all);
    else
      accumulate<Format, Op>(job, number, all);
  });
}

// 4. After all threads have met: the payload is stored, the sources are read. All meet again: the words that were
// stored here may be those that the next step waits for.
template <class Block>
RINGREDUCE_APART void publish(const Run& run, const LaneStep& at, Block& block) {
  const FlatStep& step = at.step;
  const std::uint32_t lane = lane_of(run, at);
  block.each(step.destinations + step.sources, [&](std::uint32_t i) {
    if (i < step.destinations) {
      const std::uint32_t reader = run.program.destinations[step.first_destination + i], slot = own_slot(run, at);
      store_relaxed(word_at<std::uint64_t>(run, run.rank, run.shape.taken(lane, reader, slot)), std::uint64_t{1});
      Notice* const notice = word_at<Notice>(run, reader, run.shape.notice(lane, run.rank, slot));
      notice->fingerprint = run.fingerprint;
      notice->bytes = block.job().bytes;
      store_release(&notice->full, std::uint64_t{1});
    } else {
      const FlatSource& from = source(run, at, i - step.destinations);
      const std::uint32_t slot = source_slot(run, at, from);
      store_relaxed(&word_at<Notice>(run, run.rank, run.shape.notice(lane, from.peer, slot))->full, std::uint64_t{0});
      store_release(word_at<std::uint64_t>(run, from.peer, run.shape.taken(lane, run.rank, slot)), std::uint64_t{0});
    }
  });
  block.meet();
}

// One thread looks for all, so that none goes on alone. After the group broke nothing of a peer may be touched: it may
// be gone. The host says so by `abort` alone, which it can store whatever the driver does: a launch may begin long
// after the group broke, or because its stream was let go.
template <class Block>
RINGREDUCE_APART bool may_begin(const Run& run, const LaneStep& at, Block& block) {
  return block.every(1, [&](std::uint32_t) {
    const std::uint64_t gave_up = load_relaxed(broken(run));  // on its way while the other load goes to the host
    const bool aborted = load_acquire(&run.report->abort) != 0;
    if (gave_up != 0) return false;
    return !aborted || give_up(run, at, GaveUp::aborted, run.rank);
  });
}

template <class Format, class Op, class Block>
RINGREDUCE_BOTH void interpret(const Run& run, Block& block) {
  const bool all = run.mode == Mode::run;
  const std::uint32_t number = all ? block.index() / run.lanes : run.channel;
  const std::uint32_t lane = all ? block.index() % run.lanes : 0;
  const std::uint32_t first_round = all ? 0 : run.round, first_step = all ? 0 : run.step;
  if (!may_begin(run, lane_step(run, number, lane, first_round, first_step), block)) return;
  const FlatChannel& channel = run.program.channels[number];
  const std::uint32_t rounds = all ? rounds_of(run, channel) : first_round + 1;
  const std::uint32_t steps = all ? channel.steps : first_step + 1;
  for (std::uint32_t round = first_round; round < rounds; ++round)
    for (std::uint32_t s = first_step; s < steps; ++s) {
      const LaneStep at = lane_step(run, number, lane, round, s);
      block.alone([&] { lay_out(run, at, block.job()); });
      if (!wait(run, at, block)) return;
      if (run.mode != Mode::publish) compute<Format, Op>(block, all ? 0 : block.index(), all ? 1 : block.blocks());
      if (run.mode == Mode::compute) return;
      block.meet();
      publish(run, at, block);
    }
}

#if defined(__CUDACC__)
class DeviceBlock {
 public:
  __device__ explicit DeviceBlock(StepJob& job) : job_(job) {}

  __device__ std::uint32_t index() const { return blockIdx.x; }
  __device__ std::uint32_t blocks() const { return gridDim.x; }
  __device__ StepJob& job() const { return job_; }
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
  StepJob& job_;
};
#endif

}  // namespace ringreduce::gpu
