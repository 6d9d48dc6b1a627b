// The kernels for every CPU of the architecture: SSE2 on x86-64, NEON on AArch64.
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
#include "kernels/kernels-inl.h"
