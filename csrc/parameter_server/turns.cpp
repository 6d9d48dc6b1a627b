// Which thread takes a server's turns, and when the server's thread sleeps.
#include <sched.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/atomics.h"
#include "core/float_environment.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kLookEvery = 20 * kMillisecond;   // between checks for processes that have ended
constexpr Nanoseconds kFollowEvery = 5 * kMillisecond;  // between a backup's checks of the process of its server
constexpr int kLooks = 100, kYields = 50;               // the thread polls, then yields so often before it sleeps

}  // namespace

void Server::run() {
  while (!stopping_) {
    std::uint32_t seen = bell_->rings.load(std::memory_order_seq_cst);
    Nanoseconds most = kLookEvery;
    if (const std::unique_lock turning(turning_, std::try_to_lock); turning.owns_lock()) {
      begin_turns();
      const bool is_awaited = followed_ == nullptr || followed_->server->far() || replica_.blocks.have_own_bytes();
      const int most_idle = is_awaited ? kLooks + kYields : 1;
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
      seen = end_turns();
      if (followed_ != nullptr) most = kFollowEvery;
      most = left_for_thread_ ? 0 : std::min(due_in(), most);
    }
    if (!stopping_) sleep_on(bell_->rings, seen, most);
  }
  const std::lock_guard turning(turning_);
  begin_turns();
  turn(true);
  say_ended();
}

// Sets `sleepers` to 0, so that a ring wakes no thread: the thread that takes turns polls.
void Server::begin_turns() {
  bell_->sleepers.store(0, std::memory_order_seq_cst);
  if (has_far_) wire_->connections().take_over();
  if (backup_ != nullptr) backup_->begin_turns();
  if (followed_ != nullptr) followed_->server->begin_turns();
}

// Sets `sleepers` to 1, so that a ring wakes the server's thread, and takes a last turn for what came before. Returns
// the count of rings before that turn.
std::uint32_t Server::end_turns() {
  const std::uint32_t seen = bell_->rings.load(std::memory_order_seq_cst);
  bell_->sleepers.store(1, std::memory_order_seq_cst);
  turn(false);
  if (has_far_) wire_->connections().hand_over(true);
  if (backup_ != nullptr) backup_->end_turns();
  if (followed_ != nullptr) followed_->server->end_turns();
  return seen;
}

// How long until a Tick is due.
Nanoseconds Server::due_in() const {
  const Nanoseconds due = serves_ && !frozen_ ? replica_.shard.due_in() : kForever;
  return due == kForever ? kForever : std::max<Nanoseconds>(0, due - (ringreduce::now() - replica_.stepped));
}

// An exception ends this server. Its process, which may be a worker's, goes on.
bool Server::turn(bool may_call_python) {
  try {
    return serve(may_call_python);
  } catch (const std::exception& error) {
    fall(error);
    return true;
  }
}

bool Server::serve(bool may_call_python) {
  const DefaultFloatEnvironment environment;
  bool moved = serve_orders();
  moved |= partners_move();
  if (followed_ != nullptr && !is_heir_) moved |= follow_on();
  if (!holds_back()) moved |= take_requests();
  if (has_far_) moved |= take_frames();
  if (due_in() == 0) decide(Tick{});
  moved |= !replica_.decided.empty();
  left_for_thread_ =
      !may_call_python && std::any_of(replica_.decided.operations.begin(), replica_.decided.operations.end(),
                                      [this](const auto& each) { return replica_.blocks.by_python(each); });
  if (!left_for_thread_) carry_out();
  moved |= release_held();
  moved |= give_blocks(moved);
  look_for_ended();
  return moved;
}

bool Server::Turns::take() {
  if (server_ == nullptr) return false;
  if (server_->stopping_ || server_->left_for_thread_) {
    leave();
    return false;
  }
  if (holds_) return server_->turn(false);
  if (!std::exchange(waits_, true)) server_->waiting_.fetch_add(1, std::memory_order_relaxed);
  if (!server_->turning_.try_lock()) return false;
  holds_ = true;
  server_->begin_turns();
  return server_->turn(false);
}

void Server::Turns::leave() {
  if (std::exchange(waits_, false)) server_->waiting_.fetch_sub(1, std::memory_order_relaxed);
  if (!std::exchange(holds_, false)) return;
  server_->end_turns();
  const bool wanted = server_->left_for_thread_ || server_->due_in() != kForever;
  server_->turning_.unlock();
  if (wanted) server_->bell_->ring();  // wakes the server's thread, which does not know of the work or the deadline
}

void Server::look_for_ended() {
  const Nanoseconds t = ringreduce::now();
  if (t - looked_ < kLookEvery) return;
  looked_ = t;
  if (leaves()) return look_for_heir();
  if (!serves_) return;
  lose_missing();
  if (backup_ != nullptr && (backup_->ended() || backup_->stands())) drop_backup();
  for (auto each = replica_.ports.begin(); each != replica_.ports.end();) {
    const auto& [worker, port] = *each++;
    if (port->untold) tell(*port);
    if (!port->ended()) continue;
    if (port->alive) end(*port);
    carry_out();
    replica_.ports.erase(WorkerId(worker));
  }
}

}  // namespace ringreduce::parameter_server
