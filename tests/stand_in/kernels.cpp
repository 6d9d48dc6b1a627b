// Kernels for driver_test.cpp, as the stand-in driver runs them: one call a block.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "driver_test.h"

#define KERNEL(name, Parameters)                                                                     \
  extern "C" __attribute__((visibility("default"))) const std::size_t stand_in_##name##_parameters;  \
  const std::size_t stand_in_##name##_parameters = sizeof(Parameters);                               \
  static void name(const Parameters& parameters, unsigned block, unsigned blocks, unsigned threads); \
  extern "C" __attribute__((visibility("default"))) void stand_in_##name(                            \
      const void* const* parameters, unsigned block, unsigned blocks, unsigned threads) {            \
    name(*static_cast<const Parameters*>(parameters[0]), block, blocks, threads);                    \
  }                                                                                                  \
  static void name(const Parameters& parameters, unsigned block, unsigned blocks, unsigned threads)

// Every thread of every block takes every so many elements.
KERNEL(add, Add) {
  auto* const words = reinterpret_cast<std::uint64_t*>(parameters.words);
  for (unsigned thread = 0; thread < threads; thread++)
    for (std::uint64_t i = block * threads + thread; i < parameters.count; i += std::uint64_t{blocks} * threads)
      words[i] += parameters.value;
}

// No block ends before all have begun.
KERNEL(meet, Meet) {
  std::atomic_ref<std::uint64_t> arrived(*reinterpret_cast<std::uint64_t*>(parameters.counter));
  arrived.fetch_add(1);
  while (arrived.load() < blocks) std::this_thread::yield();
  (void)block, (void)threads;
}
