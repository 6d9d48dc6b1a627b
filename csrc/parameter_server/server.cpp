#include "parameter_server/server.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <thread>

#include "core/error.h"
#include "core/partition.h"
#include "core/threads.h"
#include "parameter_server/server-inl.h"

namespace ringreduce::parameter_server {
namespace {

// create() fails when the backup has not confirmed the block for this long.
constexpr Nanoseconds kBackupSilent = 30 * kSecond;

}  // namespace

Server::Server(std::size_t capacity, Hooks hooks, bool backed_up)
    : backed_up_(backed_up),
      hooks_(std::move(hooks)),
      bell_fd_(make_memory("ringreduce bell", sizeof(Bell))),
      bell_memory_(std::make_unique<Mapping>(bell_fd_.get(), sizeof(Bell), true)),
      bell_(reinterpret_cast<Bell*>(bell_memory_->at())),
      wire_(std::make_unique<ServerWire>(*bell_)),
      blocks_(capacity, hooks_.roots, hooks_.update) {
  header().serves = 1;
  thread_ = start_thread([this] { run(); });
}

Server::~Server() {
  stop();
  if (!fork_.forked()) return;
  // In a forked child: the threads of these objects run in the parent only, so they must not be destroyed here.
  static_cast<void>(wire_.release());
  static_cast<void>(backup_.release());
  static_cast<void>(followed_.release());
  if (thread_.joinable()) new std::thread(std::move(thread_));
}

void Server::stop() {
  if (fork_.forked()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    has_orders_ = true;
  }
  bell_->ring();
  const std::lock_guard ending(ending_);
  if (thread_.joinable()) thread_.join();
}

// ---- Orders of other threads --------------------------------------------------------------------------------------

bool Server::serve_orders() {
  if (!has_orders_.exchange(false)) return false;
  std::deque<std::function<void()>> orders;
  {
    const std::lock_guard lock(mutex_);
    orders.swap(orders_);
  }
  for (const auto& each : orders) each();
  return true;
}

void Server::join(const WorkerSpec& spec) {
  auto made = std::make_unique<NearPort>(spec);
  order([&] {
    if (!serves_) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (frozen_) throw Error(ErrorKind::aborted, "this server leaves");
    if (const Port* const known = find(ports_, spec.id)) {
      // The same worker may have joined the server that this was the backup of, and got no answer before that one
      // ended.
      if (!known->far() && same_file(known->window->memory_fd.get(), made->window->memory_fd.get())) return;
      throw Error(ErrorKind::invalid_argument, "there is a worker " + std::to_string(spec.id) + " already");
    }
    give_worker(*made);
    Port& port = *ports_.emplace(spec.id, std::move(made)).first->second;
    decide(Join{spec.id, spec.group});
    tell(port);
  });
}

void Server::join_far(WorkerId id, const std::string& group, std::size_t window, const std::string& name) {
  const std::size_t bytes = lanes_bytes(0) + window;
  const auto memory = std::make_shared<Window>(make_memory("ringreduce far window", bytes), bytes, 0);
  order([&] {
    if (find(ports_, id) != nullptr)
      throw Error(ErrorKind::invalid_argument, "there is a worker " + std::to_string(id) + " already");
    if (only_near_)
      throw Error(ErrorKind::invalid_argument, "this server has a backup, or was one: its workers are on its host");
    if (!serves_ && followed_ == nullptr) throw Error(ErrorKind::aborted, "this server has ended");
    if (shard_.gave_up(id))
      throw Error(ErrorKind::invalid_argument,
                  "worker " + std::to_string(id) + " was out of reach, and has been given up");
    WorkerSpec spec;
    spec.id = id, spec.group = group, spec.name = name;
    const auto& port = ports_[id] = std::make_unique<FarPort>(std::move(spec), memory, *wire_);
    port->known = shard_.knows(id);
    if (serves_) decide(Join{id, group});
    if (!std::exchange(has_far_, true)) wire_->connections().take_over();  // as begin_turns() has not
  });
}

void Server::connect(WorkerId id, int socket, std::string path) {
  wire_->connections().add(static_cast<int>(id), socket, std::move(path));
}

void Server::lose(WorkerId worker) {
  order([&] {
    Port* const port = find(ports_, worker);
    if (port == nullptr) return;
    port->gone = true;
    if (serves_ || followed_ == nullptr) forget_gone();  // to a backup, the journal may bring more requests of it
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
    if (!serves_ && (place || has_ended())) throw Error(ErrorKind::aborted, "the server has been stopped");
    if (!serves_) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (backup_ != nullptr && !spec.rule.native(spec.dtype))
      throw Error(ErrorKind::invalid_argument,
                  "an update that Python computes has no backup: found the parameter server with backups=0, or use "
                  "another update or dtype");
    if (!place && frozen_) return;
    if (!place && backup_ != nullptr && !backup_->ended() && !may_write_down(spec)) {
      const std::uint64_t before = std::exchange(seen, backup_->carried_out());
      if (seen != before) since = ringreduce::now();
      return;
    }
    if (!place) {
      const BlockId id = blocks_.make(spec);
      place.emplace(id, blocks_.offset(blocks_[id]));
      decide(Create{spec.mode, spec.width > 0});
      if (!serves_) throw Error(ErrorKind::aborted, "the server has been stopped");
      written = backup_ == nullptr ? 0 : backup_->written();
    }
    kept = is_kept(written);
  };
  order(make);
  while (!kept) {  // polls, so that the server can take turns while the backup catches up
    const Nanoseconds patience = place || !only_near_ ? kBackupSilent : kBackupStands;
    if (ringreduce::now() - since > patience)
      throw Error(ErrorKind::system, "the server's backup has done nothing for " + std::to_string(patience / kSecond) +
                                         " s, so there can be no more keys: has its process been stopped?");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    order(make);
  }
  return *place;
}

// ---- The thread ---------------------------------------------------------------------------------------------------

void Server::say_ended() {
  serves_ = false;  // the backup may take over now, so later turns must not serve
  held_.clear();
  header().ended.store(1, std::memory_order_seq_cst);
  for (const auto* const partner : {&backup_, &followed_}) {
    if (*partner == nullptr) continue;
    (*partner)->ring();
    (*partner)->end_turns();
  }
  ring(ports_);
  if (has_far_) wire_->connections().hand_over(true);
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    served_.notify_all();
  }
  backup_.reset();  // a partner on another host is told that this one leaves
  followed_.reset();
  wire_->connections().leave();
}

// Ends this server after an exception that leaves its state unknown. What a backup has got is in order, so it goes on.
void Server::fall(const std::exception& error) {
  hooks_.warn("a server in process " + std::to_string(getpid()) + " has failed and ends" +
              (backup_ != nullptr && backup_->counts() ? ", and its backup goes on: " : ": ") + error.what());
  serves_ = false;
  decided_ = {};
  kept_back_.clear();
  stopping_ = true;
}

void Server::decide(const Message& message) {
  const Nanoseconds now = ringreduce::now(), elapsed = now - std::exchange(stepped_, now);
  if (backup_ == nullptr || write_down(message, elapsed)) decide(message, elapsed);
}

void Server::decide(const Message& message, Nanoseconds elapsed) {
  Output output = shard_.step(message, elapsed);
  std::move(output.operations.begin(), output.operations.end(), std::back_inserter(decided_.operations));
  std::move(output.replies.begin(), output.replies.end(), std::back_inserter(decided_.replies));
}

void Server::carry_out() {
  keep_back();
  if (decided_.operations.empty() && decided_.replies.empty()) return;
  try {
    carry_out(std::exchange(decided_, {}));
  } catch (const std::exception& error) {
    if (followed_ != nullptr) throw;
    fall(error);
  }
}

// Carries out operations, and sends each reply as soon as its operation is done. Operations of a block stay in order;
// of several blocks, the one with the greatest priority goes first.
void Server::carry_out(Output output) {
  failed_.clear();
  std::map<BlockId, std::int32_t> priorities;
  for (const Operation& each : output.operations) {
    const auto [found, fresh] = priorities.try_emplace(each.block, each.priority);
    if (!fresh) found->second = std::max(found->second, each.priority);
  }
  // Whether a table has room for new rows depends on the order of operations, which must be the same in a server and
  // its backup. So nothing is reordered if there are both a backup and a table.
  if ((backup_ == nullptr && turn_ == 0) || !blocks_.have_own_bytes())
    std::stable_sort(output.operations.begin(), output.operations.end(),
                     [&](const auto& a, const auto& b) { return priorities[a.block] > priorities[b.block]; });
  std::set<std::uint64_t> due;
  for (const Operation& each : output.operations) due.insert(each.index);
  std::multimap<std::uint64_t, const Reply*> waiting;  // by index of the operation
  for (const Reply& reply : output.replies) {
    if (reply.outcome != Outcome::done && due.count(reply.after) == 0)
      answer(reply);
    else
      waiting.emplace(reply.outcome == Outcome::done ? UINT64_MAX : reply.after, &reply);
  }
  const auto finish = [&](const Operation& operation) {
    const auto [begin, end] = waiting.equal_range(operation.index);
    for (auto each = begin; each != end; ++each) answer(*each->second, reads_push(operation.block));
    waiting.erase(begin, end);
  };
  bool others = false;
  for (const Operation& operation : output.operations) {
    if (blocks_.by_python(operation)) {
      others = true;
    } else {
      carry_out(operation);
      pass(Step::carried_out);
      finish(operation);
    }
  }
  if (others)
    hooks_.enter([&] {
      for (const Operation& operation : output.operations)
        if (blocks_.by_python(operation)) carry_out(operation), finish(operation);
    });
  for (const auto& [index, reply] : waiting) answer(*reply);
  send_replies();
}

void Server::send_replies() {
  for (const auto& [worker, port] : ports_)
    if (!port->send(blocks_)) end(*port);
}

void Server::carry_out(const Operation& operation) {
  Block& block = blocks_[operation.block];
  if (operation.changes) return block.change(operation.contributions[0]);
  statistics_.updates += operation.version > 0;
  if (!blocks_.apply(operation, backup_ != nullptr || followed_ != nullptr)) {
    failed_.insert(operation.index);
    if (backup_ != nullptr && backup_->next < backup_->end) {
      backup_->hurries = true;
      begin_to_give();
    }
  }
  if (operation.version > 0) pass(Step::updated);
  block.publish();
}

// Sends a reply, or holds it until the backup has carried out the journal. With `waits_for_backup`, the backup reads
// the pushed data too, and the worker may overwrite that after the reply.
void Server::answer(const Reply& reply, bool waits_for_backup) {
  Port* const to = find(ports_, reply.worker);
  if (to == nullptr || !to->alive) return;
  const bool changes = reply.outcome == Outcome::applied || reply.outcome == Outcome::initialised;
  const bool failed = changes && failed_.count(reply.after) > 0;
  const ReplySlot slot{reply.number, reply.version, failed ? Outcome::failed : reply.outcome, 0};
  if (!to->prepare(slot, blocks_, turn_)) return;
  if (backup_ != nullptr && waits_for_backup && slot.outcome != Outcome::ready && slot.outcome != Outcome::done)
    hold(reply.worker, slot);
  else
    to->put(slot), pass(Step::answered);
}

}  // namespace ringreduce::parameter_server
