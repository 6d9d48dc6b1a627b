// Words that ranks wait for one another on: loads and stores with the order that they need, between all GPUs and the
// host (.sys). On a CPU the same, for tests.
#pragma once

#include "core/device.h"

#if !defined(__CUDA_ARCH__)
#include <sched.h>

#include <chrono>
#endif

namespace ringreduce::gpu {

// What the storing thread, and all it has met at a barrier, stored before is seen by whoever loads the value so.
RINGREDUCE_BOTH std::uint64_t load_acquire(const std::uint64_t* word) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

template <class T>
RINGREDUCE_BOTH void store_release(T* word, T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 8)
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  else
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// In no order with other words.
template <class T>
RINGREDUCE_BOTH T load_relaxed(const T* word) {
#if defined(__CUDA_ARCH__)
  T value;
  if constexpr (sizeof(T) == 8)
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  else
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

template <class T>
RINGREDUCE_BOTH void store_relaxed(T* word, T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 8)
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  else
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// Makes a word that is 0 `value`; false if it is not 0 any more. Within one GPU.
RINGREDUCE_BOTH bool claim(std::uint64_t* word, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  return atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, value) == 0;
#else
  std::uint64_t nobody = 0;
  return __atomic_compare_exchange_n(word, &nobody, value, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
#endif
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
