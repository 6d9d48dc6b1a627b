// Macros that let a header compile for CPUs, with nvcc, and with NVRTC, which has no standard headers.
#pragma once

#if defined(__CUDACC_RTC__)
namespace std {
using size_t = decltype(sizeof(0));
using uintptr_t = unsigned long long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
}  // namespace std
#else
#include <cstddef>
#include <cstdint>
#endif

// Functions of a GPU and of the host, defined where they are declared: as part of those that call them, or APART, once
// for all kernels.
#if defined(__CUDACC__)
#define RINGREDUCE_BOTH __host__ __device__ __forceinline__
#define RINGREDUCE_APART inline __host__ __device__ __noinline__
#else
#define RINGREDUCE_BOTH inline
#define RINGREDUCE_APART inline
#endif
