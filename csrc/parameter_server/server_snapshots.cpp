// A server's snapshots: the copies that are written to a file, and restoring blocks from them.
#include <cstring>
#include <new>
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
    snapshot->claimed.assign(blocks_.size(), true);
    for (BlockId id = 0; id < blocks_.size(); ++id) {
      Block& block = blocks_[id];
      if (block.table == nullptr && block.words->published.load(std::memory_order_relaxed) == 0) continue;
      const std::size_t rows = block.table == nullptr ? 0 : block.table->rows();
      const int states = block.spec.rule.native(block.spec.dtype) ? block.spec.rule.states() : -1;
      Rule rule = block.spec.rule;
      for (const auto& [place, number] : shard_.coming_changes(id)) rule.change(place, number);
      snapshot->entries.push_back({id, shard_.version(id), block.steps, rows, states, rule.numbers()});
      if (block.table == nullptr) {
        snapshot->claimed[id] = false;
        snapshot->left.emplace_back(id, 0);
        continue;
      }
      for (std::size_t slab = 0; slab < block.table->slabs(); ++slab) snapshot->left.emplace_back(id, slab);
      block.table->watch([this, id](std::size_t slab) { keep(copy_slab(id, slab)); });
    }
    entries = snapshot->entries;
    snapshot_ = std::move(snapshot);
  });
  return entries;
}

// Copies a block for the snapshot, unless that has been done. Called before the block is updated.
void Server::keep_block(BlockId id) {
  if (snapshot_ == nullptr || id >= snapshot_->claimed.size() || snapshot_->claimed[id]) return;
  keep(copy_block(id));
  snapshot_->claimed[id] = true;
}

void Server::keep(Snapshot::Piece piece) {
  snapshot_bytes_ += piece.size;
  snapshot_->kept.push_back(std::move(piece));
}

Snapshot::Piece Server::copy_block(BlockId id) const {
  const Block& block = blocks_[id];
  const std::size_t bytes = block.bytes();
  Snapshot::Piece piece{id, 0, 0, bytes + block.state_bytes, nullptr};
  piece.bytes = std::make_unique_for_overwrite<std::byte[]>(piece.size);
  const std::uint64_t version = read_block(*block.words, piece.bytes.get(), bytes);
  std::memcpy(piece.bytes.get() + bytes, block.state(version + 1), block.state_bytes);
  return piece;
}

Snapshot::Piece Server::copy_slab(BlockId id, std::size_t slab) const {
  const Table& table = *blocks_[id].table;
  const std::size_t rows = table.rows_in(slab), ids = rows * sizeof(std::int64_t);
  Snapshot::Piece piece{id, slab * table.rows_in(0), rows, ids + rows * table.stored_bytes(), nullptr};
  piece.bytes = std::make_unique_for_overwrite<std::byte[]>(piece.size);
  table.copy_slab(slab, piece.bytes.get(), piece.bytes.get() + ids);
  return piece;
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
    while (!snapshot_->left.empty()) {
      const auto [block, slab] = snapshot_->left.front();
      snapshot_->left.pop_front();
      if (blocks_[block].table != nullptr) {
        if (!blocks_[block].table->claim(slab)) continue;
        piece = copy_slab(block, slab);
      } else {
        if (snapshot_->claimed[block]) continue;
        snapshot_->claimed[block] = true;
        piece = copy_block(block);
      }
      return;
    }
  });
  return piece;
}

void Server::end_snapshot() {
  order([&] {
    for (const Block& block : blocks_)
      if (block.table != nullptr) block.table->unwatch();
    snapshot_.reset();
    snapshot_bytes_ = 0;
  });
}

// ---- Restoring ----------------------------------------------------------------------------------------------------

// Carries out a request to restore. Its payload begins with the number of updates. For a dense block, the value and the
// states follow; for a table, ids and then stored rows.
void Server::restore(Block& block, const Operation& operation) {
  const auto& lent = static_cast<const Lent&>(*operation.contributions[0].payload);
  const std::byte* const data = lent.at() + sizeof(std::uint64_t);
  std::uint64_t steps = 0;
  std::memcpy(&steps, lent.at(), sizeof steps);
  block.steps = std::max(block.steps, steps);
  if (block.table == nullptr) {
    const std::size_t bytes = block.bytes();
    std::memcpy(begin_version(*block.words, bytes).next, data, bytes);
    std::memcpy(block.state(block.words->begun), data + bytes, block.state_bytes);
    return publish(block);
  }
  restore_table(block, operation, data, lent.bytes - sizeof(std::uint64_t));
}

}  // namespace ringreduce::parameter_server
