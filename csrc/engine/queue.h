// Brings the calls of a group into one order: one at a time, in the order they were made.
//
// A synchronous call runs in its caller's thread if nothing is before it, without any hand-over. Everything else goes
// through the progress thread, which starts with the first asynchronous call.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace ringreduce {

class CallQueue {
 public:
  ~CallQueue() { stop(); }

  // Runs `call` after all calls before it; returns, or throws what it throws, when it has ended.
  template <class F>
  void run(F&& call) {
    std::unique_lock lock(mutex_);
    const std::size_t turn = last_turn_++;
    turn_came_.wait(lock, [&] { return turn == next_turn_; });
    lock.unlock();
    const EndTurn end{*this};
    call();
  }

  // Runs `call` in the progress thread after all calls before it. It must not throw.
  void post(std::function<void()> call) {
    {
      std::lock_guard lock(mutex_);
      posted_.push_back({last_turn_++, std::move(call)});
      if (!thread_.joinable()) thread_ = std::thread([this] { drive(); });
    }
    turn_came_.notify_all();
  }

  // Whether any call runs or waits.
  bool busy() {
    std::lock_guard lock(mutex_);
    return next_turn_ != last_turn_;
  }

  // Waits for the calls already posted, and ends the thread.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    turn_came_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Posted {
    std::size_t turn;
    std::function<void()> call;
  };
  struct EndTurn {
    CallQueue& queue;
    ~EndTurn() {
      bool others = false;
      {
        std::lock_guard lock(queue.mutex_);
        ++queue.next_turn_;
        others = queue.next_turn_ != queue.last_turn_;
      }
      if (others) queue.turn_came_.notify_all();
    }
  };

  void drive() {
    std::unique_lock lock(mutex_);
    while (true) {
      turn_came_.wait(lock, [&] { return posted_.empty() ? stopping_ : posted_.front().turn == next_turn_; });
      if (posted_.empty()) return;
      std::function<void()> call = std::move(posted_.front().call);
      posted_.pop_front();
      lock.unlock();
      {
        const EndTurn end{*this};
        call();
        call = nullptr;  // let go of the tensors before the turn ends
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable turn_came_;
  std::deque<Posted> posted_;
  std::size_t last_turn_ = 0, next_turn_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ringreduce
