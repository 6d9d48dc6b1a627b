// A doorbell: words of shared memory that threads sleep on until another thread, perhaps of another process, rings.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/atomics.h"
#include "core/clock.h"

namespace ringreduce {

inline constexpr std::uint64_t kAwaitsAll = ~std::uint64_t{0};
constexpr std::uint64_t awaits_rank(int rank) { return std::uint64_t{1} << (rank & 63); }

// Who waits reads `rings`, looks for what it waits for, and sleeps if `rings` has not changed since. Who changes
// something tells by ring(), which every ringer may call, or by notify(), which costs next to nothing while nobody
// sleeps. A thread that may only be notified counts itself in `sleepers` before its last look. All zero bytes: a
// doorbell that nobody sleeps on.
struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;        // threads that sleep here, or look once more before they do
  std::atomic<std::uint64_t> awaits;          // bits of the ranks that the sleepers wait for (awaits_rank)
  std::atomic<std::uint32_t> fences_ringers;  // 1: who sleeps here calls fence_all() first

  // Wakes all that sleep here. With sequential consistency, either a sleeper sees the new count of rings and does not
  // sleep, or the ringer sees the sleeper.
  void ring() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all_on(rings);
  }
  // Returns if it has been rung since `seen` was read from `rings`, or after `most`.
  void sleep(std::uint32_t seen, Nanoseconds most) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    sleep_on(rings, seen, most);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  // A sleeper calls this after it has counted itself, and before its last look. If the kernel has just begun to refuse
  // it, one notification may come late by a sleep.
  void fence_ringers() {
    if (fences_ringers.load(std::memory_order_relaxed) != 0 && !fence_all())
      fences_ringers.store(0, std::memory_order_seq_cst);
  }
  // Rings if a sleeper waits for rank `from`, which has just stored what it may wait for. The sleeper counts itself,
  // then looks for the change; the ringer stores the change, then looks for sleepers. With a fence in between on both
  // sides, one of them sees the other. `fenced`: whether this process has called accept_fences().
  void notify(int from, bool fenced) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler's part of it
    if (!fenced || fences_ringers.load(std::memory_order_relaxed) == 0) fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0 &&
        (awaits.load(std::memory_order_seq_cst) & awaits_rank(from)) != 0)
      ring();
  }
};

}  // namespace ringreduce
