// The ids of rows: which server has a row, which ids of a batch are equal, and the value of a row before the first push
// to it. Workers and servers compute the first and the last on their own, so both must have the same result on any
// processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/arithmetic.h"
#include "core/types.h"

namespace ringreduce::parameter_server {

// A row's id is hashed to one of these slots, and every slot belongs to a server.
inline constexpr std::size_t kSlots = 4096;

constexpr std::uint64_t hash_of(std::int64_t id) { return mixed(static_cast<std::uint64_t>(id)); }
constexpr std::size_t slot_of(std::uint64_t hash) { return hash >> 52; }

// Returns the server of each slot, by rendezvous hashing: an additional server takes an equal share of the slots of
// each other one, and no other slot moves.
std::vector<std::uint32_t> owners_of_slots(std::size_t servers);

// The value of a row before the first push: uniform in [low, high), a function of the table's seed, the id and the
// column. It has 24 random bits, and low and high are floats, so the arithmetic is exact except for one final rounding
// and gives the same bits on every processor.
struct FirstValues {
  std::uint64_t seed = 0;
  float low = 0, high = 0;
};
void first_values(const FirstValues& first, DType dtype, std::int64_t id, void* out, std::size_t count);

// to += from, a row of `width` elements of float32 or float64.
void add_row(DType dtype, void* to, const void* from, std::size_t width);

// Numbers ids 0, 1, 2, ... in the order in which they first appear.
class Distinct {
 public:
  // `most` is the greatest number of ids that will be numbered.
  explicit Distinct(std::size_t most);

  std::uint32_t number(std::int64_t id) {
    for (std::size_t at = hash_of(id) & mask_;; at = (at + 1) & mask_) {
      const std::uint32_t found = numbers_[at];
      if (found == 0) {
        ids_.push_back(id);
        return (numbers_[at] = static_cast<std::uint32_t>(ids_.size())) - 1;
      }
      if (ids_[found - 1] == id) return found - 1;
    }
  }
  const std::vector<std::int64_t>& ids() const { return ids_; }

 private:
  std::size_t mask_;
  std::vector<std::uint32_t> numbers_;  // hash table of 1 + the number; 0: free
  std::vector<std::int64_t> ids_;
};

// The distinct ids of a batch, grouped by server, and for each id of the batch its position in that order.
class RowSet {
 public:
  struct Item {
    std::uint32_t from;  // position in the batch
    std::uint32_t to;    // position among the server's ids
  };

  // `owners`: a server for each slot. Throws Error(invalid_argument) for 2^32 - 1 ids or more.
  RowSet(std::span<const std::int64_t> ids, std::span<const std::uint32_t> owners, std::size_t servers);

  std::size_t count() const { return positions_.size(); }  // ids of the batch, equal ones included
  std::size_t distinct() const { return ids_.size(); }
  std::size_t servers() const { return begins_.size() - 1; }
  // All distinct ids, ordered by server and then by first appearance in the batch.
  std::span<const std::int64_t> ids() const { return ids_; }
  // The ids of one server are at positions [begin(server), begin(server + 1)) of ids().
  std::size_t begin(std::size_t server) const { return begins_[server]; }
  const std::vector<std::size_t>& begins() const { return begins_; }
  std::span<const std::int64_t> ids(std::size_t server) const {
    return ids().subspan(begins_[server], begins_[server + 1] - begins_[server]);
  }
  // For each id of the batch, its position in ids().
  std::span<const std::int64_t> positions() const { return positions_; }
  std::span<const Item> items(std::size_t server) const {
    return std::span(items_).subspan(starts_[server], starts_[server + 1] - starts_[server]);
  }

 private:
  std::vector<std::int64_t> ids_, positions_;
  std::vector<std::size_t> begins_, starts_;  // by server, in ids_ and items_; one more at the end
  std::vector<Item> items_;
};

}  // namespace ringreduce::parameter_server
