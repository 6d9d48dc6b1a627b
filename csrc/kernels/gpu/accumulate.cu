// The accumulate kernels, one for each row of table.cuh: accumulate_<name>(Accumulate). Any number of blocks of up to
// 256 threads. Where RINGREDUCE_GPU_ONLY is a row's name only that one is compiled, which is what NVRTC has time for.
#include "kernels/gpu/table.cuh"

namespace ringreduce::gpu::rows {

#define RINGREDUCE_ROW(name, F, O) \
  struct name {                    \
    using Format = F;              \
    using Op = O;                  \
  };
RINGREDUCE_GPU_KERNELS(RINGREDUCE_ROW)

}  // namespace ringreduce::gpu::rows

#define RINGREDUCE_KERNEL(name)                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                \
      accumulate_##name(const __grid_constant__ ringreduce::gpu::Accumulate job) { \
    using Row = ringreduce::gpu::rows::name;                                       \
    ringreduce::gpu::accumulate<Row::Format, Row::Op>(                             \
        job, static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,    \
        static_cast<std::uint64_t>(gridDim.x) * blockDim.x);                       \
  }

#if defined(RINGREDUCE_GPU_ONLY)
#define RINGREDUCE_KERNEL_OF(name) RINGREDUCE_KERNEL(name)
RINGREDUCE_KERNEL_OF(RINGREDUCE_GPU_ONLY)
#else
#define RINGREDUCE_KERNEL_OF(name, Format, Op) RINGREDUCE_KERNEL(name)
RINGREDUCE_GPU_KERNELS(RINGREDUCE_KERNEL_OF)
#endif
