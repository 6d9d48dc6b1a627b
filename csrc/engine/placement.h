// Where the ranks of a host run: every rank says on which core it is.
//
// With more ranks than cores, the kernel may leave one core with three of four ranks for seconds, since ranks that wait
// for one another look alike to it, and each call then takes twice as long. With a core for each, it may put two of
// them on one where the machine has other work, and a call then takes a hundred times as long, because the one that
// waits keeps the core from the other. So a rank that finds its core with more than its share of the ranks goes to its
// own core of an even distribution, and is free to be moved again.
//
// A rank's *mates* are the other ranks on its core. A rank that waits in a small call asks whether it waits for them.
// If so, it yields the core at once, so that they can go on. If not, it keeps the core for a little, as a yield would
// only hand it round among ranks that all wait for other cores.
#pragma once

#include <sched.h>

#include <cstdint>
#include <vector>

#include "core/clock.h"
#include "core/threads.h"
#include "transport/team.h"

namespace ringreduce {

class Placement {
 public:
  explicit Placement(const Team& team) : team_(team) {
    int own = 0;  // this rank's number among those of this host
    for (int r = 0; r < team.size(); ++r) {
      if (team.elsewhere(r)) continue;
      if (r < team.rank()) ++own;
      near_.push_back(r);
    }
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;  // more cores than the type holds
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    const int count = static_cast<int>(cores.size()), size = static_cast<int>(near_.size());
    if (count < 2 || size < 2) return;
    share_ = (size + count - 1) / count;
    home_ = cores[static_cast<std::size_t>(own * count / size)];
  }

  // The core that this rank moves to where its own is crowded.
  int home() const { return home_; }

  // For every call to begin with, in the thread that runs it.
  void go_home_if_crowded() {
    if (near_.size() < 2) return;
    std::atomic<std::int32_t>& core = team_.control(team_.rank()).core;
    const int here = sched_getcpu();
    const bool moved = core.load(std::memory_order_relaxed) != here + 1;
    if (moved) core.store(here + 1, std::memory_order_relaxed);
    if (moved || --calls_to_search_ <= 0) find_mates(here);
    if (share_ == 0 || here == home_) return;
    const Nanoseconds t = now();
    if (t < next_) return;
    next_ = t + kLookEvery;
    int together = 0;
    for (const int r : near_) together += team_.control(r).core.load(std::memory_order_relaxed) == here + 1;
    if (together <= share_) return;
    cpu_set_t allowed;
    // The cores that this thread may use need not be those of the thread that made the group.
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || !CPU_ISSET(home_, &allowed) || !pin(home_)) return;
    core.store(home_ + 1, std::memory_order_relaxed);
    find_mates(home_);
    sched_setaffinity(0, sizeof(allowed), &allowed);
    next_ = t + kMoveEvery;
  }

  // For a rank that waits in call number `seq`: how often it looks before it yields. `awaits`: for whom it waits, as
  // awaits_rank() has them. These need not be all, so a mate that has not begun the call is waited for as well.
  int looks_before_yield(std::uint64_t seq, std::uint64_t awaits) {
    if (seq != seq_) come_ = 0;
    seq_ = seq;
    while (come_ < mates_.size() && team_.control(mates_[come_]).entered.load(std::memory_order_relaxed) >= seq)
      ++come_;
    return come_ < mates_.size() || (awaits & mates_mask_) != 0 ? 0 : kLooksAtOtherCores;
  }

 private:
  static constexpr Nanoseconds kLookEvery = kMillisecond, kMoveEvery = 5 * kMillisecond;
  // For about as long as another core takes to hand itself on: 2 us on a 2-core EPYC. There 20, 60 and 200 were alike.
  // Beside 2 looks in every case, all_reduce of 64 bytes took 0.97, 0.98 and 0.84 of the time with 4, 8 and 16 ranks
  // (the slowest rank's median, groups in turns, 2026-11-28), and as a mean 0.96, 0.89 and 0.89.
  static constexpr int kLooksAtOtherCores = 50;
  // The list of mates may be stale: then this rank yields to the wrong rank, or keeps the core from the right one.
  static constexpr int kCallsBetweenSearches = 256;

  // A rank that has not said yet where it is counts as a mate, and is looked for again in the next call.
  void find_mates(int here) {
    mates_.clear();
    mates_mask_ = 0;
    calls_to_search_ = kCallsBetweenSearches;
    for (const int r : near_) {
      const int core = team_.control(r).core.load(std::memory_order_relaxed);
      if (r == team_.rank() || (core != 0 && core != here + 1)) continue;
      mates_.push_back(r);
      mates_mask_ |= awaits_rank(r);
      if (core == 0) calls_to_search_ = 1;
    }
  }

  const Team& team_;
  std::vector<int> near_;  // the ranks of this host
  int share_ = 0;          // of them, that a core has at most if they are spread evenly; 0: there is no choice
  int home_ = 0;
  Nanoseconds next_ = 0;  // when to see whether this core is crowded

  std::vector<int> mates_;
  std::uint64_t mates_mask_ = 0;  // of awaits_rank()
  int calls_to_search_ = 0;
  std::uint64_t seq_ = 0;  // of the latest call that waited,
  std::size_t come_ = 0;   // which so many of the mates had begun, in their order
};

}  // namespace ringreduce
