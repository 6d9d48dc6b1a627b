// A turn of a server: the work it does each time one of its threads comes to it (turns.h).
#include <algorithm>
#include <exception>

#include "core/float_environment.h"
#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kFollowEvery = 5 * kMillisecond;  // between a backup's checks of the process of its server

}  // namespace

void Server::begin_turns() {
  if (has_far_) wire_->connections().take_over();
  if (leader_ != nullptr) leader_->backup->begin_turns();
  if (follower_ != nullptr) follower_->server->begin_turns();
}

void Server::end_turns() {
  if (has_far_) wire_->connections().hand_over(true);
  if (leader_ != nullptr) leader_->backup->end_turns();
  if (follower_ != nullptr) follower_->server->end_turns();
}

bool Server::polls() const {
  return follower_ == nullptr || follower_->server->far() || replica_.blocks.have_own_bytes();
}

Nanoseconds Server::most_sleep() const { return follower_ == nullptr ? kForever : kFollowEvery; }

// How long until a Tick is due.
Nanoseconds Server::due_in() const {
  const Nanoseconds due = role_ == Role::primary ? replica_.shard.due_in() : kForever;
  return due == kForever ? kForever : std::max<Nanoseconds>(0, due - (ringreduce::now() - replica_.stepped));
}

// An exception ends this server. Its process, which may be a worker's, goes on.
bool Server::turn(bool may_call_python) {
  bool moved = true;
  try {
    moved = serve(may_call_python);
  } catch (const std::exception& error) {
    fall(error);
  }
  show();
  return moved;
}

bool Server::serve(bool may_call_python) {
  const DefaultFloatEnvironment environment;
  bool moved = serve_orders();
  moved |= partners_move();
  if (role_ == Role::backup) moved |= follow_on();
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

void Server::look_for_ended() {
  const Nanoseconds t = ringreduce::now();
  if (t - looked_ < kLookEvery) return;
  looked_ = t;
  if (role_ == Role::leaving) return look_for_heir();
  if (!in_charge()) return;
  lose_missing();
  if (leader_ != nullptr && (leader_->backup->ended() || leader_->stands())) leader_.reset();
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
