// What the stand-in's streams do: operations, on threads of the host.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace stand_in {

using Operation = std::function<void()>;
using Clock = std::chrono::steady_clock;

// Something that happens once.
class Moment {
 public:
  void happen() {
    std::lock_guard lock(mutex_);
    when_ = Clock::now();
    happened_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return happened_; });
  }
  bool happened() {
    std::lock_guard lock(mutex_);
    return happened_;
  }
  Clock::time_point when() {
    std::lock_guard lock(mutex_);
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
  Clock::time_point when_;
};

// A thread that does what is queued, until it is told to end and has done all.
class Worker {
 public:
  Worker() : queue_(std::make_shared<Queue>()) {
    std::thread([queue = queue_] {
      std::unique_lock lock(queue->mutex);
      for (;;) {
        queue->changed.wait(lock, [&] { return queue->ending || !queue->operations.empty(); });
        if (queue->operations.empty()) return;
        const Operation operation = std::move(queue->operations.front());
        lock.unlock();
        operation();
        lock.lock();
        queue->operations.pop_front();
        queue->changed.notify_all();
      }
    }).detach();
  }
  ~Worker() {
    std::lock_guard lock(queue_->mutex);
    queue_->ending = true;
    queue_->changed.notify_all();
  }
  void push(Operation operation) {
    std::lock_guard lock(queue_->mutex);
    queue_->operations.push_back(std::move(operation));
    queue_->changed.notify_all();
  }
  bool idle() { return pending() == 0; }
  // Operations that are not done.
  std::size_t pending() {
    std::lock_guard lock(queue_->mutex);
    return queue_->operations.size();
  }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Operation> operations;
    bool ending = false;
  };
  std::shared_ptr<Queue> queue_;
};

// Lets a number of blocks run at once.
class Slots {
 public:
  explicit Slots(std::size_t free) : free_(free) {}
  void take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return free_ > 0; });
    free_--;
  }
  void give_back() {
    std::lock_guard lock(mutex_);
    free_++;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t free_;
};

struct Node {
  Operation operation;
  std::vector<std::size_t> after;  // indices of earlier nodes
};

struct Graph {
  std::vector<Node> nodes;

  void run() const {
    std::deque<Moment> done(nodes.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < nodes.size(); i++)
      threads.emplace_back([&, i] {
        for (const std::size_t earlier : nodes[i].after) done[earlier].wait();
        nodes[i].operation();
        done[i].happen();
      });
    for (std::thread& thread : threads) thread.join();
  }

  bool comes_after(const std::vector<std::size_t>& ends, std::size_t node) const {
    return std::any_of(ends.begin(), ends.end(), [&](std::size_t end) {
      return end == node || (end > node && comes_after(nodes[end].after, node));
    });
  }
};

}  // namespace stand_in
