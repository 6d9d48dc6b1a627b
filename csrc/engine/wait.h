// One rank's waiting, for the length of one call: look again and again, then yield the core, then sleep on a doorbell.
//
// How often it looks depends on whether the other ranks have cores of their own. How often it yields depends on how
// many ranks share a core: the kernel may give a yielded core back to the same rank, or to another that waits as well,
// and then the rank that all wait for runs a scheduler tick later. A rank that sleeps is out of the way. Every
// kCheckEvery of waiting, and after every sleep, the owner's `check` looks for what makes further waiting pointless,
// and throws.
//
// A rank with links to other hosts moves what goes over them each time it looks; while it sleeps, a thread does. If no
// other rank is on its host, it sleeps on its links before that: what it waits for can only come from there.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/atomics.h"
#include "core/clock.h"
#include "engine/patience.h"
#include "transport/links.h"
#include "transport/team.h"

namespace ringreduce {

class Waiting {
 public:
  Waiting(Team& team, Doorbell& doorbell, const Patience& patience)
      : doorbell_(doorbell), links_(team.links()), alone_(team.alone()), patience_(patience) {
    if (links_ != nullptr) links_->take_over();
  }
  ~Waiting() {
    disarm();
    if (links_ != nullptr) links_->hand_over(false);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // Something moved: the next wait begins anew with looking.
  void moved() {
    if (looks_ == 0 && idle_since_ == 0) return;
    looks_ = yields_ = 0;
    standstill_.restart();
    if (idle_since_ != 0) waited_ += now() - idle_since_;
    idle_since_ = 0;
    disarm();
  }

  // How long this rank had nothing to do, up to the latest moved(). Waits that ended before it yielded are not counted:
  // to look at the clock would take as long as they do.
  Nanoseconds waited() const { return waited_; }

  // Nothing moved. Waits a little, after which the caller must look again. `awaits`: the ranks that could end the wait,
  // as awaits_rank() has them. `check(waited)` is called now and then with the time since the first wait of this call,
  // not counting time in which this process was frozen. `looks` replaces Patience::looks for this wait.
  template <class Check>
  void idle(std::uint64_t awaits, Check&& check, int looks) {
    if (links_ != nullptr && links_->progress()) return moved();
    if (!armed_ && looks_ < looks) {
      ++looks_;
      return cpu_relax();
    }
    const Nanoseconds t = now();
    if (started_ == 0) {
      started_ = t;
      next_check_ = t + kCheckEvery;  // most waits are over by then
    }
    if (idle_since_ == 0) idle_since_ = t;
    started_ += standstill_.before(t);
    if (t >= next_check_) {
      check(t - started_);
      next_check_ = t + kCheckEvery;
      standstill_.restart(now());
    }
    if (!armed_ && yields_ < patience_.yields && t - idle_since_ < kYieldFor) {
      ++yields_;
      const bool settled = links_ != nullptr && t - idle_since_ > kSettle;
      if (settled) links_->settle();
      if (settled && alone_)
        links_->doze();
      else
        sched_yield();
    } else if (!armed_ || awaits != awaits_) {
      // Only announces the sleep: the caller looks once more before it happens.
      arm(awaits);
    } else {
      doorbell_.sleep(seen_, std::clamp(t - idle_since_, kYieldFor, kSleep));
      seen_ = doorbell_.rings.load(std::memory_order_seq_cst);
    }
  }
  template <class Check>
  void idle(std::uint64_t awaits, Check&& check) {
    idle(awaits, std::forward<Check>(check), patience_.looks);
  }

 private:
  static constexpr Nanoseconds kYieldFor = kMillisecond;
  static constexpr Nanoseconds kCheckEvery = kMillisecond;
  // Peers on other hosts learn of a slot that has been read at most so much later.
  static constexpr Nanoseconds kSettle = 100 * kMicrosecond;
  // Bounds how late a dead peer, a timeout or an abort is seen. The first sleeps are as long as the wait so far, since
  // most ranks begin to wait for a peer when it dies.
  static constexpr Nanoseconds kSleep = 4 * kMillisecond;

  void arm(std::uint64_t awaits) {
    seen_ = doorbell_.rings.load(std::memory_order_seq_cst);
    doorbell_.awaits.store(awaits_ = awaits, std::memory_order_seq_cst);
    if (!armed_) {
      doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
      armed_ = true;
      if (links_ != nullptr) links_->hand_over(true);
    }
    doorbell_.fence_ringers();
  }

  void disarm() {
    if (!armed_) return;
    doorbell_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    armed_ = false;
    if (links_ != nullptr) links_->take_over();
  }

  Doorbell& doorbell_;
  Links* const links_;
  const bool alone_;  // on this host
  const Patience patience_;
  int looks_ = 0, yields_ = 0;  // since the latest moved()
  bool armed_ = false;
  std::uint64_t awaits_ = 0;
  std::uint32_t seen_ = 0;
  Nanoseconds started_ = 0, idle_since_ = 0, next_check_ = 0, waited_ = 0;
  Standstill standstill_;
};

}  // namespace ringreduce
