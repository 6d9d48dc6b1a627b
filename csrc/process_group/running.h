// What a ProcessGroupRing has only while it runs: engine, team and threads. Its .cpp files share this.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include <pybind11/pybind11.h>

#include "engine/engine.h"
#include "process_group/c10d_point_to_point.h"
#include "process_group/gpu_calls.h"
#include "process_group/process_group_ring.h"

namespace ringreduce {

// The parts with threads and locks. A forked child must leave them alone.
struct ProcessGroupRing::Running {
  explicit Running(std::shared_ptr<Engine> of)
      : engine(std::move(of)),
        broken_off(ErrorKind::aborted,
                   engine->number(engine->rank()) + " destroyed the group while calls were under way"),
        starved(ErrorKind::system, engine->number(engine->rank()) + " has no memory for a call", engine->rank()) {}

  // Ends what is under way, and all threads. Idempotent; from any thread. Returns, the first time, the error for this
  // rank if ranks are known to have made different calls. Needs no memory, but for that error.
  std::optional<Error> end();

  const std::shared_ptr<Engine> engine;
  std::shared_ptr<Team> team;                      // null where ranks share no memory
  std::shared_ptr<C10dPointToPoint> wire;          // null where they do
  std::shared_ptr<WorkSurroundings> surroundings;  // the queue's, the mailbox's and the completions' threads
  std::unique_ptr<GpuCalls> gpu;                   // null until the group has an engine for CUDA tensors
  const Error broken_off;                          // of the other ranks where this one ends while calls are under way
  const Error starved;  // of all ranks, where there is no memory for the error of a call either
  std::atomic<bool> ended{false};
};

// While it lives, calls of this thread are the set-up for CUDA tensors, and errors name them so.
struct SettingUp {
  static thread_local bool here;
  SettingUp() { here = true; }
  ~SettingUp() { here = false; }
};
inline thread_local bool SettingUp::here = false;

template <class F>
auto ProcessGroupRing::heard(const char* what, F f) const -> decltype(f()) {
  const auto tell = [&](auto why) {
    try {
      running_->engine->fail(Error(ErrorKind::system, why(), getRank()));
    } catch (const std::bad_alloc&) {
      running_->engine->fail(running_->starved);
    }
  };
  try {
    return f();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::system && !shared_->fork.forked()) tell([&] { return error.what(); });  // no thread
    throw;
  } catch (const pybind11::error_already_set&) {  // of the engine, which has told the others
    throw;
  } catch (const std::exception& error) {
    tell([&] { return std::string(what) + ": " + reason(error); });
    running_->engine->throw_if_aborted();  // the group's first error, which need not be this one
    throw;
  }
}

}  // namespace ringreduce
