// How a thread waits for others: it looks again and again, then yields its core, then sleeps on a doorbell. The engine,
// messages, barriers, a parameter server's workers and its own thread wait by this class, and how long they do what is
// decided here.
//
// How often it looks depends on whether the others have cores of their own. How often it yields depends on how many
// threads share a core: the kernel may give a yielded core back to the same thread, or to another that waits as well,
// and then the one that all wait for runs a scheduler tick later. A thread that sleeps is out of the way. Where other
// work shares the cores, what a yield or a sleep costs depends on the slices in which the kernel hands them out. Every
// kCheckEvery of waiting, and after every sleep, the owner's `check` looks for what makes further waiting pointless,
// and throws. Before a check that may call Python, the thread hands over its duties, as it does before it sleeps.
#pragma once

#include <sched.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <utility>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/doorbell.h"
#include "core/interrupt.h"
#include "core/threads.h"

namespace ringreduce {

// For how long a waiting thread keeps its core.
struct Patience {
  int looks = 50;        // before it yields its core to other threads
  int yields = INT_MAX;  // before it sleeps, which it does after `yield_for` in any case
  Nanoseconds yield_for = kMillisecond;
  bool keeps_core = false;  // it looks on where it would yield
  // How long it sleeps at a time: as long as it has waited so far, since most threads begin to wait for a peer when it
  // dies, but within these bounds. The second one bounds how late a dead peer, a timeout or an abort is seen.
  Nanoseconds least_sleep = kMillisecond, most_sleep = 4 * kMillisecond;
};

// Of workers that wait for a server, and of a server's own thread: neither knows how many threads share its core.
inline constexpr Patience kServersPatience{
    .looks = 100, .yields = 50, .least_sleep = 10 * kMillisecond, .most_sleep = 10 * kMillisecond};

// What a thread does while it waits. All of it is in the waiting thread.
class WaitingDuties {
 public:
  // Moves what others of this process need moved, such as bytes between hosts; returns whether anything did. Called at
  // each look. Never blocks.
  virtual bool progress() = 0;
  // Somebody else begins to do that for this thread, which has done so until now, and goes to sleep if it `sleeps`; or
  // this thread does it again.
  virtual void hand_over(bool sleeps) = 0;
  virtual void take_over() = 0;
  // Yields the core in a wait that has become long: here it may also sleep, for a millisecond at most, until progress()
  // has something to do.
  virtual void rest() = 0;

 protected:
  ~WaitingDuties() = default;
};

// A lock that a call holds while its waits are short: Python's. To release it and to take it back again takes as long
// as a small call between two ranks waits (70 ns of 0.8 us, 2-core EPYC, 2026-11-30).
class HeldLock {
 public:
  virtual void release() = 0;

 protected:
  ~HeldLock() = default;
};

// One thread's waiting, for the length of one call.
class Waiting {
 public:
  // `duties` and `held` may be null.
  Waiting(Doorbell& doorbell, const Patience& patience, WaitingDuties* duties, HeldLock* held = nullptr)
      : doorbell_(doorbell), patience_(patience), duties_(duties), held_(held) {
    if (duties_ != nullptr) duties_->take_over();
  }
  ~Waiting() {
    disarm();
    if (duties_ != nullptr) duties_->hand_over(false);
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

  // How long this thread had nothing to do, up to the latest moved(). Waits that ended before it yielded are not
  // counted: to look at the clock would take as long as they do.
  Nanoseconds waited() const { return waited_; }

  // Nothing moved. Waits a little, after which the caller must look again. `awaits`: the ranks that could end the wait,
  // as awaits_rank() has them. `check(waited, may_call_python)` is called now and then: with the time since the first
  // wait of this call, not counting time in which this process was frozen; it may call Python every kLookForCtrlC, as
  // that may take long. `patience` may be another each time, and may be changed by the duties' progress().
  template <class Check>
  void idle(std::uint64_t awaits, Check&& check, const Patience& patience) {
    if (duties_ != nullptr && duties_->progress()) return moved();
    if (!armed_ && looks_ < patience.looks) {
      ++looks_;
      if (held_ != nullptr && ++looks_with_lock_ == kMostLooksWithLock) release();
      return cpu_relax();
    }
    const Nanoseconds t = now();
    if (started_ == 0) {
      started_ = t;
      next_check_ = t + kCheckEvery;  // most waits are over by then
      next_python_ = t + kLookForCtrlC;
    }
    if (idle_since_ == 0) {
      idle_since_ = t;
      release();
      take_short_slices();
    }
    started_ += standstill_.before(t);
    if (t >= next_check_) {
      const bool may_call_python = t >= next_python_, lets_go = may_call_python && !armed_;
      if (lets_go) arm(awaits);
      check(t - started_, may_call_python);
      if (lets_go) disarm();
      next_check_ = t + kCheckEvery;
      if (may_call_python) next_python_ = now() + kLookForCtrlC;
      standstill_.restart(now());
    }
    if (!armed_ && yields_ < patience.yields && t - idle_since_ < patience.yield_for) {
      ++yields_;
      if (duties_ != nullptr && t - idle_since_ > kRestAfter)
        duties_->rest();
      else if (patience.keeps_core)
        cpu_relax();
      else
        sched_yield();
    } else if (!armed_ || awaits != awaits_) {
      arm(awaits);  // only announces the sleep: the caller looks once more before it happens
    } else {
      sleep_on(doorbell_.rings, seen_, std::min(std::max(t - idle_since_, patience.least_sleep), patience.most_sleep));
      seen_ = doorbell_.rings.load(std::memory_order_seq_cst);
    }
  }
  template <class Check>
  void idle(std::uint64_t awaits, Check&& check) {
    idle(awaits, check, patience_);
  }

 private:
  static constexpr Nanoseconds kCheckEvery = kMillisecond;
  static constexpr Nanoseconds kRestAfter = 100 * kMicrosecond;
  static constexpr int kMostLooksWithLock = 1000;  // of a call, some 40 us

  void release() {
    if (held_ != nullptr) std::exchange(held_, nullptr)->release();
  }

  void arm(std::uint64_t awaits) {
    seen_ = doorbell_.rings.load(std::memory_order_seq_cst);
    doorbell_.awaits.store(awaits_ = awaits, std::memory_order_seq_cst);
    if (!armed_) {
      doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
      armed_ = true;
      if (duties_ != nullptr) duties_->hand_over(true);
    }
    doorbell_.fence_ringers();
  }

  void disarm() {
    if (!armed_) return;
    doorbell_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    armed_ = false;
    if (duties_ != nullptr) duties_->take_over();
  }

  Doorbell& doorbell_;
  const Patience patience_;
  WaitingDuties* const duties_;
  HeldLock* held_;
  int looks_ = 0, yields_ = 0;  // since the latest moved()
  int looks_with_lock_ = 0;
  bool armed_ = false;
  std::uint64_t awaits_ = 0;
  std::uint32_t seen_ = 0;
  Nanoseconds started_ = 0, idle_since_ = 0, next_check_ = 0, next_python_ = 0, waited_ = 0;
  Standstill standstill_;
};

}  // namespace ringreduce
