// Compares csrc/cuda/api.h and probe_api.h with NVIDIA's cuda.h, where there is one: it compiles only if they agree.

#define __CUDA_API_VERSION_INTERNAL  // shows every version of a function, not only the newest
#include <cuda.h>
//
#include <cstddef>

#include "cuda/api.h"
#include "probe_api.h"
#include "same_function.h"

namespace ours = ringreduce::cuda;

#define FUNCTION(name, suffix, parameters) using type_of_##name = ours::CUresult parameters;
namespace ringreduce::cuda {
RINGREDUCE_CUDA_FUNCTIONS(FUNCTION)
PROBE_CUDA_FUNCTIONS(FUNCTION)
}  // namespace ringreduce::cuda
#undef FUNCTION
#define FUNCTION(name, suffix, parameters) \
  static_assert(same_function<ours::type_of_##name, decltype(::name##suffix)>::value, #name);
RINGREDUCE_CUDA_FUNCTIONS(FUNCTION)
PROBE_CUDA_FUNCTIONS(FUNCTION)
#undef FUNCTION

#define SAME_STRUCT(name) static_assert(sizeof(ours::name) == sizeof(::name) && alignof(ours::name) <= alignof(::name))
#define SAME_FIELD(name, field) static_assert(offsetof(ours::name, field) == offsetof(::name, field))
SAME_STRUCT(CUuuid);
SAME_STRUCT(CUipcMemHandle);
SAME_STRUCT(CUmemLocation);
SAME_FIELD(CUmemLocation, type);
SAME_FIELD(CUmemLocation, id);
SAME_STRUCT(CUmemAllocationProp);
SAME_FIELD(CUmemAllocationProp, type);
SAME_FIELD(CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(CUmemAllocationProp, location);
SAME_FIELD(CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(CUmemAllocationProp, allocFlags);
SAME_STRUCT(CUmemAccessDesc);
SAME_FIELD(CUmemAccessDesc, location);
SAME_FIELD(CUmemAccessDesc, flags);
SAME_STRUCT(CUstreamBatchMemOpParams);
#define SAME_OPERATION(field, of_union, of_part)                   \
  static_assert(offsetof(ours::CUstreamBatchMemOpParams, field) == \
                offsetof(::CUstreamBatchMemOpParams, of_union.of_part))
SAME_OPERATION(operation, waitValue, operation);
SAME_OPERATION(address, waitValue, address);
SAME_OPERATION(value64, waitValue, value64);
SAME_OPERATION(flags, waitValue, flags);
SAME_OPERATION(alias, waitValue, alias);
SAME_OPERATION(operation, writeValue, operation);
SAME_OPERATION(address, writeValue, address);
SAME_OPERATION(value64, writeValue, value64);
SAME_OPERATION(flags, writeValue, flags);
SAME_OPERATION(alias, writeValue, alias);

static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
static_assert(ours::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(ours::kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(ours::kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kVirtualMemoryManagementSupported == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(ours::kHandleTypePosixFileDescriptorSupported ==
              CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
#if CUDA_VERSION >= 12000  // until then the attribute was for an older version of these operations
static_assert(ours::kCanUse64BitStreamMemOps == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
#endif
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kStreamMemOpWaitValue64 == CU_STREAM_MEM_OP_WAIT_VALUE_64);
static_assert(ours::kStreamMemOpWriteValue64 == CU_STREAM_MEM_OP_WRITE_VALUE_64);
static_assert(ours::kStreamWaitValueEq == CU_STREAM_WAIT_VALUE_EQ);
static_assert(ours::kStreamCaptureStatusNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(ours::kStreamCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kMemHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(ours::kMemHostAllocDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(ours::kMemHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ours::kMemHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(ours::kIpcMemLazyEnablePeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(ours::kMemAllocationTypePinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(ours::kMemLocationTypeDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::kMemHandleTypePosixFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(ours::kMemAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(ours::kMemAllocGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(ours::kPointerAttributeMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kPointerAttributeDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(ours::kPointerAttributeRangeStart == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
static_assert(ours::kPointerAttributeRangeSize == CU_POINTER_ATTRIBUTE_RANGE_SIZE);
static_assert(ours::kMemoryTypeHost == CU_MEMORYTYPE_HOST);
static_assert(ours::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
