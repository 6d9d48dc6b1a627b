// Where the ranks of a group that live in one process meet on the host. The last rank to arrive does the work for all
// of them. That work must not run while one of these ranks waits on a GPU for another.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/shared_memory.h"
#include "engine/engine.h"

namespace ringreduce {

class Meeting {
 public:
  explicit Meeting(std::vector<int> ranks) : ranks_(std::move(ranks)) {}

  const std::vector<int>& ranks() const { return ranks_; }

  // A call that ranks make.
  struct Call {
    std::string title;
    std::uint64_t number, fingerprint;
    Nanoseconds timeout;
  };

  // Breaks the group, and throws, if another rank has made another call of this number.
  void compare(Engine& engine, const Call& call);

  // Returns when all ranks have come, and the last one has called the `part` of each, in the order of ranks, and then
  // its own `last`. Parts must not throw; what `last` throws is for the last one. Throws what `engine`, that of the
  // calling rank, has broken with.
  using Action = std::function<void()>;
  void meet(Engine& engine, const Call& call, const Action& part, const Action& last = [] {});

 private:
  void wait_for_others(Engine& engine, std::unique_lock<std::mutex>& lock, const Call& call);

  const std::vector<int> ranks_;
  std::mutex mutex_;
  std::condition_variable met_;
  std::map<int, const Action*> parts_;  // of those who have come
  std::uint64_t meetings_ = 0;
  struct Made {
    std::uint64_t fingerprint;
    int rank;  // that made it first
    std::size_t ranks;
  };
  std::map<std::uint64_t, Made> made_;  // calls that some ranks have made, and some have not
};

// The ranks of this process, of a group whose ranks have the regions `handles`, for which `is` is true.
template <class Is>
std::vector<int> ranks_here(const std::vector<cuda::Handle>& handles, int rank, Is is) {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < handles.size(); ++r)
    if (handles[r].process == handles[static_cast<std::size_t>(rank)].process && is(handles[r]))
      ranks.push_back(static_cast<int>(r));
  return ranks;
}

// Returns the object that `ranks` share: one T(arguments..., ranks) for all of them, which lives while any keeps it.
template <class T, class... Arguments>
std::shared_ptr<T> in_common(const std::vector<cuda::Handle>& handles, std::vector<int> ranks,
                             const Arguments&... arguments) {
  struct All {
    std::mutex mutex;
    std::map<std::string, std::weak_ptr<T>> by_regions;
  };
  static All& all = *new All;  // never destroyed: groups may end later than statics
  std::string key;
  for (const int r : ranks)
    key += std::to_string(r) + ":" + std::to_string(handles[static_cast<std::size_t>(r)].pointer) + " ";
  std::lock_guard lock(all.mutex);
  std::erase_if(all.by_regions, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<T>& known = all.by_regions[key];
  auto common = known.lock();
  if (common == nullptr) known = common = std::make_shared<T>(arguments..., std::move(ranks));
  return common;
}

}  // namespace ringreduce
