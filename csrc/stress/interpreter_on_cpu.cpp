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
namespace {

constexpr std::uint32_t kThreads = 40;  // of a block: not a power of two, so that parts are uneven
constexpr std::uint32_t kShares = 3;    // blocks that share a step, where ranks share a GPU

void play(const char* kernel, const Run& run, std::uint32_t index, std::uint32_t blocks) {
  CpuBlock block(index, blocks, kThreads);
#define RINGREDUCE_PLAY(name, Format, Op) \
  if (std::strcmp(kernel, #name) == 0) return interpret<Format, Op>(run, block);
  RINGREDUCE_GPU_KERNELS(RINGREDUCE_PLAY)
#undef RINGREDUCE_PLAY
  std::terminate();
}

// What the stream of a rank that shares its GPU waits for before a step. False when the call is given up.
bool stream_waits(const Run& run, const At& at) {
  const auto wait = [&](const std::uint64_t* word, std::uint64_t wanted, std::uint32_t peer) {
    return wait_for(run, at, word, wanted, peer);
  };
  for (std::uint32_t i = 0; i < at.step.sources; ++i) {
    const Source& from = source(run, at, i);
    if (!wait(&notice(run, at, run.rank, from.peer, source_slot(run, at, from))->full, 1, from.peer)) return false;
  }
  for (std::uint32_t r = 0; at.step.destinations > 0 && r < run.shape.ranks; ++r)
    if (!wait(taken(run, at, run.rank, r, own_slot(run, at)), 0, r)) return false;
  return true;
}

void run_stepwise(const char* kernel, Run run, std::uint32_t channels) {
  for (run.channel = 0; run.channel < channels; ++run.channel) {
    const Channel& channel = run.program.channels[run.channel];
    const std::uint32_t rounds = rounds_of(run, channel);
    for (run.round = 0; run.round < rounds; ++run.round)
      for (run.step = 0; run.step < channel.steps; ++run.step) {
        const At at{channel, run.program.steps[channel.first_step + run.step], run.channel, 0, run.round, run.step};
        if (!stream_waits(run, at)) return;
        run.mode = Mode::compute;
        for (std::uint32_t share = 0; share < kShares; ++share) play(kernel, run, share, kShares);
        run.mode = Mode::publish;
        play(kernel, run, 0, 1);
      }
  }
}

}  // namespace

extern "C" int run_plan(const GroupCall* call) {
  const auto size = static_cast<std::uint32_t>(call->size);
  const RegionShape shape{size, static_cast<std::uint32_t>(call->channels) * call->lanes, call->depth,
                          call->slot_bytes};
  std::vector<std::vector<std::uint64_t>> regions(size, std::vector<std::uint64_t>(shape.bytes() / 8));
  std::vector<FlatProgram> programs;
  try {
    for (std::int32_t r = 0; r < call->size; ++r)
      programs.emplace_back(bind(static_cast<Operation>(call->operation), {call->lowered, call->words}, 0, call->size,
                                 r, call->root, call->channels));
  } catch (const Error&) {
    return 1;
  }
  std::vector<std::thread> ranks;
  for (std::uint32_t r = 0; r < size; ++r) {
    if (call->absent[r] == 1) continue;
    ranks.emplace_back([&, r] {
      Run run{};
      run.program = programs[r].at(programs[r].image().data());
      run.shape = shape;
      for (std::uint32_t p = 0; p < size; ++p) run.regions[p] = reinterpret_cast<char*>(regions[p].data());
      run.report = &call->reports[r];
      run.input = call->inputs[r];
      run.output = call->outputs[r];
      run.largest = call->largest;
      run.slice = call->slice;
      run.fingerprint = call->fingerprints[r];
      run.timeout = call->timeout;
      run.factor = call->factors[r];
      run.divisor = call->divisor;
      run.scaled = call->scaled;
      run.element = call->element;
      run.parts = call->parts;
      run.rank = r;
      run.lanes = call->stepwise == 1 ? 1 : call->lanes;
      for (std::uint32_t launch = 0; launch < call->launches; ++launch) {
        if (call->stepwise == 1) {
          run_stepwise(call->kernel, run, programs[r].channels());
          continue;
        }
        std::vector<std::thread> blocks;
        const std::uint32_t grid = programs[r].channels() * call->lanes;
        for (std::uint32_t b = 0; b < grid; ++b) blocks.emplace_back([&, b] { play(call->kernel, run, b, grid); });
        for (std::thread& block : blocks) block.join();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return 0;
}

}  // namespace ringreduce::gpu
