// The handle of a call on CUDA tensors: an event at its end, in the stream that has it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "engine/gpu/gpu_engine.h"
#include "process_group/arguments.h"
#include "process_group/call_log.h"
#include "process_group/python_error.h"

namespace ringreduce {

// A stream of torch's as the driver's. For as long as torch has it, which is for ever.
inline cuda::Stream native(const cuda::DevicePtr& device, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  return cuda::Stream::borrowed(device, cuda.getStreamNativeHandle(stream));
}
inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

class GpuWork final : public c10d::Work {
 public:
  using Clock = std::chrono::steady_clock;

  struct Streams {
    c10::Stream users;  // which was current when the call was made
    c10::Stream calls;
    bool captured;  // in a capture nothing runs, and the call's end may only be waited for
  };
  GpuWork(std::shared_ptr<GpuEngine> engine, const CallLog::Call& call, const Streams& streams, bool timed,
          const TensorList& inputs, TensorList outputs)
      : Work(engine->rank(), call.type, at::hasCallbacks() ? profiling_title(call.type) : nullptr,
             at::hasCallbacks() ? std::optional(inputs.empty() ? outputs : inputs) : std::nullopt),
        call_(call),
        users_(streams.users),
        stream_(streams.calls),
        captured_(streams.captured),
        timed_(timed && !captured_),
        engine_(std::move(engine)),
        begin_(engine_->device(), timed_),
        end_(engine_->device(), timed_),
        outputs_(std::move(outputs)) {}

  bool isCompleted() override { return c10d::Work::isCompleted() || (!captured_ && end_->done()); }

  // Makes the current stream wait for the call. With a timeout this thread waits, too, and throws when it is over; the
  // call goes on then, until the timeout of its own.
  bool wait(std::chrono::milliseconds timeout) override {
    if (!c10d::Work::isCompleted()) {
      engine_->throw_if_aborted();  // which knows what the follower has yet to find, even if the GPU is done
    } else if (auto error = exception()) {
      std::rethrow_exception(error);
    }
    const c10::Stream current = current_stream(stream_.device());
    native(engine_->device(), current).wait(*end_);
    if (timeout != kNoTimeout && !captured_) wait_here(timeout);
    if (current == users_) release();  // what is freed may be used again in that stream, which comes after the call now
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

  TensorList result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return call_.sequence; }

  float getDuration() const override {
    TORCH_CHECK(timed_ && end_->done(),
                "getDuration: the work has not ended, or was made before enableCollectivesTiming()");
    return end_->milliseconds_since(*begin_);
  }

  // Completed at once, as futures of GPU values are: what waits for it is put in streams behind the call.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard lock(future_mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream_.device()});
    if (auto error = exception()) {
      future_->setError(for_future(error));
    } else {
      const c10::StreamGuard guard(stream_);
      future_->markCompleted(at::IValue(outputs_));
    }
    return future_;
  }

  // For GpuCalls.
  const cuda::Event& begin() const { return *begin_; }
  const cuda::Event& end() const { return *end_; }
  const CallLog::Call& call() const { return call_; }
  void keep(TensorList tensors) { kept_ = std::move(tensors); }
  void release() {
    TensorList freed;
    std::lock_guard lock(kept_mutex_);
    freed.swap(kept_);
  }
  // For the profiler, which may stop before the GPU is done, the call ends when it is in its stream.
  void end_profile() {
    if (recordFunctionEndCallback_) recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
  void finish(const std::exception_ptr& error) { c10d::Work::finish(error); }
  // For a completion hook: from when this side saw the call begin, to now.
  std::shared_ptr<c10d::WorkInfo> info() const {
    const auto ended = Clock::now();
    const auto took = std::chrono::nanoseconds(begun ? now() - *begun : 0);
    return std::make_shared<c10d::WorkInfo>(opType_, call_.sequence, ended - took, ended, took);
  }

  // The follower's note: when it saw that the call had begun.
  std::optional<Nanoseconds> begun;
  std::uint64_t log_id = 0;
  bool hooked = false;  // the group's completion hook is to be told

 private:
  // Until the follower has ended the work: it knows whether the call failed.
  void wait_here(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!cv_.wait_for(lock, std::chrono::nanoseconds(nanoseconds(timeout)), [&] { return completed_; }))
      throw Error(ErrorKind::timeout, c10::str("Operation timed out! ", name_of(opType_), " number ", call_.sequence,
                                               " of the group: rank ", rank_, " of it waited the ", timeout.count(),
                                               " ms that wait() was given"));
    if (exception_) std::rethrow_exception(exception_);
  }

  const CallLog::Call call_;
  const c10::Stream users_, stream_;
  const bool captured_, timed_;
  const std::shared_ptr<GpuEngine> engine_;
  const cuda::PooledEvent begin_, end_;
  const TensorList outputs_;
  std::mutex kept_mutex_, future_mutex_;
  TensorList kept_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringreduce
