// Error feedback: what rounding has cut off the values that this rank has sent to other hosts, to be added to what it
// sends the next time. So nothing is lost, only late (Seide et al. 2014; Karimireddy et al. 2019).
//
// A rank rounds an element at most once a call: as a partial sum that leaves the host, or as the result that it
// completes. So the rests of a call have one place for each element of its tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringreduce {

// Of one tensor's calls, which must not run at the same time.
class Feedback {
 public:
  // The rests, a float32 for each of `count` elements: those of the latest call if that had this `key` too, else 0.
  std::byte* rests(std::uint64_t key, std::size_t count) {
    if (key != key_ || count != rests_.size()) rests_.assign(count, 0);
    key_ = key;
    return reinterpret_cast<std::byte*>(rests_.data());
  }
  void reset() { rests_ = {}; }
  std::size_t bytes() const { return rests_.size() * sizeof(float); }

 private:
  std::uint64_t key_ = 0;
  std::vector<float> rests_;
};

}  // namespace ringreduce
