// The types, numbers and functions of the CUDA driver API that we use, declared again here, so that a build needs no
// headers of NVIDIA. tests/stand_in/signatures.cpp compares all of it with cuda.h where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringreduce::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;
using CUmodule = void*;
using CUfunction = void*;
using CUmemGenericAllocationHandle = unsigned long long;

struct CUuuid {
  unsigned char bytes[16];
};

struct CUipcMemHandle {
  unsigned char reserved[64];
};

struct CUmemLocation {
  int type;
  int id;
};

struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  unsigned char allocFlags[8];
};

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

// The part of the union that waits and writes of 64 bits have.
struct CUstreamBatchMemOpParams {
  int operation;
  CUdeviceptr address;
  std::uint64_t value64;
  unsigned flags;
  CUdeviceptr alias;
  std::uint64_t unused;
};

// Results that the code tells apart.
inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kNotInitialized = 3;
inline constexpr CUresult kNoDevice = 100;
inline constexpr CUresult kNotFound = 500;
inline constexpr CUresult kNotReady = 600;
inline constexpr CUresult kPeerAccessAlreadyEnabled = 704;
inline constexpr CUresult kNotSupported = 801;

inline constexpr int kMultiprocessorCount = 16;  // CU_DEVICE_ATTRIBUTE_...
inline constexpr int kComputeCapabilityMajor = 75;
inline constexpr int kComputeCapabilityMinor = 76;
inline constexpr int kVirtualMemoryManagementSupported = 102;
inline constexpr int kHandleTypePosixFileDescriptorSupported = 103;
inline constexpr int kCanUse64BitStreamMemOps = 122;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kStreamMemOpWaitValue64 = 4;
inline constexpr int kStreamMemOpWriteValue64 = 5;
inline constexpr unsigned kMostStreamMemOps = 255;  // in one call
inline constexpr unsigned kStreamWaitValueEq = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kMemHostAllocPortable = 1;
inline constexpr unsigned kMemHostAllocDeviceMap = 2;
inline constexpr unsigned kMemHostRegisterPortable = 1;
inline constexpr unsigned kMemHostRegisterDeviceMap = 2;
inline constexpr unsigned kIpcMemLazyEnablePeerAccess = 1;
inline constexpr int kMemAllocationTypePinned = 1;
inline constexpr int kMemLocationTypeDevice = 1;
inline constexpr int kMemHandleTypePosixFileDescriptor = 1;
inline constexpr int kMemAccessReadWrite = 3;
inline constexpr int kMemAllocGranularityRecommended = 1;
inline constexpr int kStreamCaptureStatusNone = 0;
inline constexpr int kStreamCaptureModeRelaxed = 2;
inline constexpr int kPointerAttributeMemoryType = 2;
inline constexpr int kPointerAttributeDeviceOrdinal = 9;
inline constexpr int kPointerAttributeRangeStart = 11;
inline constexpr int kPointerAttributeRangeSize = 12;
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kMemoryTypeDevice = 2;

// FUNCTION(name, what the driver appends to it, parameters), for every function. The youngest came with CUDA 11.7.
#define RINGREDUCE_CUDA_FUNCTIONS(FUNCTION)                                                                          \
  FUNCTION(cuInit, , (unsigned flags))                                                                               \
  FUNCTION(cuDriverGetVersion, , (int* version))                                                                     \
  FUNCTION(cuGetErrorName, , (CUresult error, const char** name))                                                    \
  FUNCTION(cuGetErrorString, , (CUresult error, const char** text))                                                  \
  FUNCTION(cuDeviceGetCount, , (int* count))                                                                         \
  FUNCTION(cuDeviceGet, , (CUdevice * device, int ordinal))                                                          \
  FUNCTION(cuDeviceGetName, , (char* name, int bytes, CUdevice device))                                              \
  FUNCTION(cuDeviceGetUuid, _v2, (CUuuid * uuid, CUdevice device))                                                   \
  FUNCTION(cuDeviceGetAttribute, , (int* value, int attribute, CUdevice device))                                     \
  FUNCTION(cuDeviceGetPCIBusId, , (char* id, int bytes, CUdevice device))                                            \
  FUNCTION(cuDeviceCanAccessPeer, , (int* can, CUdevice device, CUdevice peer))                                      \
  FUNCTION(cuDevicePrimaryCtxRetain, , (CUcontext * context, CUdevice device))                                       \
  FUNCTION(cuDevicePrimaryCtxRelease, _v2, (CUdevice device))                                                        \
  FUNCTION(cuCtxPushCurrent, _v2, (CUcontext context))                                                               \
  FUNCTION(cuCtxPopCurrent, _v2, (CUcontext * context))                                                              \
  FUNCTION(cuCtxEnablePeerAccess, , (CUcontext peer, unsigned flags))                                                \
  FUNCTION(cuMemAlloc, _v2, (CUdeviceptr * pointer, std::size_t bytes))                                              \
  FUNCTION(cuMemFree, _v2, (CUdeviceptr pointer))                                                                    \
  FUNCTION(cuMemHostAlloc, , (void** pointer, std::size_t bytes, unsigned flags))                                    \
  FUNCTION(cuMemFreeHost, , (void* pointer))                                                                         \
  FUNCTION(cuMemHostRegister, _v2, (void* pointer, std::size_t bytes, unsigned flags))                               \
  FUNCTION(cuMemHostUnregister, , (void* pointer))                                                                   \
  FUNCTION(cuMemHostGetDevicePointer, _v2, (CUdeviceptr * pointer, void* host, unsigned flags))                      \
  FUNCTION(cuMemsetD8Async, , (CUdeviceptr to, unsigned char value, std::size_t count, CUstream stream))             \
  FUNCTION(cuMemcpyAsync, , (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream))                  \
  FUNCTION(cuPointerGetAttribute, , (void* value, int attribute, CUdeviceptr pointer))                               \
  FUNCTION(cuIpcGetMemHandle, , (CUipcMemHandle * handle, CUdeviceptr pointer))                                      \
  FUNCTION(cuIpcOpenMemHandle, _v2, (CUdeviceptr * pointer, CUipcMemHandle handle, unsigned flags))                  \
  FUNCTION(cuIpcCloseMemHandle, , (CUdeviceptr pointer))                                                             \
  FUNCTION(cuMemGetAllocationGranularity, ,                                                                          \
           (std::size_t* granularity, const CUmemAllocationProp* properties, int option))                            \
  FUNCTION(cuMemCreate, ,                                                                                            \
           (CUmemGenericAllocationHandle * memory, std::size_t bytes, const CUmemAllocationProp* properties,         \
            unsigned long long flags))                                                                               \
  FUNCTION(cuMemRelease, , (CUmemGenericAllocationHandle memory))                                                    \
  FUNCTION(cuMemExportToShareableHandle, ,                                                                           \
           (void* shareable, CUmemGenericAllocationHandle memory, int type, unsigned long long flags))               \
  FUNCTION(cuMemImportFromShareableHandle, , (CUmemGenericAllocationHandle * memory, void* shareable, int type))     \
  FUNCTION(                                                                                                          \
      cuMemAddressReserve, ,                                                                                         \
      (CUdeviceptr * pointer, std::size_t bytes, std::size_t alignment, CUdeviceptr wish, unsigned long long flags)) \
  FUNCTION(cuMemAddressFree, , (CUdeviceptr pointer, std::size_t bytes))                                             \
  FUNCTION(cuMemMap, ,                                                                                               \
           (CUdeviceptr pointer, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle memory,         \
            unsigned long long flags))                                                                               \
  FUNCTION(cuMemUnmap, , (CUdeviceptr pointer, std::size_t bytes))                                                   \
  FUNCTION(cuMemSetAccess, ,                                                                                         \
           (CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count))               \
  FUNCTION(cuStreamCreateWithPriority, , (CUstream * stream, unsigned flags, int priority))                          \
  FUNCTION(cuStreamDestroy, _v2, (CUstream stream))                                                                  \
  FUNCTION(cuStreamSynchronize, , (CUstream stream))                                                                 \
  FUNCTION(cuStreamQuery, , (CUstream stream))                                                                       \
  FUNCTION(cuStreamWaitEvent, , (CUstream stream, CUevent event, unsigned flags))                                    \
  FUNCTION(cuStreamIsCapturing, , (CUstream stream, int* status))                                                    \
  FUNCTION(cuThreadExchangeStreamCaptureMode, , (int* mode))                                                         \
  FUNCTION(cuStreamBatchMemOp, _v2,                                                                                  \
           (CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags))                  \
  FUNCTION(cuEventCreate, , (CUevent * event, unsigned flags))                                                       \
  FUNCTION(cuEventDestroy, _v2, (CUevent event))                                                                     \
  FUNCTION(cuEventRecord, , (CUevent event, CUstream stream))                                                        \
  FUNCTION(cuEventQuery, , (CUevent event))                                                                          \
  FUNCTION(cuEventSynchronize, , (CUevent event))                                                                    \
  FUNCTION(cuEventElapsedTime, , (float* milliseconds, CUevent start, CUevent end))                                  \
  FUNCTION(cuModuleLoadData, , (CUmodule * module, const void* image))                                               \
  FUNCTION(cuModuleUnload, , (CUmodule module))                                                                      \
  FUNCTION(cuModuleGetFunction, , (CUfunction * function, CUmodule module, const char* name))                        \
  FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, ,                                                            \
           (int* blocks, CUfunction function, int threads, std::size_t shared_bytes))                                \
  FUNCTION(cuLaunchKernel, ,                                                                                         \
           (CUfunction function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,        \
            unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CUstream stream, void** parameters,       \
            void** extra))

}  // namespace ringreduce::cuda
