// Compares csrc/nccl/api.h with NVIDIA's nccl.h, where there is one: it compiles only if both agree.

#include <nccl.h>
//
#include "nccl/api.h"
#include "same_function.h"

namespace ours = ringreduce::nccl;

#define FUNCTION(name, result, parameters) using type_of_##name = result parameters;
namespace ringreduce::nccl {
RINGREDUCE_NCCL_FUNCTIONS(FUNCTION)
RINGREDUCE_NCCL_NEWER_FUNCTIONS(FUNCTION)
}  // namespace ringreduce::nccl
#undef FUNCTION
#define FUNCTION(name, result, parameters) \
  static_assert(same_function<ours::type_of_##name, decltype(::name)>::value, #name);
RINGREDUCE_NCCL_FUNCTIONS(FUNCTION)
RINGREDUCE_NCCL_NEWER_FUNCTIONS(FUNCTION)
#undef FUNCTION

static_assert(sizeof(ours::ncclUniqueId) == sizeof(::ncclUniqueId));
static_assert(ours::kSuccess == ncclSuccess);
static_assert(ours::kRemoteError == ncclRemoteError);
static_assert(ours::kInProgress == ncclInProgress);
static_assert(ours::kInt8 == ncclInt8);
