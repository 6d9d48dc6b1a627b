// Whether this process was forked after a certain moment.
//
// A forked child has its parent's memory but none of its threads, and locks that those held stay held for ever. So in a
// child everything of a group of the parent is left alone: not used, not locked, not destroyed.
#pragma once

#include <pthread.h>

#include <atomic>

namespace ringreduce {

class ForkMark {
 public:
  ForkMark() : made_(count().load(std::memory_order_relaxed)) {}
  // Whether the process that made this object is another one, of which this one was forked.
  bool forked() const { return count().load(std::memory_order_relaxed) != made_; }

 private:
  // How many forks lead to this process since the first mark.
  static std::atomic<unsigned>& count() {
    static std::atomic<unsigned> forks{0};
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    return forks;
  }

  unsigned made_;
};

// The one T of this process. A forked child begins with a new one: its parent's may be locked for ever. Never
// destroyed, since groups may end later than statics.
template <class T>
T& process_wide() {
  static std::atomic<T*> current{new T};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current = new T; });
  (void)registered;
  return *current;
}

}  // namespace ringreduce
