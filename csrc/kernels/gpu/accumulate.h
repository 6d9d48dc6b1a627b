// dst = op(src...) on a GPU: what the host says to the kernels, and which of them it needs. No CUDA in this file.
//
// The kernels give the bits that kernels/accumulate.h gives on a CPU.
#pragma once

#include <cstdint>
#include <string>

#include "core/types.h"
#include "kernels/gpu/job.h"

namespace ringreduce::gpu {

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
