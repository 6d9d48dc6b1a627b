// Ctrl-C while the program's main thread waits. Only Python knows of it, and it must not raise in the middle of a call:
// the wait makes it an error of the group, and where that error leaves C++, Python gets KeyboardInterrupt instead.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "core/clock.h"
#include "core/error.h"

namespace ringreduce {

// To ask takes the GIL, so a wait does it no more often.
inline constexpr Nanoseconds kLookForCtrlC = 100 * kMillisecond;

// Whether Ctrl-C has come, which this takes; set where Python is. Called in the main thread alone.
inline std::atomic<bool (*)()> take_ctrl_c{nullptr};
// Of the main thread: the error that it is about to throw is KeyboardInterrupt.
inline thread_local bool interrupted = false;

// Whether Ctrl-C ends this thread's wait. It may have to wait for the GIL: to be called with no lock held.
inline bool ctrl_c_came() {
  thread_local Nanoseconds asked = 0;
  const auto take = take_ctrl_c.load(std::memory_order_relaxed);
  if (take == nullptr || now() - asked < kLookForCtrlC) return false;
  asked = now();
  if (getpid() != syscall(SYS_gettid) || !take()) return false;
  return interrupted = true;
}

// What the others are told: `rank`, which is `whom`, waited in `what`.
inline Error interrupted_in(const std::string& what, const std::string& whom, int rank) {
  return Error(ErrorKind::peer_lost, what + ": " + whom + " was interrupted (KeyboardInterrupt)", rank);
}

}  // namespace ringreduce
