// Streams and events.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "machine.h"

using namespace stand_in;

namespace {

// Checks waits and writes of words as the driver does, and queues them as one piece of work.
CUresult submit_words(CUstream stream, const std::vector<CUstreamBatchMemOpParams>& all) {
  for (const CUstreamBatchMemOpParams& each : all) {
    const bool waits = each.operation == kStreamMemOpWaitValue64;
    if (!waits && each.operation != kStreamMemOpWriteValue64) return kInvalidValue;
    if (each.address % 8 != 0 || find_range(each.address, 8) == nullptr) return kInvalidValue;
    if (each.flags > (waits ? 1u : 0u)) return kInvalidValue;
  }
  return submit(stream, [all] {
    for (const CUstreamBatchMemOpParams& each : all) {
      std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(each.address));
      if (each.operation == kStreamMemOpWriteValue64) {
        word.store(each.value64, std::memory_order_release);
        continue;
      }
      const auto there = [&] {
        const std::uint64_t now = word.load(std::memory_order_acquire);
        return each.flags == kStreamWaitValueEq ? now == each.value64
                                                : static_cast<std::int64_t>(now - each.value64) >= 0;
      };
      while (!there()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
}

}  // namespace

API cuStreamCreateWithPriority(CUstream* handle, unsigned, int priority) {
  ENTER();
  auto stream = std::unique_ptr<Stream>(new Stream{contexts.back()->ordinal, std::clamp(priority, -5, 0)});
  *handle = stream.get();
  machine().streams[stream.get()] = std::move(stream);
  return kSuccess;
}

API cuStreamGetPriority(CUstream handle, int* priority) {
  ENTER();
  const Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  *priority = stream->priority;
  return kSuccess;
}

API cuStreamDestroy_v2(CUstream handle) {
  ENTER();
  const auto found = machine().streams.find(static_cast<Stream*>(handle));
  if (found == machine().streams.end()) return kInvalidHandle;
  if (found->second->capture != nullptr) {
    found->second->capture->invalid = true;
    found->second->capture->ends.erase(found->second.get());
  }
  machine().streams.erase(found);
  return kSuccess;
}

API cuStreamSynchronize(CUstream handle) {
  ENTER_UNLESS_CAPTURING();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) return stream->capture->invalid = true, kCaptureUnsupported;
  const auto reached = std::make_shared<Moment>();
  stream->worker.push([reached] { reached->happen(); });
  guard.unlock();
  reached->wait();
  return kSuccess;
}

API cuStreamQuery(CUstream handle) {
  ENTER_UNLESS_CAPTURING();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) return stream->capture->invalid = true, kCaptureUnsupported;
  return stream->worker.idle() ? kSuccess : kNotReady;
}

API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
  ENTER();
  Stream* const stream = find_stream(handle);
  Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  const bool ended = event->capture != nullptr && !machine().captures.contains(event->capture);
  if (event->capture != nullptr && !ended) {
    if (stream->capture != nullptr && stream->capture != event->capture) return kCaptureMerge;
    stream->capture = event->capture;
    std::vector<std::size_t>& ends = stream->capture->ends[stream];
    ends.insert(ends.end(), event->ends.begin(), event->ends.end());
    return kSuccess;
  }
  if (stream->capture != nullptr) return stream->capture->invalid = true, kCaptureIsolation;
  if (ended) return kCapturedEvent;
  if (event->moment != nullptr) stream->worker.push([moment = event->moment] { moment->wait(); });
  return kSuccess;
}

API cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags) {
  ENTER();
  if (count == 0 || count > kMostStreamMemOps || flags != 0) return kInvalidValue;
  return submit_words(stream, {operations, operations + count});
}

API cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  ENTER();
  return submit_words(stream, {{kStreamMemOpWaitValue64, address, value, flags, 0, 0}});
}

API cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  ENTER();
  return submit_words(stream, {{kStreamMemOpWriteValue64, address, value, flags, 0, 0}});
}

API cuEventCreate(CUevent* handle, unsigned flags) {
  ENTER();
  Event* const event = new Event{(flags & kEventDisableTiming) == 0};
  machine().events.insert(event);
  *handle = event;
  return kSuccess;
}

API cuEventDestroy_v2(CUevent handle) {
  ENTER();
  if (machine().events.erase(static_cast<Event*>(handle)) == 0) return kInvalidHandle;
  delete static_cast<Event*>(handle);
  return kSuccess;
}

API cuEventRecord(CUevent handle, CUstream stream_handle) {
  ENTER();
  Event* const event = find_event(handle);
  Stream* const stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr || stream->device != contexts.back()->ordinal) return kInvalidHandle;
  event->capture = stream->capture;
  event->moment = nullptr;
  if (stream->capture != nullptr) {
    event->ends = stream->capture->ends[stream];
    return kSuccess;
  }
  event->moment = std::make_shared<Moment>();
  stream->worker.push([moment = event->moment] { moment->happen(); });
  return kSuccess;
}

API cuEventQuery(CUevent handle) {
  ENTER_UNLESS_CAPTURING();
  Event* const event = find_event(handle);
  if (event == nullptr) return kInvalidHandle;
  if (event->capture != nullptr) return kCapturedEvent;
  return event->moment == nullptr || event->moment->happened() ? kSuccess : kNotReady;
}

API cuEventSynchronize(CUevent handle) {
  ENTER_UNLESS_CAPTURING();
  Event* const event = find_event(handle);
  if (event == nullptr) return kInvalidHandle;
  if (event->capture != nullptr) return kCapturedEvent;
  const std::shared_ptr<Moment> moment = event->moment;
  guard.unlock();
  if (moment != nullptr) moment->wait();
  return kSuccess;
}

API cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  ENTER();
  const Event* const start = find_event(start_handle);
  const Event* const end = find_event(end_handle);
  for (const Event* const event : {start, end}) {
    if (event == nullptr || !event->timed || event->moment == nullptr) return kInvalidHandle;
    if (!event->moment->happened()) return kNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->moment->when() - start->moment->when()).count();
  return kSuccess;
}
