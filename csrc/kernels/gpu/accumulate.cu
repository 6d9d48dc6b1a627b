// The accumulate kernels, one for each row of table.cuh: accumulate_<name>(Accumulate), for any number of blocks of up
// to 256 threads. Three such blocks fit a multiprocessor, two where a unit has several lanes: these take a register
// each or more. With the 80 or 128 registers that this leaves a thread no kernel spills, on sm_75 and newer.
#include "kernels/gpu/table.cuh"

#define RINGREDUCE_ACCUMULATE(name, ...)                                                                     \
  extern "C" __global__ void __launch_bounds__(256, ringreduce::gpu::rows::name::Format::kLanes > 1 ? 2 : 3) \
      accumulate_##name(const __grid_constant__ ringreduce::gpu::Accumulate job) {                           \
    using Row = ringreduce::gpu::rows::name;                                                                 \
    ringreduce::gpu::accumulate<Row::Format, Row::Op>(                                                       \
        job, static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,                              \
        static_cast<std::uint64_t>(gridDim.x) * blockDim.x);                                                 \
  }

RINGREDUCE_GPU_DEFINE(RINGREDUCE_ACCUMULATE)
