#include "stress/interpreter_on_cpu.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "engine/gpu/flat_program.h"
#include "engine/gpu/interpreter.cuh"
#include "kernels/gpu/table.cuh"
#include "stress/cpu_block.h"

namespace ringreduce::gpu {

struct Group {
  RegionShape shape;
  std::vector<std::vector<std::uint64_t>> words, regions;  // apart, as those of ranks that share a GPU
  std::vector<std::uint32_t> arrived;                      // per rank
};

namespace {

// Threads of a block. The numbers are no powers of two, so that parts are uneven.
constexpr std::uint32_t kPlayedThreads = 40;
constexpr std::uint32_t kRealThreads = 3;
constexpr std::uint32_t kShares = 3;  // blocks that share a batch, where ranks share a GPU

template <class Block>
void play(const char* kernel, const Run& run, Block block) {
#define RINGREDUCE_PLAY(name, Format, Op) \
  if (std::strcmp(kernel, #name) == 0) return interpret<Format, Op>(run, block);
  RINGREDUCE_GPU_KERNELS(RINGREDUCE_PLAY)
#undef RINGREDUCE_PLAY
  std::terminate();
}

// Counts the steps that it takes without reading whole packs.
class CountingBlock : public CpuBlock {
 public:
  CountingBlock(std::uint32_t index, std::uint32_t blocks, std::uint64_t* unlike)
      : CpuBlock(index, blocks, kPlayedThreads), unlike_(unlike) {}

  // The interpreter lays out a batch's steps, by this, right before their work.
  template <class F>
  void each(std::uint32_t n, F f) {
    steps_ = n;
    CpuBlock::each(n, f);
  }

  template <class F>
  void work(F f) {
    for (std::uint32_t i = 0; unlike_ != nullptr && i < steps_; ++i)
      if (const Accumulate& step = job().steps[i].accumulate; step.count > 0 && !aligned_alike<Pack>(step))
        std::atomic_ref(*unlike_).fetch_add(1);
    CpuBlock::work(f);
  }

 private:
  std::uint64_t* const unlike_;
  std::uint32_t steps_ = 0;
};

// f(i) for all i < n, each in a thread of its own.
template <class F>
void in_threads(std::uint32_t n, F f) {
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < n; ++i) threads.emplace_back(f, i);
  for (std::thread& thread : threads) thread.join();
}

void launch(const GroupCall& call, const Run& run, std::uint32_t blocks) {
  in_threads(blocks, [&](std::uint32_t b) {
    if (!call.threaded) return play(call.kernel, run, CountingBlock(b, blocks, call.unlike));
    ThreadedBlock::Shared shared(kRealThreads);
    in_threads(kRealThreads, [&](std::uint32_t t) { play(call.kernel, run, ThreadedBlock(b, blocks, t, shared)); });
  });
}

// Waits as the stream of a rank that shares its GPU does before a batch. It lets go if the host has given up.
void stream_waits(const Run& run) {
  if (load_acquire(&run.report->abort) != 0) return;
  const LaneBatch at = lane_batch(run, 0, 0, run.round, run.batch);
  for_each_wait(run, at, [&](const Wait& wait) { wait_for(run, at, wait); });
}

void take_batch(const GroupCall& call, Run run) {
  run.mode = Mode::step;
  launch(call, run, kShares);
}

void run_stepwise(const GroupCall& call, Run run) {
  const FlatChannel& channel = run.program.channels[0];
  const std::uint32_t rounds = rounds_of(run, channel);
  for (run.round = 0; run.round < rounds; ++run.round)
    for (run.batch = 0; run.batch < channel.batches; ++run.batch) {
      stream_waits(run);
      take_batch(call, run);
    }
}

Run make_run(Group& group, const GroupCall& call, const FlatProgram& program, std::uint32_t rank) {
  Run run{};
  run.program = program.at(program.image().data());
  run.shape = group.shape;
  for (std::uint32_t r = 0; r < group.shape.ranks; ++r) {
    run.words[r] = reinterpret_cast<char*>(group.words[r].data());
    run.regions[r] = reinterpret_cast<char*>(group.regions[r].data());
  }
  run.report = &call.reports[rank];
  run.arrived = &group.arrived[rank];
  run.input = call.inputs[rank];
  run.output = call.outputs[rank];
  run.largest = call.largest;
  run.slice = call.slice;
  run.fingerprint = call.fingerprints[rank];
  run.timeout = call.timeout;
  run.factor = call.factors[rank];
  run.divisor = call.divisor;
  run.weighs = call.weighs;
  run.scaled = call.scaled;
  run.element = call.element;
  run.parts = call.parts;
  run.rank = rank;
  run.lanes = call.stepwise ? 1 : call.lanes;
  return run;
}

// Those of a GroupCall's `batches`, if it has any. `at`: where this rank's begin, then where the next one's do.
std::vector<Batches> batches_for(const Program& program, std::uint32_t depth, const std::uint32_t*& at) {
  if (at == nullptr) return batches_of(program, depth);
  std::vector<Batches> all;
  for (const ChannelProgram& channel : program.channels) {
    Batches& batches = all.emplace_back();
    for (std::uint32_t step = 0; step < channel.steps.size(); ++step) {
      if (batches.size() <= *at) batches.resize(*at + 1);
      batches[*at++].push_back(step);
    }
  }
  return all;
}

// The programs of all ranks. Throws Error if the plan is malformed.
std::vector<FlatProgram> make_programs(const Group& group, const GroupCall& call) {
  std::vector<FlatProgram> programs;
  const std::uint32_t* given = call.batches;
  for (int rank = 0; rank < static_cast<int>(group.shape.ranks); ++rank) {
    const Program program =
        program_of({static_cast<Operation>(call.operation), {call.lowered, call.lowered + call.words}},
                   {rank, static_cast<int>(group.shape.ranks), call.root, call.channels});
    const FlatProgram::Options options{rank, group.shape.depth, call.stepwise};
    programs.emplace_back(program, batches_for(program, group.shape.depth, given), options);
  }
  return programs;
}

template <class Word>
Word* word_in(Group& group, std::uint32_t owner, std::uint64_t offset) {
  return reinterpret_cast<Word*>(reinterpret_cast<char*>(group.words[owner].data()) + offset);
}

}  // namespace

extern "C" {

Group* make_group(std::uint32_t ranks, std::uint32_t lanes, std::uint32_t depth, std::uint32_t slot_bytes) {
  const RegionShape shape{ranks, lanes, depth, slot_bytes};
  return new Group{shape, std::vector(ranks, std::vector<std::uint64_t>(shape.word_bytes() / 8)),
                   std::vector(ranks, std::vector<std::uint64_t>(shape.bytes() / 8)),
                   std::vector<std::uint32_t>(ranks)};
}

void drop_group(Group* group) { delete group; }

Notice* notice(Group* group, std::uint32_t owner, std::uint32_t lane, std::uint32_t writer, std::uint32_t slot) {
  return word_in<Notice>(*group, owner, group->shape.notice(lane, writer, slot));
}

std::uint64_t* broken_word(Group* group, std::uint32_t rank) {
  return &group->regions[rank][group->shape.broken() / 8];
}

std::uint64_t words_in_use(Group* group) {
  const RegionShape& shape = group->shape;
  std::uint64_t used = 0;
  for (std::uint32_t owner = 0; owner < shape.ranks; ++owner) {
    used += *broken_word(group, owner) != 0;
    used += group->arrived[owner] != 0;
    for (std::uint32_t lane = 0; lane < shape.lanes; ++lane)
      for (std::uint32_t peer = 0; peer < shape.ranks; ++peer)
        for (std::uint32_t slot = 0; slot < shape.depth; ++slot) {
          used += notice(group, owner, lane, peer, slot)->full != 0;
          used += *word_in<std::uint64_t>(*group, owner, shape.taken(lane, peer, slot)) != 0;
        }
  }
  return used;
}

bool make_call(Group* group, const GroupCall* call) {
  std::vector<FlatProgram> programs;
  try {
    programs = make_programs(*group, *call);
  } catch (const Error&) {
    return false;
  }
  in_threads(group->shape.ranks, [&](std::uint32_t r) {
    if (call->absent[r]) return;
    const Run run = make_run(*group, *call, programs[r], r);
    for (std::uint32_t k = 0; k < call->launches; ++k) {
      if (call->stepwise)
        run_stepwise(*call, run);
      else
        launch(*call, run, programs[r].channels() * call->lanes);
    }
  });
  return true;
}

bool launch_batch(Group* group, const GroupCall* call, std::uint32_t rank, std::uint32_t round, std::uint32_t batch) {
  try {
    const std::vector<FlatProgram> programs = make_programs(*group, *call);
    Run run = make_run(*group, *call, programs[rank], rank);
    run.lanes = 1;
    run.round = round;
    run.batch = batch;
    take_batch(*call, run);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::uint32_t waits_of_batch(Group* group, const GroupCall* call, std::uint32_t rank, std::uint32_t round,
                             std::uint32_t batch) {
  const std::vector<FlatProgram> programs = make_programs(*group, *call);
  const Run run = make_run(*group, *call, programs[rank], rank);
  std::uint32_t waits = 0;
  for_each_wait(run, lane_batch(run, 0, 0, round, batch), [&](const Wait&) { ++waits; });
  return waits;
}

}  // extern "C"

}  // namespace ringreduce::gpu
