#include "transport/life_mark.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include "core/atomics.h"
#include "core/error.h"
#include "core/fork.h"
#include "core/threads.h"

namespace ringreduce {
namespace {

// The marks of this process. A forked child has none of its parent's.
class Marks {
 public:
  void add(LifeWord& word) {
    const std::lock_guard lock(mutex_);
    if (thread_.load(std::memory_order_relaxed) == 0) start();
    word.owner.store(thread_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
    word.next.store(first(marked_.size()), std::memory_order_seq_cst);
    marked_.push_back(&word);
    point_to_first();
  }

  void remove(LifeWord& word) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find(marked_.begin(), marked_.end(), &word);
    if (found == marked_.end()) return;
    const auto after = marked_.erase(found);
    if (after == marked_.end())
      point_to_first();
    else
      (*after)->next.store(first(static_cast<std::size_t>(after - marked_.begin())), std::memory_order_seq_cst);
    word.owner.store(0, std::memory_order_seq_cst);
  }

 private:
  // As the kernel has it. Every word points to the one that was marked before it, the oldest one to the head.
  struct Head {
    std::atomic<std::uint64_t> first;
    std::int64_t offset = offsetof(LifeWord, owner);
    std::uint64_t pending = 0;
  };
  static_assert(sizeof(Head) == sizeof(robust_list_head) && offsetof(LifeWord, next) == 0);

  void start() {
    point_to_first();
    start_thread([this] {
      syscall(SYS_set_robust_list, &head_, sizeof head_);
      thread_.store(static_cast<std::uint32_t>(gettid()), std::memory_order_seq_cst);
      wake_all_on(thread_);
      for (;;) pause();
    }).detach();
    while (thread_.load(std::memory_order_seq_cst) == 0) sleep_on(thread_, 0, kSecond);
  }

  // The value of the list word behind the first `count` marks: the address that it points to.
  std::uint64_t first(std::size_t count) const {
    return count == 0 ? reinterpret_cast<std::uint64_t>(&head_) : reinterpret_cast<std::uint64_t>(marked_[count - 1]);
  }
  void point_to_first() { head_.first.store(first(marked_.size()), std::memory_order_seq_cst); }

  std::mutex mutex_;
  std::atomic<std::uint32_t> thread_ = 0;
  Head head_;
  std::vector<LifeWord*> marked_;  // oldest first
};

}  // namespace

LifeMark::LifeMark(LifeWord& word) : word_(word) {
  try {
    process_wide<Marks>().add(word);
  } catch (const Error&) {  // no thread
  }
}

LifeMark::~LifeMark() { process_wide<Marks>().remove(word_); }

}  // namespace ringreduce
