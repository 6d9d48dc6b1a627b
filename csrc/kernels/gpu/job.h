// The arguments of an accumulate kernel, for host and device. It compiles with NVRTC, which has no standard headers.
#pragma once

#include "core/device.h"

namespace ringreduce::gpu {

// A group has at most this many ranks on one host's GPUs: arguments of a kernel have 4 KB.
inline constexpr int kMostRanks = 64;

// dsts[k][i] = srcs[0][i] op ... op srcs[n-1][i], from left to right, for i in [0, count) and each of the `copies`
// destinations. A destination may be one of the sources (same pointer), and not otherwise overlap them or another one.
// Only sums of floats have a factor, weights and a divisor.
struct Accumulate {
  void* dsts[2];
  const void* srcs[kMostRanks];
  float weights[kMostRanks];  // of the sources: they are multiplied by them, if the job weighs
  std::uint64_t count;        // of the kernel's elements: see Kernel::parts
  double factor;              // srcs[scaled] is multiplied by it first, and rounded (premul_sum)
  double divisor;             // the result is divided by it before it is rounded (avg)
  std::int32_t copies;        // 0 to 2
  std::int32_t n;
  std::int32_t scaled;  // -1: none
  bool weighs;
};

}  // namespace ringreduce::gpu
