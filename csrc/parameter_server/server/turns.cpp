#include "parameter_server/server/turns.h"

#include <sched.h>

#include <algorithm>

#include "core/threads.h"
#include "core/waiting.h"

namespace ringreduce::parameter_server {

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
  const Order* next = nullptr;
  {
    const std::lock_guard lock(mutex_);
    next = std::exchange(first_order_, nullptr);
  }
  while (next != nullptr) std::exchange(next, next->next)->carry_out();  // its caller may end then
  return true;
}

// The object's own thread: it takes turns while it waits, and sleeps while others do.
struct Turns::Own final : WaitingDuties {
  explicit Own(Turns& turns) : of(turns) {}

  bool progress() override {
    patience = {.looks = 0, .yields = 0, .least_sleep = kLookEvery, .most_sleep = kLookEvery};
    if (!holds && !of.turning_.try_lock()) return false;
    if (!std::exchange(holds, true)) of.begin_turns();
    const bool moved = of.turn(true);
    // If another thread waits to take turns, this one sleeps at once.
    if (of.polls() && of.waiting_.load(std::memory_order_relaxed) == 0) patience = kServersPatience;
    if (moved || !sleeps) return moved;
    patience.least_sleep = patience.most_sleep = std::min({of.due_in(), of.most_sleep(), kLookEvery});
    give_back();
    return false;
  }
  // Before it sleeps, it takes one more turn.
  void hand_over(bool its_sleep) override {
    sleeps = its_sleep;
    if (!sleeps) give_back();
  }
  void take_over() override { sleeps = false; }
  void rest() override { sched_yield(); }
  void give_back() {
    if (!std::exchange(holds, false)) return;
    of.end_turns();
    of.turning_.unlock();
  }

  Turns& of;
  Patience patience;
  bool holds = false, sleeps = false;
};

void Turns::run() {
  {
    Own own(*this);
    Waiting waiting(bell_words(), own.patience, &own);
    while (!stopping_) waiting.idle(kAwaitsAll, [](auto...) {}, own.patience);
  }
  const std::lock_guard turning(turning_);
  begin_turns();
  turn(true);
  close();
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  first_order_ = nullptr;  // their callers get an error
  served_.notify_all();
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
  of_->bell_words().sleepers.fetch_sub(1, std::memory_order_seq_cst);  // rings need not wake the object's thread
  of_->begin_turns();
  return of_->turn(false);
}

void Turns::Guest::leave() {
  if (std::exchange(waits_, false)) of_->waiting_.fetch_sub(1, std::memory_order_relaxed);
  if (!std::exchange(holds_, false)) return;
  of_->bell_words().sleepers.fetch_add(1, std::memory_order_seq_cst);
  of_->turn(false);  // for what came before
  of_->end_turns();
  const bool wanted = of_->left_for_thread_ || of_->due_in() != kForever;
  of_->turning_.unlock();
  if (wanted) of_->bell_words().ring();  // wakes the object's thread, which does not know of the work or the deadline
}

}  // namespace ringreduce::parameter_server
