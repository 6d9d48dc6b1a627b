#include "engine/gpu/lookout.h"

#include "core/threads.h"

namespace ringreduce {

Lookout::Lookout(GpuEngine& engine, bool busy)
    : engine_(engine), busy_(busy), thread_(start_thread([this] { run(); })) {}

void Lookout::set_busy(bool busy) {
  if (!busy_.exchange(busy) && busy) changed_.ring();
}

void Lookout::look() {
  std::lock_guard lock(looking_);
  engine_.look();
}

void Lookout::run() {
  while (!stopping_) {
    const std::uint32_t seen = changed_.rings.load(std::memory_order_seq_cst);
    look();
    if (!stopping_) changed_.sleep(seen, nanoseconds(busy_ ? kBusy : kIdle));
  }
}

void Lookout::stop() {
  stopping_ = true;
  changed_.ring();
  if (thread_.joinable()) thread_.join();
}

}  // namespace ringreduce
