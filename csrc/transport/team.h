// A rank and its peers: what it shows them (region.h), how it reaches each (peer.h), and what becomes of them (fate.h).
//
// Reading a peer needs nothing of this object: Region is a plain view of what the peer shows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/arena.h"
#include "transport/fate.h"
#include "transport/life_mark.h"
#include "transport/links.h"
#include "transport/peer.h"
#include "transport/peer_memory.h"
#include "transport/segment.h"

namespace ringreduce {

// The ranks of a group, as they met: those of a host share one segment.
struct Roster {
  int memfd = -1;  // of geometry.segment_bytes() zero bytes
  Geometry geometry;
  int rank = 0;
  std::vector<RankName> names;
  Segment::Title group = {};
  std::vector<int> pidfds;                       // by rank: readable when its process ends; -1: not watched
  std::shared_ptr<OpenMemory> memory = nullptr;  // this rank's; null if some rank cannot access another
  std::vector<int> threads = {};                 // by rank: the ids under which they opened theirs; none: they did not
  std::shared_ptr<Arena> arena = nullptr;        // this rank's
  std::vector<int> arenas = {};                  // by rank: descriptors of arenas; -1, or none: there is none
  std::vector<bool> elsewhere = {};              // by rank: whether it is on another host; none: all are on this one
  Links::Connect connect = {};
  std::function<void()> disconnect = {};  // called once, when no more links are needed; must not throw. Or null
  std::function<void(const std::string&)> warn = {};  // told what the user should know; must not block. Or null
  Nanoseconds warn_after = kForever;                  // how long a rank waits before warn() is told for whom
};

class Team {
 public:
  // Takes ownership of all descriptors, also when it throws.
  static std::shared_ptr<Team> of(Roster roster);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  const Geometry& geometry() const { return layout_; }
  // The region of this rank.
  const Region& own() const { return region_; }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Region& region(int rank) const { return peers_[static_cast<std::size_t>(rank)].region(); }
  RankControl& control(int rank) const { return region(rank).control(); }
  // Whether a rank is on another host.
  bool elsewhere(int rank) const { return peers_[static_cast<std::size_t>(rank)].elsewhere(); }
  // The links to ranks on other hosts; null if there are no such ranks.
  Links* links() const { return links_.get(); }
  Fate& fate() { return fate_; }
  const Fate& fate() const { return fate_; }

  // This rank's arena; null if it has none here.
  Arena* arena() const { return arena_.get(); }
  // Whether all of [data, data + bytes) is in this rank's arena, where its peers see it.
  bool in_arena(const std::byte* data, std::size_t bytes) const { return arena() && arena()->shares(data, bytes); }
  // Counts what was withdrawn from the arena. What in_arena() said holds as long as this does not change.
  std::uint64_t withdrawals() const { return arena() ? arena()->withdrawals() : 0; }

  // Whether all ranks can access one another's memory outside of segment and arenas. It may end during a call: a
  // process has changed its user, say, or forbidden itself the system calls. Then it has ended for all ranks, for ever.
  bool opens_memory() const { return memory_ != nullptr && !copies_.load(std::memory_order_relaxed); }
  // Copies from, or to, the process of `peer`. Returns false, and ends access for all ranks, if the kernel refuses.
  // Throws peer_lost if the peer's memory is not open any more. Nothing is written once any rank has failed in a call.
  bool read(int peer, std::byte* to, std::uint64_t from, std::size_t bytes);
  bool write(int peer, std::uint64_t to, const std::byte* from, std::size_t bytes);
  // Lets no peer into this process any more. Returns when no write is under way.
  void close_memory();

  // Tells the user. Without a lock held, since it may take long.
  void warn(const std::string& text) const {
    if (warn_) warn_(text);
  }
  Nanoseconds warn_after() const { return warn_after_; }
  std::string group_name() const { return segment_->name(); }

  // Tells all who wait that this rank's control block has changed.
  void control_changed();
  // " (10.0.0.1:5 -> 10.0.0.2:6 via eth0)", how a rank on another host is reached; else nothing.
  std::string way_to(int rank) const;

  // Tells the others that this rank takes no further part, and lets them into its memory no more. Idempotent; the
  // destructor does it too.
  void leave();

 private:
  Team(const Roster& roster, std::shared_ptr<Segment> segment);
  void add(int rank, RankName name, FileDescriptor pidfd, int thread, const FileDescriptor& arena);
  void add_linked(int rank, RankName name);
  void wake_all();
  bool has_accessed(int peer, int error, const char* what);

  const int rank_;
  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<OpenMemory> memory_;
  const std::shared_ptr<Arena> arena_;
  std::function<void()> disconnect_;
  const std::function<void(const std::string&)> warn_;
  const Nanoseconds warn_after_;
  const Layout layout_;
  const Region region_;  // of this rank
  std::atomic<std::uint32_t>& copies_;
  const LifeMark life_;
  std::vector<Peer> peers_;  // by rank; of this one, its region
  Fate fate_;
  std::unique_ptr<Links> links_;
  std::once_flag said_goodbye_;
};

}  // namespace ringreduce
