// Whether a process lives, as a word in memory that it shares with others.
//
// The kernel changes the word when the process begins to end. A pidfd tells of the end only after the kernel has taken
// down the process's memory, which takes tens of milliseconds for a process with some hundred megabytes. In between,
// the process's threads may still be inside system calls, but they do not come back from them.
//
// How: a list of such words belongs to a thread that sleeps for ever. At the end of a thread the kernel walks its list
// and notes in every word that its owner has died (robust futexes, set_robust_list(2)).
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>

namespace ringreduce {

// All zero: of a process that has made no mark, of whose end nothing is known here.
struct LifeWord {
  std::atomic<std::uint64_t> next;   // in the kernel's list: an address in the process that owns the word
  std::atomic<std::uint32_t> owner;  // the sleeping thread; with FUTEX_OWNER_DIED when its process ends or has ended

  bool ends() const { return (owner.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0; }
};

// As long as it lives, `word` tells of the end of this process. Where no thread can be started it does not.
// Thread-safe.
class LifeMark {
 public:
  explicit LifeMark(LifeWord& word);
  ~LifeMark();
  LifeMark(const LifeMark&) = delete;
  LifeMark& operator=(const LifeMark&) = delete;

 private:
  LifeWord& word_;
};

}  // namespace ringreduce
