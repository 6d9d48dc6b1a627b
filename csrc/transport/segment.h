// The memory that ranks of a host share: a memfd with the team's error and a region for each rank (region.h). Nothing
// here is named in a file system: when the last process closes its descriptor, the memory is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/file_descriptor.h"
#include "transport/fate.h"
#include "transport/region.h"

namespace ringreduce {

class Segment {
 public:
  // What the program calls a group, and the job that it belongs to.
  struct Title {
    std::string name, job;
  };
  struct Header {
    AbortRecord abort;
    // 1: some rank could not access the memory of another any more, so nothing is lent from a process from now on.
    alignas(64) std::atomic<std::uint32_t> copies;
    // For who reads the segment from outside of the team: kFormat once `geometry` is there.
    alignas(64) std::atomic<std::uint64_t> format;
    Geometry geometry;
    char name[64], job[64];  // of the title, cut where it is too long; they end with a zero
  };
  // Changes with whatever a reader from outside relies on.
  static constexpr std::uint64_t kFormat = 0x72696e6700000002 + (sizeof(RankControl) << 8);
  static constexpr std::size_t kHeaderBytes = round_up(sizeof(Header), kPage);

  // Maps `memfd`, of geometry.segment_bytes() zero bytes.
  Segment(const FileDescriptor& memfd, const Geometry& geometry);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Lets processes outside of the team read the segment (engine/observe.h). They find it by a descriptor that this one
  // keeps: `memfd`, of one rank of the host.
  void show(FileDescriptor memfd, const Title& group);

  // For a rank that has met the others and then cannot join them: they find the reason as the team's error.
  static void cannot_take_part(int memfd, int rank, const RankName& name, const std::string& reason);

  // All that this process has mapped, one after the other. None ends meanwhile.
  static void each_of_process(const std::function<void(const Segment&)>& look);

  // Of the group; empty until a rank has called show().
  std::string name() const;
  // The global rank of a rank; its rank in the group, if it is on another host.
  int global_rank(int rank) const;
  const Layout& layout() const { return layout_; }
  AbortRecord& abort_record() const { return header().abort; }
  std::atomic<std::uint32_t>& copies() const { return header().copies; }
  static std::size_t offset_of(int rank, const Layout& layout) {
    return kHeaderBytes + layout.region_bytes * static_cast<std::size_t>(rank);
  }
  Region region(int rank) const { return {base_.get() + offset_of(rank, layout_), layout_}; }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* memory) const;
  };
  Header& header() const { return *reinterpret_cast<Header*>(base_.get()); }

  const Layout layout_;
  std::unique_ptr<std::byte, Unmap> base_;
  FileDescriptor shown_;
};

}  // namespace ringreduce
