// Error feedback: what rounding has cut off the values that this rank has sent to other hosts, to be added to what it
// sends the next time. So nothing is lost, only late (Seide et al. 2014; Karimireddy et al. 2019).
//
// A rank rounds an element at most once a call: as a partial sum that leaves the host, or as the result that it
// completes. The rests of a call have a place for each element that this rank rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace ringreduce {

// Of one tensor's calls. Of calls that run at the same time, all but one find no rests, and the last one's stay.
class Feedback {
 public:
  // The rests, a float32 for each of the `count` elements that are rounded: those of the latest call if that had this
  // `key` too, else 0. The caller has them for itself until put().
  std::vector<float> take(std::uint64_t key, std::size_t count) {
    std::vector<float> rests;
    const std::lock_guard lock(mutex_);
    rests.swap(rests_);
    if (key != key_ || count != rests.size()) rests.assign(count, 0);
    return rests;
  }
  void put(std::uint64_t key, std::vector<float> rests) {
    const std::lock_guard lock(mutex_);
    key_ = key;
    rests_ = std::move(rests);
  }
  void reset() { put(0, {}); }
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return rests_.size() * sizeof(float);
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t key_ = 0;
  std::vector<float> rests_;
};

}  // namespace ringreduce
