// The accumulate kernels, one for each row of table.cuh: accumulate_<name>(Accumulate), for any number of blocks of up
// to 256 threads. Three such blocks fit a multiprocessor: with at most 80 registers no kernel spills, on sm_80, 90 and
// 100.
#include "kernels/gpu/table.cuh"

#define RINGREDUCE_ACCUMULATE(name, ...)                                           \
  extern "C" __global__ void __launch_bounds__(256, 3)                             \
      accumulate_##name(const __grid_constant__ ringreduce::gpu::Accumulate job) { \
    using Row = ringreduce::gpu::rows::name;                                       \
    ringreduce::gpu::accumulate<Row::Format, Row::Op>(                             \
        job, static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,    \
        static_cast<std::uint64_t>(gridDim.x) * blockDim.x);                       \
  }

RINGREDUCE_GPU_DEFINE(RINGREDUCE_ACCUMULATE)
