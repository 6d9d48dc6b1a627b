// A table's rows on one server: by 64-bit id, each with its optimizer's state.
//
// A row is stored when something is first pushed to it. Before that its value is computed from its id, so reading makes
// nothing, and a row begins the same on any server. Rows lie in slabs, which never move; a slot (row_ids.h) has an
// index of its own, so that it takes microseconds to make an index larger.
//
// An update takes a slice of rows at a time out of the slabs, has the rules of dense blocks update them as one tensor,
// and puts them back. So a row gets the bits that it would get in a dense tensor.
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

// For one thread at a time.
class Table {
 public:
  explicit Table(const TableSpec& spec);

  std::size_t rows() const { return rows_; }
  // That so many rows take, with their states and indices.
  std::size_t bytes(std::size_t rows) const;
  std::size_t row_bytes() const { return row_bytes_; }  // of a value

  // Rows that come together: ids and, from `rows` on, a row for each, at multiples of 8 bytes. Both may be somebody
  // else's memory, which may change at any time.
  struct Batch {
    const std::byte* ids = nullptr;
    const std::byte* rows = nullptr;
    std::size_t count = 0;
    double weight = 1;  // of a push
  };

  // Copies the values of rows to `out`.
  void gather(const std::byte* ids, std::size_t count, std::byte* out);
  // One update: gradients of the same row are added in the order of batches and of rows in them, then divided. Throws
  // Error(system), and has changed nothing, if the rows would take more than `room` bytes.
  struct Step {
    std::uint64_t number = 1;  // of the table: 1 is the first update
    double divisor = 1;
    Roots roots = nullptr;
    std::size_t room = SIZE_MAX;
  };
  void update(std::span<const Batch> batches, const Step& step);

  // ---- For snapshots ----
  // What is kept of a row: its value and its states, one after the other.
  std::size_t stored_bytes() const { return stored_bytes_; }
  // Rows as they are stored, instead of those there are. As update() for `room`.
  void restore(const Batch& stored, std::size_t room);
  // From now on, and until unwatch(), `before(slab)` is called before a slab is first changed or gets another row,
  // unless it has been claimed. Those that there are now: each once, with as many rows as it has now.
  void watch(std::function<void(std::size_t)> before);
  void unwatch() { watch(nullptr); }
  std::size_t slabs() const { return slabs_.size(); }
  bool claim(std::size_t slab);
  std::size_t rows_in(std::size_t slab) const;
  // Copies of its rows' ids, then of what is kept of them.
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
  void touch(std::size_t row);
  void update_slice(std::span<const std::int64_t> ids, const std::byte* gradients, const Step& step);

  const TableSpec spec_;
  const std::size_t row_bytes_, states_, state_bytes_;  // the last: of one state of a row
  const std::size_t stored_bytes_, stride_, per_slab_;
  std::size_t rows_ = 0;
  std::array<Index, kSlots> indices_;
  std::vector<std::unique_ptr<std::byte[], Free>> slabs_;
  std::vector<std::int64_t> ids_;   // of the update under way
  std::vector<std::size_t> found_;  // their rows
  std::vector<std::byte> merged_, scratch_;
  std::function<void(std::size_t)> before_;
  std::vector<bool> unclaimed_;  // slabs
};

}  // namespace ringreduce::parameter_server
