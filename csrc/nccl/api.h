// The types, numbers and functions of NCCL that we use, declared again here, so that a build does not need nccl.h.
// tests/stand_in/nccl_signatures.cpp compares all of it with nccl.h where there is one.
#pragma once

#include <cstddef>

namespace ringreduce::nccl {

using ncclResult_t = int;
using ncclDataType_t = int;
using ncclComm_t = void*;
using cudaStream_t = void*;

struct ncclUniqueId {
  char internal[128];
};

// Results that the code tells apart.
inline constexpr ncclResult_t kSuccess = 0;
inline constexpr ncclResult_t kRemoteError = 6;
inline constexpr ncclResult_t kInProgress = 7;

inline constexpr ncclDataType_t kInt8 = 0;

// FUNCTION(name, result, parameters), for every function that there must be. The youngest came with NCCL 2.7.
#define RINGREDUCE_NCCL_FUNCTIONS(FUNCTION)                                                                         \
  FUNCTION(ncclGetVersion, ncclResult_t, (int* version))                                                            \
  FUNCTION(ncclGetUniqueId, ncclResult_t, (ncclUniqueId * id))                                                      \
  FUNCTION(ncclCommInitRank, ncclResult_t, (ncclComm_t * made, int size, ncclUniqueId id, int rank))                \
  FUNCTION(ncclCommDestroy, ncclResult_t, (ncclComm_t communicator))                                                \
  FUNCTION(ncclCommAbort, ncclResult_t, (ncclComm_t communicator))                                                  \
  FUNCTION(ncclCommGetAsyncError, ncclResult_t, (ncclComm_t communicator, ncclResult_t * error))                    \
  FUNCTION(ncclCommCount, ncclResult_t, (const ncclComm_t communicator, int* size))                                 \
  FUNCTION(ncclCommUserRank, ncclResult_t, (const ncclComm_t communicator, int* rank))                              \
  FUNCTION(ncclCommCuDevice, ncclResult_t, (const ncclComm_t communicator, int* device))                            \
  FUNCTION(ncclGetErrorString, const char*, (ncclResult_t result))                                                  \
  FUNCTION(ncclSend, ncclResult_t,                                                                                  \
           (const void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,            \
            cudaStream_t stream))                                                                                   \
  FUNCTION(                                                                                                         \
      ncclRecv, ncclResult_t,                                                                                       \
      (void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream)) \
  FUNCTION(ncclGroupStart, ncclResult_t, ())                                                                        \
  FUNCTION(ncclGroupEnd, ncclResult_t, ())

// Those that newer ones have: from 2.13 and 2.18 on.
#define RINGREDUCE_NCCL_NEWER_FUNCTIONS(FUNCTION)                    \
  FUNCTION(ncclGetLastError, const char*, (ncclComm_t communicator)) \
  FUNCTION(ncclCommSplit, ncclResult_t, (ncclComm_t communicator, int color, int key, ncclComm_t* made, void* config))

}  // namespace ringreduce::nccl
