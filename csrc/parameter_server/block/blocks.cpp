#include "parameter_server/block/blocks.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/error.h"
#include "parameter_server/block/dense.h"
#include "parameter_server/block/table.h"

namespace ringreduce::parameter_server {

void visit(Archive& archive, BlockSpec& spec) {
  archive(spec.dtype, spec.count, spec.mode, spec.rule, spec.width, spec.first, spec.note, spec.two_states);
}

Blocks::Blocks(std::size_t capacity, Roots roots, std::function<void(const PythonUpdate&)> update)
    : capacity_(capacity),
      roots_(roots),
      update_(std::move(update)),
      values_fd_(make_memory("ringreduce values", capacity)),
      values_(values_fd_.get(), capacity, true) {
  if (capacity < sizeof(ValuesHeader))
    throw Error(ErrorKind::invalid_argument, "memory of " + std::to_string(capacity) + " bytes is no room for values");
  seal_for_readers(values_fd_);
}

BlockId Blocks::make(const BlockSpec& spec) {
  const std::size_t left = memory_left();
  if (spec.width > 0) {
    blocks_.push_back(std::make_unique<Table>(spec, left, capacity_));
    own_bytes_ += blocks_.back()->own_bytes();
  } else {
    auto block = std::make_unique<Dense>(spec, values_.at(used_), left, capacity_);
    const std::size_t bytes = block->bytes();
    blocks_.push_back(std::move(block));
    used_ += bytes;
  }
  return size() - 1;
}

std::size_t Blocks::offset(const Block& block) const {
  return block.place() == nullptr ? 0 : static_cast<std::size_t>(block.place() - values_.at());
}

bool Blocks::apply(const Operation& operation, bool has_partner) {
  Block& block = *blocks_[operation.block];
  const std::size_t before = block.own_bytes();
  bool done = false;
  try {
    block.apply(operation, {scratch_, roots_, update_, room()});
    block.failure.clear();
    done = true;
  } catch (const std::bad_alloc&) {
    if (has_partner || !block.is_table()) throw;
    block.failure = "the server's process has no memory left for the rows";
  } catch (const std::exception& error) {
    block.failure = error.what();
  }
  own_bytes_ += block.own_bytes() - before;
  return done;
}

// The memory that an operation may take. A new backup that lacks rows cannot tell whether there is room for more. So
// the server, which can, gives it everything again after an update for which there was none.
std::size_t Blocks::room() const {
  const bool lacks_rows = std::any_of(begin(), end(), [](const auto& each) { return each->lacks_rows; });
  return lacks_rows ? SIZE_MAX : memory_left();
}

void Blocks::take(BlockId id, std::size_t piece, Archive& content, bool more_follow) {
  Block& block = *blocks_[id];
  const std::size_t before = block.own_bytes();
  block.visit(content, piece);
  own_bytes_ += block.own_bytes() - before;
  block.is_missing = false;
  block.lacks_rows = more_follow;
}

std::vector<Snapshot::Entry> Blocks::begin_snapshot(const Shard& shard) {
  if (snapshot_ != nullptr) throw Error(ErrorKind::invalid_argument, "a snapshot of this server is under way already");
  snapshot_ = std::make_unique<Snapshot>();
  for (BlockId id = 0; id < size(); ++id) {
    Block& block = *blocks_[id];
    if (!block.has_value()) continue;
    Rule rule = block.spec.rule;
    for (const auto& [place, number] : shard.coming_changes(id)) rule.change(place, number);
    const int states = block.by_python() ? -1 : rule.states();
    snapshot_->entries.push_back({id, shard.version(id), block.steps, block.rows(), states, rule.numbers()});
    for (std::size_t piece = 0; piece < block.pieces(); ++piece) snapshot_->left.emplace_back(id, piece);
    block.watch().begin(block.pieces(), [this, id](std::size_t piece) {
      if (snapshot_->failed) return;
      try {
        snapshot_->kept.push_back(blocks_[id]->copy(id, piece));
        snapshot_bytes_ += snapshot_->kept.back().size;
      } catch (const std::bad_alloc&) {  // the snapshot is lost, and the update goes on
        snapshot_->failed = true;
        snapshot_->kept.clear();
        snapshot_bytes_ = 0;
      }
    });
  }
  return snapshot_->entries;
}

std::optional<Snapshot::Piece> Blocks::next_piece() {
  if (snapshot_ == nullptr) throw Error(ErrorKind::invalid_argument, "no snapshot is under way");
  if (snapshot_->failed)
    throw Error(ErrorKind::system, "the server's process had no memory to copy a block that was updated meanwhile");
  std::optional<Snapshot::Piece> piece;
  if (!snapshot_->kept.empty()) {
    piece = std::move(snapshot_->kept.front());
    snapshot_->kept.pop_front();
    snapshot_bytes_ -= piece->size;
  }
  while (!piece && !snapshot_->left.empty()) {
    const auto [block, next] = snapshot_->left.front();
    snapshot_->left.pop_front();
    if (blocks_[block]->watch().claim(next)) piece = blocks_[block]->copy(block, next);
  }
  return piece;
}

void Blocks::end_snapshot() {
  for (const auto& block : blocks_) block->watch().end();
  snapshot_.reset();
  snapshot_bytes_ = 0;
}

void Blocks::visit(Archive& archive) {
  const std::size_t count = visit_size(archive, blocks_.size());
  for (BlockId id = 0; id < count; ++id) {
    if (archive.reads()) {
      BlockSpec spec;
      archive(spec);
      make(spec);
    } else {
      archive(blocks_[id]->spec);
    }
    Block& block = *blocks_[id];
    archive(block.steps, block.failure);
    block.is_missing = archive.reads() && !block.spec.two_states;
    block.lacks_rows = block.is_missing && block.is_table();
  }
}

}  // namespace ringreduce::parameter_server
