// Tests that a group that cannot be made leaves nothing behind, and which cores its ranks have.
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <set>

#include "engine/placement.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

// Descriptors are closed where the sizes are refused.
void refuses_sizes() {
  const auto open = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open();
  for (const Geometry& wrong : {Geometry{.ranks = 0}, Geometry{.ranks = 2, .depth = 3}, Geometry{.slot_bytes = 7}})
    check(error_of([&] {
            Team::of({.memfd = memfd_create("stress", MFD_CLOEXEC),
                      .geometry = wrong,
                      .names = std::vector<RankName>(2),
                      .pidfds = {eventfd(0, 0), eventfd(0, 0)}});
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
      homes.insert(Placement(*group.ranks[static_cast<std::size_t>(r)]->team).home());
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
constexpr Case kCases[]{{"sizes", refuses_sizes}, {"places", places_ranks_of_a_host}};

}  // namespace

void stress_segment(const std::string& only) {
  for (const Case& each : kCases)
    if (only.empty() || only == each.name) each.run();
}

}  // namespace ringreduce::stress
