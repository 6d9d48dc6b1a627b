// Threads that run what users hang on the end of a call (futures and their callbacks).
//
// A callback may itself start a call and wait for it, whose end is then reported here too. So a thread is added
// whenever none is free; normally there is one.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ringreduce {

class Completions {
 public:
  ~Completions() { stop(); }

  // Runs `callback`, which must not throw, in another thread. After stop() it runs in this one.
  void post(std::function<void()> callback) {
    {
      std::lock_guard lock(mutex_);
      if (!stopping_) {
        posted_.push_back(std::move(callback));
        if (posted_.size() > free_) threads_.emplace_back([this] { drive(); });
        callback = nullptr;
      }
    }
    if (callback) return callback();
    came_.notify_one();
  }

  // Returns when no callback runs or waits. Not to be called by a callback.
  void drain() {
    std::unique_lock lock(mutex_);
    rested_.wait(lock, [&] { return posted_.empty() && free_ == threads_.size(); });
  }

  // Waits for all callbacks posted, and ends the threads.
  void stop() {
    std::vector<std::thread> ending;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      ending.swap(threads_);
    }
    came_.notify_all();
    for (std::thread& thread : ending) thread.join();
  }

 private:
  void drive() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++free_;
      rested_.notify_all();
      came_.wait(lock, [&] { return stopping_ || !posted_.empty(); });
      --free_;
      if (posted_.empty()) return;
      std::function<void()> callback = std::move(posted_.front());
      posted_.pop_front();
      lock.unlock();
      callback();
      callback = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_, rested_;
  std::deque<std::function<void()>> posted_;
  std::size_t free_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ringreduce
