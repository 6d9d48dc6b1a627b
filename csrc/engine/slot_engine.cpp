#include "engine/slot_engine.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/interrupt.h"
#include "engine/history.h"
#include "kernels/accumulate.h"
#include "transport/links.h"

namespace ringreduce {
namespace {

// Where the blame for a timeout is looked for: a rank that waits says so again at least this often.
Nanoseconds sign_of_life(const Call& call) { return std::min(kSecond / 2, call.timeout / 2); }

// For whom this rank waits; -1: for nobody. Once it has done its part, that is a peer whose socket does not take what
// is left to be sent.
int awaited(const Team& team, const Execution& execution) {
  if (execution.blocked_on() >= 0 || team.links() == nullptr) return execution.blocked_on();
  return team.links()->behind();
}

std::string at(const Execution& execution) {
  return execution.blocked_on() < 0 ? " to take what was sent to it" : " at " + execution.position();
}

std::size_t bytes_of(const Call& call) { return call.largest * call.element_bytes(); }

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> latest{0};
  return ++latest;
}

}  // namespace

SlotEngine::SlotEngine(std::shared_ptr<Team> team, const Options& options)
    : Engine(team->rank(), team->size(), static_cast<int>(team->geometry().channels), options,
             team->geometry().slot_bytes),
      team_(std::move(team)),
      number_(next_number()),
      placement_(*team_) {
  const Geometry& geometry = team_->geometry();
  workspace_.channels.resize(geometry.channels);
  populated_.resize(geometry.channels);
  for (ChannelState& channel : workspace_.channels) {
    channel.tail.resize(geometry.ranks);
    channel.read_by.resize(geometry.ranks);
    channel.readers.resize(geometry.depth);
  }
}

int SlotEngine::reporter() const { return team_->fate().reporter(); }

// The call bound to its tensors: one of the latest calls, if it was the same.
const BoundCall& SlotEngine::bind(const Call& call, const Buffers& buffers, Way way) {
  if (std::exchange(choices_bound_, choices_made()) != choices_made()) bound_.clear();
  for (const BoundCall& known : bound_)
    if (known.serves(call, buffers, way)) return known;
  check(call, size());
  const auto [program, slice] = plan_of(call);
  if (bound_.size() == kBound) bound_.pop_back();
  bound_.emplace_front(*team_, *program, call, buffers, slice, options(), way);
  if (bound_.front().has_choice() && bound_.front().fills_slots()) populate(bound_.front());
  return bound_.front();
}

// The kernel gives memory page by page when it is first touched. That must not be taken for slow copies, so slots are
// touched before ways are compared.
void SlotEngine::populate(const BoundCall& bound) {
  const Geometry& geometry = team_->geometry();
  const std::size_t bytes =
      lesser(geometry.slot_bytes, std::max<std::size_t>(bound.largest(), bound.spread_bytes() / geometry.depth));
  for (std::size_t channel = 0; channel < bound.channels().size(); ++channel) {
    if (bytes <= std::exchange(populated_[channel], std::max(bytes, populated_[channel]))) continue;
    for (std::uint64_t seq = 0; seq < geometry.depth; ++seq)
      team_->own().populate(static_cast<int>(channel), seq, bytes);
  }
}

// Binds the call, and takes what else it needs before others are told of it.
SlotEngine::Prepared SlotEngine::prepare(const Call& call, const Buffers& buffers) {
  const std::size_t bytes = bytes_of(call);
  const bool is_small = bytes < std::min(kernels::kLeastStreamed, options().least_fetch_bytes);
  const auto [way, timed] = is_small ? std::pair(Way::copy, false) : ways_.next(call, bytes);
  const BoundCall& bound = bind(call, buffers, way);
  Prepared prepared{.bound = bound, .timed = timed && bound.has_choice()};
  if (call.feedback != nullptr && bound.packing() != Packing::none) {
    // Rests belong to the places where this plan rounds in this group, and to what it makes there.
    prepared.rounding =
        mix(mix(mix(number_, bound.program().digest), call.count),
            static_cast<std::uint64_t>(call.reduce_op) << 32 | static_cast<std::uint64_t>(call.packing));
    // If the call fails they are lost: they would be those of some of its values only.
    prepared.rests = call.feedback->take(prepared.rounding, bound.rounded());
  }
  placement_.go_home_if_crowded();
  return prepared;
}

Tally SlotEngine::run(const Call& call, const Buffers& buffers) {
  team_->fate().throw_if_aborted();
  Prepared prepared = or_tell_the_others(call, [&] { return prepare(call, buffers); });

  RankControl& own = team_->control(team_->rank());
  const std::uint64_t seq = next_call();
  const CallHeader header = header_of(call, seq, prepared.bound.program().digest, history_);
  history_ = header.fingerprint;
  own.waiting_for.store(-1, std::memory_order_relaxed);
  record(own, header, call.op);

  Waiting waiting(own.for_calls, options().patience, team_->links(), call.held);
  Execution execution(*team_, prepared.bound, workspace_, call, history_,
                      prepared.rests ? reinterpret_cast<std::byte*>(prepared.rests->data()) : nullptr, prepared.timed);
  const auto fail = [&](const Error& error) {
    team_->fate().abort(error);  // first, so that a peer that fails because of what follows finds the reason
    team_->fate().fail(seq);
    execution.shut_out_peers();
  };
  try {
    carry_out(call, seq, prepared, execution, waiting);
    execution.finish();
  } catch (const Error& error) {
    fail(error);
    team_->fate().throw_if_aborted();  // the group's first error, which need not be this one
    throw;
  } catch (const std::exception& error) {  // out of memory: the peers must not wait for this rank
    fail(Error(ErrorKind::system, title(call, seq) + ": " + reason(error), team_->rank()));
    throw;
  }
  if (prepared.rests) call.feedback->put(prepared.rounding, std::move(*prepared.rests));
  own.completed.store(seq, std::memory_order_release);
  if (const int culprit = execution.failed_on(); culprit >= 0)
    throw Error(ErrorKind::operator_failed,
                title(call, seq) + " by operator " + call.op->name + ": it failed on " + number(culprit) + ": " +
                    call.op->failure + "; the group can be used again",
                culprit);
  return {waiting.waited(), execution.lent()};
}

// Moves the call's data; returns when its tensors may change.
void SlotEngine::carry_out(const Call& call, std::uint64_t seq, const Prepared& prepared, Execution& execution,
                           Waiting& waiting) {
  Links* const links = team_->links();
  if (links != nullptr) reach(call, prepared.bound.program(), title(call, seq));
  const auto check_on_peers = [&](Nanoseconds waited, bool may_call_python) {
    if (may_call_python && ctrl_c_came()) team_->fate().interrupt(title(call, seq));
    RankControl& own = team_->control(team_->rank());
    own.waiting_for.store(execution.blocked_on(), std::memory_order_relaxed);
    own.heartbeat.store(now(), std::memory_order_release);
    look(call, seq, execution, waited);
  };
  try {
    move(call, seq, execution, waiting, check_on_peers);
    const Nanoseconds moved = prepared.timed ? now() : 0;
    // Lent memory must not change before it is read. And what a root sent over links is lost if its process ends before
    // the peers have read it, unlike what is in slots.
    const bool rooted = links != nullptr && has_root(call.operation);
    if (rooted) links->send_held();
    if (execution.lent() > 0 || rooted)
      while (!execution.all_read(rooted)) waiting.idle(execution.awaits(), check_on_peers);
    // All peers have come by now, so this wait is for what they have to do because this rank lends.
    if (prepared.timed) ways_.note(call, bytes_of(call), prepared.bound.way(), execution.moved_for() + now() - moved);
    if (execution.sends_away())
      while (!links->sent()) waiting.idle(kAwaitsAll, check_on_peers);
    waiting.moved();
    execution.check_memory();
    // A rank that fails says so before its tensor may change. If none has by now, what was read here, and by those
    // whose data came here, had not changed. The reason is the group's, by way of run().
    if (team_->fate().failed(seq)) throw Error(ErrorKind::aborted, title(call, seq) + ": another rank gave it up");
  } catch (const Error& error) {
    team_->fate().throw_if_aborted();  // which may be what was thrown, and explains itself
    if (error.kind() == ErrorKind::mismatch) throw_mismatch(call, seq, error.culprit(), waiting);
    throw;
  }
}

template <class Check>
void SlotEngine::move(const Call& call, std::uint64_t seq, Execution& execution, Waiting& waiting,
                      const Check& check_on_peers) {
  Links* const links = team_->links();
  const bool by_mates =
      options().looks_by_mates && bytes_of(call) < kernels::kLeastStreamed && !has_root(call.operation);
  Patience patience = options().patience;
  patience.keeps_core = options().keeps_core && call.by_caller;
  const auto advance = [&] {
    try {
      return execution.advance();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::mismatch) throw;
      throw Error(error.kind(), title(call, seq) + ": " + error.what(), error.culprit());
    }
  };
  while (true) {
    const bool came = links != nullptr && links->progress();
    const bool moved = advance() || came;
    if (execution.done()) return;
    if (moved) {
      waiting.moved();
      continue;
    }
    if (by_mates) patience.looks = placement_.looks_before_yield(seq, execution.awaits());
    waiting.idle(execution.awaits(), check_on_peers, patience);
  }
}

// Makes the links that a program needs and that are not there yet.
void SlotEngine::reach(const Call& call, const Program& program, const std::string& what) {
  if (!linked_.insert(&program).second) return;
  std::vector<int> peers;
  for (const int peer : program.peers)
    if (team_->elsewhere(peer)) peers.push_back(peer);
  try {
    team_->links()->reach(peers, call.timeout);
  } catch (const Error& error) {
    throw Error(error.kind(), what + ": " + error.what(), error.culprit());
  }
}

// Called while waiting: throws if it is in vain.
void SlotEngine::look(const Call& call, std::uint64_t seq, const Execution& execution, Nanoseconds waited) {
  team_->fate().throw_if_aborted();
  if (team_->links() != nullptr) team_->links()->tell();
  for (int r = 0; r < team_->size(); ++r)
    if (r != team_->rank() && differ(team_->control(team_->rank()), team_->control(r)))
      throw Error(ErrorKind::mismatch, "", r);
  const int blocked_on = awaited(*team_, execution);
  for (int r : team_->fate().gone()) {
    const RankControl& peer = team_->control(r);
    if (peer.completed.load(std::memory_order_acquire) >= seq) continue;  // it has done its part of this call
    // This rank cannot see how far a rank of another host has come. The rank that waits for it tells the others.
    if (blocked_on < 0 || (team_->elsewhere(r) && r != blocked_on)) continue;
    throw Error(ErrorKind::peer_lost,
                title(call, seq) + ": " + team_->fate().describe(r) + " " + team_->fate().how_gone(r) + "; " +
                    number(team_->rank()) + " waited for " + number(blocked_on) + team_->way_to(blocked_on) +
                    at(execution),
                r);
  }
  team_->fate().throw_if_over(seq);
  if (blocked_on < 0) return;
  if (waited < call.timeout) return warn_if_long(call, seq, execution, blocked_on, waited);
  const Late late = who_is_late(call, seq, blocked_on);
  throw Error(ErrorKind::timeout,
              title(call, seq) + ": " + number(team_->rank()) + " waited the timeout of " + in_seconds(waited) +
                  " for " + number(blocked_on) + team_->way_to(blocked_on) + at(execution) + late.text,
              late.culprit);
}

// One line for the ranks of a host: the first of those that wait says what it knows of all.
void SlotEngine::warn_if_long(const Call& call, std::uint64_t seq, const Execution& execution, int blocked_on,
                              Nanoseconds waited) {
  if (stuck_.obstacle != execution.obstacle()) stuck_ = {execution.obstacle(), waited, {}};
  if (!stuck_.reminder.due(waited - stuck_.since, team_->warn_after())) return;
  for (int r = 0; r < team_->rank(); ++r)
    if (!team_->elsewhere(r) && waits_in(call, seq, r) >= 0) return;
  const RankControl& own = team_->control(team_->rank());
  team_->warn(describe_call(own, seq) + ", seq " + std::to_string(number_of_call(own, seq)) + of_group(*team_) + ": " +
              still_waits(*team_, waited - stuck_.since, number(blocked_on) + team_->way_to(blocked_on) + at(execution),
                          call.timeout - waited) +
              who_is_late(call, seq, blocked_on).text);
}

void SlotEngine::waits_for(int peer) {
  RankControl& own = team_->control(team_->rank());
  own.gpu_waiting_for.store(peer, std::memory_order_relaxed);
  own.gpu_heartbeat.store(now(), std::memory_order_release);
}

int SlotEngine::kept_waiting_by(int peer) const {
  return end_of_chain(peer, [this](int r) { return gpu_waiting_for(r); });
}

// The rank that a GPU of `rank` waits for; -1 if it is not seen to wait.
int SlotEngine::gpu_waiting_for(int rank) const {
  const RankControl& c = team_->control(rank);
  return seen_to_wait_for(c.gpu_waiting_for, c.gpu_heartbeat, team_->size(), kSecond / 2);
}

// Follows the chain of ranks that wait for each other, from `peer`, and returns its end. `waiting_for(r)` is the rank
// that r waits for, or -1.
template <class F>
int SlotEngine::end_of_chain(int peer, F waiting_for) const {
  for (int hops = 0; hops < team_->size(); ++hops) {
    const int next = waiting_for(peer);
    if (next < 0 || next == team_->rank()) break;
    peer = next;
  }
  return peer;
}

void SlotEngine::throw_mismatch(const Call& call, std::uint64_t seq, int peer, Waiting& waiting) const {
  // From another host the call's description may come after its data.
  const Nanoseconds deadline = now() + kSecond;
  while (team_->elsewhere(peer) && now() < deadline && !differ(team_->control(team_->rank()), team_->control(peer)))
    waiting.idle(kAwaitsAll, [this](auto...) {
      team_->fate().throw_if_aborted();
      team_->links()->tell();
    });
  throw different_calls(*team_, peer, title(call, seq));
}

// The rank that a rank waits for in this call; -1 if it is not seen to wait.
int SlotEngine::waits_in(const Call& call, std::uint64_t seq, int rank) const {
  const RankControl& c = team_->control(rank);
  const bool here =
      c.entered.load(std::memory_order_acquire) == seq && c.completed.load(std::memory_order_acquire) < seq;
  return here ? seen_to_wait_for(c.waiting_for, c.heartbeat, team_->size(), sign_of_life(call)) : -1;
}

// What is known of the others while this rank waits for `blocked_on`: "; rank 1 (node7, pid 4711) is what the group
// waits for. Rank 1 has not made any call."
SlotEngine::Late SlotEngine::who_is_late(const Call& call, std::uint64_t seq, int blocked_on) const {
  const int own = team_->rank();
  const int culprit = end_of_chain(blocked_on, [&](int r) { return waits_in(call, seq, r); });
  std::string waiting, text = "; " + team_->fate().describe(culprit) +
                              (culprit == blocked_on ? "" : team_->way_to(culprit)) + " is what the group waits for.";
  for (int r = 0; r < team_->size(); ++r) {
    if (r == own) continue;
    const RankControl& c = team_->control(r);
    const std::uint64_t entered = c.entered.load(std::memory_order_acquire);
    if (team_->elsewhere(r) && entered < seq && r != culprit) continue;  // it may be that this rank is not told
    const int peer = waits_in(call, seq, r);
    if (peer == culprit) {
      waiting += (waiting.empty() ? "" : ", ") + number(r);
      continue;
    }
    text += " " + begins_with(*team_, r);
    if (entered < seq) {
      const bool far = team_->elsewhere(r);  // what such a rank does is known as far as it has told of it
      if (entered == 0)
        text += far ? " has not told of any call." : " has not made any call.";
      else
        text += (far ? " has told of no later call than seq " : " has not arrived: its latest call is seq ") +
                std::to_string(number_of_call(c, entered)) + ", " + describe_call(c, entered) + ".";
      if (const int awaited = gpu_waiting_for(r); awaited >= 0)
        text += " Its GPU waits for " + number(awaited) + ", in a call on CUDA tensors.";
      text += doings(*team_, r);
    } else if (c.completed.load(std::memory_order_acquire) >= seq) {
      text += " has finished this call.";
    } else if (peer >= 0) {
      text += " waits for " + number(peer) + ".";
    } else {
      text += " is in this call and has shown no sign of waiting or progress: stopped or busy." + doings(*team_, r);
    }
  }
  if (!waiting.empty()) text += " Also waiting for " + number(culprit) + ": " + waiting + ".";
  return {culprit, text};
}

}  // namespace ringreduce
