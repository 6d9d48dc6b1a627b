#include "process_group/gpu_calls.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/threads.h"
#include "process_group/gil.h"
#include "process_group/gpu_work.h"

namespace ringreduce {
namespace {

constexpr std::chrono::seconds kFarewell{10};

}  // namespace

GpuCalls::GpuCalls(std::shared_ptr<GpuEngine> engine, at::Device device, std::shared_ptr<WorkSurroundings> surroundings)
    : engine_(std::move(engine)),
      device_(device),
      surroundings_(std::move(surroundings)),
      lookout_(*engine_, false),
      follower_(start_thread([this] { follow(); })) {}

c10::Stream GpuCalls::own_stream() {
  if (!own_stream_)
    own_stream_ = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(device_, true);
  return *own_stream_;
}

WorkPtr GpuCalls::submit(const CallLog::Call& call, bool async, const TensorList& inputs, TensorList outputs,
                         TensorList kept, const Put& put) {
  std::lock_guard lock(submit_mutex_);
  const c10::Stream users = current_stream(device_);
  const cuda::Stream current = native(engine_->device(), users);
  const bool captured = current.capturing(), apart = async || captured;
  const c10::Stream stream = apart ? own_stream() : users;
  const cuda::Stream chosen = native(engine_->device(), stream);
  const std::uint64_t log_id = surroundings_->log->begin(call, inputs, outputs);
  auto work = c10::make_intrusive<GpuWork>(engine_, call, GpuWork::Streams{users, stream, captured},
                                           surroundings_->timing.load(), inputs, std::move(outputs));
  work->log_id = log_id;
  work->hooked = surroundings_->hooked;
  try {
    if (apart) {
      const cuda::PooledEvent ready(engine_->device());
      current.record(*ready);
      chosen.wait(*ready);
    }
    const c10::StreamGuard guard(stream);
    if (!captured) chosen.record(work->begin());
    put(chosen);
    chosen.record(work->end());
  } catch (...) {
    surroundings_->log->end(log_id, call.type, false, {});
    surroundings_->completions.post([shared = surroundings_] { shared->work_failed(); });
    work->finish(std::current_exception());
    if (apart) {  // what was put already must have ended before the tensors' memory is used again
      chosen.record(work->end());
      current.wait(work->end());
    }
    throw;
  }
  work->end_profile();
  if (async) work->keep(std::move(kept));
  if (captured) {
    if (!async) current.wait(work->end());
    surroundings_->log->end(log_id, call.type, true, {});
    return work;
  }
  std::unique_lock list(mutex_);
  under_way_.push_back(work);
  const bool first = under_way_.size() == 1;
  list.unlock();
  if (first) {  // neither thread is in a hurry yet
    changed_.notify_all();
    lookout_.set_busy(true);
  }
  return work;
}

// Whether the call has ended. If it should have long ago, that is the group's error, unless the engine knew a better
// one: an engine that finds lost peers knows of late calls, too, without the driver.
bool GpuCalls::advance(GpuWork& work) {
  if (work.end().done()) return true;
  if (!work.begun && work.begin().done()) work.begun = now();
  if (!work.begun) return false;
  const Nanoseconds timeout = nanoseconds(work.call().timeout);
  const auto fail = [&](ErrorKind kind, const std::string& why, int culprit) {
    const std::string call = c10::str(name_of(work.call().type), " number ", work.call().sequence, " of the group: ");
    engine_->fail(Error(kind, call + why, culprit));
  };
  if (now() - *work.begun > timeout + GpuEngine::kGrace)
    fail(ErrorKind::timeout,
         c10::str("it has not ended on ", engine_->device()->describe(), " of ", engine_->number(engine_->rank()),
                  " within ", work.call().timeout.count(), " ms", engine_->hint()),
         -1);
  if (engine_->finds_lost_peers()) return false;
  const std::vector<int> gone = engine_->gone();
  if (gone.empty()) {
    gone_since_ = 0;
  } else if (gone_since_ == 0) {
    gone_since_ = now();
  } else if (now() - std::max(gone_since_, *work.begun) > GpuEngine::kGrace) {
    fail(ErrorKind::peer_lost, engine_->describe(gone[0]) + " is gone, and the call does not end without it", gone[0]);
  }
  return false;
}

// The error that broke the group, if one did.
std::exception_ptr GpuCalls::broken() const {
  try {
    engine_->throw_if_aborted();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void GpuCalls::finish(GpuWork& work) {
  const std::exception_ptr error = broken();
  surroundings_->log->end(work.log_id, work.call().type, error == nullptr, {});
  work.release();
  work.finish(error);
  if (error) surroundings_->completions.post([shared = surroundings_] { shared->work_failed(); });
  if (work.hooked)
    surroundings_->completions.post([shared = surroundings_, info = work.info()] { shared->call_hook(info); });
}

void GpuCalls::follow() {
  const cuda::RelaxedCapture relaxed;  // what this thread asks is no part of what others capture
  std::unique_lock lock(mutex_);
  while (!stopping_ || (!ended() && !abandoned_)) {
    const bool busy = !ended();
    lookout_.set_busy(busy);
    changed_.wait_for(lock, busy ? Lookout::kBusy : Lookout::kIdle);
    std::deque<c10::intrusive_ptr<GpuWork>> works = under_way_;
    lock.unlock();
    std::erase_if(works, [&](const auto& work) {
      try {
        return !advance(*work);
      } catch (const Error& error) {  // of the driver, which stays as it is
        engine_->fail(Error(ErrorKind::system, error.what(), engine_->rank()));
        return false;
      }
    });
    if (!works.empty()) lookout_.look();  // they may have ended with an error
    for (const auto& ended : works) finish(*ended);
    lock.lock();
    std::erase_if(under_way_,
                  [&](const auto& work) { return std::find(works.begin(), works.end(), work) != works.end(); });
    if (!works.empty() || stopping_) changed_.notify_all();
    lock.unlock();
    works.clear();  // the last owner, maybe, of what takes other locks to be freed
    lock.lock();
  }
}

void GpuCalls::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return under_way_.empty() || abandoned_; });
}

void GpuCalls::stop() {
  const WithoutGil no_gil;
  std::call_once(stopped_, [this] { stop_once(); });  // who comes second waits for the first
}

void GpuCalls::stop_once() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  const auto ended = [&] { return this->ended(); };
  if (!changed_.wait_for(lock, kFarewell, ended)) {
    engine_->fail(Error(ErrorKind::aborted, c10::str(engine_->number(engine_->rank()),
                                                     " destroyed the group while calls were under way on its GPU")));
    abandoned_ = !changed_.wait_for(lock, kFarewell, ended);
    changed_.notify_all();
  }
  lock.unlock();
  follower_.join();
  try {  // peers may still read what this rank sent; if they are gone, or the group is broken, they never will
    const auto deadline = std::chrono::steady_clock::now() + kFarewell;
    while (engine_->gone().empty() && !engine_->quiet() && std::chrono::steady_clock::now() < deadline) {
      engine_->throw_if_aborted();
      std::this_thread::sleep_for(Lookout::kBusy);
    }
  } catch (const Error&) {
  }
  lookout_.stop();
  engine_->leave();
}

}  // namespace ringreduce
