// The accumulate kernels as the stand-in driver runs them: the bodies of csrc/kernels/gpu, one call a block.

#include "kernels/gpu/table.cuh"

using ringreduce::gpu::Accumulate;

#define KERNEL(name, Format, Op)                                                                               \
  extern "C" __attribute__((visibility("default"))) const std::size_t stand_in_accumulate_##name##_parameters; \
  const std::size_t stand_in_accumulate_##name##_parameters = sizeof(Accumulate);                              \
  extern "C" __attribute__((visibility("default"))) void stand_in_accumulate_##name(                           \
      const void* const* parameters, unsigned block, unsigned blocks, unsigned threads) {                      \
    const auto& job = *static_cast<const Accumulate*>(parameters[0]);                                          \
    for (unsigned thread = 0; thread < threads; thread++)                                                      \
      ringreduce::gpu::accumulate<Format, ringreduce::gpu::Op>(job, std::uint64_t{block} * threads + thread,   \
                                                               std::uint64_t{blocks} * threads);               \
  }

namespace ringreduce::gpu {
RINGREDUCE_GPU_KERNELS(KERNEL)
}
