// The rows of a table on one server, found by a 64-bit id. Each has a value and an optimizer state.
//
// A row takes memory from the first push to it. Before that, its value is computed from its id, so reading does not
// create rows, and a row has the same first value on any server. Rows are stored in slabs, which never move. Each slot
// (row_ids.h) has its own hash index, so that enlarging an index takes microseconds.
//
// An update copies a slice of rows out of the slabs, lets the rules of dense blocks update them as one tensor, and
// copies them back. A row therefore gets the same bits as in a dense tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "parameter_server/row_ids.h"
#include "parameter_server/rules.h"

namespace ringreduce::parameter_server {

// to += from, a row of `width` elements of float32 or float64.
void add_row(DType dtype, void* to, const void* from, std::size_t width);

struct TableSpec {
  DType dtype = DType::float32;  // or float64
  std::size_t width = 0;         // elements of a row
  Rule rule;
  FirstValues first;
};

// Not thread-safe: the thread that takes the server's turns calls it.
class Table {
 public:
  explicit Table(const TableSpec& spec);

  std::size_t rows() const { return rows_; }
  // The memory that `rows` rows take, including states and indices.
  std::size_t bytes(std::size_t rows) const;
  std::size_t row_bytes() const { return row_bytes_; }  // of a row's value, without states

  // `count` ids at `ids` and a row for each at `rows`, both aligned to 8 bytes. They may be in a worker's window and
  // change at any time.
  struct Batch {
    const std::byte* ids = nullptr;
    const std::byte* rows = nullptr;
    std::size_t count = 0;
    double weight = 1;  // of a push
  };

  // Copies the values of `count` rows to `out`.
  void gather(const std::byte* ids, std::size_t count, std::byte* out);
  // Carries out one update. Gradients of the same row are added, in the order of the batches and of the rows in each,
  // and the sum is divided by `divisor`. Throws Error(system), and changes nothing, if the table would then take more
  // than `room` bytes.
  struct Step {
    std::uint64_t number = 1;  // of this update of the table; the first is 1
    double divisor = 1;
    Roots roots = nullptr;
    std::size_t room = SIZE_MAX;
  };
  void update(std::span<const Batch> batches, const Step& step);
  void change(const Rule& rule) { spec_.rule = rule; }

  // ---- For snapshots ----
  // The size of a stored row: its value followed by its states.
  std::size_t stored_bytes() const { return stored_bytes_; }
  // Adds rows in stored form, or replaces those with the same ids. Throws as update() if there is no room.
  void restore(const Batch& stored, std::size_t room);
  // Until unwatch(), calls `before(slab)` before a slab is first changed or gets another row. Slabs that are made
  // later, and those that have been claimed, are left out.
  void watch(std::function<void(std::size_t)> before);
  void unwatch() { watch(nullptr); }
  std::size_t slabs() const { return slabs_.size(); }
  // Claims a watched slab; returns false if it is not watched or has been claimed before.
  bool claim(std::size_t slab);
  std::size_t rows_in(std::size_t slab) const;
  // Copies the ids of the slab's rows to `ids`, and the stored rows to `stored`.
  void copy_slab(std::size_t slab, std::byte* ids, std::byte* stored) const;

 private:
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

  std::byte* at(std::size_t row) const { return slabs_[row / per_slab_].get() + row % per_slab_ * stride_; }
  std::byte* id_at(std::size_t row) const {
    return slabs_[row / per_slab_].get() + per_slab_ * stride_ + row % per_slab_ * sizeof(std::int64_t);
  }
  std::size_t find(std::int64_t id, std::uint64_t hash) const;
  void find(std::span<const std::int64_t> ids, std::size_t* rows) const;
  std::size_t make(std::int64_t id);
  static void grow(Index& index);
  void check_room(std::span<const std::int64_t> ids, std::size_t room);
  const std::byte* merge(std::span<const Batch> batches, double divisor);
  void take_ids(const Batch& batch);
  void find_or_make();
  void touch(std::size_t row);
  std::size_t slice_bytes(std::size_t count) const;
  void update_slice(std::span<const std::size_t> rows, const std::byte* gradients, const Step& step);

  TableSpec spec_;
  const std::size_t row_bytes_, states_, state_bytes_;  // states_: number of states; state_bytes_: of one of a row
  const std::size_t stored_bytes_, stride_, per_slab_;
  std::size_t rows_ = 0;
  std::array<Index, kSlots> indices_;
  std::vector<std::unique_ptr<std::byte[], Free>> slabs_;
  std::vector<std::int64_t> ids_;   // of the call under way
  std::vector<std::size_t> found_;  // their rows
  std::vector<std::byte> merged_, scratch_;
  std::function<void(std::size_t)> before_;
  std::vector<bool> unclaimed_;  // by slab: it is watched and has not been claimed
};

}  // namespace ringreduce::parameter_server
