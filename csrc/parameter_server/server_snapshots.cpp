// A server's snapshots: the copies that are written to a file.
#include <memory>
#include <utility>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

std::vector<Snapshot::Entry> Server::begin_snapshot() {
  std::vector<Snapshot::Entry> entries;
  order([&] {
    if (snapshot_ != nullptr)
      throw Error(ErrorKind::invalid_argument, "a snapshot of this server is under way already");
    carry_out();  // brings the values in line with the versions of the shard
    auto snapshot = std::make_unique<Snapshot>();
    for (BlockId id = 0; id < blocks_.size(); ++id) {
      Block& block = *blocks_[id];
      if (!block.has_value()) continue;
      Rule rule = block.spec.rule;
      for (const auto& [place, number] : shard_.coming_changes(id)) rule.change(place, number);
      const int states = block.by_python() ? -1 : rule.states();
      snapshot->entries.push_back({id, shard_.version(id), block.steps, block.rows(), states, rule.numbers()});
      for (std::size_t piece = 0; piece < block.pieces(); ++piece) snapshot->left.emplace_back(id, piece);
      block.watch().begin(block.pieces(), [this, id](std::size_t piece) {
        snapshot_->kept.push_back(blocks_[id]->copy(id, piece));
        snapshot_bytes_ += snapshot_->kept.back().size;
      });
    }
    entries = snapshot->entries;
    snapshot_ = std::move(snapshot);
  });
  return entries;
}

std::optional<Snapshot::Piece> Server::next_piece() {
  std::optional<Snapshot::Piece> piece;
  order([&] {
    if (snapshot_ == nullptr) throw Error(ErrorKind::invalid_argument, "no snapshot is under way");
    if (!snapshot_->kept.empty()) {
      piece = std::move(snapshot_->kept.front());
      snapshot_->kept.pop_front();
      snapshot_bytes_ -= piece->size;
      return;
    }
    while (!piece && !snapshot_->left.empty()) {
      const auto [block, next] = snapshot_->left.front();
      snapshot_->left.pop_front();
      if (blocks_[block]->watch().claim(next)) piece = blocks_[block]->copy(block, next);
    }
  });
  return piece;
}

void Server::end_snapshot() {
  order([&] {
    for (const auto& block : blocks_) block->watch().end();
    snapshot_.reset();
    snapshot_bytes_ = 0;
  });
}

}  // namespace ringreduce::parameter_server
