// The kernels for x86-64 CPUs with AVX-512 (F, BW, DQ and VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/target.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define RINGREDUCE_TARGET avx512
#define RINGREDUCE_TARGET_NAME "avx512"
#define RINGREDUCE_VECTOR_BYTES 64
#define RINGREDUCE_STREAM(p, v) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)(v))
#define RINGREDUCE_STREAMED() _mm_sfence()
#include "kernels/kernels-inl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
