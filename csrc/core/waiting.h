// How a thread waits for others: it looks again and again, then yields its core, then sleeps on a doorbell. All threads
// of ringreduce that wait do it by this class, and how long they do what is decided here.
//
// How often it looks depends on whether the others have cores of their own. How often it yields depends on how many
// threads share a core: the kernel may give a yielded core back to the same thread, or to another that waits as well,
// and then the one that all wait for runs a scheduler tick later. A thread that sleeps is out of the way. Every
// kCheckEvery of waiting, and after every sleep, the owner's `check` looks for what makes further waiting pointless,
// and throws.
#pragma once

#include <sched.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/doorbell.h"

namespace ringreduce {

// For how long a waiting thread keeps its core, and how long it sleeps at most.
struct Patience {
  int looks = 50;        // before it yields its core to other threads
  int yields = INT_MAX;  // before it sleeps; after a millisecond it sleeps in any case
  // Bounds how late a dead peer, a timeout or an abort is seen. Less than a second, see Standstill.
  Nanoseconds sleep = 4 * kMillisecond;
};

// What a thread does and holds while it waits. All of it is in the waiting thread.
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
  virtual void rest() { sched_yield(); }
  // Lets go of what the thread holds, such as a lock, while it yields, checks or sleeps.
  virtual void let_go() {}
  virtual void take_again() {}

 protected:
  ~WaitingDuties() = default;
};

// One thread's waiting, for the length of one call.
class Waiting {
 public:
  // `duties`: may be null.
  Waiting(Doorbell& doorbell, const Patience& patience, WaitingDuties* duties)
      : doorbell_(doorbell), patience_(patience), duties_(duties) {
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
  // as awaits_rank() has them. `check(waited)` is called now and then with the time since the first wait of this call,
  // not counting time in which this process was frozen. `patience` may be another each time.
  template <class Check>
  void idle(std::uint64_t awaits, Check&& check, const Patience& patience) {
    if (stays_awake(check, patience)) return;
    const LetGo let_go(duties_);
    if (!armed_ || awaits != awaits_) {
      arm(awaits);  // only announces the sleep: the caller looks once more before it happens
    } else {
      sleep_on(doorbell_.rings, seen_, std::min(std::max(looked_ - idle_since_, kYieldFor), patience.sleep));
      seen_ = doorbell_.rings.load(std::memory_order_seq_cst);
    }
  }
  template <class Check>
  void idle(std::uint64_t awaits, Check&& check) {
    idle(awaits, check, patience_);
  }

  // As idle(), for who sleeps in another way: returns false, having waited for nothing, when it is time to.
  template <class Check>
  bool stays_awake(Check&& check, const Patience& patience) {
    if (duties_ != nullptr && duties_->progress()) {
      moved();
      return true;
    }
    if (!armed_ && looks_ < patience.looks) {
      ++looks_;
      cpu_relax();
      return true;
    }
    const LetGo let_go(duties_);
    looked_ = now();
    if (started_ == 0) {
      started_ = looked_;
      next_check_ = looked_ + kCheckEvery;  // most waits are over by then
    }
    if (idle_since_ == 0) idle_since_ = looked_;
    started_ += standstill_.before(looked_);
    if (looked_ >= next_check_) {
      check(looked_ - started_);
      next_check_ = looked_ + kCheckEvery;
      standstill_.restart(now());
    }
    if (armed_ || yields_ >= patience.yields || looked_ - idle_since_ >= kYieldFor) return false;
    ++yields_;
    if (duties_ != nullptr && looked_ - idle_since_ > kRestAfter)
      duties_->rest();
    else
      sched_yield();
    return true;
  }

 private:
  static constexpr Nanoseconds kYieldFor = kMillisecond;
  static constexpr Nanoseconds kCheckEvery = kMillisecond;
  static constexpr Nanoseconds kRestAfter = 100 * kMicrosecond;

  // Of what the thread holds.
  class LetGo {
   public:
    explicit LetGo(WaitingDuties* of) : of_(of) {
      if (of_ != nullptr) of_->let_go();
    }
    ~LetGo() {
      if (of_ != nullptr) of_->take_again();
    }
    LetGo(const LetGo&) = delete;
    LetGo& operator=(const LetGo&) = delete;

   private:
    WaitingDuties* const of_;
  };

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
  int looks_ = 0, yields_ = 0;  // since the latest moved()
  bool armed_ = false;
  std::uint64_t awaits_ = 0;
  std::uint32_t seen_ = 0;
  Nanoseconds started_ = 0, idle_since_ = 0, looked_ = 0, next_check_ = 0, waited_ = 0;
  Standstill standstill_;
};

}  // namespace ringreduce
