// A group's calls on CUDA tensors: what c10d's works mean where a call is put in a stream and nobody waits for it.
//
// A synchronous call goes into torch's current stream, and is ordered like any kernel there. An asynchronous one goes
// into a stream of torch's pool that first waits for the current one; its Work makes the stream that is current in
// wait() wait for it. So neither blocks the host. In a capture all calls go into that other stream, which keeps them in
// order within the graph.
//
// The tensors of an asynchronous call are kept until it has ended, or until its Work was waited for: torch gives their
// memory away only after that. Two threads look after the calls that are under way. The follower asks the driver how
// far they are, ends their works, and frees what they kept. That may take as long as another call of CUDA holds the
// context's lock, so what ends a wait in vain is left to a Lookout: it breaks the group if the GPU says so, or if a
// call waits for a peer that is gone or late, and lets the GPU go.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "engine/gpu/gpu_engine.h"
#include "engine/gpu/lookout.h"
#include "process_group/call_log.h"
#include "process_group/gpu_work.h"
#include "process_group/work.h"

namespace ringreduce {

class GpuCalls {
 public:
  // Calls on tensors of `device`, for the group whose works share `surroundings`.
  GpuCalls(std::shared_ptr<GpuEngine> engine, at::Device device, std::shared_ptr<WorkSurroundings> surroundings);
  ~GpuCalls() { stop(); }
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  GpuEngine& engine() const { return *engine_; }
  // Waits until no call is being put in a stream.
  void add(const Engine::PlanFor& plan) {
    std::lock_guard lock(submit_mutex_);
    engine_->add(plan);
  }
  at::Device device() const { return device_; }

  // `put` puts the call, and what else belongs to it, in the stream that it is given, which is torch's current one
  // then. `kept` is what must not be freed before the call has ended.
  using Put = std::function<void(const cuda::Stream&)>;
  WorkPtr submit(const CallLog::Call& call, bool async, const TensorList& inputs, TensorList outputs, TensorList kept,
                 const Put& put);

  // Returns when all calls made so far have ended, or the group has broken.
  void drain();
  // Waits for calls under way, for some time, then breaks the group. No call may follow. Idempotent.
  void stop();

 private:
  c10::Stream own_stream();
  void stop_once();
  void follow();
  std::exception_ptr broken() const;
  void finish(GpuWork& work);
  bool advance(GpuWork& work);
  bool ended() const { return under_way_.empty() && engine_->idle(); }

  const std::shared_ptr<GpuEngine> engine_;
  const at::Device device_;
  const std::shared_ptr<WorkSurroundings> surroundings_;
  std::mutex submit_mutex_;  // calls are put in streams one after the other
  std::optional<c10::Stream> own_stream_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<GpuWork>> under_way_;
  bool stopping_ = false, abandoned_ = false;
  Nanoseconds gone_since_ = 0;  // for the follower: since when it has known that a peer is gone; 0: none is
  std::once_flag stopped_;
  Lookout lookout_;
  std::thread follower_;
};

}  // namespace ringreduce
