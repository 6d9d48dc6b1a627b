// The thread that looks after an engine on a GPU: it finds what has gone wrong there and ends what the GPU waits for.
//
// This thread must never block in the driver. While the GPU waits for a peer that is gone, a call of any other thread
// may wait for the GPU and hold the context's lock, which most calls of CUDA take. So this thread makes none, unless
// the engine's look() has to (NcclEngine, to abort communicators).
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "core/doorbell.h"
#include "engine/gpu/gpu_engine.h"

namespace ringreduce {

class Lookout {
 public:
  // The time between two looks.
  static constexpr std::chrono::milliseconds kBusy{1}, kIdle{20};

  // Looks every kIdle until it is destroyed, and every kBusy while it is `busy`.
  explicit Lookout(GpuEngine& engine, bool busy);
  ~Lookout() { stop(); }
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;

  void set_busy(bool busy);
  // Looks now, in the calling thread.
  void look();
  // Idempotent.
  void stop();

 private:
  void run();  // waits for nothing but the time, so not by Waiting

  GpuEngine& engine_;
  std::mutex looking_;
  Doorbell changed_{};
  std::atomic<bool> busy_, stopping_ = false;
  std::thread thread_;
};

}  // namespace ringreduce
