// Memory for tensors that peers read where they are: this rank's arena in the segment, handed out piece by piece.
//
// The arena is address space; only what is written takes memory, and what is released gives it back.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "core/fork.h"
#include "transport/segment.h"

namespace ringreduce {

// Thread-safe. Lives, and keeps the segment mapped, as long as any of its pieces is in use.
class Arena {
 public:
  explicit Arena(std::shared_ptr<const Segment> segment);

  // At least `bytes` bytes, aligned to a page; zero unless they were used before. Throws Error(system) if no gap is
  // large enough.
  std::byte* allocate(std::size_t bytes);
  // Takes back what allocate() returned. In a forked child it does nothing: the memory is the parent's.
  void release(std::byte* piece) noexcept;

 private:
  const std::shared_ptr<const Segment> segment_;
  const ForkMark fork_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> gaps_, used_;  // offset -> bytes
};

}  // namespace ringreduce
