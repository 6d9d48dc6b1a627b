// Turns at an object, for one thread at a time: a thread of the object's own or, while it waits, a thread of the same
// process. Then no other thread has to wake up between a request and its reply. Whoever takes a turn has the object for
// itself, so there are no locks inside. Calls of all other threads are queued until the next turn (order()). The queue
// needs no memory, so that a thread can end or undo by one call what it has begun by another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/fork.h"
#include "core/no_calls.h"
#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

struct Servers {
  static constexpr char kWhy[] =
      "a function that a server calls, such as an update function, may not use the parameter server, since the server "
      "waits for its end: use what the function is given, or ask in the thread that pushes";
};
// Lives in a turn while it calls Python. Its thread would wait for the turn's end.
using NoQuestions = NoCallsOf<Servers>;

class Turns {
 public:
  Turns();
  // stop() must have been called.
  virtual ~Turns();

  int bell() const { return bell_fd_.get(); }
  Bell& bell_words() const { return *reinterpret_cast<Bell*>(bell_memory_.at()); }

  // Has a turn call `body`, and waits for that. Returns what it returns, and throws what it throws, or Error(aborted)
  // after stop(). Throws Error(invalid_argument) where there is a NoQuestions.
  template <class F>
  auto order(F&& body);
  // Ends the thread. Idempotent; every caller returns after the thread has ended.
  void stop();

  // Lets a waiting thread of this process take turns, as long as no other thread does.
  class Guest {
   public:
    explicit Guest(Turns* of) : of_(of) {}  // nullptr: there is nothing to take turns at
    ~Guest() { leave(); }
    Guest(const Guest&) = delete;
    Guest& operator=(const Guest&) = delete;

    // Takes a turn if it can; returns whether there was something to do. What calls Python is left to the object's own
    // thread, since it may outlast the timeout of the wait.
    bool take();
    // Lets others take turns. Called before the thread sleeps.
    void leave();

   private:
    Turns* const of_;
    bool holds_ = false, waits_ = false;
  };

 protected:
  // The thread sleeps no longer, so that it notices processes that have ended.
  static constexpr Nanoseconds kLookEvery = 20 * kMillisecond;

  void start();  // the thread

  // This thread takes turns from now on, or no longer.
  virtual void begin_turns() = 0;
  virtual void end_turns() = 0;
  // Returns whether there was something to do. Throws nothing. `left_for_thread` is set if something was left since
  // Python may not be called.
  virtual bool turn(bool may_call_python) = 0;
  // How long until a turn is due.
  virtual Nanoseconds due_in() const = 0;
  // Whether the thread polls for a while before it sleeps, and how long it sleeps at most.
  virtual bool polls() const = 0;
  virtual Nanoseconds most_sleep() const = 0;
  // Called after each order, before its caller goes on.
  virtual void show() = 0;
  // Called last, by the thread.
  virtual void close() = 0;

  bool serve_orders();
  bool has_orders() const { return has_orders_; }
  bool stopping() const { return stopping_; }
  // Has the thread end after this turn.
  void end_thread() { stopping_ = true; }

  std::atomic<bool> left_for_thread_ = false;
  const ForkMark fork_;

 private:
  // A call of order(), in its caller's frame.
  struct Order {
    const std::function<void()> carry_out;
    Order* next = nullptr;
  };

  void run();
  struct Own;

  const FileDescriptor bell_fd_;
  const Mapping bell_memory_;
  std::mutex turning_;            // held by the thread that takes turns
  std::atomic<int> waiting_ = 0;  // threads that would like to take turns

  std::mutex mutex_;  // guards stopped_ and the list of orders
  std::condition_variable served_;
  Order *first_order_ = nullptr, *last_order_ = nullptr;
  std::atomic<bool> has_orders_ = false;
  std::atomic<bool> stopping_ = false;
  bool stopped_ = false;
  std::mutex ending_;  // held in stop(), which several threads may call
  std::thread thread_;
};

template <class F>
auto Turns::order(F&& body) {
  if constexpr (!std::is_void_v<std::invoke_result_t<F>>) {
    std::optional<std::invoke_result_t<F>> result;
    order([&] { result.emplace(body()); });
    return std::move(*result);
  }
  NoQuestions::check();
  std::exception_ptr failed;
  bool done = false;
  const auto carry_out = [&] {
    try {
      body();
    } catch (...) {
      failed = std::current_exception();
    }
    show();
    const std::lock_guard relock(mutex_);
    done = true;
    served_.notify_all();
  };
  Order own{std::cref(carry_out)};
  std::unique_lock lock(mutex_);
  if (stopping_) throw Error(ErrorKind::aborted, "the server has been stopped");
  (first_order_ == nullptr ? first_order_ : last_order_->next) = &own;
  last_order_ = &own;
  has_orders_ = true;
  bell_words().ring();
  served_.wait(lock, [&] { return done || stopped_; });
  if (!done) throw Error(ErrorKind::aborted, "the server has been stopped");
  if (failed) std::rethrow_exception(failed);
}

}  // namespace ringreduce::parameter_server
