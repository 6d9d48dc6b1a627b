// The blocks of a server, and the memory that holds them: the server's values, which workers on its host map, and
// memory of the process. For one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "parameter_server/block/block.h"
#include "parameter_server/block/shard.h"

namespace ringreduce::parameter_server {

class Blocks {
 public:
  // `capacity` bounds the bytes of all blocks, both buffers and the optimizer states included. Throws Error(system).
  // `roots` and `update` are those of Server::Hooks.
  Blocks(std::size_t capacity, Roots roots, std::function<void(const PythonUpdate&)> update);

  const FileDescriptor& values() const { return values_fd_; }
  std::size_t capacity() const { return capacity_; }
  ValuesHeader& header() const { return *reinterpret_cast<ValuesHeader*>(values_.at()); }
  std::size_t memory() const { return used_ + own_bytes_; }
  std::size_t memory_left() const { return capacity_ - memory(); }
  // Whether blocks take memory of the process, as tables do.
  bool have_own_bytes() const { return own_bytes_ > 0; }

  // Makes the next block. Throws Error(invalid_argument) if there is no room or no such update of the dtype.
  BlockId make(const BlockSpec& spec);
  BlockId size() const { return static_cast<BlockId>(blocks_.size()); }
  bool have(BlockId id) const { return id < blocks_.size(); }
  Block& operator[](BlockId id) const { return *blocks_[id]; }
  auto begin() const { return blocks_.begin(); }
  auto end() const { return blocks_.end(); }
  // Where a block begins in the values; 0: it is not there.
  std::size_t offset(const Block& block) const;

  bool by_python(const Operation& operation) const {
    return (operation.version > 0 || operation.changes) && blocks_[operation.block]->by_python();
  }
  // Carries out an operation; publish() of the block must follow. Returns false if the block's value is as it was, and
  // then the block knows the reason. `has_partner`: another server carries out the same operation. So if this process
  // has no memory for it, the two differ, and this throws std::bad_alloc.
  bool apply(const Operation& operation, bool has_partner);
  // Reads a piece of a block that its server has sent.
  void take(BlockId id, std::size_t piece, Archive& content, bool more_follow);

  // ---- Snapshots (snapshot.h) ----
  // Begins a snapshot of all blocks that have a value. Precondition: all operations of the shard have been carried out.
  // Throws Error(invalid_argument) if a snapshot is under way.
  std::vector<Snapshot::Entry> begin_snapshot(const Shard& shard);
  // Returns the next piece, or nothing after the last. Throws Error(invalid_argument) if no snapshot is under way, and
  // Error(system) if there was no memory to copy a piece before its update.
  std::optional<Snapshot::Piece> next_piece();
  void end_snapshot();
  bool in_snapshot() const { return snapshot_ != nullptr; }
  // Whether so much has been copied that requests should wait until pieces have been taken. For any thread.
  bool too_many_copied() const { return snapshot_bytes_ > Snapshot::kMostKept; }

  // What a new backup must know of the blocks, without the content of those that are updated in place.
  void visit(Archive& archive);

 private:
  std::size_t room() const;

  const std::size_t capacity_;
  const Roots roots_;
  const std::function<void(const PythonUpdate&)> update_;
  const FileDescriptor values_fd_;
  const Mapping values_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::size_t used_ = sizeof(ValuesHeader);  // bytes of the values
  std::size_t own_bytes_ = 0;                // bytes of the process that blocks take besides
  std::vector<std::byte> scratch_;
  std::unique_ptr<Snapshot> snapshot_;           // the one under way
  std::atomic<std::size_t> snapshot_bytes_ = 0;  // bytes of its copies that have not been taken
};

}  // namespace ringreduce::parameter_server
