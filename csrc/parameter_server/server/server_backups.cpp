// A server and its backup (near_log.h): how the server writes the log, how the backup repeats it, and how the
// backup takes over.
//
// On one host no agreement is needed that a server has ended. Only the end of its process, or of its thread, counts,
// and its one backup sees this for itself. server_far_backups.cpp has what differs for backups that are reached by TCP.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"
#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kLookForServerEvery = 2 * kMillisecond;  // between a backup's checks whether its server has ended
constexpr Nanoseconds kLeaving = kSecond;                      // a server that leaves waits so long for its backup
constexpr Nanoseconds kMissing = 10 * kSecond;  // workers must come to a backup within this time of the takeover

}  // namespace

// ---- The server ---------------------------------------------------------------------------------------------------

void Server::lead(std::unique_ptr<Partner> partner) {
  order([&] {
    if (!in_charge()) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (leader_ != nullptr && (leader_->backup->far() || partner->far()))
      throw Error(ErrorKind::invalid_argument, "this server has a backup already: it can have no other one");
    for (const auto& block : replica_.blocks)
      if (block->by_python())
        throw Error(ErrorKind::invalid_argument,
                    "an update that Python computes has no backup, and this server has a block of one");
    for (const auto& [worker, port] : replica_.ports)
      if (!partner->far() && port->descriptors()[2] < 0)
        throw Error(ErrorKind::invalid_argument, "a server with workers of other hosts can have no backup yet");
    carry_out();  // includes operations that were kept back for an earlier backup
    const bool is_far = partner->far();
    const auto before = std::exchange(leader_, std::make_unique<Leader>(replica_, std::move(partner), ++backups_made_));
    only_near_ |= !is_far;
    // The new backup has these updates in the state, so the replies need not wait for it to carry them out.
    unconfirmed_.release_replies();
    leader_->begin_to_give(false);
    if (leader_->counts) backup_counts();
    if (before != nullptr) before->backup->ring();
  });
}

// Sends News to a worker: about the backup that counts, or about this server if it was a backup and has taken over.
void Server::tell(Port& port) {
  port.untold = false;
  const Partner* const backup =
      leader_ != nullptr && !leader_->backup->far() && leader_->counts ? leader_->backup.get() : nullptr;
  if (backup == nullptr && (replica_.turn == 0 || !only_near_)) return;
  News news{};
  news.turn = backup != nullptr ? replica_.turn + 1 : replica_.turn;
  news.number = backup != nullptr ? leader_->number : replica_.number;
  news.capacity = backup != nullptr ? backup->capacity : replica_.blocks.capacity();
  cut(backup != nullptr ? backup->name : name_, News::kText - 1).copy(news.name, News::kText);
  cut(backup != nullptr ? backup->address : address_, News::kText - 1).copy(news.address, News::kText);
  const int given[] = {backup != nullptr ? backup->values_fd.get() : values(),
                       backup != nullptr ? backup->bell_fd.get() : bell(),
                       backup != nullptr ? backup->pidfd.get() : pidfd_.get()};
  port.tell(news, given);
}

bool Server::may_take() const { return role_ == Role::primary && (leader_ == nullptr || leader_->takes_requests()); }

// Called when a backup on this host counts from now on.
void Server::backup_counts() {
  show();  // before the News: who has them takes the backup for one that may take over
  for (const auto& [worker, port] : replica_.ports) tell(*port);
  if (role_ == Role::heir) take_over();
}

bool Server::give_blocks(bool moved) {
  if (leader_ == nullptr || !leader_->gives() || !leader_->backup->is_there()) return false;
  const bool gave = leader_->give(moved || unconfirmed_.holds_replies());
  if (leader_->counts) backup_counts();
  return gave;
}

// Sends the held replies to requests that the backup has carried out.
bool Server::release_held() {
  if (leader_ != nullptr && leader_->backup->silent()) return false;
  const std::uint64_t until = leader_ == nullptr ? UINT64_MAX : leader_->backup->carried_out();
  bool moved = false;
  while (const auto reply = unconfirmed_.next_reply(until)) {
    Port* const port = find(replica_.ports, reply->first);
    if (port == nullptr || !port->alive) continue;
    port->put(reply->second);
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
    pidfd_ = own_pidfd();
    follower_ = std::make_unique<Follower>(replica_, std::move(partner));
    name_ = follower_->server->name, address_ = follower_->server->address;
    only_near_ = !follower_->server->far();
    role_ = Role::backup;
  });
}

void Server::leave_to_backup() {
  bool leaves = false, late = false;
  const auto leave = [&] {
    if (leader_ == nullptr || !leader_->counts || !leader_->backup->is_there()) {
      come_back();
      throw Error(ErrorKind::invalid_argument, "this server has no backup that could go on");
    }
    role_ = Role::frozen;
    carry_out();
    if (role_ == Role::ended) throw Error(ErrorKind::aborted, "the server has failed");
    // A lane has one writer: this server writes its last reply before a backup on this host can become the heir.
    if (leader_->backup->far() ? !tell_heir(late) : unconfirmed_.holds_replies()) return;
    leaves = true;
    role_ = Role::leaving;
    show();
    leader_->backup->ring();
    replica_.pass(Step::leaves);
  };
  const Nanoseconds until = ringreduce::now() + kLeaving;
  while (true) {
    order(leave);
    if (leaves) return;
    if (late) {
      unfreeze();
      throw Error(ErrorKind::invalid_argument, "this server's backup has not carried out its log in time to go on");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    late = ringreduce::now() > until;
  }
}

// Tells a backup on another host that it is the heir. Returns false if there is no memory for that. The store says
// already that the backup is the server, so this one cannot go on: it tries again until it is `late`, and then ends,
// which the backup notices.
bool Server::tell_heir(bool late) {
  Record last;
  last.kind = Record::Kind::inherit;
  try {
    leader_->backup->write({last});
    return true;
  } catch (const std::bad_alloc& error) {
    if (!late) return false;
    fall(error);
    throw;
  }
}

// Called while this server leaves its blocks to a backup on this host; decided() does the same for other hosts. If the
// heir has ended, but has a backup of its own, that backup takes over, so this server is replaced all the same.
void Server::look_for_heir() {
  if (leader_ == nullptr || leader_->backup->far()) return;
  const Partner* const heir = leader_->backup.get();
  const bool has_ended = heir->ended(), has_backup = heir->header().backup.load(std::memory_order_seq_cst) != 0;
  if (heir->header().serves.load(std::memory_order_seq_cst) != 0 || (has_ended && has_backup)) {
    bell_words().over.store(1, std::memory_order_seq_cst);
    retire("");
  } else if (has_ended) {
    come_back();
    leader_.reset();
    forget_gone();
  }
}

// Goes on after the heir has ended.
void Server::come_back() {
  if (role_ == Role::frozen || role_ == Role::leaving) role_ = Role::primary;
}

void Server::serve_alone() {
  order([&] {
    if (role_ == Role::heir) take_over();
  });
}

// A backup's part of a turn: repeats what is new in the log, and otherwise checks whether its server has ended.
bool Server::follow_on() {
  bool moved = false;
  try {
    moved = repeat_all(false);
    if (!moved && !has_orders()) look_for_partner();
  } catch (const std::exception& error) {
    retire(reason(error));
    return true;
  }
  return moved;
}

// Repeats the records of the log; returns whether there were any. Stops when an order waits, unless `all`. Updates
// that are carried out here are confirmed at once, since replies to pushes wait for that.
bool Server::repeat_all(bool all) {
  bool moved = false;
  follower_->server->acknowledge();
  while (all || !has_orders()) {
    const auto kind = follower_->repeat_next();
    if (!kind) break;
    moved = true;
    if (*kind == Record::Kind::inherit) role_ = Role::heir;
    if (replica_.decided.operations.empty()) continue;
    carry_out();
    follower_->server->confirm();
  }
  if (!moved) return false;
  carry_out();
  follower_->server->confirm();
  follower_->drop_published();
  return true;
}

// Ends this server, which serves nobody from now on: its backup has taken over, or it is a backup that will not. `why`
// says why a backup has failed, and is logged; "" if it has not.
void Server::retire(std::string_view why) {
  cease();
  leader_.reset();
  note_failure(why);
  show();
  if (follower_ != nullptr) follower_->server->ring();
  follower_.reset();
  replica_.ports.clear();
  if (why.empty()) return;
  try {
    hooks_.warn("the backup of a server, in process " + std::to_string(getpid()) +
                ", has failed and is none any more: " + std::string(why));
  } catch (const std::bad_alloc&) {  // its server notices
  }
}

// Checks whether the server has ended or leaves, and takes over if so. Precondition: the log has been repeated.
void Server::look_for_partner() {
  if (follower_->server->far()) return forget_gone();  // decided() says when to take over
  const Nanoseconds t = ringreduce::now();
  if (t - looked_ < kLookForServerEvery) return;
  looked_ = t;
  const ValuesHeader& its = follower_->server->header();
  const auto counts = [&] { return its.backup.load(std::memory_order_seq_cst); };
  const bool leaves = its.leaves.load(std::memory_order_seq_cst) != 0, ended = follower_->server->ended();
  if (!ended && !leaves) {
    follower_->drop_published();
    if (replica_.number > 0 && counts() > replica_.number) retire("");  // the server has a newer backup
    return;
  }
  repeat_all(true);  // the server may have written more before it ended; now the log is final
  if (replica_.number == 0 || counts() != replica_.number) return retire("");
  follower_->adopt_values();
  carry_out();
  if (ended) return take_over();
  role_ = Role::heir;
  replica_.pass(Step::inherits);
}

// Removes workers that have gone and of which no more requests can come, from them or through the log. A server
// that leaves must decide nothing more; it removes them if it comes back.
void Server::forget_gone() {
  if (role_ == Role::leaving) return;
  for (const auto& [worker, port] : replica_.ports)
    if (in_charge() && port->gone && port->alive) end(*port);
  carry_out();  // may still answer them
  std::erase_if(replica_.ports, [this](const auto& each) {
    const Port& port = *each.second;
    return port.gone && (role_ != Role::backup || !port.alive || !port.known);
  });
}

// After a takeover by TCP: workers that have connected here but are not members join now. Members without a connection
// get some time to come: they may be on their way, or may have gone before this server knew of them.
void Server::settle_workers() {
  for (const auto& [worker, port] : replica_.ports)
    if (port->alive) decide(Join{worker, port->spec.group});
  missing_until_ = ringreduce::now() + kMissing;
}

void Server::lose_missing() {
  if (ringreduce::now() < missing_until_) return;
  missing_until_ = kForever;
  for (const WorkerId worker : replica_.without_port()) decide(Lose{worker});
}

void Server::take_over() {
  replica_.pass(Step::taking_over);
  const auto follower = std::exchange(follower_, nullptr);
  Partner& ended = *follower->server;
  role_ = Role::primary;
  if (ended.far()) settle_workers();
  for (const auto& [worker, port] : replica_.ports) tell(*port);
  ended.say_over();
  show();
  replica_.pass(Step::serving);
  forget_gone();
}

}  // namespace ringreduce::parameter_server
