// Threads that run what users hang on the end of a call (futures and their callbacks).
//
// A callback may itself start a call and wait for it, whose end is then reported here too. So a thread is added
// whenever none is free; normally there is one.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/fork.h"
#include "core/threads.h"

namespace ringreduce {

class Completions {
 public:
  ~Completions() { stop(); }

  // Runs `given`, which must not throw, in another thread; in this one after stop(), or if no thread, or no memory for
  // handing it over, can be had.
  template <class F>
  void post(F given) {
    if (!hand_over(given)) given();
  }

  // Returns when no callback runs or waits. Not to be called by a callback.
  void drain() {
    std::unique_lock lock(shared_->mutex);
    shared_->rested.wait(lock, [&] { return shared_->posted.empty() && shared_->free == shared_->threads; });
  }

  // Waits for all callbacks posted, except one that calls this itself, and ends the threads.
  void stop() {
    const std::thread::id self = std::this_thread::get_id();
    std::vector<std::thread> ending;
    {
      std::lock_guard lock(shared_->mutex);
      shared_->stopping = true;
      ending.swap(threads_);
      const auto own =
          std::find_if(ending.begin(), ending.end(), [&](auto& thread) { return thread.get_id() == self; });
      if (own != ending.end()) {
        shared_->detached = self;
        Detached& detached = process_wide<Detached>();
        std::lock_guard detached_lock(detached.mutex);
        ++detached.threads;
        own->detach();
        ending.erase(own);
      }
    }
    shared_->came.notify_all();
    for (std::thread& thread : ending) thread.join();
  }

  // Waits, but not longer than `patience`, until no thread of this process is left that stop() could not wait for.
  static void wait_for_detached(Nanoseconds patience) {
    Detached& detached = process_wide<Detached>();
    std::unique_lock lock(detached.mutex);
    detached.ended.wait_for(lock, std::chrono::nanoseconds(patience), [&] { return detached.threads == 0; });
  }

 private:
  // Whether another thread will run it.
  template <class F>
  bool hand_over(const F& given) try {
    {
      std::lock_guard lock(shared_->mutex);
      if (shared_->stopping) return false;
      for (const std::thread::id id : std::exchange(shared_->ended, {})) {
        const auto ended = std::find_if(threads_.begin(), threads_.end(), [&](auto& t) { return t.get_id() == id; });
        ended->join();
        threads_.erase(ended);
      }
      if (shared_->posted.size() >= shared_->free) {
        threads_.reserve(threads_.size() + 1);  // a thread that has started must find its place
        threads_.push_back(start_thread([shared = shared_] { shared->drive(); }));
        ++shared_->threads;
      }
      shared_->posted.emplace_back(given);
    }
    shared_->came.notify_one();
    return true;
  } catch (const std::exception&) {
    return false;
  }

  struct Detached {
    std::mutex mutex;
    std::condition_variable ended;
    int threads = 0;
  };

  // The threads' common state. It outlives this object: a callback in one of the threads may drop the last reference to
  // the group.
  struct Shared {
    void drive() {
      const std::thread::id self = std::this_thread::get_id();
      std::unique_lock lock(mutex);
      while (true) {
        ++free;
        rested.notify_all();
        came.wait(lock, [&] { return stopping || !posted.empty(); });
        if (posted.empty()) break;
        --free;
        std::function<void()> callback = std::move(posted.front());
        posted.pop_front();
        lock.unlock();
        callback();
        callback = nullptr;
        lock.lock();
        if (free > 0 && !stopping) {  // one that waits is enough
          ended.push_back(self);
          --threads;
          rested.notify_all();
          return;
        }
      }
      --free;
      --threads;
      rested.notify_all();
      if (detached != self) return;
      Detached& all = process_wide<Detached>();
      std::lock_guard all_lock(all.mutex);
      --all.threads;
      all.ended.notify_all();
    }

    std::mutex mutex;
    std::condition_variable came, rested;
    std::deque<std::function<void()>> posted;
    std::size_t free = 0, threads = 0;
    bool stopping = false;
    std::vector<std::thread::id> ended;  // to be joined
    std::thread::id detached;            // the one in which stop() was called
  };

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<std::thread> threads_;  // guarded by the mutex too
};

}  // namespace ringreduce
