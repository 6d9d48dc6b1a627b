// What an accumulate kernel is told to do, for host and device. Compiles with NVRTC: no standard headers there.
#pragma once

#if defined(__CUDACC_RTC__)
namespace std {  // NVRTC has no <cstdint>
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
}  // namespace std
#else
#include <cstdint>
#endif

namespace ringreduce::gpu {

// A group has at most this many ranks on one host's GPUs: arguments of a kernel have 4 KB.
inline constexpr int kMostRanks = 64;

// dsts[k][i] = srcs[0][i] op ... op srcs[n-1][i], from left to right, for i in [0, count) and each of the `copies`
// destinations. A destination may be one of the sources (same pointer), and not otherwise overlap them or another one.
// Only sums of floats have a factor and a divisor.
struct Accumulate {
  void* dsts[2];
  const void* srcs[kMostRanks];
  std::uint64_t count;  // of the kernel's elements: see Kernel::parts
  double factor = 1;    // srcs[scaled] is multiplied by it first, and rounded (premul_sum)
  double divisor = 1;   // the result is divided by it before it is rounded (avg)
  std::int32_t copies = 1;
  std::int32_t n = 1;
  std::int32_t scaled = -1;  // -1: none
};

}  // namespace ringreduce::gpu
