// The kernels for x86-64 CPUs with AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/target.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define RINGREDUCE_TARGET avx2
#define RINGREDUCE_TARGET_NAME "avx2"
#define RINGREDUCE_VECTOR_BYTES 32
#define RINGREDUCE_STREAM(p, v) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)(v))
#define RINGREDUCE_STREAMED() _mm_sfence()
#include "kernels/kernels-inl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
