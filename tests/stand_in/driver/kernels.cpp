// Kernels that the tests beside this file launch.

#include <atomic>
#include <cstdint>
#include <thread>

#include "driver/parameters.h"
#include "kernel.h"

// Every thread of every block takes every so many elements.
STAND_IN_KERNEL(add, Add, 1024) {
  auto* const words = reinterpret_cast<std::uint64_t*>(parameters.words);
  for (unsigned thread = 0; thread < threads; thread++)
    for (std::uint64_t i = block * threads + thread; i < parameters.count; i += std::uint64_t{blocks} * threads)
      words[i] += parameters.value;
}

// No block ends before all have begun.
STAND_IN_KERNEL(meet, Meet, 1024) {
  std::atomic_ref<std::uint64_t> arrived(*reinterpret_cast<std::uint64_t*>(parameters.counter));
  arrived.fetch_add(1);
  while (arrived.load() < blocks) std::this_thread::yield();
}
