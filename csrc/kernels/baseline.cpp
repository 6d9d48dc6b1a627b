// The kernels for every CPU of the architecture: SSE2 on x86-64, NEON on AArch64.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/target.h"

#define RINGREDUCE_TARGET baseline
#if defined(__aarch64__)
#define RINGREDUCE_TARGET_NAME "neon"
#else
#define RINGREDUCE_TARGET_NAME "baseline"
#endif
#define RINGREDUCE_VECTOR_BYTES 16
#if defined(__SSE2__)
#define RINGREDUCE_STREAM(p, v) _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)(v))
#define RINGREDUCE_STREAMED() _mm_sfence()
#else
#define RINGREDUCE_STREAM(p, v) store(p, v)
#define RINGREDUCE_STREAMED()
#endif
#include "kernels/kernels-inl.h"
