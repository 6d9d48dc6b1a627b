// Words of 4 or 8 bytes that ranks wait for one another on: loads and stores with the order that they need, between all
// GPUs and the host (.sys). On a CPU the same, for tests.
#pragma once

#include "core/device.h"

#if !defined(__CUDA_ARCH__)
#include <sched.h>

#include <chrono>
#endif

namespace ringreduce::gpu {

#if defined(__CUDA_ARCH__)
#define RINGREDUCE_LOAD(order, ORDER)                                                            \
  template <class T>                                                                             \
  RINGREDUCE_BOTH T load_##order(const T* word) {                                                \
    const auto at = __cvta_generic_to_global(word);                                              \
    T value;                                                                                     \
    if constexpr (sizeof(T) == 8)                                                                \
      asm volatile("ld." #order ".sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"); \
    else                                                                                         \
      asm volatile("ld." #order ".sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory"); \
    return value;                                                                                \
  }
#define RINGREDUCE_STORE(order, ORDER)                                                         \
  template <class T>                                                                           \
  RINGREDUCE_BOTH void store_##order(T* word, T value) {                                       \
    const auto at = __cvta_generic_to_global(word);                                            \
    if constexpr (sizeof(T) == 8)                                                              \
      asm volatile("st." #order ".sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory"); \
    else                                                                                       \
      asm volatile("st." #order ".sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory"); \
  }
#else
#define RINGREDUCE_LOAD(order, ORDER)             \
  template <class T>                              \
  RINGREDUCE_BOTH T load_##order(const T* word) { \
    return __atomic_load_n(word, ORDER);          \
  }
#define RINGREDUCE_STORE(order, ORDER)                   \
  template <class T>                                     \
  RINGREDUCE_BOTH void store_##order(T* word, T value) { \
    __atomic_store_n(word, value, ORDER);                \
  }
#endif

// Everything that the storing thread, and the threads it has met at a barrier, did before a store_release happens
// before everything that follows a load_acquire of the stored value.
RINGREDUCE_LOAD(acquire, __ATOMIC_ACQUIRE)
RINGREDUCE_STORE(release, __ATOMIC_RELEASE)
// In no order with other words.
RINGREDUCE_LOAD(relaxed, __ATOMIC_RELAXED)
RINGREDUCE_STORE(relaxed, __ATOMIC_RELAXED)

#undef RINGREDUCE_LOAD
#undef RINGREDUCE_STORE

// Makes a word that is 0 `value`; false if it is not 0 any more. Within one GPU.
RINGREDUCE_BOTH bool claim(std::uint64_t* word, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  return atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, value) == 0;
#else
  std::uint64_t nobody = 0;
  return __atomic_compare_exchange_n(word, &nobody, value, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
#endif
}

// Counts those that arrive, and says whether this is the last of `all`; then the word is 0 again. What all of them did
// before is before what the last one does after. Within one GPU.
RINGREDUCE_BOTH bool arrives_last(std::uint32_t* word, std::uint32_t all) {
  std::uint32_t before;
#if defined(__CUDA_ARCH__)
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(all - 1) : "memory");
#else
  before = __atomic_fetch_add(word, 1u, __ATOMIC_ACQ_REL);
  if (before == all - 1) store_relaxed(word, std::uint32_t{0});
#endif
  return before == all - 1;
}

RINGREDUCE_BOTH std::uint64_t nanoseconds() {
#if defined(__CUDA_ARCH__)
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// Between two looks at a word.
RINGREDUCE_BOTH void pause() {
#if !defined(__CUDA_ARCH__)
  sched_yield();
#endif
}

}  // namespace ringreduce::gpu
