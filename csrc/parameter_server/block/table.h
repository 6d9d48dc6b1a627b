// A server's part of a table: rows, found by a 64-bit id. Each has a value and an optimizer state.
//
// A row takes memory from the first push to it. Before that, its value is computed from its id, so reading does not
// create rows, and a row has the same first value on any server. Rows are stored in slabs, which never move. Each slot
// (row_ids.h) has its own hash index, so that enlarging an index takes microseconds.
//
// An update copies a slice of rows out of the slabs, lets the rules of dense blocks update them as one tensor, and
// copies them back. A row therefore gets the same bits as in a dense tensor.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parameter_server/block/block.h"

namespace ringreduce::parameter_server {

// Not thread-safe: the thread that takes the server's turns calls it.
class Table final : public Block {
 public:
  // Throws Error(invalid_argument) if the first row needs more than the `left` bytes that are left of the server's
  // `capacity`.
  Table(BlockSpec spec, std::size_t left, std::size_t capacity);

  bool fits(const RequestSlot& slot) const override;
  void apply(const Operation& operation, const Means& means) override;
  std::size_t value_bytes(std::size_t rows) const override { return rows * row_bytes_; }
  std::uint64_t read(const std::byte* ids, std::size_t rows, std::byte* out) override;
  std::size_t rows() const override { return rows_; }
  std::size_t own_bytes() const override { return bytes(rows_); }
  std::size_t pieces() const override { return slabs_.size(); }
  void visit(Archive& archive, std::size_t slab) override;
  Snapshot::Piece copy(BlockId id, std::size_t slab) const override;
  Watch& watch() override { return watch_; }  // a slab is also changed when it gets another row

 private:
  // `count` ids at `ids` and a row for each at `rows`, both aligned to 8 bytes. They may be in a worker's window and
  // change at any time.
  struct Batch {
    const std::byte* ids = nullptr;
    const std::byte* rows = nullptr;
    std::size_t count = 0;
    double weight = 1;  // of a push
  };
  struct Entry {
    std::int64_t id;
    std::uint32_t row;  // 1 + the row; 0: free
    std::uint32_t reserved;
  };
  struct Index {
    std::vector<Entry> entries;
    std::size_t used = 0;
  };
  struct Free {
    void operator()(std::byte* memory) const;
  };

  std::size_t bytes(std::size_t rows) const;
  std::byte* at(std::size_t row) const { return slabs_[row / per_slab_].get() + row % per_slab_ * stride_; }
  std::byte* id_at(std::size_t row) const {
    return slabs_[row / per_slab_].get() + per_slab_ * stride_ + row % per_slab_ * sizeof(std::int64_t);
  }
  std::size_t find(std::int64_t id, std::uint64_t hash) const;
  void find(std::span<const std::int64_t> ids, std::size_t* rows) const;
  std::size_t make(std::int64_t id);
  static void grow(Index& index);
  void check_room(std::size_t room);
  const std::byte* merge(std::span<const Batch> batches, double divisor);
  void take_ids(const std::byte* ids, std::size_t count);
  void store(const std::byte* ids, const std::byte* stored, std::size_t count, std::size_t room);
  void update(std::span<const Batch> batches, double divisor, const Means& means, std::size_t room);
  void find_or_make();
  void touch(std::size_t row) { watch_.touch(row / per_slab_); }
  std::size_t slice_bytes(std::size_t count) const;
  void update_slice(std::span<const std::size_t> rows, const std::byte* gradients, Roots roots);
  std::size_t rows_in(std::size_t slab) const { return std::min(per_slab_, rows_ - slab * per_slab_); }
  void copy_slab(std::size_t slab, std::byte* ids, std::byte* stored) const;

  const std::size_t row_bytes_, states_, state_bytes_;  // states_: number of states; state_bytes_: of one of a row
  const std::size_t stored_bytes_, stride_, per_slab_;
  std::size_t rows_ = 0;
  std::array<Index, kSlots> indices_;
  std::vector<std::unique_ptr<std::byte[], Free>> slabs_;
  std::vector<std::int64_t> ids_;   // of the call under way
  std::vector<std::size_t> found_;  // their rows
  std::vector<std::byte> merged_, scratch_;
  Watch watch_;
};

}  // namespace ringreduce::parameter_server
