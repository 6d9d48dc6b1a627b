// A snapshot: the state of a server's blocks at one moment, taken while pushes go on.
//
// A block, or a slab of a table, is copied when the thread that writes the file asks for it, or before its first update
// after the moment of the snapshot, whichever comes first. When more than kMostKept bytes of copies wait to be written,
// the server takes no requests, so pushes wait for the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "parameter_server/messages.h"
#include "parameter_server/rules.h"

namespace ringreduce::parameter_server {

struct Snapshot {
  static constexpr std::size_t kMostKept = 256 * 1024 * 1024;

  struct Entry {
    BlockId block = 0;
    std::uint64_t version = 0, steps = 0;
    std::size_t rows = 0;                          // of a table
    int states = 0;                                // number of optimizer states; -1: Python has them
    std::array<double, Rule::kNumbers> numbers{};  // of the rule
  };
  // For a dense block, the bytes of the value and then of the states. For a slab, rows [first, first + rows) of the
  // table's saved rows: first their ids, then the value and states of each row.
  struct Piece {
    BlockId block = 0;
    std::size_t first = 0, rows = 0;
    std::size_t size = 0;
    std::unique_ptr<std::byte[]> bytes;
  };

  std::vector<Entry> entries;
  std::deque<std::pair<BlockId, std::size_t>> left;  // block and slab of the pieces not yet asked for, in order
  std::vector<bool> claimed;                         // by block: it is dense and copied, or not part of the snapshot
  std::deque<Piece> kept;                            // copied before they were asked for
};

}  // namespace ringreduce::parameter_server
