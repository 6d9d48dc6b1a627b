// A rank's Program as one piece of memory without pointers, to be copied to a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/gpu/batches.h"
#include "engine/gpu/run.h"
#include "engine/program.h"

namespace ringreduce::gpu {

class FlatProgram {
 public:
  // How the group runs plans; `rank`: whose program it is.
  struct Options {
    int rank = 0;
    std::uint32_t depth = 1;
    bool one_lane = false;  // which takes the channels one after the other, so that each has all of its slots
  };
  // `batches`: of each channel, as batches_of has them.
  FlatProgram(const Program& program, const std::vector<Batches>& batches, const Options& options);

  const std::vector<std::byte>& image() const { return image_; }
  std::uint32_t channels() const { return channels_; }  // FlatChannels
  // The program, if the image lies at `base` (aligned to 8), on a GPU or here.
  FlatArrays at(const void* base) const;

 private:
  template <class T>
  std::size_t append(const std::vector<T>& part);

  std::vector<std::byte> image_;
  std::uint32_t channels_;
  std::size_t channels_at_, stripes_at_, batches_at_, steps_at_, sources_at_, sends_at_;
};

}  // namespace ringreduce::gpu
