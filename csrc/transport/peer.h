// Another rank of a team, as this rank reaches it. There are two kinds. The region of one on the same host is memory
// that both map: what is stored there it sees, a futex wakes it, and its arena and perhaps its process can be read in
// place. One on another host is linked: its region is a mirror, and what it is to see goes there as frames (links.h).
//
// The calls that a small collective makes are inline, with one branch for the kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/arena.h"
#include "transport/links.h"
#include "transport/region.h"

namespace ringreduce {

class alignas(64) Peer final {
 public:
  Peer() = default;  // nobody
  // As rank `own` reaches rank `rank` of its host. `memory` keeps the region mapped. `thread`: the id under which it
  // opened its process's memory; 0: it did not. `arena`: null if it has none.
  Peer(int own, int rank, const Region& region, std::shared_ptr<const void> memory, int thread,
       std::shared_ptr<const PeerArena> arena)
      : region_(region),
        own_(own),
        rank_(rank),
        memory_(std::move(memory)),
        thread_(thread),
        arena_(std::move(arena)),
        fenced_(accept_fences()) {}
  // A peer of another host: `mirror` keeps the region mapped.
  Peer(int rank, const Region& region, std::shared_ptr<const void> mirror, Links& links)
      : region_(region), links_(&links), rank_(rank), memory_(std::move(mirror)) {}

  const Region& region() const { return region_; }
  bool elsewhere() const { return links_ != nullptr; }

  // Notifications about slots and mailboxes. The caller has stored the stamp or the acknowledgement; these functions
  // then tell this peer that a slot was filled for it, or that one of its own slots was read.
  void slot_filled(int channel, std::uint64_t seq, const SlotValue& value) {
    if (elsewhere()) return links_->slot_filled(rank_, channel, seq, value);
    region_.control().for_calls.notify(own_, fenced_);
  }
  void slot_read(int channel, std::uint64_t seq) {
    if (elsewhere()) return links_->slot_read(rank_, channel, seq);
    region_.control().for_calls.notify(own_, fenced_);
  }
  void message_filled(std::uint64_t seq) {
    if (elsewhere()) return links_->message_filled(rank_, seq);
    region_.control().for_messages.notify(own_, fenced_);
  }
  void message_read(std::uint64_t seq) {
    if (elsewhere()) return links_->message_read(rank_, seq);
    region_.control().for_messages.notify(own_, fenced_);
  }

  // The id for read_memory() and write_memory().
  int thread() const { return thread_; }
  // The place of a value that this peer lent from its arena; null if any part of it is outside the arena.
  std::byte* lent(std::uint64_t address, std::size_t bytes) const {
    const bool its = arena_ != nullptr && address <= arena_->bytes() && arena_->bytes() - address >= bytes;
    return its ? arena_->base() + address : nullptr;
  }

 private:
  Region region_;
  Links* links_ = nullptr;
  int own_ = -1, rank_ = -1;
  std::shared_ptr<const void> memory_;
  int thread_ = 0;
  std::shared_ptr<const PeerArena> arena_;
  bool fenced_ = false;
};

}  // namespace ringreduce
