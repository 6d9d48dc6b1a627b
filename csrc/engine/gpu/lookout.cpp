#include "engine/gpu/lookout.h"

#include "core/threads.h"

namespace ringreduce {

Lookout::Lookout(GpuEngine& engine, bool busy)
    : engine_(engine), busy_(busy), thread_(start_thread([this] { run(); })) {}

void Lookout::set_busy(bool busy) {
  std::lock_guard lock(mutex_);
  if (busy && !busy_) changed_.notify_all();
  busy_ = busy;
}

void Lookout::look() {
  std::lock_guard lock(looking_);
  engine_.look();
}

void Lookout::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    look();
    lock.lock();
    if (!stopping_) changed_.wait_for(lock, busy_ ? kBusy : kIdle);
  }
}

void Lookout::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ringreduce
