// Brings the calls of a group into one order: one at a time, in the order they were made.
//
// A synchronous call runs in its caller's thread if nothing is before it, without any hand-over. Everything else goes
// through the progress thread, which starts with the first asynchronous call, unless a thread that waits for the call
// takes it first: see help().
//
// Calls that two threads make at once come in an order that other ranks cannot know, who may have paired the wrong ones
// by then. So a call that begins while another thread runs one, or waits to, is the end of them all, if `misused` is
// given: it gets the error that the call throws.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/threads.h"

namespace ringreduce {

class CallQueue {
 public:
  using Misused = std::function<void(const Error&)>;
  // `interrupt`: ends the calls, after Ctrl-C in a thread that waits for its turn.
  explicit CallQueue(Misused misused = nullptr, std::function<void()> interrupt = nullptr)
      : misused_(std::move(misused)), interrupt_(std::move(interrupt)) {}
  ~CallQueue() { stop(); }

  // A call's turn in its caller's thread: after all calls before it, until this object goes.
  class Turn {
   public:
    explicit Turn(CallQueue& queue) : queue_(queue) {
      std::lock_guard lock(queue.mutex_);
      queue.throw_if_refused();
      queue.caller_ = std::this_thread::get_id();
      number_ = queue.last_turn_++;
      came_ = number_ == queue.next_turn_;
    }
    ~Turn() {
      await();
      queue_.end_turn(true);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    bool came() const { return came_; }
    void await() {
      if (came_) return;
      std::unique_lock lock(queue_.mutex_);
      const auto its_turn = [&] { return number_ == queue_.next_turn_; };
      while (!queue_.turn_came_.wait_for(lock, std::chrono::nanoseconds(kLookForCtrlC), its_turn)) {
        lock.unlock();
        if (queue_.interrupt_ && ctrl_c_came()) queue_.interrupt_();
        lock.lock();
      }
      came_ = true;
    }

   private:
    CallQueue& queue_;
    std::size_t number_ = 0;
    bool came_ = false;
  };

  // Runs `call` after all calls before it; returns, or throws what it throws, when it has ended.
  template <class F>
  void run(F&& call) {
    Turn turn(*this);
    turn.await();
    call();
  }

  // Runs `call` in the progress thread after all calls before it, and then, when the next may begin, `done`. Neither
  // may throw, and `done` must be short. Returns the call's turn.
  std::size_t post(std::function<void()> call, std::function<void()> done) {
    std::size_t turn = 0;
    {
      std::lock_guard lock(mutex_);
      throw_if_refused();
      if (!thread_.joinable()) thread_ = start_thread([this] { drive(); });
      posted_.push_back({last_turn_, std::move(call), std::move(done)});
      turn = last_turn_++;
      ++not_done_;
    }
    posted_came_.notify_one();
    return turn;
  }

  // Runs posted calls up to that of `turn` in this thread, as long as no other thread is running one.
  void help(std::size_t turn) {
    std::unique_lock lock(mutex_);
    while (next_is_posted() && next_turn_ <= turn) run_next(lock);
  }

  // Whether any call runs or waits.
  bool busy() {
    std::lock_guard lock(mutex_);
    return next_turn_ != last_turn_;
  }

  // Returns when no call runs or waits, and what follows the posted ones is done too.
  void drain() {
    std::unique_lock lock(mutex_);
    turn_came_.wait(lock, [&] { return not_done_ == 0 && next_turn_ == last_turn_; });
  }

  // Waits for the calls already posted, and ends the thread. Later calls throw aborted.
  void stop() {
    std::thread ending;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      ending.swap(thread_);
    }
    posted_came_.notify_one();
    if (ending.joinable()) ending.join();
    drain();  // of what other threads run
  }

 private:
  struct Posted {
    std::size_t turn;
    std::function<void()> call, done;
  };
  void end_turn(bool of_caller) {
    bool for_thread = false;
    {
      std::lock_guard lock(mutex_);
      if (of_caller) caller_ = std::thread::id();
      ++next_turn_;
      for_thread = next_is_posted() || stopping_;
    }
    turn_came_.notify_all();
    if (for_thread) posted_came_.notify_one();
  }

  void throw_if_refused() const {
    if (stopping_) throw Error(ErrorKind::aborted, "the group has been shut down");
    if (!misused_ || caller_ == std::thread::id()) return;
    const auto shown = [](std::thread::id id) {  // as threading.get_ident() has it
      std::ostringstream text;
      text << id;
      return text.str();
    };
    const Error error(ErrorKind::mismatch,
                      "thread " + shown(std::this_thread::get_id()) + " makes a call of the group while thread " +
                          shown(caller_) +
                          " is in another one. Other ranks cannot know the order of the two, and may have paired the "
                          "wrong ones: make calls of a group from one thread at a time, or a group for each thread");
    misused_(error);
    throw error;
  }

  void drive() {
    std::unique_lock lock(mutex_);
    while (true) {
      posted_came_.wait(lock, [&] { return posted_.empty() ? stopping_ : next_is_posted(); });
      if (posted_.empty()) return;
      run_next(lock);
    }
  }

  bool next_is_posted() const { return !posted_.empty() && posted_.front().turn == next_turn_; }

  void run_next(std::unique_lock<std::mutex>& lock) {
    Posted next = std::move(posted_.front());
    posted_.pop_front();
    lock.unlock();
    next.call();
    end_turn(false);
    next.done();
    next = {};  // lets go of the tensors without the lock
    lock.lock();
    --not_done_;
    turn_came_.notify_all();
  }

  const Misused misused_;
  const std::function<void()> interrupt_;
  std::mutex mutex_;
  std::thread::id caller_;               // of the call that runs, or waits to, in its caller's thread; else none
  std::condition_variable turn_came_;    // for those who run their call themselves, and for drain()
  std::condition_variable posted_came_;  // for the thread, which synchronous calls must not wake
  std::deque<Posted> posted_;
  std::size_t last_turn_ = 0, next_turn_ = 0, not_done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ringreduce
