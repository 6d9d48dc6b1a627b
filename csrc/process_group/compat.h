// Differences between the torch versions that ringreduce builds with: 2.11 and newer.
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ringreduce {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#endif

// A gather into one tensor, gather_single, is a call of c10d::Backend.
#define RINGREDUCE_HAS_GATHER_SINGLE (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14)

// Under which backend's name, and barrier's, `torchfrtrace` takes our calls: it has closed lists of them.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
inline constexpr const char* kAnalysedAs = "gloo:";
inline constexpr const char* kAnalysedBarrier = "barrier";
#else
inline constexpr const char* kAnalysedAs = "nccl:";
inline constexpr const char* kAnalysedBarrier = "all_reduce_barrier";
#endif

}  // namespace ringreduce
