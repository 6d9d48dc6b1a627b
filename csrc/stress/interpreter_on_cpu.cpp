#include "stress/interpreter_on_cpu.h"

#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "engine/gpu/cpu_block.h"
#include "engine/gpu/flat_program.h"
#include "engine/gpu/interpreter.cuh"
#include "kernels/gpu/table.cuh"

namespace ringreduce::gpu {

struct Group {
  RegionShape shape;
  std::vector<std::vector<std::uint64_t>> words, regions;  // apart, as those of ranks that share a GPU
};

namespace {

// Of a block. Not powers of two, so that parts are uneven.
constexpr std::uint32_t kPlayedThreads = 40;
constexpr std::uint32_t kRealThreads = 3;
constexpr std::uint32_t kShares = 3;  // blocks that share a step, where ranks share a GPU

template <class Block>
void play(const char* kernel, const Run& run, Block block) {
#define RINGREDUCE_PLAY(name, Format, Op) \
  if (std::strcmp(kernel, #name) == 0) return interpret<Format, Op>(run, block);
  RINGREDUCE_GPU_KERNELS(RINGREDUCE_PLAY)
#undef RINGREDUCE_PLAY
  std::terminate();
}

// f(i) for all i < n, each in a thread of its own.
template <class F>
void in_threads(std::uint32_t n, F f) {
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < n; ++i) threads.emplace_back(f, i);
  for (std::thread& thread : threads) thread.join();
}

void launch(const GroupCall& call, const Run& run, std::uint32_t blocks) {
  in_threads(blocks, [&](std::uint32_t b) {
    if (!call.threaded) return play(call.kernel, run, CpuBlock(b, blocks, kPlayedThreads));
    ThreadedBlock::Shared shared(kRealThreads);
    in_threads(kRealThreads, [&](std::uint32_t t) { play(call.kernel, run, ThreadedBlock(b, blocks, t, shared)); });
  });
}

// What the stream of a rank that shares its GPU waits for before a step. Where the host has given up, it lets go.
void stream_waits(const Run& run) {
  if (load_acquire(&run.report->abort) != 0) return;
  const LaneStep at = lane_step(run, run.channel, 0, run.round, run.step);
  for_each_wait(run, run.channel, run.round, run.step, [&](const Wait& wait) { wait_for(run, at, wait); });
}

void take_step(const GroupCall& call, Run run, Mode mode) {
  run.mode = mode;
  launch(call, run, mode == Mode::compute ? kShares : 1);
}

void run_stepwise(const GroupCall& call, Run run, std::uint32_t channels) {
  for (run.channel = 0; run.channel < channels; ++run.channel) {
    const FlatChannel& channel = run.program.channels[run.channel];
    const std::uint32_t rounds = rounds_of(run, channel);
    for (run.round = 0; run.round < rounds; ++run.round)
      for (run.step = 0; run.step < channel.steps; ++run.step) {
        stream_waits(run);
        take_step(call, run, Mode::compute);
        take_step(call, run, Mode::publish);
      }
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
  run.input = call.inputs[rank];
  run.output = call.outputs[rank];
  run.largest = call.largest;
  run.slice = call.slice;
  run.fingerprint = call.fingerprints[rank];
  run.timeout = call.timeout;
  run.factor = call.factors[rank];
  run.divisor = call.divisor;
  run.scaled = call.scaled;
  run.element = call.element;
  run.parts = call.parts;
  run.rank = rank;
  run.lanes = call.stepwise ? 1 : call.lanes;
  return run;
}

// Throws Error if the plan is malformed.
FlatProgram make_program(const Group& group, const GroupCall& call, std::uint32_t rank) {
  return FlatProgram(bind(static_cast<Operation>(call.operation), {call.lowered, call.words}, 0,
                          static_cast<int>(group.shape.ranks), static_cast<int>(rank), call.root, call.channels));
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
                   std::vector(ranks, std::vector<std::uint64_t>(shape.bytes() / 8))};
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
    for (std::uint32_t r = 0; r < group->shape.ranks; ++r) programs.push_back(make_program(*group, *call, r));
  } catch (const Error&) {
    return false;
  }
  in_threads(group->shape.ranks, [&](std::uint32_t r) {
    if (call->absent[r]) return;
    const Run run = make_run(*group, *call, programs[r], r);
    for (std::uint32_t k = 0; k < call->launches; ++k) {
      if (call->stepwise)
        run_stepwise(*call, run, programs[r].channels());
      else
        launch(*call, run, programs[r].channels() * call->lanes);
    }
  });
  return true;
}

bool launch_step(Group* group, const GroupCall* call, std::uint32_t rank, Mode mode, std::uint32_t channel,
                 std::uint32_t round, std::uint32_t step) {
  try {
    const FlatProgram program = make_program(*group, *call, rank);
    Run run = make_run(*group, *call, program, rank);
    run.lanes = 1;
    run.channel = channel;
    run.round = round;
    run.step = step;
    take_step(*call, run, mode);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // extern "C"

}  // namespace ringreduce::gpu
