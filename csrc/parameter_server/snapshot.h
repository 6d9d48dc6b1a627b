// What a server's blocks are at one moment, taken while pushes go on.
//
// A block or a slab of a table is copied when it is asked for, or before its first update after that moment, whichever
// is first. What has been copied and not yet been taken is bounded: beyond kMostKept the server takes no requests, so
// pushes wait for the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

struct Snapshot {
  static constexpr std::size_t kMostKept = 256 * 1024 * 1024;

  // What it has of a block.
  struct Entry {
    BlockId block = 0;
    std::uint64_t version = 0, steps = 0;
    std::size_t rows = 0;  // of a table
    int states = 0;        // -1: Python has them
  };
  // A block: its value and its states. A slab: rows [first, first + rows) of what is saved of the table, as their ids,
  // then each row's value and states.
  struct Piece {
    BlockId block = 0;
    std::size_t first = 0, rows = 0;
    std::size_t size = 0;
    std::unique_ptr<std::byte[]> bytes;
  };

  std::vector<Entry> entries;
  std::deque<std::pair<BlockId, std::size_t>> left;  // block, slab: in the order in which they will be asked for
  std::vector<bool> claimed;                         // dense blocks that have been copied, or are not in it
  std::deque<Piece> kept;
};

}  // namespace ringreduce::parameter_server
