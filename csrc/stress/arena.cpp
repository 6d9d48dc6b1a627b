// A process's arena: what is handed out again, what its peers see of it, and what they do not when a call has failed.
#include "transport/arena.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr std::size_t kPage = 4096, kMegabyte = std::size_t{1} << 20, kHugePage = 2 * kMegabyte;

// Memory that an arena takes.
std::size_t taken(const Arena& arena) {
  struct stat file{};
  check(fstat(arena.descriptor(), &file) == 0, "arena: no fstat");
  return static_cast<std::size_t>(file.st_blocks) * 512;
}

void fill(std::byte* piece, std::size_t bytes, unsigned value) { std::fill_n(piece, bytes, std::byte(value)); }

// Freed pieces keep their pages up to the bound, the youngest of them, and are handed out again first.
void keeps_freed_pieces() {
  Arena arena({64 * kMegabyte, 8 * kMegabyte});
  const auto filled = [&](std::size_t bytes) {
    std::byte* const piece = arena.allocate(bytes);
    fill(piece, bytes, 1);
    return piece;
  };
  std::byte* const first = filled(4 * kMegabyte);
  std::byte* const second = filled(6 * kMegabyte);
  std::byte* const guard = filled(kPage);
  check(taken(arena) == 10 * kMegabyte + kPage && arena.statistics().in_use == taken(arena), "arena: pages of pieces");
  arena.release(first);
  check(arena.statistics().kept == 4 * kMegabyte && taken(arena) == 10 * kMegabyte + kPage, "arena: a piece is kept");
  check(arena.allocate(3 * kMegabyte) == first, "arena: what was kept is used again");
  check(first[0] == std::byte{1} && arena.statistics().kept == kMegabyte, "arena: with its pages");
  arena.release(first);
  arena.release(second);
  check(arena.statistics().kept <= 8 * kMegabyte && arena.statistics().kept >= 6 * kMegabyte, "arena: the bound");
  check(taken(arena) == arena.statistics().kept + kPage, "arena: what is beyond the bound gives its pages back");
  check(arena.allocate(6 * kMegabyte) == second, "arena: the youngest is kept");
  arena.release(second);
  std::byte* const huge = filled(16 * kMegabyte);
  arena.release(huge);
  check(taken(arena) <= 8 * kMegabyte + kPage, "arena: a piece above the bound gives its pages back");
  arena.release(guard);
  check(arena.statistics().in_use == 0, "arena: all is released");

  Arena none({64 * kMegabyte, 0});
  std::byte* const piece = none.allocate(4 * kMegabyte);
  fill(piece, 4 * kMegabyte, 1);
  none.release(piece);
  check(taken(none) == 0, "arena: nothing is kept");
  std::printf("arena: freed pieces keep their pages\n");
}

// Pieces of any sizes, from several threads: each is aligned, and nobody else's; all of the room is there at the end.
void allocates_from_threads() {
  constexpr std::size_t kAll = 64 * kMegabyte;
  Arena arena({kAll, 16 * kMegabyte});
  in_threads(4, [&](int thread) {
    Random random(static_cast<std::uint64_t>(thread));
    std::vector<std::pair<std::byte*, std::size_t>> pieces;
    for (int i = 0; i < 2000; ++i) {
      if (pieces.size() > 5 || (!pieces.empty() && random_int(random, 0, 2) == 0)) {
        const auto at = static_cast<std::ptrdiff_t>(random_int(random, 0, static_cast<int>(pieces.size()) - 1));
        const auto [piece, bytes] = pieces[static_cast<std::size_t>(at)];
        pieces.erase(pieces.begin() + at);
        const auto mark = std::byte(thread + 1);
        check(piece[0] == mark && piece[bytes / 2] == mark && piece[bytes - 1] == mark, "arena: a piece is another's");
        arena.release(piece);
        continue;
      }
      const auto bytes =
          static_cast<std::size_t>(random_int(random, 1, random_int(random, 0, 3) == 0 ? 3 << 20 : 99999));
      std::byte* const piece = arena.try_allocate(bytes);
      if (piece == nullptr) continue;
      const auto address = reinterpret_cast<std::uintptr_t>(piece);
      check(address % (bytes >= kHugePage ? kHugePage : kPage) == 0, "arena: a piece is not aligned");
      piece[0] = piece[bytes / 2] = piece[bytes - 1] = std::byte(thread + 1);
      pieces.emplace_back(piece, bytes);
    }
    for (const auto& [piece, bytes] : pieces) arena.release(piece);
  });
  check(arena.statistics().in_use == 0 && arena.statistics().kept <= 16 * kMegabyte, "arena: what is left");
  check(arena.try_allocate(kAll) == arena.base(), "arena: the gaps are one again");
  check(arena.try_allocate(1) == nullptr && arena.statistics().refusals >= 1, "arena: there is no room");
  std::printf("arena: pieces of several threads\n");
}

// All groups of a process have one mapping of a peer's arena. An arena that its owner could shrink is refused.
void maps_peers_once() {
  const auto open = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const Arena arena({4 * kMegabyte, 0});
  const auto before = open();
  {
    const auto one = map_arena(FileDescriptor(dup(arena.descriptor())));
    const auto other = map_arena(FileDescriptor(dup(arena.descriptor())));
    check(one == other && one->bytes() == 4 * kMegabyte, "arena: there are two mappings");
    arena.base()[5] = std::byte{7};
    check(one->base()[5] == std::byte{7}, "arena: a peer does not see it");
    check(error_of([&] { map_arena(FileDescriptor(memfd_create("stress", MFD_CLOEXEC))); }).kind() == ErrorKind::system,
          "arena: one that can shrink is not refused");
  }
  check(open() == before, "arena: descriptors are left");
  std::printf("arena: peers' arenas are mapped once\n");
}

Call all_reduce_of(std::size_t count) {
  Call call{.operation = Operation::all_reduce, .dtype = DType::int64, .timeout = 60 * kSecond};
  call.count = call.largest = count;
  return call;
}

// After a withdrawal the same call on the same tensor goes on with what the tensor now holds.
void calls_on_withdrawn_tensors() {
  Group group(2, 8, 4096);
  constexpr std::size_t kCount = 3000;
  on_all_ranks(group, [&](Rank& rank) {
    auto* const values = reinterpret_cast<std::int64_t*>(rank.arena->allocate(kCount * 8));
    auto* const data = reinterpret_cast<std::byte*>(values);
    rank.engine.choose(Operation::all_reduce, ~std::uint64_t{0}, 1);  // two_shot, whose peers write to the tensor
    for (int number = 0; number < 4; ++number) {
      if (number == 2 && rank.number() == 0) rank.arena->withdraw(data, kCount * 8);
      check(rank.team->in_arena(data, kCount * 8) == (number < 2 || rank.number() == 1), "arena: what is shared");
      std::fill_n(values, kCount, 10 * number + rank.number());
      const std::size_t count = kCount;
      const Call call = all_reduce_of(count);
      rank.engine.run(call, {.input = {{&data, 1}, {&count, 1}}, .output = {{&data, 1}, {&count, 1}}});
      check(std::count(values, values + kCount, 20 * number + 1) == kCount, "arena: a withdrawn tensor is still lent");
    }
    rank.arena->release(data);
  });
  std::printf("arena: calls on withdrawn tensors\n");
}

// Another group's call fails on a part of the same piece while this one is under way: no rank gets wrong results.
void withdraws_during_a_call() {
  for (const bool first : {true, false}) {
    Group group(2, 8, 4096);
    constexpr std::size_t kCount = 40000, kBytes = kCount * 8;
    std::atomic<bool> withdrawn = false;
    on_all_ranks(group, [&](Rank& rank) {
      std::byte* piece = rank.arena->allocate(2 * kBytes);
      auto* const values = reinterpret_cast<std::int64_t*>(piece);
      std::fill_n(values, kCount, rank.number());
      rank.engine.choose(Operation::all_reduce, ~std::uint64_t{0}, 1);
      const std::size_t count = kCount;
      const Call call = all_reduce_of(count);
      std::thread other;
      if (rank.number() == 0) {
        other = std::thread([&, entered = &rank.team->control(0).entered] {
          while (entered->load() < 1) sched_yield();
          rank.arena->withdraw(piece + kBytes, kBytes - 100);
          withdrawn = true;
        });
      } else if (first) {
        while (!withdrawn) sched_yield();
      }
      bool right = true;
      try {
        rank.engine.run(call, {.input = {{&piece, 1}, {&count, 1}}, .output = {{&piece, 1}, {&count, 1}}});
        right = std::count(values, values + kCount, 1) == kCount;
      } catch (const Error& error) {
        check(error.kind() == ErrorKind::system, std::string("arena: ") + error.what());
      }
      check(right, "arena: a wrong result where another group failed");
      if (other.joinable()) other.join();
    });
  }
  std::printf("arena: a piece is withdrawn during a call\n");
}

#if !defined(__SANITIZE_THREAD__)  // under which ranks have one mapping, and nothing is withdrawn
std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t pages = 0;
  statm >> pages >> pages;
  return pages * kPage;
}

std::shared_ptr<const PeerArena> seen(const Arena& arena) { return map_arena(FileDescriptor(dup(arena.descriptor()))); }

// A late peer's write into a tensor that was withdrawn goes nowhere, and the memory around the tensor stays as it was.
void withdraws_a_tensor() {
  constexpr std::size_t kBegin = 100, kEnd = 5 * kPage + 200, kAll = 7 * kPage;
  for (const std::size_t end : {kEnd, kBegin + 20, kPage + 50, 2 * kPage}) {
    Arena arena({16 * kPage, 0});
    const auto peer = seen(arena);
    std::byte *const own = arena.allocate(kAll), *const theirs = peer->base() + (own - arena.base());
    fill(own, kAll, 1);
    check(arena.shares(own, kAll), "arena: a piece is not shared");
    arena.withdraw(own + kBegin, end - kBegin);
    check(!arena.shares(own, kAll) && !arena.shares(own + 6 * kPage, 1), "arena: a withdrawn piece is shared");
    std::fill(theirs + kBegin, theirs + end, std::byte{2});
    for (std::size_t i = 0; i < kAll; ++i)
      check(i >= kBegin && i < end ? own[i] != std::byte{2} : own[i] == std::byte{1}, "arena: a late write is seen");
    fill(own, kAll, 3);
    check(std::count(own, own + kAll, std::byte{3}) == kAll, "arena: withdrawn memory cannot be written");
    // Another part of it, which begins on a page that is private already.
    const std::size_t next = end + 8;
    arena.withdraw(own + next, kAll - next - 8);
    for (std::size_t i = 0; i < kAll; ++i)
      check((i >= next && i < kAll - 8) || own[i] == std::byte{3}, "arena: a second withdrawal loses what lies around");
  }
  std::printf("arena: a tensor is withdrawn\n");
}

// The rest of its first and last page may belong to tensors that other threads write at that moment.
void withdraws_while_others_write() {
  constexpr std::size_t kTensors = 2000, kEach = 2 * kPage;
  Arena arena({kTensors * kEach, 0});
  std::byte* const own = arena.allocate(kTensors * kEach);
  std::atomic<std::size_t> at = 0;
  std::thread writer([&] {
    unsigned value = 0;
    for (std::size_t tensor = at; tensor < kTensors; tensor = at) {
      auto* const word = reinterpret_cast<volatile unsigned*>(own + tensor * kEach);
      *word = ++value;
      check(*word == value, "arena: a write of another thread is lost");
    }
  });
  for (; at < kTensors; ++at) {
    if (at % 16 == 0) sched_yield();
    arena.withdraw(own + at * kEach + 64, kEach - 128);
  }
  writer.join();
  std::printf("arena: tensors are withdrawn while others write next to them\n");
}

// A tensor of any size is withdrawn without a copy of it.
void withdraws_a_large_tensor() {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  Arena arena({kBytes + 2 * kPage, 0});
  std::byte* const own = arena.allocate(kBytes + 2 * kPage);
  const std::size_t before = resident_bytes();
  arena.withdraw(own + 64, kBytes);
  check(resident_bytes() < before + kBytes / 8, "arena: withdrawing takes as much memory as the tensor");
  std::printf("arena: a large tensor is withdrawn\n");
}

// The addresses of a withdrawn piece are not used again, whatever is allocated; its memory is given back.
void keeps_addresses_from_late_writers() {
  constexpr std::size_t kBytes = 4 * kMegabyte, kAll = 32 * kMegabyte;
  Arena arena({kAll, kAll});
  const auto peer = seen(arena);
  std::byte* const piece = arena.allocate(kBytes + 100);
  fill(piece, kBytes + 100, 1);
  arena.withdraw(piece + 50, kBytes);
  fill(piece, kBytes + 100, 2);  // private memory
  const std::size_t before = resident_bytes();
  arena.release(piece);
  check(taken(arena) == 0 && resident_bytes() + kBytes / 2 < before, "arena: withdrawn memory is not given back");
  check(arena.statistics().lost == kBytes + kPage && arena.statistics().in_use == 0, "arena: what is lost");
  std::vector<std::byte*> others;
  while (std::byte* const other = arena.try_allocate(kPage)) {
    check(other + kPage <= piece || other >= piece + kBytes + kPage, "arena: a late writer's place is used again");
    fill(other, kPage, 3);
    others.push_back(other);
  }
  check(others.size() * kPage == kAll - kBytes - kPage, "arena: more is lost than the piece");
  fill(peer->base() + (piece - arena.base()), kBytes, 9);  // the late writer
  for (const std::byte* other : others)
    check(std::count(other, other + kPage, std::byte{3}) == kPage, "arena: a late write is seen");
  std::printf("arena: late writers find nobody\n");
}

// Memory that a forked child may still read is not used again while that child, or a child of its own, lives. The child
// neither frees nor allocates there.
void children_keep_what_they_see() {
  const std::shared_ptr<Arena> arena = Arena::open({16 * kMegabyte, 16 * kMegabyte});
  check(Arena::of_process() == arena && Arena::around(arena->base() + 5) == arena.get(), "arena: it is not known");
  check(Arena::around(&arena) == nullptr, "arena: something else is in it");
  const auto allocated = [&] {
    std::byte* const piece = arena->allocate(kMegabyte);
    fill(piece, kMegabyte, 1);
    return piece;
  };
  std::byte* const old = allocated();
  int go[2], ready[2];
  check(pipe(go) == 0 && pipe(ready) == 0, "arena: no pipes");
  const pid_t child = fork();
  if (child == 0) {
    close(go[1]);
    char word = 0;
    arena->release(old);
    bool right =
        Arena::of_process() == nullptr && arena->try_allocate(1) == nullptr && Arena::around(old) == arena.get();
    const auto own = Arena::open({kMegabyte, 0});
    right = right && own != arena && Arena::around(own->allocate(1)) == own.get();
    if (fork() != 0) _exit(right ? 0 : 1);  // the grandchild goes on
    right = write(ready[1], &word, 1) == 1 && read(go[0], &word, 1) == 0;
    right = right && std::count(old, old + kMegabyte, std::byte{1}) == kMegabyte;
    right = right && write(ready[1], right ? "y" : "n", 1) == 1;
    _exit(0);
  }
  close(go[0]);
  int status = 0;
  char word = 0;
  check(waitpid(child, &status, 0) == child && status == 0, "arena: a child uses its parent's arena");
  check(read(ready[0], &word, 1) == 1, "arena: no grandchild");
  std::byte* const young = allocated();  // after the fork
  arena->release(old);
  arena->release(young);
  check(arena->statistics().held == kMegabyte && arena->statistics().kept == kMegabyte, "arena: what children see");
  for (int i = 0; i < 3; ++i) {
    std::byte* const other = arena->allocate(kMegabyte);
    check(other != old, "arena: what a child sees is used again");
    fill(other, kMegabyte, 2);
    arena->release(other);
  }
  close(go[1]);
  check(read(ready[0], &word, 1) == 1 && word == 'y', "arena: a child's memory has changed");
  close(ready[1]);
  check(read(ready[0], &word, 1) == 0, "arena: the grandchild lives");
  arena->release(arena->allocate(1));
  check(arena->statistics().held == 0 && arena->statistics().kept == 2 * kMegabyte, "arena: it is kept for nobody");
  close(ready[0]);
  std::printf("arena: forked children\n");
}
#endif

struct Case {
  const char* name;
  void (*run)();
};
constexpr Case kCases[]{
    {"keeps", keeps_freed_pieces},
    {"threads", allocates_from_threads},
    {"peers", maps_peers_once},
    {"again", calls_on_withdrawn_tensors},
    {"during", withdraws_during_a_call},
#if !defined(__SANITIZE_THREAD__)
    {"tensor", withdraws_a_tensor},
    {"writes", withdraws_while_others_write},
    {"large", withdraws_a_large_tensor},
    {"late", keeps_addresses_from_late_writers},
    {"children", children_keep_what_they_see},
#endif
};

}  // namespace

void stress_arena(const std::string& only) {
  for (const Case& each : kCases)
    if (only.empty() || only == each.name) each.run();
}

}  // namespace ringreduce::stress
