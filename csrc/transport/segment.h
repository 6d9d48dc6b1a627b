// The memory that ranks of a host share: a memfd with the team's error and a region for each rank (region.h). Nothing
// here is named in a file system: when the last process closes its descriptor, the memory is gone.
#pragma once

#include <cstddef>

#include "core/file_descriptor.h"
#include "transport/fate.h"
#include "transport/region.h"

namespace ringreduce {

class Segment {
 public:
  static constexpr std::size_t kHeaderBytes = round_up(sizeof(AbortRecord), kPage);

  // Maps `memfd`, of geometry.segment_bytes() zero bytes.
  Segment(const FileDescriptor& memfd, const Geometry& geometry);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const Layout& layout() const { return layout_; }
  AbortRecord& abort_record() const { return *reinterpret_cast<AbortRecord*>(base_); }
  Region region(int rank) const {
    return {base_ + kHeaderBytes + layout_.region_bytes * static_cast<std::size_t>(rank), layout_};
  }

 private:
  const Layout layout_;
  const std::size_t bytes_;
  std::byte* base_;
};

}  // namespace ringreduce
