// A snapshot: the state of a server's blocks at one moment, taken while pushes go on.
//
// A block, or a slab of a table, is copied when the thread that writes the file asks for it, or before its first update
// after the moment of the snapshot, whichever comes first. When more than kMostKept bytes of copies wait to be written,
// the server takes no requests, so pushes wait for the disk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "parameter_server/block/rules.h"
#include "parameter_server/messages.h"

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
  std::deque<std::pair<BlockId, std::size_t>> left;  // the pieces not yet asked for, in order
  std::deque<Piece> kept;                            // copied before they were asked for
  bool failed = false;                               // there was no memory for a copy
};

// The pieces of a block that a snapshot has not copied.
class Watch {
 public:
  // Until end(), calls `before(piece)` before one of the first `pieces` pieces is first changed, unless it has been
  // claimed. Pieces that the block gets later are left out.
  void begin(std::size_t pieces, std::function<void(std::size_t)> before) {
    before_ = std::move(before);
    unclaimed_.assign(pieces, true);
  }
  void end() { begin(0, nullptr); }
  // Claims a watched piece; returns false if it is not watched or has been claimed before.
  bool claim(std::size_t piece) {
    const bool claims = piece < unclaimed_.size() && unclaimed_[piece];
    if (claims) unclaimed_[piece] = false;
    return claims;
  }
  // The block calls this before it changes a piece.
  void touch(std::size_t piece) {
    if (piece >= unclaimed_.size() || !unclaimed_[piece]) return;
    before_(piece);
    unclaimed_[piece] = false;
  }

 private:
  std::function<void(std::size_t)> before_;
  std::vector<bool> unclaimed_;
};

}  // namespace ringreduce::parameter_server
