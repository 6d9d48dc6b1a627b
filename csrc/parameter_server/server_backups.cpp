// A server and its backup (journal.h): how the server writes the journal, how the backup repeats it, and how the backup
// takes over.
//
// On one host no agreement is needed that a server has ended. Only the end of its process, or of its thread, counts,
// and its one backup sees this for itself. server_far_backups.cpp has what differs for backups that are reached by TCP.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "core/error.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kLookEvery = 2 * kMillisecond;  // between a backup's checks whether its server has ended
constexpr Nanoseconds kLeaving = kSecond;             // a server that leaves waits so long for its backup
constexpr Nanoseconds kMissing = 10 * kSecond;        // workers must come to a backup within this time of the takeover

}  // namespace

// ---- The server ---------------------------------------------------------------------------------------------------

void Server::lead(std::unique_ptr<Partner> partner) {
  order([&] {
    if (!serves_) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (backup_ != nullptr && (backup_->far() || partner->far()))
      throw Error(ErrorKind::invalid_argument, "this server has a backup already: it can have no other one");
    check_native();
    for (const auto& [worker, port] : replica_.ports)
      if (!partner->far() && port->descriptors()[2] < 0)
        throw Error(ErrorKind::invalid_argument, "a server with workers of other hosts can have no backup yet");
    carry_out();  // includes operations that were kept back for an earlier backup
    give_state(*partner);
    // The new backup has these updates in the state, so the replies need not wait for it to carry them out.
    for (Held& each : held_) each.after = 0;
    only_near_ |= !partner->far();
    const auto before = std::exchange(backup_, std::move(partner));
    begin_to_give();
    if (before != nullptr) before->ring();
  });
}

void Server::check_native() const {
  for (const auto& block : replica_.blocks)
    if (block->by_python())
      throw Error(ErrorKind::invalid_argument,
                  "an update that Python computes has no backup, and this server has a block of one");
}

// Called when the backup on this host has ended.
void Server::drop_backup() {
  backup_.reset();
  header().backup.store(0, std::memory_order_seq_cst);
}

// Gives the backup a worker's descriptors. Called before the journal names the worker.
void Server::give_worker(const Port& port) {
  if (backup_ == nullptr || backup_->ended()) return;
  if (!backup_->send(port.descriptors()) && !backup_->ended())
    throw Error(ErrorKind::system,
                std::string("the server's backup was not told of a worker that joins: ") + why_not_sent());
}

// Sends News to a worker: about the backup that counts, or about this server if it was a backup and has taken over.
void Server::tell(Port& port) {
  port.untold = false;
  const Partner* const backup = backup_ != nullptr && !backup_->far() && backup_->counts() ? backup_.get() : nullptr;
  if (backup == nullptr && (replica_.turn == 0 || !only_near_)) return;
  News news{};
  news.turn = backup != nullptr ? replica_.turn + 1 : replica_.turn;
  news.number = backup != nullptr ? header().backup.load(std::memory_order_relaxed) : replica_.number;
  news.capacity = backup != nullptr ? backup->capacity : replica_.blocks.capacity();
  (backup != nullptr ? backup->name : name_).copy(news.name, News::kText - 1);
  (backup != nullptr ? backup->address : address_).copy(news.address, News::kText - 1);
  const FileDescriptor mine = backup != nullptr ? FileDescriptor() : own_pidfd();
  const int given[] = {backup != nullptr ? backup->values_fd.get() : values(),
                       backup != nullptr ? backup->bell_fd.get() : bell(),
                       backup != nullptr ? backup->pidfd.get() : mine.get()};
  port.tell(news, given);
}

// Requests wait while the backup is too far behind or out of reach.
bool Server::may_take() const {
  return serves_ && !frozen_ &&
         (backup_ == nullptr || (backup_->room() >= Journal::kReserve && !backup_->silent() && !backup_->hurries));
}

// Whether the journal has room for a new block. Blocks may use half of the reserve. The rest is for ticks and for
// workers that join and leave: these are few while requests wait.
bool Server::may_write_down(const BlockSpec& spec) const {
  const std::size_t bytes = sizeof(Record) + written(spec).size();
  if (bytes > Journal::kReserve / 2)
    throw Error(ErrorKind::invalid_argument, "what is said of a block has " + std::to_string(bytes) +
                                                 " bytes; its server's backup takes at most " +
                                                 std::to_string(Journal::kReserve / 2));
  return backup_->room() >= Journal::kReserve / 2 + bytes && !backup_->silent();
}

// Writes a message to the journal. Called before this server's shard gets the message; returns false if it must not get
// it, since this server has been stopped.
bool Server::write_down(const Message& message, Nanoseconds elapsed) {
  Entry entry;
  Record& record = entry.record;
  record.elapsed = elapsed;
  const auto* const request = std::get_if<Request>(&message);
  if (request != nullptr) {
    record.kind = Record::Kind::request;
    record.worker = request->worker;
    const auto* const lent = static_cast<const Lent*>(request->payload.get());
    const std::size_t offset = lent == nullptr || lent->window == nullptr ? 0 : lent->offset - lent->window->data_begin;
    record.slot = slot_of(*request, offset, lent == nullptr ? 0 : lent->bytes);
    if (lent != nullptr) entry.data = lent->memory;
  } else if (const auto* join = std::get_if<Join>(&message)) {
    record.kind = Record::Kind::join;
    record.worker = join->worker;
    record.descriptors = backup_->far() ? 0 : 3;
    entry.bytes = written(replica_.ports.at(join->worker)->spec);
  } else if (const auto* lose = std::get_if<Lose>(&message)) {
    record.kind = Record::Kind::lose;
    record.worker = lose->worker;
  } else if (std::holds_alternative<Create>(message)) {
    record.kind = Record::Kind::create;
    entry.bytes = written(replica_.blocks[replica_.blocks.size() - 1].spec);
  }
  record.bytes = entry.bytes.size();
  if (!wait_for_room(sizeof record + entry.bytes.size())) return false;
  if (backup_ == nullptr) return true;
  backup_->write(std::move(entry));
  const bool waits = request != nullptr && replica_.blocks.have(request->block) && reads_push(request->block);
  if (waits || backup_->room() < Journal::kBytes / 4 * 3) backup_->ring();
  replica_.pass(Step::journalled);
  return true;
}

// Waits until the journal has room, or the backup has ended. Returns false if this server has been stopped.
bool Server::wait_for_room(std::size_t bytes) {
  while (!backup_->far() && backup_->room() < bytes) {
    if (backup_->ended()) {
      drop_backup();
      return true;
    }
    if (stopping()) serves_ = false;  // the backup takes over without this message
    if (!serves_) return false;
    sched_yield();
  }
  return true;
}

void Server::hold(WorkerId worker, const ReplySlot& reply) {
  held_.push_back({answers_up_to_, worker, reply});
  backup_->ring();
}

// Sends the held replies to requests that the backup has carried out.
bool Server::release_held() {
  if (held_.empty()) return false;
  if (backup_ != nullptr && backup_->silent()) return false;
  const std::uint64_t until = backup_ == nullptr ? UINT64_MAX : backup_->carried_out();
  bool moved = false;
  for (; !held_.empty() && held_.front().after <= until; held_.pop_front()) {
    Port* const port = find(replica_.ports, held_.front().worker);
    if (port == nullptr || !port->alive) continue;
    port->put(held_.front().reply);
    replica_.pass(Step::answered);
    moved = true;
  }
  if (moved) send_replies();
  return moved;
}

// ---- The backup ---------------------------------------------------------------------------------------------------

void Server::follow(std::unique_ptr<Partner> partner) {
  order([&] {
    if (!replica_.ports.empty() || replica_.blocks.size() > 0)
      throw Error(ErrorKind::invalid_argument, "this server has workers or blocks already: it can be no backup now");
    followed_ = std::make_unique<Follower>(replica_, std::move(partner));
    name_ = followed_->server->name, address_ = followed_->server->address;
    only_near_ = !followed_->server->far();
    serves_ = false;
    header().serves = 0;
  });
}

void Server::leave_to_backup() {
  bool leaves = false;
  const auto leave = [&] {
    frozen_ = backup_ != nullptr && backup_->counts() && backup_->is_there();
    if (!frozen_) throw Error(ErrorKind::invalid_argument, "this server has no backup that could go on");
    carry_out();
    // A lane has one writer: this server writes its last reply before a backup on this host can become the heir.
    if (!backup_->far() && !held_.empty()) return;
    leaves = true;
    header().leaves.store(1, std::memory_order_seq_cst);
    Record last;
    last.kind = Record::Kind::inherit;
    if (backup_->far()) backup_->write({last});
    backup_->ring();
    replica_.pass(Step::leaves);
  };
  const Nanoseconds until = ringreduce::now() + kLeaving;
  for (order(leave); !leaves; order(leave)) {
    if (ringreduce::now() > until) {
      order([&] { frozen_ = false; });
      throw Error(ErrorKind::invalid_argument, "this server's backup has not carried out its log in time to go on");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Called while this server leaves its blocks to a backup on this host; decided() does the same for other hosts. If the
// heir has ended, but has a backup of its own, that backup takes over, so this server is replaced all the same.
void Server::look_for_heir() {
  const Partner* const heir = backup_.get();
  if (heir == nullptr || heir->far()) return;
  const bool has_ended = heir->ended(), has_backup = heir->header().backup.load(std::memory_order_seq_cst) != 0;
  if (heir->header().serves.load(std::memory_order_seq_cst) != 0 || (has_ended && has_backup)) {
    bell_words().over.store(1, std::memory_order_seq_cst);
    be_replaced();
  } else if (has_ended) {
    come_back();
    drop_backup();
    forget_gone();
  }
}

// Goes on after the heir has ended.
void Server::come_back() {
  frozen_ = false;
  header().leaves.store(0, std::memory_order_seq_cst);
}

void Server::become_heir() { is_heir_ = serves_ = frozen_ = true; }

void Server::serve_alone() {
  order([&] {
    if (is_heir_) take_over();
  });
}

// A backup's part of a turn: repeats what is new in the journal, and otherwise checks whether its server has ended.
bool Server::follow_on() {
  bool moved = false;
  try {
    moved = repeat_all(false);
    if (!moved && !has_orders()) look_for_partner();
  } catch (const std::exception& error) {
    give_up(error.what());
    return true;
  }
  return moved;
}

// Repeats the records of the journal; returns whether there were any. Stops when an order waits, unless `all`. Updates
// that are carried out here are confirmed at once, since replies to pushes wait for that.
bool Server::repeat_all(bool all) {
  bool moved = false;
  followed_->server->acknowledge();
  while (all || !has_orders()) {
    const auto kind = followed_->repeat_next();
    if (!kind) break;
    moved = true;
    if (*kind == Record::Kind::inherit) become_heir();
    if (replica_.decided.operations.empty()) continue;
    carry_out();
    followed_->server->confirm();
  }
  if (!moved) return false;
  carry_out();
  followed_->server->confirm();
  followed_->drop_published();
  return true;
}

// Ends this backup or heir: it will not take over and serves nobody. `why` is logged, unless it is "".
void Server::give_up(const std::string& why) {
  serves_ = is_heir_ = false;
  backup_.reset();
  header().serves.store(0, std::memory_order_seq_cst);
  header().ended.store(1, std::memory_order_seq_cst);
  replica_.decided = {};
  if (followed_ != nullptr) followed_->server->ring();
  followed_.reset();
  send_away();
  if (why.empty()) return;
  hooks_.warn("the backup of a server, in process " + std::to_string(getpid()) +
              ", has failed and is none any more: " + why);
}

// Checks whether the server has ended or leaves, and takes over if so. Precondition: the journal has been repeated.
void Server::look_for_partner() {
  if (followed_->server->far()) return forget_gone();  // decided() says when to take over
  const Nanoseconds t = ringreduce::now();
  if (t - looked_ < kLookEvery) return;
  looked_ = t;
  const ValuesHeader& its = followed_->server->header();
  const auto counts = [&] { return its.backup.load(std::memory_order_seq_cst); };
  const bool leaves = its.leaves.load(std::memory_order_seq_cst) != 0, ended = followed_->server->ended();
  if (!ended && !leaves) {
    followed_->drop_published();
    if (replica_.number > 0 && counts() > replica_.number) give_up("");  // the server has a newer backup
    return;
  }
  repeat_all(true);  // the server may have written more before it ended; now the journal is final
  if (replica_.number == 0 || counts() != replica_.number) return give_up("");
  followed_->adopt_values();
  carry_out();
  if (ended) return take_over();
  become_heir();
  replica_.pass(Step::inherits);
}

// Removes workers that have gone and of which no more requests can come, from them or through the journal. A server
// that leaves must decide nothing more; it removes them if it comes back.
void Server::forget_gone() {
  if (leaves()) return;
  for (const auto& [worker, port] : replica_.ports)
    if (serves_ && port->gone && port->alive) end(*port);
  carry_out();  // may still answer them
  std::erase_if(replica_.ports, [this](const auto& each) {
    const Port& port = *each.second;
    return port.gone && (serves_ || followed_ == nullptr || !port.alive || !port.known);
  });
}

// Wakes all workers and removes them, after this server has ended for them.
void Server::send_away() {
  ring(replica_.ports);
  replica_.ports.clear();
}

// After a takeover by TCP: workers that have connected here but are not members join now. Members without a connection
// get some time to come: they may be on their way, or may have gone before this server knew of them.
void Server::settle_workers() {
  for (const auto& [worker, port] : replica_.ports)
    if (port->alive) decide(Join{worker, port->spec.group});
  missing_until_ = ringreduce::now() + kMissing;
}

std::vector<WorkerId> Server::without_connection() const {
  std::vector<WorkerId> found;
  for (const auto& [worker, clock] : replica_.shard.clocks())
    if (find(replica_.ports, worker) == nullptr) found.push_back(worker);
  return found;
}

void Server::lose_missing() {
  if (ringreduce::now() < missing_until_) return;
  missing_until_ = kForever;
  for (const WorkerId worker : without_connection()) decide(Lose{worker});
}

void Server::take_over() {
  replica_.pass(Step::taking_over);
  const auto leader = std::exchange(followed_, nullptr);
  Partner& ended = *leader->server;
  serves_ = true;
  is_heir_ = frozen_ = false;
  if (ended.far()) settle_workers();
  for (const auto& [worker, port] : replica_.ports) tell(*port);
  ended.say_over();
  header().serves.store(1, std::memory_order_seq_cst);
  replica_.pass(Step::serving);
  ring(replica_.ports);
  forget_gone();
}

}  // namespace ringreduce::parameter_server
