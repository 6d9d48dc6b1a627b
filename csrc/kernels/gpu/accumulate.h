// dst = op(src...) on a GPU: what the host says to the kernels, and which of them it needs. No CUDA in this file.
//
// The kernels give the bits that kernels/accumulate.h gives on a CPU.
#pragma once

#include <cstdint>
#include <string>

#include "core/types.h"

namespace ringreduce::gpu {

// A group has at most this many ranks on one host's GPUs: arguments of a kernel have 4 KB.
inline constexpr int kMostRanks = 64;

// dsts[k][i] = srcs[0][i] op ... op srcs[n-1][i], from left to right, for i in [0, count) and each of the `copies`
// destinations. A destination may be one of the sources (same pointer), and not otherwise overlap them or another one.
struct Accumulate {
  void* dsts[2];
  const void* srcs[kMostRanks];
  std::uint64_t count;     // of the kernel's elements: see Kernel::parts
  double factor = 1;       // srcs[scaled] is multiplied by it first, and rounded (premul_sum)
  double divisor = 1;      // the result is divided by it before it is rounded (avg)
  std::int32_t copies = 1;
  std::int32_t n = 1;
  std::int32_t scaled = -1;  // -1: none
};

// Kernels are named by how they see elements, "float32_sum"; several (dtype, op) may share one.
struct Kernel {
  std::string name;
  std::uint32_t parts;  // how many of the kernel's elements make one of the dtype's
};

// The kernel of `op` on `dtype`. Precondition: kernels::supports(dtype, op).
Kernel kernel_for(DType dtype, ReduceOp op);

// The kernel that copies bytes, with one source; an element is a byte.
Kernel copy_kernel();

}  // namespace ringreduce::gpu
