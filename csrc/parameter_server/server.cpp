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

constexpr std::size_t kCopies = 8 * 1024 * 1024;  // most bytes of values on their way to one worker
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

Server::Connection Server::connection_of(WorkerSpec spec) {
  Connection connection;
  connection.pidfd = FileDescriptor(spec.pidfd);
  connection.news = FileDescriptor(spec.news);
  connection.window = std::make_shared<Window>(FileDescriptor(spec.window), spec.window_bytes, spec.servers);
  if (spec.lane >= spec.servers || spec.servers > 65536 || spec.window_bytes < lanes_bytes(spec.servers))
    throw Error(ErrorKind::invalid_argument, "a window of " + std::to_string(spec.window_bytes) +
                                                 " bytes has no lane " + std::to_string(spec.lane) + " of " +
                                                 std::to_string(spec.servers));
  connection.lane = &connection.window->lane(spec.lane);
  connection.spec = std::move(spec);
  return connection;
}

void Server::join(const WorkerSpec& spec) {
  Connection connection = connection_of(spec);
  order([&] {
    const WorkerId id = connection.spec.id;
    if (!serves_) throw Error(ErrorKind::invalid_argument, "this server is a backup, and has not taken over");
    if (frozen_) throw Error(ErrorKind::aborted, "this server leaves");
    if (const auto found = connections_.find(id); found != connections_.end()) {
      // The same worker may have joined the server that this was the backup of, and got no answer before that one
      // ended.
      if (found->second.lane != nullptr &&
          same_file(found->second.window->memory_fd.get(), connection.window->memory_fd.get()))
        return;
      throw Error(ErrorKind::invalid_argument, "there is a worker " + std::to_string(id) + " already");
    }
    give_worker(connection);
    Connection& known = connections_.emplace(id, std::move(connection)).first->second;
    decide(Join{id, known.spec.group});
    tell(known);
  });
}

void Server::join_far(WorkerId id, const std::string& group, std::size_t window, const std::string& name) {
  const std::size_t bytes = lanes_bytes(0) + window;
  Connection connection;
  connection.window = std::make_shared<Window>(make_memory("ringreduce far window", bytes), bytes, 0);
  connection.spec = {id, group, connection.window->memory_fd.get(), bytes, 0, 0, -1, -1, name};
  order([&] {
    if (connections_.count(id) > 0)
      throw Error(ErrorKind::invalid_argument, "there is a worker " + std::to_string(id) + " already");
    if (only_near_)
      throw Error(ErrorKind::invalid_argument, "this server has a backup, or was one: its workers are on its host");
    if (!serves_ && followed_ == nullptr) throw Error(ErrorKind::aborted, "this server has ended");
    if (shard_.gave_up(id))
      throw Error(ErrorKind::invalid_argument,
                  "worker " + std::to_string(id) + " was out of reach, and has been given up");
    connection.known = shard_.knows(id);
    wire_->admit(id, connection.window, connection.window->memory.at(connection.window->data_begin), window);
    connections_.emplace(id, std::move(connection));
    if (serves_) decide(Join{id, group});
    if (!std::exchange(has_far_, true)) wire_->connections().take_over();  // as begin_turns() has not
  });
}

void Server::connect(WorkerId id, int socket, std::string path) {
  wire_->connections().add(static_cast<int>(id), socket, std::move(path));
}

void Server::lose(WorkerId worker) {
  order([&] {
    const auto found = connections_.find(worker);
    if (found == connections_.end()) return;
    found->second.gone = true;
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
  for (auto& [worker, connection] : connections_) connection.window->bell().ring();
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
  ring_answered();
}

void Server::ring_answered() {
  for (auto& [worker, connection] : connections_) {
    if (!std::exchange(connection.answered, false)) continue;
    if (connection.lane == nullptr)
      send_to(connection);
    else
      connection.window->bell().ring();
  }
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
  const auto found = connections_.find(reply.worker);
  if (found == connections_.end() || !found->second.alive) return;
  Connection& to = found->second;
  const bool changes = reply.outcome == Outcome::applied || reply.outcome == Outcome::initialised;
  const bool failed = changes && failed_.count(reply.after) > 0;
  const ReplySlot slot{reply.number, reply.version, failed ? Outcome::failed : reply.outcome, 0};
  const auto pull = to.pulls.extract(reply.number);
  const bool comes = !pull.empty() && reply.outcome == Outcome::ready;
  // Before a worker has turned to this server, no replies go to it. It will repeat its requests here, and until then
  // its data may be on the way a second time.
  if (to.lane != nullptr ? !to.attached : turn_ > 0 && to.asked.erase(reply.number) == 0) return;
  // Rows are copied now, before later updates change them.
  if (comes && blocks_[pull.mapped().block].is_table()) {
    const auto& [block, offset, rows, packing] = pull.mapped();
    std::byte* const ids = to.window->memory.at(offset);
    blocks_[block].read(ids, rows, ids + rows * sizeof(std::int64_t));
  }
  to.answered = true;
  if (to.lane == nullptr && comes)
    to.values.emplace_back(pull.mapped(), slot);
  else if (backup_ != nullptr && waits_for_backup && slot.outcome != Outcome::ready && slot.outcome != Outcome::done)
    hold(reply.worker, slot);
  else
    put_reply(to, slot), pass(Step::answered);
}

void Server::put_reply(Connection& connection, const ReplySlot& slot) {
  connection.answered = true;
  if (connection.lane == nullptr) return connection.replies.push_back(slot);
  const std::uint64_t index = connection.lane->answered.load(std::memory_order_relaxed);
  connection.lane->replies[index % kMostOutstanding] = slot;
  connection.lane->answered.store(index + 1, std::memory_order_release);
}

// ---- To other hosts -----------------------------------------------------------------------------------------------

// Sends all waiting replies, and values up to the limit of kCopies.
void Server::send_to(Connection& connection) {
  std::size_t under_way = 0;
  std::erase_if(connection.copies, [&](const auto& copy) {
    under_way += copy.first.expired() ? 0 : copy.second;
    return copy.first.expired();
  });
  while (!connection.values.empty() && connection.alive) {
    auto [pull, reply] = connection.values.front();
    const std::size_t bytes = blocks_[pull.block].value_bytes(pull.count), sent = wire_bytes(pull.packing, bytes);
    if (under_way > 0 && under_way + sent > kCopies) break;
    connection.values.pop_front();
    under_way += sent;
    const auto value = value_for(connection, pull, reply);
    connection.copies.emplace_back(value, sent);
    for (std::size_t begin = 0; begin < bytes; begin += kFragment) {
      const std::size_t some = std::min(kFragment, bytes - begin);
      const FrameHeader header = packed(
          {.kind = WireKind::value, .bytes = static_cast<std::uint32_t>(some), .seq = begin, .tag = reply.number},
          pull.packing);
      wire_->connections().send(static_cast<int>(connection.spec.id),
                                {header, value.get() + wire_bytes(pull.packing, begin), value});
    }
    connection.replies.push_back(reply);
  }
  for (std::size_t begin = 0; begin < connection.replies.size(); begin += kMostOutstanding) {
    const std::size_t count = std::min<std::size_t>(kMostOutstanding, connection.replies.size() - begin);
    Frame frame = frame_of(WireKind::replies, std::as_bytes(std::span(connection.replies).subspan(begin, count)));
    connection.copies.emplace_back(frame.own, 0);
    wire_->connections().send(static_cast<int>(connection.spec.id), std::move(frame));
  }
  connection.replies.clear();
  // A worker that keeps to kMostOutstanding never has more than this, so one that does not is given up.
  if (connection.alive && std::max(connection.copies.size(), connection.values.size()) > 2 * kMostOutstanding)
    end(connection);
}

// Returns the value to send: a copy of a block as it is now, or the rows in this server's copy of the worker's window.
std::shared_ptr<std::byte[]> Server::value_for(const Connection& connection, const Pull& pull, ReplySlot& reply) {
  if (blocks_[pull.block].is_table())
    return {connection.window->memory.at(pull.offset + pull.count * sizeof(std::int64_t)),
            [window = connection.window](const std::byte*) {}};
  const std::size_t bytes = blocks_[pull.block].value_bytes(0);
  auto copy = std::make_shared_for_overwrite<std::byte[]>(bytes);
  reply.version = blocks_[pull.block].read(nullptr, 0, copy.get());
  return pull.packing == Packing::none ? copy : pack_for_wire(pull.packing, copy.get(), bytes);
}

}  // namespace ringreduce::parameter_server
