#include "parameter_server/server/server.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <span>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "core/utf8.h"
#include "core/waiting.h"

namespace ringreduce::parameter_server {
namespace {

// create() fails when the backup has not confirmed the block for this long.
constexpr Nanoseconds kBackupSilent = 30 * kSecond;

}  // namespace

Server::Server(std::size_t capacity, Hooks hooks, bool backed_up)
    : backed_up_(backed_up),
      hooks_(std::move(hooks)),
      wire_(std::make_unique<ServerWire>(bell_words())),
      replica_(capacity, hooks_.roots, hooks_.update) {
  show();
  start();
}

Server::~Server() {
  stop();
  if (!fork_.forked()) return;
  // In a forked child: the threads of these objects run in the parent only, so they must not be destroyed here.
  static_cast<void>(wire_.release());
  static_cast<void>(leader_.release());
  static_cast<void>(follower_.release());
}

// ---- Orders of other threads ---------------------------------------------------------------------------------------

void Server::join(WorkerSpec its) {
  auto made = std::make_unique<NearPort>(std::move(its));
  const WorkerSpec& spec = made->spec;
  order([&] {
    if (!in_charge()) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (role_ != Role::primary) throw Error(ErrorKind::aborted, "this server leaves");
    if (const Port* const known = find(replica_.ports, spec.id)) {
      // The same worker may have joined the server that this was the backup of, and got no answer before that one
      // ended.
      if (!known->far() && same_file(known->window->memory_fd.get(), made->window->memory_fd.get())) return;
      throw Error(ErrorKind::invalid_argument, "there is a worker " + std::to_string(spec.id) + " already");
    }
    if (leader_ != nullptr) leader_->introduce(*made);
    Port& port = *replica_.ports.emplace(spec.id, std::move(made)).first->second;
    decide(Join{spec.id, spec.group});
    tell(port);
  });
}

void Server::join_far(WorkerId id, const std::string& group, std::size_t window, const std::string& name) {
  const std::size_t bytes = lanes_bytes(0) + window;
  const auto memory = std::make_shared<Window>(make_memory("ringreduce far window", bytes), bytes, 0);
  order([&] {
    if (find(replica_.ports, id) != nullptr)
      throw Error(ErrorKind::invalid_argument, "there is a worker " + std::to_string(id) + " already");
    if (only_near_)
      throw Error(ErrorKind::invalid_argument, "this server has a backup, or was one: its workers are on its host");
    if (role_ == Role::ended) throw Error(ErrorKind::aborted, "this server has ended");
    if (replica_.shard.gave_up(id))
      throw Error(ErrorKind::invalid_argument,
                  "worker " + std::to_string(id) + " was out of reach, and has been given up");
    WorkerSpec spec;
    spec.id = id, spec.group = group, spec.name = name;
    const auto& port = replica_.ports[id] = std::make_unique<FarPort>(std::move(spec), memory, *wire_);
    port->known = replica_.shard.knows(id);
    if (in_charge()) decide(Join{id, group});
    if (!std::exchange(has_far_, true)) wire_->connections().take_over();  // as begin_turns() has not
  });
}

void Server::connect(WorkerId id, int socket, std::string path) {
  wire_->connections().add(static_cast<int>(id), socket, std::move(path));
}

void Server::lose(WorkerId worker) {
  order([&] {
    Port* const port = find(replica_.ports, worker);
    if (port == nullptr) return;
    port->gone = true;
    if (role_ != Role::backup) forget_gone();  // to a backup, the log may bring more requests of it
  });
}

std::pair<BlockId, std::size_t> Server::create(const BlockSpec& wanted) {
  BlockSpec spec = wanted;
  spec.two_states = backed_up_ && spec.width == 0;
  std::optional<std::pair<BlockId, std::size_t>> place;
  std::uint64_t seen = 0, written = 0;
  bool kept = false;
  Nanoseconds since = ringreduce::now();
  const auto make = [&] {
    if (!in_charge() && (place || has_ended())) throw Error(ErrorKind::aborted, "the server has been stopped");
    if (!in_charge()) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (leader_ != nullptr && !spec.rule.native(spec.dtype))
      throw Error(ErrorKind::invalid_argument,
                  "an update that Python computes has no backup: found the parameter server with backups=0, or use "
                  "another update or dtype");
    if (!place && role_ != Role::primary) return;
    if (!place && leader_ != nullptr && !leader_->backup->ended() && !leader_->has_room_for(spec)) {
      const std::uint64_t before = std::exchange(seen, leader_->backup->carried_out());
      if (seen != before) since = ringreduce::now();
      return;
    }
    if (!place) {
      const BlockId id = replica_.blocks.make(spec);
      place.emplace(id, replica_.blocks.offset(replica_.blocks[id]));
      decide(Create{spec.mode, spec.width > 0});
      if (!in_charge()) throw Error(ErrorKind::aborted, "the server has been stopped");
      written = leader_ == nullptr ? 0 : leader_->backup->written();
    }
    kept = leader_ == nullptr || leader_->kept_until() >= written;
  };
  order(make);
  while (!kept) {  // polls, so that the server can take turns while the backup catches up
    const Nanoseconds patience = place || !only_near_ ? kBackupSilent : Leader::kBackupStands;
    if (ringreduce::now() - since > patience)
      throw Error(ErrorKind::system, "the server's backup has done nothing for " + std::to_string(patience / kSecond) +
                                         " s, so there can be no more keys: has its process been stopped?");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    order(make);
  }
  return *place;
}

// ---- The thread ---------------------------------------------------------------------------------------------------

void Server::close() {
  cease();
  show();
  for (Partner* const partner : {leader_ == nullptr ? nullptr : leader_->backup.get(),
                                 follower_ == nullptr ? nullptr : follower_->server.get()}) {
    if (partner == nullptr) continue;
    partner->ring();
    partner->end_turns();
  }
  if (header().failure[0] != 0) tell_failure();
  if (has_far_) wire_->connections().hand_over(true);
  leader_.reset();  // a partner on another host is told that this one leaves
  follower_.reset();
  wire_->connections().leave();
}

// The first reason is the one to tell.
void Server::note_failure(std::string_view why) {
  if (header().failure[0] != 0) return;
  const std::string_view text = cut(why, sizeof(header().failure) - 1);
  text.copy(header().failure, text.size());
}

// Tells workers on other hosts what this server has failed of. Those on this host read it.
void Server::tell_failure() {
  const std::span<const char> text(header().failure, std::strlen(header().failure));
  for (const auto& [worker, port] : replica_.ports) {
    const auto peer = static_cast<int>(worker);
    if (!port->far() || !wire_->connections().reaches(peer)) continue;
    try {
      wire_->connections().send(peer, frame_of(WireKind::failure, std::as_bytes(text)));
    } catch (const std::bad_alloc&) {  // it hears that the server has left
    }
  }
}

// Ends this server after an exception that leaves its state unknown. What a backup has got is in order, so it goes on.
void Server::fall(const std::exception& error) {
  if (stopping() && role_ == Role::ended) return;
  if (leader_ != nullptr && leader_->backup->ended()) {  // so workers need not wait for it
    leader_.reset();
    show();
  }
  note_failure(reason(error));
  const bool served = in_charge() && role_ != Role::heir, has_backup = leader_ != nullptr && leader_->counts;
  failed_alone_ = served && !has_backup;
  cease();
  end_thread();
  try {
    hooks_.warn("a server in process " + std::to_string(getpid()) + " has failed and ends" +
                (has_backup ? ", and its backup goes on: " : ": ") + reason(error));
  } catch (const std::bad_alloc&) {  // workers are told
  }
}

// The backup may take over from now on. So this server carries out and answers nothing more, not even what it has
// decided: the one that serves may decide differently.
void Server::cease() {
  role_ = Role::ended;
  unconfirmed_.clear();
  replica_.decided = {};
}

// Tells workers and the partner on this host who serves the blocks. Nothing else writes these words. Called before
// anything that a change of role_ or leader_ permits is to be seen.
void Server::show() {
  bool changed = false;
  const auto set = [&](std::atomic<std::uint32_t>& word, std::uint32_t value) {
    if (word.load(std::memory_order_relaxed) == value) return;
    word.store(value, std::memory_order_seq_cst);
    changed = true;
  };
  const bool has_near = leader_ != nullptr && leader_->counts && !leader_->backup->far();
  const bool in_reach = leader_ == nullptr || !leader_->backup->silent();
  if (role_ != Role::ended) set(header().backup, has_near ? leader_->number : 0);  // the backup still looks there
  set(header().serves, in_charge() && role_ != Role::heir && in_reach);
  set(header().ended, role_ == Role::ended);
  // Last: has_left() in server/process.py takes a server with neither flag, `leaves` or `ended`, for one that has come
  // back.
  set(header().leaves, role_ == Role::leaving);
  if (changed) ring(replica_.ports);
}

void Server::decide(const Message& message) {
  try {
    write_down_and_decide(message);
  } catch (const std::exception& error) {  // perhaps in an order, whose caller is told as well
    fall(error);
    throw Error(ErrorKind::aborted, std::string("the server has failed: ") + reason(error));
  }
}

void Server::write_down_and_decide(const Message& message) {
  const Nanoseconds now = ringreduce::now(), elapsed = now - std::exchange(replica_.stepped, now);
  Waiting waiting(bell_words(), kServersPatience, nullptr);
  while (leader_ != nullptr && !leader_->write_down(message, elapsed)) {  // its backup is far behind, and rings
    if (leader_->backup->ended()) {
      leader_.reset();
      break;
    }
    if (stopping()) cease();  // the backup takes over without this message
    if (!in_charge()) return;
    waiting.idle(kAwaitsAll, [](auto...) {});
  }
  replica_.decide(message, elapsed);
}

void Server::carry_out() {
  const std::uint64_t at = leader_ == nullptr ? 0 : leader_->backup->written();
  // A backup on another host knows only what it has received, so nobody may see anything else (far_log.h).
  const bool keeps_back = leader_ != nullptr && leader_->backup->far() && !leader_->gives();
  replica_.decided =
      unconfirmed_.next(std::exchange(replica_.decided, {}), at, keeps_back ? leader_->kept_until() : UINT64_MAX);
  if (replica_.decided.empty()) return;
  // Whether a table has room for new rows depends on the order of operations, which must be the same in a server and
  // its backup. So nothing is reordered if there are both a backup and a table.
  const bool in_order = (leader_ != nullptr || replica_.turn > 0) && replica_.blocks.have_own_bytes();
  const bool has_partner = leader_ != nullptr || follower_ != nullptr;
  try {
    const bool done = replica_.carry_out(
        std::exchange(replica_.decided, {}), in_order, has_partner, hooks_.enter,
        [this](const Reply& reply, const Operation* operation, bool failed) { answer(reply, operation, failed); });
    if (!done && leader_ != nullptr && leader_->gives()) leader_->begin_to_give(true);
    send_replies();
  } catch (const std::exception& error) {
    if (follower_ != nullptr) throw;
    fall(error);
  }
}

void Server::send_replies() {
  for (const auto& [worker, port] : replica_.ports)
    if (!port->send(replica_.blocks)) end(*port);
}

// Sends the reply to a request that led to the operation, if to any. If the backup reads the pushed data too, which the
// worker may overwrite after the reply, the reply is held until the backup has carried out the log.
void Server::answer(const Reply& reply, const Operation* operation, bool has_failed) {
  Port* const to = find(replica_.ports, reply.worker);
  if (to == nullptr || !to->alive) return;
  const bool changes = reply.outcome == Outcome::applied || reply.outcome == Outcome::initialised;
  const ReplySlot slot{reply.number, reply.version, changes && has_failed ? Outcome::failed : reply.outcome, 0};
  if (!to->prepare(slot, replica_.blocks, replica_.turn)) return;
  const bool brings_nothing = slot.outcome != Outcome::ready && slot.outcome != Outcome::done;
  if (leader_ != nullptr && brings_nothing && (operation == nullptr || leader_->reads_push(operation->block))) {
    unconfirmed_.hold(reply.worker, slot);
    leader_->backup->ring();
  } else {
    to->put(slot);
    replica_.pass(Step::answered);
  }
}

}  // namespace ringreduce::parameter_server
