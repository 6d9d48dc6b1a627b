// Words that threads of several processes share: fences, and looking or sleeping (futex) until a word changes.
#pragma once

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "core/clock.h"

namespace ringreduce {

inline void fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)  // which knows no fences
  std::atomic_thread_fence(order);
#endif
}

// After accept_fences(), fence_all() in any process acts as a full fence in every thread of this one. So of two sides
// that need a fence each, the one that needs it often can leave it out. Both return false if the kernel cannot do it.
inline bool accept_fences() { return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0; }
inline bool fence_all() { return syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0; }

// For a loop that looks at a word again and again.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

// Begins to bring a cache line here, to be read, or to be written.
inline void prefetch(const void* line) { __builtin_prefetch(line, 0); }
inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));  // not by default part of what GCC may use
#else
  __builtin_prefetch(line, 1);
#endif
}

inline void wake_all_on(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Returns when the word is not `seen`, or after `timeout`, or now and then for no reason.
inline void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen, Nanoseconds timeout) {
  const timespec duration{.tv_sec = static_cast<time_t>(timeout / kSecond),
                          .tv_nsec = static_cast<long>(timeout % kSecond)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &duration, nullptr, 0);
}

}  // namespace ringreduce
