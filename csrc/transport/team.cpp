#include "transport/team.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace ringreduce {
namespace {

// Zero bytes of this process's own, for a mirror.
std::shared_ptr<std::byte> private_memory(std::size_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    throw Error(ErrorKind::system, "cannot get " + std::to_string(bytes) +
                                       " bytes of address space for a rank on another host: " + std::strerror(errno));
  return {static_cast<std::byte*>(mapped), [bytes](std::byte* memory) { munmap(memory, bytes); }};
}

std::vector<FileDescriptor> owned(const std::vector<int>& descriptors, std::size_t count) {
  std::vector<FileDescriptor> all;
  for (const int fd : descriptors) all.emplace_back(fd);
  all.resize(std::max(all.size(), count));
  return all;
}

}  // namespace

Team::Team(Own own)
    : own_(std::move(own)),
      layout_(own_.segment->layout()),
      region_(own_.segment->region(own_.rank)),
      copies_(own_.segment->copies()),
      life_(region_.control().life),
      peers_(layout_.ranks),
      fate_(own_.segment->abort_record(), own_.rank, layout_.ranks, [this] {
        wake_all();
        region_.control().wake();  // its other threads
        if (links_) links_->tell_soon();
      }) {
  peer(own_.rank) = Peer(own_.rank, own_.rank, region_, nullptr, 0, nullptr);
  fate_.watch(own_.rank, {.name = own_.name, .region = region_});
  if (own_.connect) links_ = std::make_unique<Links>(own_.rank, layout_, region_, fate_, own_.connect);
  region_.control().waiting_for.store(-1, std::memory_order_relaxed);
  region_.control().pid.store(own_.name.pid, std::memory_order_relaxed);
  region_.control().global_rank.store(own_.name.global < 0 ? own_.rank : own_.name.global, std::memory_order_relaxed);
  for (Doorbell* doorbell : {&region_.control().for_calls, &region_.control().for_messages})
    doorbell->fences_ringers.store(fence_all() ? 1 : 0, std::memory_order_relaxed);
  region_.control().state.store(RankState::live, std::memory_order_release);
}

Team::~Team() { leave(); }

void Team::add(int rank, Reach reach) {
  Peer made;
  if (!reach.segment && !links_)
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank) + " is on another host, and the team has no links");
  if (reach.segment) {
    std::shared_ptr<const PeerArena> arena;
    if (reach.arena.get() >= 0) arena = map_arena(reach.arena);
    made = Peer(own_.rank, rank, reach.segment->region(rank), reach.segment, reach.thread, std::move(arena));
    ++neighbours_;
  } else {
    const auto mirror = private_memory(layout_.region_bytes);
    const Region region(mirror.get(), layout_);
    region.control().waiting_for.store(-1, std::memory_order_relaxed);
    region.control().state.store(RankState::live, std::memory_order_relaxed);
    made = Peer(rank, region, mirror, *links_);
    links_->admit(rank, region);
  }
  fate_.watch(rank, {std::move(reach.name), made.region(), std::move(reach.pidfd), made.elsewhere(), reach.fatal});
  std::lock_guard lock(membership_);
  peer(rank) = std::move(made);
}

void Team::drop(int rank) {
  fate_.forget(rank);
  if (links_) links_->drop(rank);
  std::lock_guard lock(membership_);
  if (region(rank) && !elsewhere(rank)) --neighbours_;
  peer(rank) = Peer();
  region_.forget(rank, static_cast<int>(layout_.channels));
}

void Team::leave() {
  bool first = false;
  std::call_once(said_goodbye_, [&] { first = true; });
  if (!first) return;
  if (own_.memory) own_.memory->close();
  region_.control().state.store(RankState::left, std::memory_order_seq_cst);
  wake_all();
  if (!links_) return;
  links_->leave();
  // Called as a copy, since it may let go of the group, and of this object with it.
  if (const auto disconnect = own_.disconnect) disconnect();
}

void Team::wake_all() {
  std::lock_guard lock(membership_);
  for (int r = 0; r < size(); ++r)
    if (r != own_.rank && region(r) && !elsewhere(r)) control(r).wake();
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
    if (own_.warn)
      own_.warn(fate_.number(own_.rank) + " cannot " + what + " the memory of " + fate_.describe(peer) +
                " any more: " + std::strerror(error) +
                "; the group copies tensors from now on, as with "
                "RINGREDUCE_FETCH=0");
  }
  return false;
}

void Team::close_memory() {
  if (!own_.memory) return;
  own_.memory->close();
  // A write that had begun takes microseconds of its core's time. A peer that is stopped right after it cannot say that
  // it has ended; for its sake there is a limit.
  const Nanoseconds deadline = now() + kSecond / 2;
  const auto writes = [&](int peer) {
    return region(peer) && control(peer).writes_to.load(std::memory_order_seq_cst) == own_.rank + 1;
  };
  for (int r = 0; r < size(); ++r)
    while (r != own_.rank && writes(r) && now() < deadline) {
      const std::vector<int> left = fate_.silent();
      if (std::find(left.begin(), left.end(), r) != left.end()) break;
      sched_yield();
    }
}

std::string Team::way_to(int rank) const {
  const std::string path = rank >= 0 && elsewhere(rank) ? links_->path(rank) : "";
  return path.empty() ? "" : " (" + path + ")";
}

std::shared_ptr<Team> team_of(Roster roster) {
  FileDescriptor memfd(roster.memfd);
  const std::size_t ranks = roster.geometry.ranks;
  std::vector<FileDescriptor> pidfds = owned(roster.pidfds, ranks), arenas = owned(roster.arenas, ranks);
  const RankName own = roster.names.at(static_cast<std::size_t>(roster.rank));
  const auto is_elsewhere = [&](std::size_t r) { return r < roster.elsewhere.size() && roster.elsewhere[r]; };
  const bool linked = std::count(roster.elsewhere.begin(), roster.elsewhere.end(), true) > 0;
  try {
    const auto segment = std::make_shared<Segment>(memfd, roster.geometry);
    auto team = std::make_shared<Team>(Team::Own{.rank = roster.rank,
                                                 .name = own,
                                                 .segment = segment,
                                                 .memory = std::move(roster.memory),
                                                 .arena = std::move(roster.arena),
                                                 .connect = linked ? std::move(roster.connect) : Links::Connect(),
                                                 .disconnect = std::move(roster.disconnect),
                                                 .warn = std::move(roster.warn)});
    for (std::size_t r = 0; r < ranks; ++r)
      if (static_cast<int>(r) != roster.rank)
        team->add(static_cast<int>(r), {.name = std::move(roster.names.at(r)),
                                        .segment = is_elsewhere(r) ? nullptr : segment,
                                        .pidfd = std::move(pidfds[r]),
                                        .thread = r < roster.threads.size() ? roster.threads[r] : 0,
                                        .arena = std::move(arenas[r])});
    std::size_t first = 0;  // of the ranks on this host
    while (is_elsewhere(first)) ++first;
    if (static_cast<int>(first) == roster.rank) segment->show(std::move(memfd), roster.group);
    return team;
  } catch (const Error& error) {
    Segment::cannot_take_part(memfd, roster.rank, own, error);
    throw;
  }
}

}  // namespace ringreduce
