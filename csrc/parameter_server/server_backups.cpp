// A server and its backup (journal.h): what the server writes down, what the backup does of it, and how it takes over.
//
// Nobody has to agree that a server has ended: only the end of its process, or of its thread, counts, and its one
// backup sees that for itself.
#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <exception>
#include <utility>
#include <variant>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kLookEvery = 2 * kMillisecond;  // of a backup that is awake: whether its server has ended

// A block as it lies in the journal. The names of its group and its note follow.
struct WrittenBlock {
  DType dtype;
  Consistency consistency;
  std::uint32_t quorum;
  std::uint32_t group_bytes;
  std::uint64_t count, width, staleness;
  Nanoseconds grace;
  Rule rule;
  FirstValues first;
};

std::vector<std::byte> bytes_in(const std::string& text) {
  const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::vector<std::byte> written(const BlockSpec& spec) {
  const Mode& mode = spec.mode;
  const WrittenBlock block{spec.dtype, mode.consistency, mode.quorum,    static_cast<std::uint32_t>(mode.group.size()),
                           spec.count, spec.width,       mode.staleness, mode.grace,
                           spec.rule,  spec.first};
  std::vector<std::byte> bytes(sizeof block);
  std::memcpy(bytes.data(), &block, sizeof block);
  for (const std::string* const text : {&mode.group, &spec.note}) {
    const std::vector<std::byte> more = bytes_in(*text);
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  return bytes;
}

BlockSpec block_of(const std::vector<std::byte>& bytes) {
  WrittenBlock block;
  std::memcpy(&block, bytes.data(), sizeof block);
  const auto* const text = reinterpret_cast<const char*>(bytes.data()) + sizeof block;
  const std::size_t texts = bytes.size() - sizeof block, group = block.group_bytes;
  return {block.dtype,
          block.count,
          {block.consistency, block.quorum, block.grace, block.staleness, std::string(text, group)},
          block.rule,
          block.width,
          block.first,
          std::string(text + group, texts - group)};
}

}  // namespace

// ---- The server ---------------------------------------------------------------------------------------------------

void Server::lead(const PartnerSpec& backup) {
  auto partner = std::make_unique<Partner>(backup);
  order([&] {
    if (!connections_.empty() || !blocks_.empty())
      throw Error(ErrorKind::invalid_argument, "this server has workers or blocks already: it can have no backup now");
    backup_ = std::move(partner);
  });
}

bool Server::has_backup() {
  bool has = false;
  order([&] { has = backup_ != nullptr && !backup_->ended(); });
  return has;
}

// Requests wait when the backup is too far behind.
bool Server::may_take() const {
  return serves_ && (backup_ == nullptr || backup_->journal.room() >= Journal::kReserve);
}

// Nor are there new blocks then, for which half of the reserve is: the rest is for ticks and for workers that come and
// go. Of these there are only so many, since requests wait and a worker comes to the backup first.
bool Server::may_write_down(const BlockSpec& spec) const {
  const std::size_t bytes = sizeof(Record) + sizeof(WrittenBlock) + spec.mode.group.size() + spec.note.size();
  if (bytes > Journal::kReserve / 2)
    throw Error(ErrorKind::invalid_argument, "what is said of a block has " + std::to_string(bytes) +
                                                 " bytes; its server's backup takes at most " +
                                                 std::to_string(Journal::kReserve / 2));
  return backup_->journal.room() >= Journal::kReserve / 2 + bytes;
}

// For the backup, before this server's shard gets the message; false: it must not get it.
bool Server::write_down(const Message& message, Nanoseconds now) {
  Record record;
  record.at = now;
  std::vector<std::byte> more;
  if (const auto* request = std::get_if<Request>(&message)) {
    record.kind = Record::Kind::request;
    record.worker = request->worker;
    const auto* const lent = static_cast<const Lent*>(request->payload.get());
    record.slot = {request->kind,
                   request->block,
                   request->number,
                   request->seen,
                   request->round,
                   request->pulled,
                   request->weight,
                   lent == nullptr ? 0 : lent->offset - lent->window->data,
                   lent == nullptr ? 0 : lent->bytes,
                   request->priority,
                   Packing::none};
  } else if (const auto* join = std::get_if<Join>(&message)) {
    record.kind = Record::Kind::join;
    record.worker = join->worker;
    more = bytes_in(join->group);
  } else if (const auto* lose = std::get_if<Lose>(&message)) {
    record.kind = Record::Kind::lose;
    record.worker = lose->worker;
  } else if (std::holds_alternative<Create>(message)) {
    record.kind = Record::Kind::create;
    more = written(blocks_.back().spec);
  }
  record.bytes = more.size();
  while (backup_->journal.room() < sizeof record + more.size()) {
    if (backup_->ended()) {
      backup_.reset();
      return true;
    }
    if (stopping_) serves_ = false;  // the backup will take over without this message
    if (!serves_) return false;
    sched_yield();
  }
  backup_->journal.write(record, more);
  backup_->bell().ring();
  pass(Step::journalled);
  return true;
}

// What the backup has carried out as well may be answered.
bool Server::release_held() {
  if (held_.empty()) return false;
  const std::uint64_t until = backup_ == nullptr ? UINT64_MAX : backup_->journal.carried_out();
  bool moved = false;
  for (; !held_.empty() && held_.front().after <= until; held_.pop_front()) {
    const auto found = connections_.find(held_.front().worker);
    if (found == connections_.end() || !found->second.alive) continue;
    put_reply(found->second, held_.front().reply);
    pass(Step::answered);
    moved = true;
  }
  if (moved) ring_answered();
  return moved;
}

// ---- The backup ---------------------------------------------------------------------------------------------------

void Server::follow(const PartnerSpec& server) {
  auto partner = std::make_unique<Partner>(server);
  order([&] {
    if (!connections_.empty() || !blocks_.empty())
      throw Error(ErrorKind::invalid_argument, "this server has workers or blocks already: it can be no backup now");
    followed_ = std::move(partner);
    serves_ = false;
    was_backup_ = true;
    header().serves = 0;
  });
}

bool Server::serves() { return header().serves.load(std::memory_order_seq_cst) != 0; }

std::vector<std::tuple<std::string, BlockId, std::size_t>> Server::notes() {
  std::vector<std::tuple<std::string, BlockId, std::size_t>> found;
  order([&] {
    for (BlockId id = 0; id < blocks_.size(); ++id) {
      const Block& block = blocks_[id];
      const std::byte* const at = reinterpret_cast<const std::byte*>(block.words);
      found.emplace_back(block.spec.note, id, at == nullptr ? 0 : static_cast<std::size_t>(at - values_->at()));
    }
  });
  return found;
}

// Does what the server has written down. Each update is confirmed at once, as pushes wait for that.
bool Server::follow_on() {
  bool moved = false;
  Record record;
  std::vector<std::byte> bytes;
  try {
    while (!has_orders_ && followed_->journal.read(record, bytes)) {
      repeat(record, bytes);
      moved = true;
      if (decided_.operations.empty()) continue;
      carry_out();
      followed_->journal.confirm();
      followed_->bell().ring();
    }
    if (moved) {
      carry_out();
      followed_->journal.confirm();
      followed_->bell().ring();
    } else if (!has_orders_) {
      look_for_partner();
    }
  } catch (const std::exception& error) {
    give_up(error.what());
    return true;
  }
  return moved;
}

// From here on this is no backup, and serves nobody.
void Server::give_up(const std::string& why) {
  serves_ = false;
  header().serves.store(0, std::memory_order_seq_cst);
  header().ended.store(1, std::memory_order_seq_cst);
  decided_ = {};
  if (followed_ != nullptr) followed_->bell().ring();
  followed_.reset();
  for (auto& [worker, connection] : connections_) connection.window->bell().ring();
  std::erase_if(connections_, [](const auto& each) { return each.second.gone; });
  hooks_.warn("the backup of a server, in process " + std::to_string(getpid()) +
              ", has failed and is none any more: " + why);
}

void Server::repeat(const Record& record, const std::vector<std::byte>& bytes) {
  switch (record.kind) {
    case Record::Kind::request: {
      const auto found = connections_.find(record.worker);
      if (found == connections_.end()) throw Error(ErrorKind::mismatch, "a worker is unknown to the backup");
      return decide(request_of(found->second, record.slot), record.at);
    }
    case Record::Kind::join:
      if (const auto found = connections_.find(record.worker); found != connections_.end()) found->second.known = true;
      return decide(Join{record.worker, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}}, record.at);
    case Record::Kind::lose: {
      decide(Lose{record.worker}, record.at);
      const auto found = connections_.find(record.worker);
      if (found != connections_.end()) found->second.alive = false;
      return;
    }
    case Record::Kind::create: {
      const BlockSpec spec = block_of(bytes);
      make_block(spec);
      return decide(Create{spec.mode, spec.width > 0}, record.at);
    }
    case Record::Kind::tick:
      return decide(Tick{}, record.at);
  }
}

// Precondition: what the journal had is repeated.
void Server::look_for_partner() {
  // Of workers that the server has lost, and that have gone from here too, nothing will be repeated. Nor of those that
  // have gone before the server knew them: they have asked it nothing.
  std::erase_if(connections_,
                [](const auto& each) { return each.second.gone && (!each.second.alive || !each.second.known); });
  const Nanoseconds t = ringreduce::now();
  if (t - looked_ < kLookEvery) return;
  looked_ = t;
  if (!followed_->ended()) return;
  Record record;  // what it had written since the last look; nothing comes after this
  for (std::vector<std::byte> bytes; followed_->journal.read(record, bytes);) repeat(record, bytes);
  carry_out();
  take_over();
}

void Server::take_over() {
  pass(Step::taking_over);
  followed_.reset();
  serves_ = true;
  for (auto& [worker, connection] : connections_)  // that came to the server too late; no effect on others
    if (connection.alive) decide(Join{worker, connection.spec.group});
  for (const auto& [worker, clock] : shard_.clocks())  // that had gone before the server knew them
    if (connections_.count(worker) == 0) decide(Lose{worker});
  header().serves.store(1, std::memory_order_seq_cst);
  pass(Step::serving);
  for (auto& [worker, connection] : connections_) {
    connection.window->bell().ring();
    if (connection.gone && connection.alive) end(connection);
  }
  carry_out();
  std::erase_if(connections_, [](const auto& each) { return each.second.gone; });
}

// ---- For tests ----------------------------------------------------------------------------------------------------

void Server::die_at(Step step, std::uint64_t times) {
  order([&] {
    last_step_ = step;
    steps_left_ = times;
  });
}

void Server::pass(Step step) {
  if (step == last_step_ && --steps_left_ == 0) kill(getpid(), SIGKILL);
}

}  // namespace ringreduce::parameter_server
