// A rank's Program as one piece of memory without pointers, to be copied to a GPU.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/gpu/run.h"
#include "engine/program.h"

namespace ringreduce::gpu {

class FlatProgram {
 public:
  explicit FlatProgram(const Program& program);

  const std::vector<std::byte>& image() const { return image_; }
  std::uint32_t channels() const { return channels_; }
  // The program, if the image lies at `base` (aligned to 8), on a GPU or here.
  FlatArrays at(const void* base) const;

 private:
  template <class T>
  std::size_t append(const std::vector<T>& part);

  std::vector<std::byte> image_;
  std::uint32_t channels_;
  std::size_t channels_at_, steps_at_, sources_at_, destinations_at_, sends_at_;
};

}  // namespace ringreduce::gpu
