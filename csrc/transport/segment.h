// The memory that ranks of a host share: a memfd with the team's error and a region for each rank (region.h). Nothing
// here is named in a file system: when the last process closes its descriptor, the memory is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/file_descriptor.h"
#include "transport/fate.h"
#include "transport/region.h"

namespace ringreduce {

class Segment {
 public:
  struct Header {
    AbortRecord abort;
    // 1: some rank could not access the memory of another any more, so nothing is lent from a process from now on.
    alignas(64) std::atomic<std::uint32_t> copies;
  };
  static constexpr std::size_t kHeaderBytes = round_up(sizeof(Header), kPage);

  // Maps `memfd`, of geometry.segment_bytes() zero bytes.
  Segment(const FileDescriptor& memfd, const Geometry& geometry);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // For a rank that has met the others and then cannot map what they share: they find the reason as the team's error.
  static void cannot_take_part(const FileDescriptor& memfd, int rank, const RankName& name, const Error& error);

  const Layout& layout() const { return layout_; }
  AbortRecord& abort_record() const { return header().abort; }
  std::atomic<std::uint32_t>& copies() const { return header().copies; }
  Region region(int rank) const {
    return {base_ + kHeaderBytes + layout_.region_bytes * static_cast<std::size_t>(rank), layout_};
  }

 private:
  Header& header() const { return *reinterpret_cast<Header*>(base_); }

  const Layout layout_;
  const std::size_t bytes_;
  std::byte* base_;
};

}  // namespace ringreduce
