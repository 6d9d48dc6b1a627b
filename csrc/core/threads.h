// Starting threads, and where they run.
#pragma once

#include <sched.h>

#include <csignal>
#include <exception>
#include <string>
#include <thread>
#include <utility>

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
