#include "transport/segment.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ringreduce {

std::size_t Geometry::segment_bytes() const { return Segment::kHeaderBytes + Layout(*this).region_bytes * ranks; }

Segment::Segment(const FileDescriptor& memfd, const Geometry& geometry)
    : layout_(geometry), bytes_(geometry.segment_bytes()) {
  void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd.get(), 0);
  if (mapped == MAP_FAILED)
    throw Error(ErrorKind::system,
                "cannot map " + std::to_string(bytes_) +
                    " bytes of shared memory (RINGREDUCE_CHANNEL_BYTES lowers it): " + std::strerror(errno));
  base_ = static_cast<std::byte*>(mapped);
}

Segment::~Segment() { munmap(base_, bytes_); }

}  // namespace ringreduce
