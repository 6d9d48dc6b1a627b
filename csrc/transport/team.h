// A rank and its peers: what it shows them (region.h), how it reaches each (peer.h), and what becomes of them (fate.h).
//
// A team has room for a fixed number of ranks. Peers come by add() and go by drop(), each alone: nothing of the others
// is made anew, and calls with them go on meanwhile. Nobody may be in a call with a rank while it is added or dropped.
// A group of collectives adds all of its ranks before its first call (team_of) and drops none.
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

class Team {
 public:
  // The parts of a team that belong to this rank.
  struct Own {
    int rank = 0;
    RankName name;
    std::shared_ptr<Segment> segment;              // where its region is, and the team's error
    std::shared_ptr<OpenMemory> memory = nullptr;  // null: peers do not read this process's memory
    std::shared_ptr<Arena> arena = nullptr;        // null: it lends nothing from one
    Links::Connect connect = {};                   // null: no peer is on another host
    std::function<void()> disconnect = {};  // called once, when no more links are needed; must not throw. Or null
    std::function<void(const std::string&)> warn = {};  // told what ends access to peers' memory; or null
  };
  explicit Team(Own own);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // How a peer is reached, and what its end means.
  struct Reach {
    RankName name;
    std::shared_ptr<Segment> segment = nullptr;  // where its region is; null: it is on another host
    FileDescriptor pidfd = FileDescriptor();     // becomes readable when its process ends; none: not watched
    int thread = 0;                              // under whose id it opened its process's memory; 0: it did not
    FileDescriptor arena = FileDescriptor();     // none: it has none here
    bool fatal = true;                           // whether its end is the whole team's
  };
  // Throws Error where its memory cannot be mapped.
  void add(int rank, Reach reach);
  // Lets go of all that belongs to a peer: memory, connections, descriptors. Another may come in its place.
  void drop(int rank);

  int rank() const { return own_.rank; }
  int size() const { return static_cast<int>(peers_.size()); }  // the ranks that there is room for
  const Geometry& geometry() const { return layout_; }
  // The region of this rank.
  const Region& own() const { return region_; }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Region& region(int rank) const { return peers_[static_cast<std::size_t>(rank)].region(); }
  RankControl& control(int rank) const { return region(rank).control(); }
  // Whether a rank is on another host.
  bool elsewhere(int rank) const { return peers_[static_cast<std::size_t>(rank)].elsewhere(); }
  // Whether all others are.
  bool alone() const { return neighbours_.load(std::memory_order_relaxed) == 0; }
  // The links to ranks on other hosts; null if there are no such ranks.
  Links* links() const { return links_.get(); }
  Fate& fate() { return fate_; }
  const Fate& fate() const { return fate_; }

  // This rank's arena; null if it has none here.
  Arena* arena() const { return own_.arena.get(); }
  // Whether all of [data, data + bytes) is in this rank's arena, where its peers see it.
  bool in_arena(const std::byte* data, std::size_t bytes) const { return arena() && arena()->shares(data, bytes); }
  // Counts what was withdrawn from the arena. What in_arena() said holds as long as this does not change.
  std::uint64_t withdrawals() const { return arena() ? arena()->withdrawals() : 0; }

  // Whether all ranks can access one another's memory outside of segment and arenas. It may end during a call: a
  // process has changed its user, say, or forbidden itself the system calls. Then it has ended for all ranks, for ever.
  bool opens_memory() const { return own_.memory != nullptr && !copies_.load(std::memory_order_relaxed); }
  // Copies from, or to, the process of `peer`. Returns false, and ends access for all ranks, if the kernel refuses.
  // Throws peer_lost if the peer's memory is not open any more. Nothing is written once any rank has failed in a call.
  bool read(int peer, std::byte* to, std::uint64_t from, std::size_t bytes);
  bool write(int peer, std::uint64_t to, const std::byte* from, std::size_t bytes);
  // Lets no peer into this process any more. Returns when no write is under way.
  void close_memory();

  // Tells all who wait that this rank's control block has changed.
  void control_changed();
  // " (10.0.0.1:5 -> 10.0.0.2:6 via eth0)", how a rank on another host is reached; else nothing.
  std::string way_to(int rank) const;

  // Tells the others that this rank takes no further part, and lets them into its memory no more. Idempotent; the
  // destructor does it too.
  void leave();

 private:
  void wake_all();
  bool has_accessed(int peer, int error, const char* what);

  const Own own_;
  const Layout layout_;
  const Region region_;  // of this rank
  std::atomic<std::uint32_t>& copies_;
  const LifeMark life_;
  std::vector<Peer> peers_;  // by rank; of this one, its region
  std::mutex membership_;    // held while peers_ changes, and by who looks at all of them at once
  std::atomic<int> neighbours_ = 0;
  Fate fate_;
  std::unique_ptr<Links> links_;
  std::once_flag said_goodbye_;
};

// The ranks of a group, as they met: those of a host share one segment.
struct Roster {
  int memfd = -1;  // of geometry.segment_bytes() zero bytes
  Geometry geometry;
  int rank = 0;
  std::vector<RankName> names;
  Segment::Title group = {};
  std::vector<int> pidfds;                       // by rank; -1: not watched
  std::shared_ptr<OpenMemory> memory = nullptr;  // this rank's; null if some rank cannot access another
  std::vector<int> threads = {};                 // by rank: the ids under which they opened theirs; none: they did not
  std::shared_ptr<Arena> arena = nullptr;        // this rank's
  std::vector<int> arenas = {};                  // by rank: descriptors of arenas; -1, or none: there is none
  std::vector<bool> elsewhere = {};              // by rank: whether it is on another host; none: all are on this one
  Links::Connect connect = {};
  std::function<void()> disconnect = {};
  std::function<void(const std::string&)> warn = {};
};
// Takes ownership of all descriptors, also when it throws.
std::shared_ptr<Team> team_of(Roster roster);

}  // namespace ringreduce
