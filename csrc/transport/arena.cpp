#include "transport/arena.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "core/arithmetic.h"
#include "core/descriptors.h"
#include "core/error.h"
#include "transport/region.h"

namespace ringreduce {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

// Smaller pieces give their pages back at once: few faults are saved, and many kept pieces take long to search.
constexpr std::size_t kLeastKept = std::size_t{64} << 10;

[[noreturn]] void throw_system(const std::string& what) { throw Error(ErrorKind::system, what + ": " + last_error()); }

// Large pieces may get huge pages.
std::size_t alignment(std::size_t bytes) { return bytes >= kHugePage ? kHugePage : kPage; }

// A piece of address space: offset, bytes.
using Range = std::pair<std::size_t, std::size_t>;

bool fits(const Range& room, std::size_t wanted) {
  const std::size_t lead = round_up(room.first, alignment(wanted)) - room.first;
  return lead <= room.second && room.second - lead >= wanted;
}

// Large pieces get the lowest address and small ones the highest, so that small ones do not break up the room for large
// ones.
std::size_t place_in(const std::vector<Range>& rooms, std::size_t wanted) {
  const auto has_room = [wanted](const Range& room) { return fits(room, wanted); };
  if (alignment(wanted) == kPage) {
    const auto room = std::find_if(rooms.rbegin(), rooms.rend(), has_room);
    return room == rooms.rend() ? kNone : room->first + room->second - wanted;
  }
  const auto room = std::find_if(rooms.begin(), rooms.end(), has_room);
  return room == rooms.end() ? kNone : round_up(room->first, kHugePage);
}

// Maps a memfd at a multiple of kHugePage.
std::byte* map_shared(int memfd, std::size_t bytes) {
  const std::size_t room = bytes + kHugePage;
  void* const reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* mapped = MAP_FAILED;
  if (reserved != MAP_FAILED) {
    auto* const first = static_cast<std::byte*>(reserved);
    std::byte* const start = first + (kHugePage - reinterpret_cast<std::uintptr_t>(reserved) % kHugePage) % kHugePage;
    mapped = mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, memfd, 0);
    const int reason = errno;
    if (mapped == start) {
      if (start > first) munmap(first, static_cast<std::size_t>(start - first));
      munmap(start + bytes, room - bytes - static_cast<std::size_t>(start - first));
    } else {  // failed, or stress/one_mapping.cpp had a mapping already
      munmap(reserved, room);
    }
    errno = reason;
  }
  if (mapped == MAP_FAILED)
    throw_system(
        "cannot map an arena of " + std::to_string(bytes) +
        " bytes of address space, this rank's or a peer's (RINGREDUCE_ARENA_BYTES, set on all ranks, lowers it; "
        "`ulimit -v` limits it)");
  madvise(mapped, bytes, MADV_HUGEPAGE);  // the kernel may refuse
  return static_cast<std::byte*>(mapped);
}

// The process's arenas: its own, then those of the processes that it was forked from.
std::atomic<Arena*> newest{nullptr};

struct OfProcess {
  std::mutex mutex;
  std::shared_ptr<Arena> arena;
  std::atomic<Arena*> there{nullptr};  // the same, once it is there
};

}  // namespace

// The living children that were forked since there is an arena. Each holds the write end of a pipe, which closes when
// it and all that it forked have ended, or started another program; this process holds the read end. A piece that is
// released and a fork must not pass each other, so the arena is locked while the process forks.
struct Arena::Children {
  std::uint64_t forks = 0;
  std::map<std::uint64_t, int> living;  // number -> read end; -1: it is not known when it ends

  // One for all processes: a child has no children yet, and its parent's arena is locked.
  static Children& of_process() { return process_wide<Children>(); }

  void watch() {
    [[maybe_unused]] static const int registered =
        pthread_atfork([] { OfForking::begin(); }, [] { OfForking::in_parent(); }, [] { OfForking::in_child(); });
  }

  void forget_dead() {
    for (auto child = living.begin(); child != living.end();) {
      pollfd end{.fd = child->second, .events = POLLIN, .revents = 0};
      if (child->second >= 0 && poll(&end, 1, 0) > 0) {
        close(child->second);
        child = living.erase(child);
      } else {
        ++child;
      }
    }
  }

  // Whether a child lives whose number is above `after` and up to `until`.
  bool any(std::uint64_t after, std::uint64_t until) const {
    const auto next = living.upper_bound(after);
    return next != living.end() && next->first <= until;
  }

  // State of the thread that forks, from before to after the fork.
  struct OfForking {
    static thread_local Arena* arena;
    static thread_local int pipe[2];

    static void begin() {
      arena = process_wide<OfProcess>().there.load(std::memory_order_acquire);
      if (arena == nullptr) return;
      arena->mutex_.lock();
      of_process().forget_dead();
      if (pipe2(pipe, O_CLOEXEC) != 0 || !above_streams(pipe)) pipe[0] = pipe[1] = -1;
    }
    static void in_parent() {
      if (arena == nullptr) return;
      Children& children = of_process();
      children.living[++children.forks] = pipe[0];
      if (pipe[1] >= 0) close(pipe[1]);
      arena->mutex_.unlock();
    }
    // The write end stays open, and the arena locked.
    static void in_child() {
      if (arena != nullptr && pipe[0] >= 0) close(pipe[0]);
    }
  };
};
thread_local Arena* Arena::Children::OfForking::arena = nullptr;
thread_local int Arena::Children::OfForking::pipe[2] = {-1, -1};

Arena::Arena(const Options& options) : options_(options) {
  if (options.bytes == 0 || options.bytes % kPage != 0)
    throw Error(ErrorKind::invalid_argument,
                "arena_bytes is " + std::to_string(options.bytes) + "; it must be a multiple of 4096, not 0");
  memfd_ = above_streams(memfd_create("ringreduce-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  // If it became smaller, all who map it would end, by SIGBUS.
  const bool made = memfd_ >= 0 && ftruncate(memfd_, static_cast<off_t>(options.bytes)) == 0 &&
                    fcntl(memfd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  try {
    if (!made)
      throw_system("cannot make an arena of " + std::to_string(options.bytes) +
                   " bytes of address space (RINGREDUCE_ARENA_BYTES lowers it)");
    base_ = map_shared(memfd_, options.bytes);
  } catch (...) {
    if (memfd_ >= 0) close(memfd_);
    throw;
  }
  gaps_[0] = options.bytes;
}

Arena::~Arena() {
  munmap(base_, options_.bytes);
  close(memfd_);
}

std::shared_ptr<Arena> Arena::open(const Options& options) {
  auto& process = process_wide<OfProcess>();
  std::lock_guard lock(process.mutex);
  if (!process.arena) {
    process.arena = std::make_shared<Arena>(options);
    Children::of_process().watch();
    process.arena->older_ = newest.load(std::memory_order_relaxed);
    newest.store(process.arena.get(), std::memory_order_release);
    process.there.store(process.arena.get(), std::memory_order_release);
  }
  return process.arena;
}

std::shared_ptr<Arena> Arena::of_process() {
  auto& process = process_wide<OfProcess>();
  if (process.there.load(std::memory_order_acquire) == nullptr) return nullptr;
  return process.arena;
}

Arena* Arena::around(const void* data) {
  Arena* arena = newest.load(std::memory_order_acquire);
  while (arena != nullptr && !arena->contains(data)) arena = arena->older_;
  return arena;
}

bool Arena::contains(const void* data) const {
  return data >= base_ && static_cast<std::size_t>(static_cast<const std::byte*>(data) - base_) < options_.bytes;
}

std::byte* Arena::allocate(std::size_t bytes) {
  if (std::byte* const piece = try_allocate(bytes)) return piece;
  throw Error(ErrorKind::system, "no " + std::to_string(bytes) + " bytes in one piece are left of the arena's " +
                                     std::to_string(options_.bytes) +
                                     "; free shared tensors, or set RINGREDUCE_ARENA_BYTES higher");
}

std::byte* Arena::try_allocate(std::size_t bytes) {
  if (fork_.forked()) return nullptr;
  const std::size_t wanted = round_up(std::clamp<std::size_t>(bytes, 1, options_.bytes), kPage);
  std::lock_guard lock(mutex_);
  if (!held_.empty()) recycle_what_no_child_reads();
  const std::size_t offset = bytes <= options_.bytes ? find(wanted) : kNone;
  if (offset == kNone) {
    ++statistics_.refusals;
    return nullptr;
  }
  take(offset, wanted);
  statistics_.in_use += wanted;
  return base_ + offset;
}

// The parts of the gaps that have no pages.
std::vector<std::pair<std::size_t, std::size_t>> Arena::cold() const {
  std::vector<Range> result;
  for (const auto& [offset, bytes] : gaps_) {
    std::size_t begin = offset;
    for (auto kept = kept_.lower_bound(offset); kept != kept_.end() && kept->first < offset + bytes; ++kept) {
      if (kept->first > begin) result.push_back({begin, kept->first - begin});
      begin = kept->first + kept->second.bytes;
    }
    if (offset + bytes > begin) result.push_back({begin, offset + bytes - begin});
  }
  return result;
}

// Where a piece fits best: where a freed one of up to twice its size has kept its pages; else where there are no pages,
// so that what was kept stays whole.
std::size_t Arena::find(std::size_t wanted) const {
  auto best = kept_.end();
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    const std::size_t bytes = kept->second.bytes;
    if (bytes / 2 > wanted || !fits({kept->first, bytes}, wanted)) continue;
    if (best == kept_.end() || bytes < best->second.bytes) best = kept;
    if (bytes == wanted) break;
  }
  if (best != kept_.end()) return round_up(best->first, alignment(wanted));
  const std::size_t place = place_in(cold(), wanted);
  return place != kNone ? place : place_in({gaps_.begin(), gaps_.end()}, wanted);
}

// A node of a map, for an entry that will be made when nothing may fail any more.
template <class Map>
typename Map::node_type spare(const Map&) {
  Map one;
  one.try_emplace(typename Map::key_type());
  return one.extract(one.begin());
}

template <class Map>
void put(Map& map, typename Map::node_type node, typename Map::key_type key, typename Map::mapped_type value) {
  node.key() = key;
  node.mapped() = std::move(value);
  map.insert(std::move(node));
}

// Makes [offset, offset + bytes) a piece that is used: it is no longer in a gap, nor among what has kept its pages.
void Arena::take(std::size_t offset, std::size_t bytes) {
  auto new_gap = spare(gaps_);
  auto new_kept = spare(kept_);
  used_[offset] = {.bytes = bytes, .forks = Children::of_process().forks};

  const std::size_t end = offset + bytes;
  const auto gap = std::prev(gaps_.upper_bound(offset));
  const auto [begin, size] = *gap;
  if (end < begin + size) put(gaps_, std::move(new_gap), end, begin + size - end);
  if (begin < offset)
    gap->second = offset - begin;
  else
    gaps_.erase(gap);

  auto kept = kept_.upper_bound(offset);
  if (kept != kept_.begin()) --kept;
  while (kept != kept_.end() && kept->first < end) {
    const auto [first, old] = *kept;
    const std::size_t last = first + old.bytes;
    if (last <= offset) {
      ++kept;
      continue;
    }
    if (last > end) put(kept_, std::move(new_kept), end, {last - end, old.age});  // one piece at most
    if (first < offset)
      (kept++)->second.bytes = offset - first;
    else
      kept = kept_.erase(kept);
    statistics_.kept -= std::min(last, end) - std::max(first, offset);
  }
}

void Arena::release(std::byte* piece) noexcept try {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::size_t>(piece - base_);
  const Piece released = used_.extract(offset).mapped();
  statistics_.in_use -= released.bytes;
  if (released.withdrawn) return give_up(offset, released.bytes);
  Children& children = Children::of_process();
  if (children.forks > released.forks) {
    held_.push_back({offset, released.bytes, released.forks, children.forks});
    statistics_.held += released.bytes;
    return recycle_what_no_child_reads();
  }
  recycle(offset, released.bytes);
} catch (const std::bad_alloc&) {  // there is no memory to remember its place by, which is lost
}

void Arena::recycle_what_no_child_reads() {
  Children& children = Children::of_process();
  children.forget_dead();
  std::erase_if(held_, [&](const Held& held) {
    if (children.any(held.after, held.until)) return false;
    statistics_.held -= held.bytes;
    recycle(held.offset, held.bytes);
    return true;
  });
}

void Arena::recycle(std::size_t offset, std::size_t bytes) {
  add_gap(offset, bytes);
  keep(offset, bytes);
}

// Joins it with the gaps on both sides.
void Arena::add_gap(std::size_t offset, std::size_t bytes) {
  const auto after = gaps_.find(offset + bytes);
  if (after != gaps_.end()) {
    bytes += after->second;
    gaps_.erase(after);
  }
  const auto next = gaps_.lower_bound(offset);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  gaps_[offset] = bytes;
}

// Lets a gap keep its pages, and the oldest others give theirs back, as far as the bound demands it.
void Arena::keep(std::size_t offset, std::size_t bytes) {
  if (bytes < kLeastKept || bytes > options_.keep_bytes) return punch(offset, bytes);
  kept_[offset] = {bytes, ages_++};
  statistics_.kept += bytes;
  while (statistics_.kept > options_.keep_bytes) {
    const auto oldest = std::min_element(kept_.begin(), kept_.end(),
                                         [](const auto& a, const auto& b) { return a.second.age < b.second.age; });
    punch(oldest->first, oldest->second.bytes);
    statistics_.kept -= oldest->second.bytes;
    kept_.erase(oldest);
  }
}

void Arena::punch(std::size_t offset, std::size_t bytes) const {
  fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

bool Arena::shares(const std::byte* data, std::size_t bytes) const {
  if (!contains(data) || bytes > options_.bytes - static_cast<std::size_t>(data - base_)) return false;
  if (withdrawals() == 0) return true;
  std::lock_guard lock(mutex_);
  const auto next = used_.upper_bound(static_cast<std::size_t>(data - base_));
  return next != used_.begin() && !std::prev(next)->second.withdrawn;
}

// A page that lies in the tensor as a whole need not keep anything: it gets new memory, and the old is freed.
void Arena::withdraw(std::byte* data, [[maybe_unused]] std::size_t bytes) {
  std::lock_guard lock(mutex_);
  withdrawals_.fetch_add(1, std::memory_order_seq_cst);
  const auto begin = static_cast<std::size_t>(data - base_);
  const auto next = used_.upper_bound(begin);
  if (next != used_.begin()) std::prev(next)->second.withdrawn = true;
#if !defined(__SANITIZE_THREAD__)  // under which all ranks see one mapping: stress/one_mapping.cpp
  const std::size_t end = begin + bytes, whole = round_up(begin, kPage), rest = end / kPage * kPage;
  if (whole < rest) {
    void* const replaced = mmap(base_ + whole, rest - whole, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (replaced != MAP_FAILED) punch(whole, rest - whole);
  }
  if (begin < whole && !is_private(whole - kPage)) withdraw_page(base_ + whole - kPage);
  if (rest < end && rest >= whole && !is_private(rest)) withdraw_page(base_ + rest);
  private_.emplace_back(begin / kPage * kPage, round_up(end, kPage));
#endif
}

// An earlier withdrawal may have made the page private already. Then it keeps what it has.
bool Arena::is_private(std::size_t page) const {
  return std::any_of(private_.begin(), private_.end(),
                     [page](const auto& range) { return range.first <= page && page < range.second; });
}

// A page that is not the tensor's alone. It is mapped again, so that the first write to it makes a copy, and then
// written to without a change. The kernel copies it as one step for all threads of this process: what they wrote before
// is in the copy, what they write later goes there.
void Arena::withdraw_page(std::byte* page) const {
  void* const mapped = mmap(page, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, memfd_, page - base_);
  if (mapped == MAP_FAILED) return;  // no memory left: peers that are late may still write
  const std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(page));
  std::uint64_t value = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(value, value, std::memory_order_relaxed)) {
  }
}

// A piece that was withdrawn gives its memory back and keeps its addresses: a late peer may still write there. It is
// made inaccessible here, so a use after the end does not go unnoticed.
void Arena::give_up(std::size_t offset, std::size_t bytes) {
#if !defined(__SANITIZE_THREAD__)
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(base_ + offset, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) madvise(base_ + offset, bytes, MADV_DONTNEED);
#endif
  std::erase_if(private_, [&](const auto& range) { return range.first >= offset && range.first < offset + bytes; });
  punch(offset, bytes);
  statistics_.lost += bytes;
}

Arena::Statistics Arena::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

PeerArena::PeerArena(int memfd, std::size_t bytes) : base_(map_shared(memfd, bytes)), bytes_(bytes) {}

PeerArena::~PeerArena() { munmap(base_, bytes_); }

std::shared_ptr<const PeerArena> map_arena(const FileDescriptor& descriptor) {
  struct Mapped {
    std::mutex mutex;
    std::map<std::pair<dev_t, ino_t>, std::weak_ptr<const PeerArena>> arenas;
  };
  auto& mapped = process_wide<Mapped>();
  std::lock_guard lock(mapped.mutex);
  std::erase_if(mapped.arenas, [](const auto& entry) { return entry.second.expired(); });
  struct stat file{};
  const int fd = descriptor.get(), seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &file) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw Error(ErrorKind::system, "a rank sent an arena that is not a memfd sealed against shrinking");
  std::weak_ptr<const PeerArena>& known = mapped.arenas[{file.st_dev, file.st_ino}];
  std::shared_ptr<const PeerArena> arena = known.lock();
  if (!arena) known = arena = std::make_shared<const PeerArena>(fd, static_cast<std::size_t>(file.st_size));
  return arena;
}

}  // namespace ringreduce
