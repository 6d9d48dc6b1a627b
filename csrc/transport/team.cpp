#include "transport/team.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/descriptors.h"

namespace ringreduce {
namespace {

// Zero bytes of this process's own, for a mirror.
std::shared_ptr<std::byte> private_memory(std::size_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    throw Error(ErrorKind::system, "cannot get " + std::to_string(bytes) +
                                       " bytes of address space for a rank on another host: " + last_error());
  return {static_cast<std::byte*>(mapped), [bytes](std::byte* memory) { munmap(memory, bytes); }};
}

// Closes what nobody has taken. Needs no memory.
class DescriptorsByRank {
 public:
  explicit DescriptorsByRank(std::vector<int>&& all) : all_(std::move(all)) {}
  DescriptorsByRank(const DescriptorsByRank&) = delete;
  DescriptorsByRank& operator=(const DescriptorsByRank&) = delete;
  ~DescriptorsByRank() {
    for (const int fd : all_) FileDescriptor{fd};
  }

  FileDescriptor take(std::size_t rank) {
    return FileDescriptor(rank < all_.size() ? std::exchange(all_[rank], -1) : -1);
  }

 private:
  std::vector<int> all_;
};

}  // namespace

std::shared_ptr<Team> Team::of(Roster roster) {
  FileDescriptor memfd(roster.memfd);
  DescriptorsByRank pidfds(std::move(roster.pidfds)), arenas(std::move(roster.arenas));
  const std::size_t ranks = roster.geometry.ranks;
  const auto is_elsewhere = [&](std::size_t r) { return r < roster.elsewhere.size() && roster.elsewhere[r]; };
  try {
    const auto segment = std::make_shared<Segment>(memfd, roster.geometry);
    const std::shared_ptr<Team> team(new Team(roster, segment));
    for (std::size_t r = 0; r < ranks; ++r) {
      const int rank = static_cast<int>(r);
      if (rank == roster.rank) continue;
      if (is_elsewhere(r))
        team->add_linked(rank, roster.names.at(r));
      else
        team->add(rank, roster.names.at(r), pidfds.take(r), r < roster.threads.size() ? roster.threads[r] : 0,
                  arenas.take(r));
    }
    std::size_t first = 0;  // of the ranks on this host
    while (is_elsewhere(first)) ++first;
    if (static_cast<int>(first) == roster.rank) segment->show(std::move(memfd), roster.group);
    return team;
  } catch (const std::exception& error) {
    Segment::cannot_take_part(memfd.get(), roster.rank, roster.names.at(static_cast<std::size_t>(roster.rank)),
                              reason(error));
    throw;
  }
}

Team::Team(const Roster& roster, std::shared_ptr<Segment> segment)
    : rank_(roster.rank),
      segment_(std::move(segment)),
      memory_(roster.memory),
      arena_(roster.arena),
      disconnect_(roster.disconnect),
      warn_(roster.warn),
      warn_after_(roster.warn_after),
      layout_(segment_->layout()),
      region_(segment_->region(rank_)),
      copies_(segment_->copies()),
      life_(region_.control().life),
      peers_(layout_.ranks),
      fate_(segment_->abort_record(), rank_, layout_.ranks, [this] {
        wake_all();
        region_.control().wake();  // its other threads
        if (links_) links_->tell_soon();
      }) {
  const RankName& own = roster.names.at(static_cast<std::size_t>(rank_));
  peer(rank_) = Peer(rank_, rank_, region_, nullptr, 0, nullptr);
  fate_.watch(rank_, {.name = own, .region = region_});
  if (std::count(roster.elsewhere.begin(), roster.elsewhere.end(), true) > 0)
    links_ = std::make_unique<Links>(rank_, layout_, region_, fate_, roster.connect);
  region_.control().waiting_for.store(-1, std::memory_order_relaxed);
  region_.control().pid.store(own.pid, std::memory_order_relaxed);
  region_.control().global_rank.store(own.global < 0 ? rank_ : own.global, std::memory_order_relaxed);
  for (Doorbell* doorbell : {&region_.control().for_calls, &region_.control().for_messages})
    doorbell->fences_ringers.store(fence_all() ? 1 : 0, std::memory_order_relaxed);
  region_.control().state.store(RankState::live, std::memory_order_release);
}

Team::~Team() { leave(); }

void Team::add(int rank, RankName name, FileDescriptor pidfd, int thread, const FileDescriptor& arena) {
  std::shared_ptr<const PeerArena> mapped;
  if (arena.get() >= 0) mapped = map_arena(arena);
  peer(rank) = Peer(rank_, rank, segment_->region(rank), segment_, thread, std::move(mapped));
  fate_.watch(rank, {std::move(name), region(rank), std::move(pidfd), false});
}

void Team::add_linked(int rank, RankName name) {
  const auto mirror = private_memory(layout_.region_bytes);
  const Region region(mirror.get(), layout_);
  region.control().waiting_for.store(-1, std::memory_order_relaxed);
  region.control().state.store(RankState::live, std::memory_order_relaxed);
  peer(rank) = Peer(rank, region, mirror, *links_);
  links_->admit(rank, region);
  fate_.watch(rank, {.name = std::move(name), .region = region, .elsewhere = true});
}

void Team::leave() {
  bool first = false;
  std::call_once(said_goodbye_, [&] { first = true; });
  if (!first) return;
  if (memory_) memory_->close();
  region_.control().state.store(RankState::left, std::memory_order_seq_cst);
  wake_all();
  if (!links_) return;
  links_->leave();
  // Not called as a member, since it may let go of the group, and of this object with it.
  if (const auto disconnect = std::move(disconnect_)) disconnect();
}

void Team::wake_all() {  // also where of() has failed before it knew all peers
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && region(r) && !elsewhere(r)) control(r).wake();
}

void Team::control_changed() {
  wake_all();
  if (links_) links_->tell(true);
}

bool Team::read(int peer, std::byte* to, std::uint64_t from, std::size_t bytes) {
  return has_accessed(peer, read_memory(this->peer(peer).thread(), to, from, bytes), "read");
}

bool Team::write(int peer, std::uint64_t to, const std::byte* from, std::size_t bytes) {
  std::atomic<std::int32_t>& writes_to = region_.control().writes_to;
  writes_to.store(peer + 1, std::memory_order_seq_cst);  // before we and the kernel look whether the peer is open
  // A peer that closes has said so before it looks at writes_to. By now its thread's id may be another's.
  const int error = fate_.anybody_failed() ? ESRCH : write_memory(this->peer(peer).thread(), to, from, bytes);
  writes_to.store(0, std::memory_order_release);
  return has_accessed(peer, error, "write");
}

bool Team::has_accessed(int peer, int error, const char* what) {
  if (error == ESRCH) throw Error(ErrorKind::peer_lost, fate_.describe(peer) + " died or gave the call up", peer);
  if (error == 0) return true;
  if (copies_.exchange(1, std::memory_order_seq_cst) == 0) {
    wake_all();
    warn(fate_.number(rank_) + " cannot " + what + " the memory of " + fate_.describe(peer) +
         " any more: " + std::strerror(error) + "; the group copies tensors from now on, as with RINGREDUCE_FETCH=0");
  }
  return false;
}

void Team::close_memory() {
  if (!memory_) return;
  memory_->close();
  // A write that had begun takes microseconds of its core's time. A peer that is stopped right after it cannot say that
  // it has ended; for its sake there is a limit.
  const Nanoseconds deadline = now() + kSecond / 2;
  const auto writes = [&](int peer) { return control(peer).writes_to.load(std::memory_order_seq_cst) == rank_ + 1; };
  for (int r = 0; r < size(); ++r)
    while (r != rank_ && writes(r) && now() < deadline) {
      const std::vector<int> left = fate_.silent();
      if (std::find(left.begin(), left.end(), r) != left.end()) break;
      sched_yield();
    }
}

std::string Team::way_to(int rank) const {
  const std::string path = rank >= 0 && elsewhere(rank) ? links_->path(rank) : "";
  return path.empty() ? "" : " (" + path + ")";
}

}  // namespace ringreduce
