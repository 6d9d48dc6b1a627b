// The ids of rows: where a row lives, which ids of a batch are the same, and what a row's value is before anybody has
// pushed to it. Workers and servers must agree about the first and the last, whatever their processors are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace ringreduce::parameter_server {

// Rows are spread over so many slots by their ids; a slot is what a server has, and what would move to another.
inline constexpr std::size_t kSlots = 4096;

// Every bit of the result depends on every bit of `x` (the finaliser of splitmix64, by Vigna).
constexpr std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
constexpr std::uint64_t hash_of(std::int64_t id) { return mixed(static_cast<std::uint64_t>(id)); }
constexpr std::size_t slot_of(std::uint64_t hash) { return hash >> 52; }

// The server of each slot, by rendezvous hashing: one more server takes its share from all the others, and nothing else
// changes.
std::vector<std::uint32_t> owners_of_slots(std::size_t servers);

// First values: uniform in [low, high), from the table's seed, the id and the column alone. They have 24 random bits,
// and low and high are floats, so the arithmetic is exact but for one rounding and has the same bits everywhere.
struct FirstValues {
  std::uint64_t seed = 0;
  float low = 0, high = 0;
};
void first_values(const FirstValues& first, DType dtype, std::int64_t id, void* out, std::size_t count);

// Numbers ids 0, 1, 2, ... in the order in which they first appear.
class Distinct {
 public:
  // For at most `most` ids.
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
  std::vector<std::uint32_t> numbers_;  // 1 + the number; 0: free
  std::vector<std::int64_t> ids_;
};

// The distinct ids of a batch, grouped by server, and where in that order each id of the batch is.
class RowSet {
 public:
  struct Item {
    std::uint32_t from;  // position in the batch
    std::uint32_t to;    // position among the server's ids
  };

  // `owners`: a server for each slot. Throws Error(invalid_argument) for 2^32 - 1 ids or more.
  RowSet(std::span<const std::int64_t> ids, std::span<const std::uint32_t> owners, std::size_t servers);

  std::size_t count() const { return positions_.size(); }  // ids of the batch
  std::size_t distinct() const { return ids_.size(); }
  std::size_t servers() const { return begins_.size() - 1; }
  // All distinct ids, server after server, each server's in the order of their first appearance.
  std::span<const std::int64_t> ids() const { return ids_; }
  // The server's: positions [begin(server), begin(server + 1)) of ids().
  std::size_t begin(std::size_t server) const { return begins_[server]; }
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
  std::vector<std::size_t> begins_, starts_;  // by server; one more at the end
  std::vector<Item> items_;
};

}  // namespace ringreduce::parameter_server
