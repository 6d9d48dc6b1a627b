// Where the ranks of a host run. With more ranks than cores, the kernel may leave one core with three of four ranks for
// seconds, since ranks that wait for one another look alike to it, and each call then takes twice as long. With a core
// for each, it may put two of them on one where the machine has other work, and a call then takes a hundred times as
// long, because the one that waits keeps the core from the other.
//
// So every rank says on which core it is. One that finds its core with more than its share of the ranks goes to its own
// core of an even distribution, and is free to be moved again.
//
// So, too, a rank that waits in a small call knows whether to keep its core. Every rank of such a call needs all
// others, unless one is its root. Until the ranks of its core have come, a yield lets them come. Then they all wait for
// other cores, and a yield would only hand the core round.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/clock.h"
#include "core/threads.h"
#include "transport/team.h"

namespace ringreduce {

class Placement {
 public:
  explicit Placement(const Team& team) : team_(team) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;  // more cores than the type holds
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    int size = 0, own = 0;  // of the ranks of this host, and this one's number among them
    for (int r = 0; r < team.size(); ++r) {
      if (team.elsewhere(r)) continue;
      if (r == team.rank()) own = size;
      ++size;
    }
    const int count = static_cast<int>(cores.size());
    if (count < 2 || size < 2) return;
    share_ = (size + count - 1) / count;
    home_ = cores[static_cast<std::size_t>(own * count / size)];
  }

  // The core that this rank moves to where its own is crowded.
  int home() const { return home_; }

  // For every call to begin with, in the thread that runs it.
  void settle() {
    if (share_ == 0) return;
    std::atomic<std::int32_t>& core = team_.control(team_.rank()).core;
    const int here = sched_getcpu();
    if (core.load(std::memory_order_relaxed) != here + 1) core.store(here + 1, std::memory_order_relaxed);
    if (share_ > 1 && calls_++ % kLookAtMatesEvery == 0) look_for_mates(here);
    if (here == home_) return;
    const Nanoseconds t = now();
    if (t < next_) return;
    next_ = t + kLookEvery;
    int together = 0;
    for (int r = 0; r < team_.size(); ++r)  // ranks on other hosts tell nobody their cores
      together += team_.control(r).core.load(std::memory_order_relaxed) == here + 1;
    if (together <= share_) return;
    cpu_set_t allowed;
    // The cores that this thread may use need not be those of the thread that made the group.
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || !CPU_ISSET(home_, &allowed) || !pin(home_)) return;
    core.store(home_ + 1, std::memory_order_relaxed);
    sched_setaffinity(0, sizeof(allowed), &allowed);
    next_ = t + kMoveEvery;
  }

  // How often a rank that waits in call number `seq`, a small one without a root, looks before it yields, where ranks
  // share cores.
  int looks(std::uint64_t seq) const {
    const bool some_to_come = std::any_of(mates_.begin(), mates_.end(), [seq](const RankControl* mate) {
      return mate->entered.load(std::memory_order_relaxed) < seq;
    });
    return some_to_come ? 0 : kLooksAtOtherCores;
  }

 private:
  // For about as long as another core takes to hand itself on: 2 us on a 2-core EPYC. There 20, 60 and 200 were alike.
  // Beside 2 looks in every case, all_reduce of 64 bytes took 0.94, 0.84 and 0.77 of the time with 4, 8 and 16 ranks
  // (the slowest rank's median, groups in turns, 2026-11-28), and as a mean 0.89, 0.94 and 0.98.
  static constexpr int kLooksAtOtherCores = 50;
  static constexpr unsigned kLookAtMatesEvery = 256;  // calls; nothing but time is lost if a mate has moved since

  void look_for_mates(int here) {
    mates_.clear();
    for (int r = 0; r < team_.size(); ++r)
      if (r != team_.rank() && team_.control(r).core.load(std::memory_order_relaxed) == here + 1)
        mates_.push_back(&team_.control(r));
  }

  static constexpr Nanoseconds kLookEvery = kMillisecond, kMoveEvery = 5 * kMillisecond;

  const Team& team_;
  int share_ = 0;  // of the ranks that a core has at most, if they are spread evenly; 0: there is no choice
  int home_ = 0;
  Nanoseconds next_ = 0;  // when to look again
  unsigned calls_ = 0;
  std::vector<const RankControl*> mates_;  // the other ranks that were on this core
};

}  // namespace ringreduce
