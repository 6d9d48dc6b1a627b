// Runs one rank's program of one call on a GPU: what engine/execution.h is on a CPU, as the body of a kernel.
//
// A block takes the batches of its lane one after the other, round after round:
//   1. lay_out  for each step: the operands and where the value goes: the local chunk, the sources' slots, its own
//   2. wait     until every source's notice says that its slot is full, and no reader has a slot to send from
//   3. compute  all threads combine the operands of all steps, in rank order, into the outputs and the slots
//   4. publish  to every destination: taken, then full; to every source: no longer full, then no longer taken
// A plan whose round ends if it runs alone (ringreduce.plan.verify) ends so however many rounds there are, and in
// batches (batches.h).
//
// `Block` is a thread block: DeviceBlock here, or those of stress/cpu_block.h for tests. All its threads take the same
// way.
//   index(), blocks()   its number in the grid, of how many
//   job()               a BatchJob that all threads see
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
  // The value's size, and its offset in the slot that it is sent from. A value that a step only forwards may have any
  // size, and keeps the offset that it has in the first source's slot, which is known after the wait.
  std::uint64_t bytes, offset;
};

struct BatchJob {
  StepJob steps[kMostSteps];
  bool publishes;  // this block does
};

template <class Word>
RINGREDUCE_BOTH Word* word_at(const Run& run, std::uint32_t owner, std::uint64_t offset) {
  return reinterpret_cast<Word*>(run.words[owner] + offset);
}

RINGREDUCE_BOTH std::uint64_t* broken(const Run& run) {
  return reinterpret_cast<std::uint64_t*>(run.regions[run.rank] + run.shape.broken());
}

// Ends this launch and all later ones, unless another block has done so already. `step`: of the batch.
RINGREDUCE_APART bool give_up(const Run& run, const LaneBatch& at, std::uint32_t step, GaveUp why, std::uint32_t peer) {
  if (!claim(broken(run), 1)) return false;
  const FlatStep& of = step_of(run, at, step);
  Report& report = *run.report;
  store_relaxed(&report.fingerprint, run.fingerprint);
  store_relaxed(&report.peer, peer);
  store_relaxed(&report.channel, stripe_of(run, at, of).channel);
  store_relaxed(&report.round, at.round);
  store_relaxed(&report.step, of.number);
  store_release(&report.gave_up, static_cast<std::uint32_t>(why));
  return false;
}

// Looks until the wait is over. False if that will not be. What makes waiting pointless is looked for now and then
// only: it lies in the host's memory, a microsecond away.
RINGREDUCE_BOTH bool wait_for(const Run& run, const LaneBatch& at, const Wait& wait) {
  constexpr std::uint32_t kLooks = 1024;
  const auto* const word = word_at<const std::uint64_t>(run, run.rank, wait.offset);
  std::uint64_t started = 0;
  for (std::uint32_t looks = 1; load_acquire(word) != wait.value; ++looks) {
    pause();
    if (looks % kLooks != 0) continue;
    const std::uint64_t now = nanoseconds();
    if (started == 0) started = now;
    if (load_relaxed(broken(run)) != 0) return false;
    if (load_relaxed(&run.report->abort) != 0) return give_up(run, at, wait.step, GaveUp::aborted, wait.peer);
    if (now - started >= run.timeout) return give_up(run, at, wait.step, GaveUp::timeout, wait.peer);
    store_relaxed(&run.report->waiting_for, wait.peer);
    store_relaxed(&run.report->waited, now - started);
  }
  return true;
}

// Whether the wait is over. For a launch that never waits: if its stream did not either, the host has given up.
RINGREDUCE_BOTH bool has_come(const Run& run, const LaneBatch& at, const Wait& wait) {
  const auto* const word = word_at<const std::uint64_t>(run, run.rank, wait.offset);
  return load_acquire(word) == wait.value || give_up(run, at, wait.step, GaveUp::aborted, wait.peer);
}

// The elements of the step's slice in a block of `count`.
RINGREDUCE_BOTH Range slice_of(const Run& run, const LaneBatch& at, const FlatStep& step, std::uint64_t count) {
  const std::size_t unit = unit_of(run.element);
  const FlatStripe& of = stripe_of(run, at, step);
  const Range chunk = split(stripe(count, of.share, unit), of.chunks, step.chunk, unit);
  return slice(split(chunk, run.lanes, at.lane, unit), at.round, run.slice);
}

struct TensorSlice {
  char* data;
  std::uint64_t bytes;
};

RINGREDUCE_BOTH TensorSlice tensor_slice(const Run& run, const LaneBatch& at, const FlatStep& step,
                                         const Tensors& tensors, std::int32_t position) {
  const Range range = slice_of(run, at, step, tensors.count[position]);
  return {tensors.data[position] + range.begin * run.element, range.size() * run.element};
}

RINGREDUCE_BOTH TensorSlice local_slice(const Run& run, const LaneBatch& at, const FlatStep& step) {
  return step.input_position >= 0 ? tensor_slice(run, at, step, run.input, step.input_position)
                                  : tensor_slice(run, at, step, run.output, step.output_position);
}

// The begin of a slot, without the payload's offset.
RINGREDUCE_BOTH char* payload(const Run& run, const LaneBatch& at, std::uint32_t owner, std::uint32_t slot) {
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

// Where the value goes in the slot that it is sent from, if it is: that is the first destination.
RINGREDUCE_BOTH void set_offset(const FlatStep& step, StepJob& job, std::uint64_t offset) {
  job.offset = offset;
  if (step.sends()) job.accumulate.dsts[0] = static_cast<char*>(job.accumulate.dsts[0]) + offset;
}

RINGREDUCE_BOTH bool only_forwards(const FlatStep& step) { return !step.reads() && !step.writes(); }

// The place of the step's source i among the operands: the local chunk is one of them if it is read.
RINGREDUCE_BOTH std::uint32_t operand_of(const FlatStep& step, std::uint32_t i) {
  return step.reads() && i >= step.local_position ? i + 1 : i;
}

// 1. What is there to do in a step, as far as this rank knows.
RINGREDUCE_APART void lay_out(const Run& run, const LaneBatch& at, const FlatStep& step, StepJob& job) {
  Accumulate& to_do = job.accumulate;
  TensorSlice local = {};
  to_do.n = 0;
  for (std::uint32_t i = 0; i <= step.sources; ++i) {
    if (step.reads() && i == step.local_position) {
      local = local_slice(run, at, step);
      to_do.weights[to_do.n] = step.local_weight;
      to_do.srcs[to_do.n++] = local.data;
    }
    if (i == step.sources) break;
    const FlatSource& from = run.program.sources[step.first_source + i];
    to_do.weights[to_do.n] = from.weight;
    to_do.srcs[to_do.n++] = payload(run, at, from.peer, source_slot(run, at, from));
  }
  to_do.scaled = run.scaled && step.input_position >= 0 ? static_cast<std::int32_t>(step.local_position) : -1;
  to_do.factor = run.factor;
  to_do.weighs = run.weighs && to_do.n > 1;
  to_do.divisor = to_do.weighs ? step.mean_divisor : step.completes ? run.divisor : 1;

  TensorSlice output = {};
  to_do.copies = 0;
  if (step.sends()) to_do.dsts[to_do.copies++] = payload(run, at, run.rank, own_slot(run, at, step));
  if (step.writes()) {
    output = tensor_slice(run, at, step, run.output, step.write_position);
    const bool there_already = moves(to_do) && output.data == to_do.srcs[0];
    if (!there_already) to_do.dsts[to_do.copies++] = output.data;
  }
  const TensorSlice& own = step.reads() ? local : output;  // none if it only forwards
  set_bytes(run, job, own.bytes);
  set_offset(step, job, reinterpret_cast<std::uintptr_t>(own.data) % kPack);
}

// 2. Whether the batch can be taken, after it was waited for if it must be. No size is taken on trust from a peer.
template <class Block>
RINGREDUCE_APART bool wait(const Run& run, const LaneBatch& at, Block& block) {
  const auto came = [&](const Wait& wait) {
    return run.mode == Mode::run ? wait_for(run, at, wait) : has_come(run, at, wait);
  };
  const auto notice = [&](const Wait& wait) -> const Notice& {
    return *word_at<const Notice>(run, run.rank, wait.offset);
  };
  return block.every(waits_of(run, at), [&](std::uint32_t i) {
    Wait its;
    if (!wait_of(run, at, i, its)) return true;
    if (!came(its)) return false;
    if (i >= at.batch.sources) return true;
    if (notice(its).fingerprint != run.fingerprint) return give_up(run, at, its.step, GaveUp::mismatch, its.peer);

    const FlatStep& step = step_of(run, at, its.step);
    StepJob& job = block.job().steps[its.step];
    const std::uint32_t first_of_step = step.first_source - at.batch.first_source;
    const std::uint64_t bytes = notice(its).bytes, offset = notice(its).offset;
    const void*& operand = job.accumulate.srcs[operand_of(step, i - first_of_step)];
    operand = static_cast<const char*>(operand) + offset % kPack;
    bool right = bytes == job.bytes;
    if (only_forwards(step)) {
      const Wait first = wait_for_source(run, at, first_of_step);
      if (!came(first)) return false;
      right = bytes == notice(first).bytes && bytes <= run.shape.slot_bytes && bytes % run.element == 0;
      if (right && i == first_of_step) {
        set_bytes(run, job, bytes);
        set_offset(step, job, offset % kPack);
      }
    }
    return right || give_up(run, at, its.step, GaveUp::wrong_size, its.peer);
  });
}

// The number of threads that a step gets, at most `threads`. Each takes a few packs of 16 bytes at once, and warps are
// whole.
RINGREDUCE_BOTH std::uint32_t threads_for(std::uint64_t bytes, std::uint32_t threads) {
  constexpr std::uint32_t kBytesOfThread = 64, kWarp = 32;
  return static_cast<std::uint32_t>(lesser(ceil_div(bytes, kBytesOfThread * kWarp) * kWarp, threads));
}

// 3. `share` of `shares` blocks does its part. Each step begins with the thread after those that the one before it has,
// so that threads take small steps side by side.
template <class Format, class Op, class Block>
RINGREDUCE_BOTH void compute(Block& block, std::uint32_t steps, std::uint32_t share, std::uint32_t shares) {
  block.work([&](std::uint32_t thread, std::uint32_t threads) {
    const std::uint32_t all = shares * threads;
    std::uint32_t number = share * threads + thread;  // counted from the first thread of the step
    RINGREDUCE_LOOP for (std::uint32_t i = 0; i < steps; ++i) {
      const StepJob& job = block.job().steps[i];
      const std::uint32_t needed = threads_for(job.bytes, all);
      if (number < needed) {
        if (moves(job.accumulate))
          move(job.accumulate, number, needed);
        else
          accumulate<Format, Op>(job.accumulate, number, needed);
        number += all;
      }
      number -= needed;
    }
  });
}

// 4. After all threads have met: the payloads are stored, the sources are read. All meet again: the words that were
// stored here may be those that the next batch waits for.
template <class Block>
RINGREDUCE_APART void publish(const Run& run, const LaneBatch& at, Block& block) {
  const std::uint32_t lane = lane_of(run, at), ranks = run.shape.ranks;
  block.each(at.batch.sources + at.batch.steps * ranks, [&](std::uint32_t i) {
    if (i < at.batch.sources) {
      const FlatSource& from = run.program.sources[at.batch.first_source + i];
      const std::uint32_t slot = source_slot(run, at, from);
      store_relaxed(&word_at<Notice>(run, run.rank, run.shape.notice(lane, from.peer, slot))->full, std::uint64_t{0});
      store_release(word_at<std::uint64_t>(run, from.peer, run.shape.taken(lane, run.rank, slot)), std::uint64_t{0});
      return;
    }
    const std::uint32_t number = (i - at.batch.sources) / ranks, reader = (i - at.batch.sources) % ranks;
    const FlatStep& step = step_of(run, at, number);
    if (!is_in(step.destinations, reader)) return;
    const std::uint32_t slot = own_slot(run, at, step);
    store_relaxed(word_at<std::uint64_t>(run, run.rank, run.shape.taken(lane, reader, slot)), std::uint64_t{1});
    Notice* const notice = word_at<Notice>(run, reader, run.shape.notice(lane, run.rank, slot));
    notice->fingerprint = run.fingerprint;
    notice->bytes = block.job().steps[number].bytes;
    notice->offset = block.job().steps[number].offset;
    store_release(&notice->full, std::uint64_t{1});
  });
  block.meet();
}

// One thread looks for all, so that none goes on alone. After the group broke nothing of a peer may be touched: it may
// be gone. The host says so by `abort` alone, which it can store whatever the driver does: a launch may begin long
// after the group broke, or because its stream was let go.
template <class Block>
RINGREDUCE_APART bool may_begin(const Run& run, const LaneBatch& at, Block& block) {
  return block.every(1, [&](std::uint32_t) {
    const std::uint64_t gave_up = load_relaxed(broken(run));  // on its way while the other load goes to the host
    const bool aborted = load_acquire(&run.report->abort) != 0;
    if (gave_up != 0) return false;
    return !aborted || give_up(run, at, 0, GaveUp::aborted, run.rank);
  });
}

// How many blocks take a batch together; the number of this one among them.
template <class Block>
RINGREDUCE_BOTH std::uint32_t shares_of(const Run& run, const Block& block) {
  return run.mode == Mode::run ? 1 : block.blocks();
}
template <class Block>
RINGREDUCE_BOTH std::uint32_t share_of(const Run& run, const Block& block) {
  return run.mode == Mode::run ? 0 : block.index();
}

// Whether this block publishes the batch: of those that take it, the one that ends last.
template <class Block>
RINGREDUCE_BOTH bool ends_last(const Run& run, Block& block) {
  block.meet();
  const std::uint32_t shares = shares_of(run, block);
  if (shares == 1) return true;
  block.alone([&] { block.job().publishes = arrives_last(run.arrived, shares); });
  return block.job().publishes;
}

// Takes a batch. False if the call has been given up, or another block publishes.
template <class Format, class Op, class Block>
RINGREDUCE_BOTH bool take(const Run& run, const LaneBatch& at, Block& block) {
  block.each(at.batch.steps, [&](std::uint32_t i) { lay_out(run, at, step_of(run, at, i), block.job().steps[i]); });
  block.meet();
  if (!wait(run, at, block)) return false;
  compute<Format, Op>(block, at.batch.steps, share_of(run, block), shares_of(run, block));
  if (!ends_last(run, block)) return false;
  publish(run, at, block);
  return true;
}

template <class Format, class Op, class Block>
RINGREDUCE_BOTH void interpret(const Run& run, Block& block) {
  const bool all = run.mode == Mode::run;
  const std::uint32_t number = all ? block.index() / run.lanes : 0, lane = all ? block.index() % run.lanes : 0;
  const FlatChannel& channel = run.program.channels[number];
  if (channel.batches == 0) return;
  if (!may_begin(run, lane_batch(run, number, lane, run.round, run.batch), block)) return;
  const std::uint32_t rounds = all ? rounds_of(run, channel) : run.round + 1;
  for (std::uint32_t round = run.round; round < rounds; ++round)
    for (std::uint32_t b = run.batch; b < (all ? channel.batches : run.batch + 1); ++b)
      if (!take<Format, Op>(run, lane_batch(run, number, lane, round, b), block)) return;
}

#if defined(__CUDACC__)
class DeviceBlock {
 public:
  __device__ explicit DeviceBlock(BatchJob& job) : job_(job) {}

  __device__ std::uint32_t index() const { return blockIdx.x; }
  __device__ std::uint32_t blocks() const { return gridDim.x; }
  __device__ BatchJob& job() const { return job_; }
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
  BatchJob& job_;
};
#endif

}  // namespace ringreduce::gpu
