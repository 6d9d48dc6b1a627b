#include "transport/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "core/error.h"

namespace ringreduce {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

Arena::Arena(std::shared_ptr<const Segment> segment) : segment_(std::move(segment)) {
  if (segment_->geometry().arena_bytes > 0) gaps_[0] = segment_->geometry().arena_bytes;
}

std::byte* Arena::allocate(std::size_t bytes) {
  const std::size_t wanted = (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  std::lock_guard lock(mutex_);
  const auto gap = std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& g) { return g.second >= wanted; });
  if (gap == gaps_.end())
    throw Error(ErrorKind::system, "no " + std::to_string(bytes) + " bytes in one piece are left of the arena's " +
                                       std::to_string(segment_->geometry().arena_bytes) +
                                       "; free shared tensors, or set RINGREDUCE_ARENA_BYTES higher");
  const auto [offset, size] = *gap;
  gaps_.erase(gap);
  if (size > wanted) gaps_[offset + wanted] = size - wanted;
  used_[offset] = wanted;
  return segment_->arena(segment_->rank()) + offset;
}

void Arena::release(std::byte* piece) noexcept {
  if (fork_.forked()) return;
  std::lock_guard lock(mutex_);
  auto offset = static_cast<std::size_t>(piece - segment_->arena(segment_->rank()));
  std::size_t bytes = used_.extract(offset).mapped();
  // Memory that was withdrawn (Segment::withdraw) is no longer the segment's.
  if (madvise(piece, bytes, MADV_REMOVE) != 0) madvise(piece, bytes, MADV_DONTNEED);
  // Join it with the gaps on both sides.
  const auto after = gaps_.find(offset + bytes);
  if (after != gaps_.end()) {
    bytes += after->second;
    gaps_.erase(after);
  }
  const auto next = gaps_.lower_bound(offset);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
    }
  }
  gaps_[offset] = bytes;
}

}  // namespace ringreduce
