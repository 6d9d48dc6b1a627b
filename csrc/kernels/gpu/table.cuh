// All accumulate kernels: X(name, format, operation) for each.
//
// Fewer than there are pairs of dtype and operation: sums and products of integers do not depend on the sign,
// operations on bits not on the type, and the sum of complex numbers is one of real ones (kernel_for in accumulate.cpp
// chooses).
#pragma once

#include "kernels/gpu/accumulate.cuh"

#define RINGREDUCE_GPU_ARITHMETIC(X, name, Format) X(name##_sum, Format, Sum) X(name##_product, Format, Product)
#define RINGREDUCE_GPU_ORDER(X, name, Format) X(name##_min, Format, Min) X(name##_max, Format, Max)
#define RINGREDUCE_GPU_BITS(X, name, Format) \
  X(name##_and, Format, And) X(name##_or, Format, Or) X(name##_xor, Format, Xor)

// clang-format off
#define RINGREDUCE_GPU_KERNELS(X)                               \
  RINGREDUCE_GPU_ARITHMETIC(X, float64, Native<double>)         \
  RINGREDUCE_GPU_ORDER(X, float64, Native<double>)              \
  RINGREDUCE_GPU_ARITHMETIC(X, float32, Native<float>)          \
  RINGREDUCE_GPU_ORDER(X, float32, Native<float>)               \
  RINGREDUCE_GPU_ARITHMETIC(X, float16, Float16)                \
  RINGREDUCE_GPU_ORDER(X, float16, Float16)                     \
  RINGREDUCE_GPU_ARITHMETIC(X, bfloat16, BFloat16)              \
  RINGREDUCE_GPU_ORDER(X, bfloat16, BFloat16)                   \
  RINGREDUCE_GPU_ARITHMETIC(X, float8_e4m3fn, Float8E4M3FN)     \
  RINGREDUCE_GPU_ORDER(X, float8_e4m3fn, Float8E4M3FN)          \
  RINGREDUCE_GPU_ARITHMETIC(X, float8_e5m2, Float8E5M2)         \
  RINGREDUCE_GPU_ORDER(X, float8_e5m2, Float8E5M2)              \
  RINGREDUCE_GPU_ARITHMETIC(X, uint8, Native<std::uint8_t>)     \
  RINGREDUCE_GPU_ARITHMETIC(X, uint16, Native<std::uint16_t>)   \
  RINGREDUCE_GPU_ARITHMETIC(X, uint32, Native<std::uint32_t>)   \
  RINGREDUCE_GPU_ARITHMETIC(X, uint64, Native<std::uint64_t>)   \
  RINGREDUCE_GPU_ORDER(X, int8, Native<std::int8_t>)            \
  RINGREDUCE_GPU_ORDER(X, int16, Native<std::int16_t>)          \
  RINGREDUCE_GPU_ORDER(X, int32, Native<std::int32_t>)          \
  RINGREDUCE_GPU_ORDER(X, int64, Native<std::int64_t>)          \
  RINGREDUCE_GPU_ORDER(X, uint8, Native<std::uint8_t>)          \
  RINGREDUCE_GPU_BITS(X, bits, Bytes)                           \
  RINGREDUCE_GPU_BITS(X, bool, Boolean)                         \
  X(complex64_product, Complex<float>, Product)                 \
  X(complex128_product, Complex<double>, Product)
// clang-format on

// A row's format and operation by its name.
namespace ringreduce::gpu::rows {

#define RINGREDUCE_ROW(name, F, O) \
  struct name {                    \
    using Format = F;              \
    using Op = O;                  \
  };
RINGREDUCE_GPU_KERNELS(RINGREDUCE_ROW)
#undef RINGREDUCE_ROW

}  // namespace ringreduce::gpu::rows

// Defines KERNEL(name) for every row; where RINGREDUCE_GPU_ONLY is a row's name, for that one alone, which is what
// NVRTC has time for.
#if defined(RINGREDUCE_GPU_ONLY)
#define RINGREDUCE_GPU_DEFINE(KERNEL) RINGREDUCE_GPU_DEFINE_NAMED(KERNEL, RINGREDUCE_GPU_ONLY)
#define RINGREDUCE_GPU_DEFINE_NAMED(KERNEL, name) KERNEL(name)
#else
#define RINGREDUCE_GPU_DEFINE(KERNEL) RINGREDUCE_GPU_KERNELS(KERNEL)
#endif

// NVRTC compiles a row when it is first needed, but with every row the conversions of all: so a GPU or a compiler that
// lacks an instruction fails while a group is set up, not at the first sum of a dtype.
#if defined(__CUDACC_RTC__)
namespace ringreduce::gpu {

template <class Format>
__device__ void there_and_back(Word& word) {
  word = Format::narrow(Format::widen({{word}})).word[0];
}

}  // namespace ringreduce::gpu

extern "C" __global__ void all_conversions(ringreduce::gpu::Word* words) {
  ringreduce::gpu::there_and_back<ringreduce::gpu::BFloat16>(words[0]);
  ringreduce::gpu::there_and_back<ringreduce::gpu::Float16>(words[1]);
  ringreduce::gpu::there_and_back<ringreduce::gpu::Float8E4M3FN>(words[2]);
  ringreduce::gpu::there_and_back<ringreduce::gpu::Float8E5M2>(words[3]);
}
#endif
