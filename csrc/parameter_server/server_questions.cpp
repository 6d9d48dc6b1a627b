// What other threads ask a server.
#include <unistd.h>

#include <csignal>

#include "parameter_server/server-inl.h"

namespace ringreduce::parameter_server {

std::vector<WorkerId> Server::awaited(BlockId block) {
  std::vector<WorkerId> found;
  order([&] {
    if (!blocks_.have(block)) return;
    const Mode& mode = shard_.mode(block);
    if (mode.consistency == Consistency::sync) found = shard_.awaited(block);
    if (mode.consistency == Consistency::ssp) found = shard_.slowest(mode.group);
  });
  return found;
}

std::vector<WorkerId> Server::absent(const std::string& group) {
  return order([&] { return shard_.absent(group); });
}

std::map<WorkerId, std::pair<std::string, std::string>> Server::workers() {
  return order([&] {
    std::map<WorkerId, std::pair<std::string, std::string>> found;
    const std::map<WorkerId, std::uint64_t> members = shard_.clocks();
    for (const auto& [worker, port] : ports_)
      if (members.count(worker) > 0) found[worker] = {port->spec.group, port->spec.name};
    return found;
  });
}

std::string Server::failure(BlockId block) {
  return order([&] { return blocks_.have(block) ? blocks_[block].failure : std::string(); });
}

Server::Statistics Server::statistics() {
  Statistics now;
  order([&] {
    now = statistics_;
    now.blocks = blocks_.size();
    now.memory = blocks_.memory();
    now.capacity = blocks_.capacity();
    now.waiting = shard_.waiting();
    now.clocks = shard_.clocks();
    now.saving = blocks_.are_saved();
    if (backup_ != nullptr && backup_->counts() && backup_->is_there()) {
      now.backup = backup_->name;
      now.lag = backup_->written() - backup_->carried_out();
    }
    for (const auto& block : blocks_) now.rows += block->rows();
    for (const auto& [worker, port] : ports_) now.workers += port->alive;
  });
  return now;
}

Server::Standing Server::standing() {
  return order([&] {
    Standing now{.turn = turn_, .is_heir = is_heir_};
    if (backup_ == nullptr || !backup_->is_there()) return now;
    now.has_backup = backup_->counts();
    now.backup_starts = !backup_->counts();
    now.backup_follows = backup_->next == backup_->end && backup_->received() >= backup_->given_at;
    now.confirmed = backup_->received();
    return now;
  });
}

bool Server::leaves() { return header().leaves.load(std::memory_order_seq_cst) != 0; }

bool Server::serves() { return header().serves.load(std::memory_order_seq_cst) != 0; }
bool Server::has_ended() { return header().ended.load(std::memory_order_seq_cst) != 0; }

std::vector<std::tuple<std::string, BlockId, std::size_t>> Server::notes() {
  return order([&] {
    std::vector<std::tuple<std::string, BlockId, std::size_t>> found;
    for (BlockId id = 0; id < blocks_.size(); ++id)
      found.emplace_back(blocks_[id].spec.note, id, blocks_.offset(blocks_[id]));
    return found;
  });
}

std::vector<WorkerId> Server::missing() {
  return order([&] { return serves_ && missing_until_ != kForever ? without_connection() : std::vector<WorkerId>(); });
}

// ---- Snapshots ----------------------------------------------------------------------------------------------------

std::vector<Snapshot::Entry> Server::begin_snapshot() {
  return order([&] {
    carry_out();  // brings the values in line with the versions of the shard
    return blocks_.begin_snapshot(shard_);
  });
}

std::optional<Snapshot::Piece> Server::next_piece() {
  return order([&] { return blocks_.next_piece(); });
}

void Server::end_snapshot() {
  order([&] { blocks_.end_snapshot(); });
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
