#include "parameter_server/server/turns.h"

#include <sched.h>

#include <algorithm>

#include "core/atomics.h"
#include "core/threads.h"

namespace ringreduce::parameter_server {
namespace {

constexpr int kLooks = 100, kYields = 50;  // the thread polls, then yields so often before it sleeps

}  // namespace

Turns::Turns()
    : bell_fd_(make_memory("ringreduce bell", sizeof(Bell))), bell_memory_(bell_fd_.get(), sizeof(Bell), true) {}

Turns::~Turns() {
  // In a forked child the thread runs in the parent only, so its object must not be destroyed here.
  if (fork_.forked() && thread_.joinable()) new std::thread(std::move(thread_));
}

void Turns::start() {
  thread_ = start_thread([this] { run(); });
}

void Turns::stop() {
  if (fork_.forked()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    has_orders_ = true;
  }
  bell_words().ring();
  const std::lock_guard ending(ending_);
  if (thread_.joinable()) thread_.join();
}

bool Turns::serve_orders() {
  if (!has_orders_.exchange(false)) return false;
  std::deque<std::function<void()>> orders;
  {
    const std::lock_guard lock(mutex_);
    orders.swap(orders_);
  }
  for (const auto& each : orders) each();
  return true;
}

void Turns::run() {
  Bell& bell = bell_words();
  while (!stopping_) {
    std::uint32_t seen = bell.rings.load(std::memory_order_seq_cst);
    Nanoseconds most = kLookEvery;
    if (const std::unique_lock turning(turning_, std::try_to_lock); turning.owns_lock()) {
      begin();
      const int most_idle = polls() ? kLooks + kYields : 1;
      for (int idle = 0; idle < most_idle && !stopping_;) {
        if (turn(true)) {
          idle = 0;
        } else if (waiting_.load(std::memory_order_relaxed) > 0) {
          break;  // lets the waiting thread take turns
        } else if (++idle < kLooks) {
          cpu_relax();
        } else {
          sched_yield();
        }
      }
      seen = end();
      most = left_for_thread_ ? 0 : std::min({due_in(), most_sleep(), kLookEvery});
    }
    if (!stopping_) sleep_on(bell.rings, seen, most);
  }
  const std::lock_guard turning(turning_);
  begin();
  turn(true);
  close();
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  orders_.clear();  // their callers get an error
  served_.notify_all();
}

// Sets `sleepers` to 0, so that a ring wakes no thread: the thread that takes turns polls.
void Turns::begin() {
  bell_words().sleepers.store(0, std::memory_order_seq_cst);
  begin_turns();
}

// Sets `sleepers` to 1, so that a ring wakes the object's thread, and takes a last turn for what came before. Returns
// the count of rings before that turn.
std::uint32_t Turns::end() {
  const std::uint32_t seen = bell_words().rings.load(std::memory_order_seq_cst);
  bell_words().sleepers.store(1, std::memory_order_seq_cst);
  turn(false);
  end_turns();
  return seen;
}

bool Turns::Guest::take() {
  if (of_ == nullptr) return false;
  if (of_->stopping_ || of_->left_for_thread_) {
    leave();
    return false;
  }
  if (holds_) return of_->turn(false);
  if (!std::exchange(waits_, true)) of_->waiting_.fetch_add(1, std::memory_order_relaxed);
  if (!of_->turning_.try_lock()) return false;
  holds_ = true;
  of_->begin();
  return of_->turn(false);
}

void Turns::Guest::leave() {
  if (std::exchange(waits_, false)) of_->waiting_.fetch_sub(1, std::memory_order_relaxed);
  if (!std::exchange(holds_, false)) return;
  of_->end();
  const bool wanted = of_->left_for_thread_ || of_->due_in() != kForever;
  of_->turning_.unlock();
  if (wanted) of_->bell_words().ring();  // wakes the object's thread, which does not know of the work or the deadline
}

}  // namespace ringreduce::parameter_server
