// What a rank's memory is to its peers and to its own threads when a call fails, and what is left where a group cannot
// be made.
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "engine/placement.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr std::size_t kPage = 4096;

#if !defined(__SANITIZE_THREAD__)  // under which ranks have one mapping, and nothing is withdrawn
std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t pages = 0;
  statm >> pages >> pages;
  return pages * kPage;
}

// Two ranks' views of one segment, with so much arena each.
std::array<std::shared_ptr<const Segment>, 2> two_views(std::size_t arena_bytes) {
  const Geometry geometry{.ranks = 2, .arena_bytes = arena_bytes};
  const int memfd = memfd_create("stress", MFD_CLOEXEC);
  check(memfd >= 0 && ftruncate(memfd, static_cast<off_t>(geometry.segment_bytes())) == 0, "no memory for a segment");
  const auto view = [&](int rank) {
    return std::make_shared<const Segment>(dup(memfd), geometry, rank, std::vector<int>{-1, -1},
                                           std::vector<RankName>(2, {"thread", getpid()}));
  };
  std::array<std::shared_ptr<const Segment>, 2> views{view(0), view(1)};
  close(memfd);
  return views;
}

// What a late peer writes into a tensor that was withdrawn goes nowhere; what lies around it stays as it was.
void withdraws_a_tensor() {
  constexpr std::size_t kBegin = 100, kEnd = 5 * kPage + 200, kAll = 7 * kPage;
  for (const std::size_t end : {kEnd, kBegin + 20, kPage + 50, 2 * kPage}) {
    const auto views = two_views(16 * kPage);
    std::byte *const own = views[0]->arena(0), *const seen = views[1]->arena(0);
    std::fill_n(own, kAll, std::byte{1});
    views[0]->withdraw(own + kBegin, end - kBegin);
    std::fill(seen + kBegin, seen + end, std::byte{2});
    for (std::size_t i = 0; i < kAll; ++i)
      check(i >= kBegin && i < end ? own[i] != std::byte{2} : own[i] == std::byte{1}, "segment: a late write is seen");
    std::fill_n(own, kAll, std::byte{3});
    check(std::count(own, own + kAll, std::byte{3}) == kAll, "segment: withdrawn memory cannot be written");
  }
  std::printf("segment: a tensor is withdrawn\n");
}

// The rest of its first and last page may belong to tensors that other threads write at that moment.
void withdraws_while_others_write() {
  constexpr std::size_t kTensors = 2000, kEach = 2 * kPage;
  const auto views = two_views(kTensors * kEach);
  std::byte* const own = views[0]->arena(0);
  std::atomic<std::size_t> at = 0;
  std::thread writer([&] {
    for (unsigned value = 1; at < kTensors; ++value) {
      auto* const word = reinterpret_cast<volatile unsigned*>(own + at * kEach);
      *word = value;
      check(*word == value, "segment: a write of another thread is lost");
    }
  });
  for (; at < kTensors; ++at) {
    if (at % 16 == 0) sched_yield();
    views[0]->withdraw(own + at * kEach + 64, kEach - 128);
  }
  writer.join();
  std::printf("segment: tensors are withdrawn while others write next to them\n");
}

// A tensor of any size is withdrawn without a copy of it.
void withdraws_a_large_tensor() {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const auto views = two_views(kBytes + 2 * kPage);
  const std::size_t before = resident_bytes();
  views[0]->withdraw(views[0]->arena(0) + 64, kBytes);
  check(resident_bytes() < before + kBytes / 8, "segment: withdrawing takes as much memory as the tensor");
  std::printf("segment: a large tensor is withdrawn\n");
}
#endif

// Descriptors are closed where the sizes are refused.
void refuses_sizes() {
  const auto open = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open();
  for (const Geometry& wrong : {Geometry{.ranks = 0}, Geometry{.ranks = 2, .depth = 3}, Geometry{.arena_bytes = 7}})
    check(error_of([&] {
            const Segment segment(memfd_create("stress", MFD_CLOEXEC), wrong, 0, {eventfd(0, 0), eventfd(0, 0)}, {});
          }).kind() == ErrorKind::invalid_argument,
          "segment: sizes are not refused as arguments");
  check(open() == before, "segment: descriptors are left where sizes are refused");
  std::printf("segment: wrong sizes\n");
}

// The ranks of each host have the cores of that host, whatever the ranks of the group are numbered.
void places_ranks_of_a_host() {
  cpu_set_t before, two;
  sched_getaffinity(0, sizeof before, &before);
  CPU_ZERO(&two);
  for (int core = 0, count = 0; core < CPU_SETSIZE && count < 2; ++core)
    if (CPU_ISSET(core, &before)) CPU_SET(core, &two), ++count;
  if (CPU_COUNT(&two) < 2) return;
  sched_setaffinity(0, sizeof two, &two);
  Group group(8, 8, 256, {0, 0, 0, 0, 1, 1, 1, 1});
  for (const int first : {0, 4}) {
    std::multiset<int> homes;
    for (int r = first; r < first + 4; ++r)
      homes.insert(Placement(*group.ranks[static_cast<std::size_t>(r)]->segment).home());
    check(homes.count(*homes.begin()) == 2 && homes.count(*homes.rbegin()) == 2,
          "segment: the ranks of a host do not share its cores evenly");
  }
  sched_setaffinity(0, sizeof before, &before);
  std::printf("segment: ranks of two hosts on two cores each\n");
}

struct Case {
  const char* name;
  void (*run)();
};
constexpr Case kCases[]{
#if !defined(__SANITIZE_THREAD__)
    {"tensor", withdraws_a_tensor},
    {"writes", withdraws_while_others_write},
    {"large", withdraws_a_large_tensor},
#endif
    {"sizes", refuses_sizes},
    {"places", places_ranks_of_a_host}};

}  // namespace

void stress_segment(const std::string& only) {
  for (const Case& each : kCases)
    if (only.empty() || only == each.name) each.run();
}

}  // namespace ringreduce::stress
