// A worker's own window, of whose data pieces are taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "core/fork.h"
#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

// Thread-safe.
class OwnWindow : public Window, public std::enable_shared_from_this<OwnWindow> {
 public:
  // A piece of the data. It keeps the window mapped, and is free again when nobody holds it any more.
  using Piece = std::shared_ptr<std::byte>;

  // Throws Error(system).
  OwnWindow(std::size_t servers, std::size_t bytes)
      : Window(make_memory("ringreduce window", lanes_bytes(servers) + aligned(bytes)),
               lanes_bytes(servers) + aligned(bytes), servers) {}

  std::byte* data() const { return memory.at(data_begin); }
  std::size_t data_bytes() const { return memory.bytes() - data_begin; }

  // Takes a piece of `bytes` bytes; nullptr: there is no room.
  Piece take(std::size_t bytes) {
    std::unique_lock lock(mutex_);
    std::size_t begin = 0;
    bytes = std::max<std::size_t>(bytes, 1);
    for (const auto& [offset, taken] : taken_) {
      if (offset - begin >= bytes) break;
      begin = offset + aligned(taken.bytes);
    }
    if (begin > data_bytes() || data_bytes() - begin < bytes) return nullptr;
    taken_[begin].bytes = bytes;
    lock.unlock();  // if there is no memory for the pointer, its deleter is called
    const Piece piece(data() + begin, [window = shared_from_this(), begin](std::byte*) { window->free(begin); });
    lock.lock();
    taken_.at(begin).piece = piece;
    return piece;
  }
  // The piece that `at` is in; nullptr: none.
  Piece piece_with(const std::byte* at) {
    if (at < data() || at >= data() + data_bytes()) return nullptr;
    const auto offset = static_cast<std::size_t>(at - data());
    const std::lock_guard lock(mutex_);
    const auto after = taken_.upper_bound(offset);
    if (after == taken_.begin()) return nullptr;
    const auto& [begin, taken] = *std::prev(after);
    return offset < begin + aligned(taken.bytes) ? taken.piece.lock() : nullptr;
  }
  std::size_t pieces() const {
    const std::lock_guard lock(mutex_);
    return taken_.size();
  }

 private:
  struct Taken {
    std::size_t bytes = 0;
    std::weak_ptr<std::byte> piece = {};
  };

  void free(std::size_t offset) {
    if (fork_.forked()) return;
    const std::lock_guard lock(mutex_);
    taken_.erase(offset);
  }

  const ForkMark fork_;
  mutable std::mutex mutex_;
  std::map<std::size_t, Taken> taken_;  // by offset in the data
};

}  // namespace ringreduce::parameter_server
