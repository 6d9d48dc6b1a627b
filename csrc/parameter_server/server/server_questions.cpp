// What a server tells other threads: its figures, whether it serves, who is missing, what is in a snapshot.
#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {

Server::Statistics Server::statistics() {
  Statistics now;
  order([&] {
    now.requests = replica_.requests, now.updates = replica_.updates, now.bytes = replica_.bytes;
    now.blocks = replica_.blocks.size();
    now.memory = replica_.blocks.memory();
    now.capacity = replica_.blocks.capacity();
    now.waiting = replica_.shard.waiting();
    now.clocks = replica_.shard.clocks();
    now.saving = replica_.blocks.in_snapshot();
    if (leader_ != nullptr && leader_->counts && leader_->backup->is_there()) {
      now.backup = leader_->backup->name;
      now.lag = leader_->backup->written() - leader_->backup->carried_out();
    }
    for (const auto& block : replica_.blocks) now.rows += block->rows();
    for (const auto& [worker, port] : replica_.ports) now.workers += port->alive;
  });
  return now;
}

Server::Standing Server::standing() {
  return order([&] {
    Standing now{.turn = replica_.turn, .is_heir = role_ == Role::heir};
    if (leader_ == nullptr || !leader_->backup->is_there()) return now;
    now.has_backup = leader_->counts;
    now.backup_starts = !leader_->counts;
    now.backup_follows = leader_->follows();
    now.confirmed = leader_->backup->received();
    return now;
  });
}

bool Server::leaves() { return header().leaves.load(std::memory_order_seq_cst) != 0; }

bool Server::serves() { return header().serves.load(std::memory_order_seq_cst) != 0; }
bool Server::has_ended() { return header().ended.load(std::memory_order_seq_cst) != 0; }

std::vector<WorkerId> Server::missing() {
  return order(
      [&] { return in_charge() && missing_until_ != kForever ? replica_.without_port() : std::vector<WorkerId>(); });
}

// ---- Snapshots ----------------------------------------------------------------------------------------------------

std::vector<Snapshot::Entry> Server::begin_snapshot() {
  return order([&] {
    carry_out();  // brings the values in line with the versions of the shard
    return replica_.blocks.begin_snapshot(replica_.shard);
  });
}

}  // namespace ringreduce::parameter_server
