// The kernels of csrc as the stand-in driver runs them: those of engine/gpu/interpreter.cu and of
// kernels/gpu/accumulate.cu, for every row of the table.
#include "engine/gpu/interpreter.cuh"
#include "kernel.h"
#include "kernels/gpu/table.cuh"
#include "stress/cpu_block.h"

using ringreduce::gpu::Accumulate;
using ringreduce::gpu::Run;

#define RUN(name, ...)                                                              \
  STAND_IN_KERNEL(run_##name, Run, ringreduce::gpu::kBlockThreads) {                \
    using Row = ringreduce::gpu::rows::name;                                        \
    ringreduce::gpu::CpuBlock threads_of_block(block, blocks, threads);             \
    ringreduce::gpu::interpret<Row::Format, Row::Op>(parameters, threads_of_block); \
  }
RINGREDUCE_GPU_KERNELS(RUN)

#define ACCUMULATE(name, ...)                                                                          \
  STAND_IN_KERNEL(accumulate_##name, Accumulate, 256) {                                                \
    using Row = ringreduce::gpu::rows::name;                                                           \
    const std::uint64_t first = std::uint64_t{block} * threads, all = std::uint64_t{blocks} * threads; \
    for (unsigned thread = 0; thread < threads; ++thread)                                              \
      ringreduce::gpu::accumulate<Row::Format, Row::Op>(parameters, first + thread, all);              \
  }
RINGREDUCE_GPU_KERNELS(ACCUMULATE)
