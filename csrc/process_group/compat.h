// What differs between the torch versions that ringreduce builds with: 2.11 and newer.
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ringreduce {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#endif

// Under which backend's name `torchfrtrace` takes our calls: it has a closed list of them.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
inline constexpr const char* kAnalysedAs = "gloo:";
#else
inline constexpr const char* kAnalysedAs = "nccl:";
#endif

}  // namespace ringreduce
