// Starting threads, and where they run.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/float_environment.h"

namespace ringreduce {

// Moves the calling thread to `core`, and lets it run on no other. False, and nothing changes, if it may not.
inline bool pin(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  return sched_setaffinity(0, sizeof(only), &only) == 0;
}

// From the first call on, the calling thread has its core in the shortest slices that Linux gives. Its share of the
// core stays the same, but beside other work it gets the core as soon as it is woken, and a yield costs it less: on
// Linux 6.18 a thread that yields gives up a slice of its share. There a thread that worked for 50 us between yields,
// beside a process that worked all the time, got 0.04 of the core with the default slices (1.4 ms on 2 cores) and 0.34
// with these (2026-11-29). Threads and processes that it starts later inherit them. Nothing changes for threads whose
// policy has no slices, nor before Linux 6.12.
inline void take_short_slices() {
  static thread_local bool asked = false;
  if (std::exchange(asked, true)) return;
  // The kernel's sched_attr, which not every C library's headers have.
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t slice, deadline, period;
  } attributes{};
  constexpr Nanoseconds kShortest = kMillisecond / 10;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if ((attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) || attributes.slice <= kShortest) return;
  attributes.slice = kShortest;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// A thread that takes none of the process's signals but those of its own faults: they are for the program's threads. It
// does not inherit the starter's floating-point environment either. Throws Error(system) where std::thread, or memory,
// would throw its own.
template <class F>
std::thread start_thread(F&& body) {
  sigset_t all, before;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // which the new thread inherits
  std::thread thread;
  std::string refusal;
  try {
    thread = std::thread([body = std::forward<F>(body)]() mutable {
      const DefaultFloatEnvironment environment;
      // Makes what a thread's first exception needs: where there is no memory for it then, glibc ends the process.
      [[maybe_unused]] const volatile int none = std::uncaught_exceptions();
      body();
    });
  } catch (const std::exception& error) {
    refusal = error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!thread.joinable())
    throw Error(ErrorKind::system,
                "cannot start a thread: " + refusal + "; raise `ulimit -u`, `ulimit -v` or the cgroup's pids.max");
  return thread;
}

}  // namespace ringreduce
