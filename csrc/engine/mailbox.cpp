#include "engine/mailbox.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/interrupt.h"
#include "core/threads.h"
#include "engine/history.h"
#include "kernels/accumulate.h"
#include "transport/links.h"

namespace ringreduce {
namespace {

std::string title(const Message& m) {
  return std::string(m.sends ? "send" : "recv") + "(" + std::to_string(m.bytes) +
         " bytes, tag=" + std::to_string(m.tag) + ")";
}

// A copy that shares nothing with `error`: threads must not end up with parts of one exception, whose users libstdc++
// counts where ThreadSanitizer does not see it. Without memory, one that does share.
Error own(const Error& error) noexcept try {
  return Error(error.kind(), std::string(error.what()), error.culprit());
} catch (const std::bad_alloc&) {
  return error;
}

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Team> team, const Patience& patience)
    : team_(std::move(team)), patience_(patience), pairs_(static_cast<std::size_t>(team_->size())) {}

Mailbox::~Mailbox() { stop(); }

void Mailbox::complete(Message& message, std::optional<Error> error) {
  message.done = true;
  message.error = std::move(error);
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const auto& m) { return m.get() == &message; });
  finished_.splice(finished_.end(), all_, found);
}

// Tells the owners. What they hang on a message is let go of here, since it may hold the message itself.
void Mailbox::finish(Messages finished) {
  for (const auto& m : finished)
    if (auto on_done = std::exchange(m->on_done, nullptr))
      on_done(m->error ? std::make_exception_ptr(own(*m->error)) : nullptr);
}

void Mailbox::post(const std::shared_ptr<Message>& message) {
  Messages finished;
  bool pending = false;
  if (message->peer != kAnySource && team_->elsewhere(message->peer)) {
    const int peer = message->peer;
    try {
      team_->links()->reach({&peer, 1}, message->timeout);
    } catch (const Error& error) {
      throw Error(error.kind(), title(*message) + ": " + error.what(), error.culprit());
    }
  }
  {
    std::lock_guard lock(mutex_);
    team_->fate().throw_if_aborted();
    if (stopping_) throw Error(ErrorKind::aborted, "the group has been shut down");
    try {
      // Before anything moves: a message cannot be withdrawn once part of it has.
      if (!driver_.joinable()) driver_ = start_thread([this] { drive(); });
    } catch (const Error& error) {
      throw Error(error.kind(), title(*message) + ": " + error.what());
    }
    message->posted = now();
    all_.push_back(message);
    if (message->sends)
      pairs_[static_cast<std::size_t>(message->peer)].sends.push_back(message);
    else if (!deliver_set_aside(message))
      receives_.push_back(message);
    while (progress()) {
    }
    pending = !message->done;
    finished.swap(finished_);
  }
  if (pending) work_.notify_all();
  finish(std::move(finished));
}

// Moves messages until `ends()`, which is asked under the lock. `check` is called without it.
template <class Ends, class Check>
void Mailbox::move_until(std::unique_lock<std::mutex>& lock, Ends ends, Check check) try {
  Waiting waiting(team_->control(team_->rank()).for_messages, patience_, team_->links());
  for (bool ended = false; !ended; lock.lock()) {
    const bool moved = progress();
    ended = ends();
    Messages finished;
    finished.swap(finished_);
    lock.unlock();
    finish(std::move(finished));
    if (moved)
      waiting.moved();
    else if (!ended)
      waiting.idle(kAwaitsAll, check);
  }
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {  // out of memory: the peers must not wait for this rank
  const Error told(ErrorKind::system, "messages of " + team_->fate().number(team_->rank()) + ": " + reason(error),
                   team_->rank());
  team_->fate().abort(told);
  throw told;
}

void Mailbox::wait(const std::shared_ptr<Message>& message, Nanoseconds patience) {
  std::unique_lock lock(mutex_);
  move_until(
      lock, [&] { return message->done; },
      [&](Nanoseconds waited, bool may_call_python) {
        if (may_call_python && ctrl_c_came()) team_->fate().interrupt(title(*message));  // which ends all messages
        look();
        const std::lock_guard relock(mutex_);
        if (waited >= patience && !message->done)
          throw Error(ErrorKind::timeout,
                      title(*message) + ": not done after the " + in_seconds(waited) + " that wait() was given");
      });
  if (message->error) throw own(*message->error);
}

// The thread for messages that nobody waits for.
void Mailbox::drive() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || !all_.empty() || !finished_.empty(); });
    if (stopping_) return;
    try {
      move_until(lock, [&] { return stopping_ || all_.empty(); }, [&](auto...) { look(); });
    } catch (const Error&) {  // the group has it, and it will end the messages
      if (!lock.owns_lock()) lock.lock();
    }
  }
}

void Mailbox::stop() {
  std::thread ending;
  Messages finished;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    ending.swap(driver_);
    while (!all_.empty()) complete(*all_.back(), own(stopped_));
    receives_.clear();
    for (Pair& pair : pairs_) {
      pair.sends.clear();
      pair.arriving.reset();
    }
    finished.swap(finished_);
  }
  work_.notify_all();
  finish(std::move(finished));
  if (ending.joinable()) ending.join();
}

// Called while waiting, without the lock.
void Mailbox::look() {
  std::unique_lock lock(mutex_);
  const std::string warning = check();
  lock.unlock();
  if (!warning.empty()) team_->warn(warning);
}

std::string Mailbox::whom(const Message& m) const {
  return m.peer == kAnySource ? "any rank" : team_->fate().describe(m.peer) + team_->way_to(m.peer);
}

// What to tell the user about the oldest message; empty if it has not waited for long.
std::string Mailbox::warning(Nanoseconds t) {
  if (all_.empty()) return "";
  const std::shared_ptr<Message>& m = all_.front();
  if (stuck_.message.lock() != m || stuck_.moved != m->moved) stuck_ = {m, m->moved, m->moved == 0 ? m->posted : t, {}};
  const Nanoseconds waited = t - std::max(stuck_.since, m->posted);  // which time stood still may have put off
  if (!stuck_.reminder.due(waited, team_->warn_after())) return "";
  std::string text = title(*m) + of_group(*team_) + ": " +
                     still_waits(*team_, waited, whom(*m), m->posted + m->timeout - t) + "; " +
                     std::to_string(m->moved) + " bytes have moved.";
  if (m->peer != kAnySource) text += doings(*team_, m->peer);
  if (all_.size() > 1) text += " Later messages wait, too: " + std::to_string(all_.size() - 1) + ".";
  return text;
}

// Ends the messages that wait in vain: aborted, peer gone, deadline passed. Returns what to tell the user about others.
std::string Mailbox::check() {
  std::optional<Error> aborted;
  try {
    team_->fate().throw_if_over();
  } catch (const Error& error) {
    aborted = error;
  }
  const std::vector<int> gone = team_->fate().gone();
  while (progress()) {  // what they sent before they went still counts
  }
  const Nanoseconds t = now(), still = standstill_.before(t);
  const auto snapshot = all_;
  for (const auto& m : snapshot) {
    const bool peer_gone = m->peer != kAnySource && std::find(gone.begin(), gone.end(), m->peer) != gone.end();
    const bool all_gone = m->peer == kAnySource && !gone.empty() && std::ssize(gone) + 1 == team_->size();
    std::optional<Error> error;
    m->posted = std::min(m->posted + still, t);
    if (aborted) {
      error = own(*aborted);
    } else if (peer_gone || all_gone) {
      const int culprit = peer_gone ? m->peer : gone.front();
      error =
          Error(ErrorKind::peer_lost,
                title(*m) + ": " + team_->fate().describe(culprit) + " " + team_->fate().how_gone(culprit), culprit);
      // Others may wait for this rank, which is told to give up.
      team_->fate().abort(*error);
    } else if (t - m->posted >= m->timeout) {
      const Error timeout(ErrorKind::timeout,
                          title(*m) + ": " + team_->fate().number(team_->rank()) + " waited the timeout of " +
                              in_seconds(t - m->posted) + " for " + whom(*m) + "; " + std::to_string(m->moved) +
                              " bytes had moved." + (m->peer == kAnySource ? "" : doings(*team_, m->peer)),
                          m->peer);
      team_->fate().abort(timeout);  // part of it may be under way, and what came next would be taken for the rest
      error = timeout;
    } else {
      continue;
    }
    withdraw(m, *error);
  }
  return warning(t);
}

void Mailbox::withdraw(const std::shared_ptr<Message>& m, const Error& error) {
  receives_.remove(m);
  for (Pair& pair : pairs_) {
    std::erase(pair.sends, m);
    if (pair.arriving && pair.arriving->receive == m) {  // the rest of it goes aside
      pair.arriving->receive = nullptr;
      pair.arrived.push_back(std::move(*pair.arriving));
      pair.arriving.reset();
    }
  }
  complete(*m, error);
}

bool Mailbox::progress() {
  bool moved = false;
  try {
    for (int r = 0; r < team_->size(); ++r) {
      Pair& pair = pairs_[static_cast<std::size_t>(r)];
      if (r == team_->rank()) continue;
      while (send_some(r, pair)) moved = true;
      while (receive_some(r, pair)) moved = true;
    }
  } catch (const Error& error) {
    team_->fate().abort(error);  // check() ends all messages
  } catch (const std::exception& error) {
    team_->fate().abort(Error(ErrorKind::system, std::string("receiving a message: ") + reason(error), team_->rank()));
  }
  if (moved) standstill_.restart();
  return moved;
}

bool Mailbox::send_some(int rank, Pair& pair) {
  if (pair.sends.empty()) return false;
  Message& m = *pair.sends.front();
  const Geometry& g = team_->geometry();
  MessageHeader& slot = team_->region(team_->rank()).message(rank, pair.sent);
  // The slot's previous content, of stamp sent + 1 - depth, must have been consumed.
  if (pair.sent >= g.mailbox_depth && slot.consumed.load(std::memory_order_seq_cst) < pair.sent + 1 - g.mailbox_depth)
    return false;
  const std::size_t n = std::min<std::size_t>(m.bytes - m.moved, g.mailbox_slot_bytes);
  slot.message_bytes = m.bytes;
  slot.bytes = static_cast<std::uint32_t>(n);
  slot.dtype = static_cast<std::uint32_t>(m.dtype);
  slot.tag = m.tag;
  slot.timed = 0;
  if (team_->elsewhere(rank) || n < kernels::kLeastStreamed)
    std::copy_n(m.data + m.moved, n, slot.payload());
  else
    fill(pair, slot, m.data + m.moved, n);
  slot.stamp.store(++pair.sent, std::memory_order_release);
  team_->peer(rank).message_filled(pair.sent - 1);
  m.moved += n;
  if (m.moved == m.bytes) {
    complete(m);
    pair.sends.pop_front();
  }
  return true;
}

// Copies to a slot through the caches or past them: whichever has just been faster for both sides.
void Mailbox::fill(Pair& pair, MessageHeader& slot, const std::byte* from, std::size_t bytes) const {
  const std::size_t depth = team_->geometry().mailbox_depth;
  pair.puts.resize(depth);
  Put& put = pair.puts[pair.sent % depth];
  const std::uint32_t taken = slot.taken;
  if (put.timed && taken != MessageHeader::kNotTimed) {
    // Slots of both kinds are under way at a time, so their times differ less than those of whole messages do. Past the
    // caches is right only where it is much faster.
    const Nanoseconds spent = put.spent + taken;
    pair.ways[put.size_class].note(put.copy, put.copy == streamed ? spent * 4 / 3 : spent);
  }
  put.size_class = std::bit_width(bytes);
  const auto [copy, timed, trial] = pair.ways[put.size_class].next();
  const Nanoseconds begun = timed ? now() : 0;
  if (copy == cached)
    std::copy_n(from, bytes, slot.payload());
  else
    kernels::stream(slot.payload(), from, bytes);
  put.copy = copy;
  put.timed = timed;
  put.spent = timed ? now() - begun : 0;
  slot.timed = timed;
  slot.taken = MessageHeader::kNotTimed;
}

bool Mailbox::wanted_from(int source) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const auto& r) { return r->peer == source || r->peer == kAnySource; });
}

std::shared_ptr<Message> Mailbox::take_receive(int source, std::uint64_t tag) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it)
    if (((*it)->peer == source || (*it)->peer == kAnySource) && (*it)->tag == tag) {
      auto receive = *it;
      receives_.erase(it);
      return receive;
    }
  return nullptr;
}

// Points an arrival at the receive it belongs to; one of another size or dtype is an error of the receive, and is
// dropped.
void Mailbox::begin(Arrival& arrival, int source) {
  Message& m = *arrival.receive;
  m.peer = source;
  if (m.bytes != arrival.bytes || m.dtype != arrival.dtype) {
    complete(m,
             Error(ErrorKind::mismatch,
                   title(m) + " of dtype " + std::string(name(m.dtype)) + ": " + team_->fate().describe(source) +
                       " sent " + std::to_string(arrival.bytes) + " bytes of dtype " + std::string(name(arrival.dtype)),
                   source));
    arrival.receive = nullptr;
  }
}

bool Mailbox::receive_some(int rank, Pair& pair) {
  const Geometry& g = team_->geometry();
  MessageHeader& slot = team_->region(rank).message(team_->rank(), pair.received);
  if (slot.stamp.load(std::memory_order_seq_cst) != pair.received + 1) return false;

  const bool continues =
      pair.arriving || (!pair.arrived.empty() && pair.arrived.back().moved < pair.arrived.back().bytes);
  if (!continues) {
    const std::uint32_t dtype = slot.dtype;
    if (dtype >= kDTypeCount) throw Error(ErrorKind::mismatch, "a message with an unknown dtype arrived", rank);
    Arrival arrival{.tag = slot.tag,
                    .dtype = static_cast<DType>(dtype),
                    .bytes = slot.message_bytes,
                    .moved = 0,
                    .aside = {},
                    .receive = nullptr};
    arrival.receive = take_receive(rank, arrival.tag);
    if (!arrival.receive && !wanted_from(rank)) return false;  // it can stay where it is
    if (differ(team_->control(team_->rank()), team_->control(rank))) throw different_calls(*team_, rank, "recv");
    if (arrival.receive) {
      begin(arrival, rank);
      pair.arriving = std::move(arrival);
    } else {
      pair.arrived.push_back(std::move(arrival));
    }
  }

  Arrival& arrival = pair.arriving ? *pair.arriving : pair.arrived.back();
  const std::size_t n = slot.bytes;
  if (n > g.mailbox_slot_bytes || n > arrival.bytes - arrival.moved)
    throw Error(ErrorKind::mismatch, "a message longer than announced arrived", rank);
  // Grows with what comes: how much was announced is the peer's word.
  if (!pair.arriving) arrival.aside.resize(arrival.moved + n);
  std::byte* to = pair.arriving ? (arrival.receive ? arrival.receive->data : nullptr) : arrival.aside.data();
  const bool timed = slot.timed != 0 && arrival.receive;
  const Nanoseconds begun = timed ? now() : 0;
  if (to != nullptr && n > 0) std::memcpy(to + arrival.moved, slot.payload(), n);
  if (timed) slot.taken = static_cast<std::uint32_t>(std::min<Nanoseconds>(now() - begun, MessageHeader::kNotTimed));
  slot.consumed.store(++pair.received, std::memory_order_release);
  team_->peer(rank).message_read(pair.received - 1);
  arrival.moved += n;
  if (arrival.receive) arrival.receive->moved = arrival.moved;

  if (arrival.moved == arrival.bytes) {
    if (pair.arriving) {
      if (arrival.receive) complete(*arrival.receive);
      pair.arriving.reset();
    } else if (auto receive = take_receive(rank, arrival.tag)) {  // posted while it was set aside
      if (!deliver_set_aside(receive)) receives_.push_front(receive);
    }
  }
  return true;
}

// Gives a receive what was set aside for it, the oldest first; returns whether there was anything.
bool Mailbox::deliver_set_aside(const std::shared_ptr<Message>& receive) {
  for (int r = 0; r < team_->size(); ++r) {
    if (receive->peer != kAnySource && receive->peer != r) continue;
    auto& arrived = pairs_[static_cast<std::size_t>(r)].arrived;
    for (auto it = arrived.begin(); it != arrived.end(); ++it) {
      if (it->tag != receive->tag) continue;
      if (it->moved < it->bytes) break;  // still arriving: receive_some ends it
      it->receive = receive;
      begin(*it, r);
      if (it->receive) {
        if (it->bytes > 0) std::memcpy(receive->data, it->aside.data(), it->bytes);
        receive->moved = it->bytes;
        complete(*receive);
      }
      arrived.erase(it);
      return true;
    }
  }
  return false;
}

}  // namespace ringreduce
