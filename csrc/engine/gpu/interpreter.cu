// The kernels that run plans: run_<name>(Run) for every row of the table. Mode::run takes a block for each lane,
// Mode::step as many as are to share a batch.
#include "engine/gpu/interpreter.cuh"
#include "kernels/gpu/table.cuh"

#define RINGREDUCE_RUN(name, ...)                                                 \
  extern "C" __global__ void __launch_bounds__(ringreduce::gpu::kBlockThreads, 1) \
      run_##name(const __grid_constant__ ringreduce::gpu::Run run) {              \
    __shared__ ringreduce::gpu::BatchJob job;                                     \
    ringreduce::gpu::DeviceBlock block(job);                                      \
    using Row = ringreduce::gpu::rows::name;                                      \
    ringreduce::gpu::interpret<Row::Format, Row::Op>(run, block);                 \
  }
RINGREDUCE_GPU_DEFINE(RINGREDUCE_RUN)
