// dst = op(src...) on the CPU: the one place where elements are combined.
//
// Implementations for several instruction sets are compiled from one source; the best one that this CPU runs is chosen
// once, at the first call. All of them give the same bits, also in a thread that rounds otherwise or flushes denormal
// numbers to zero. All functions are thread-safe and allocate nothing.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "core/types.h"

namespace ringreduce::kernels {

// Whether `op` is defined for `dtype`:
//   sum, product, min, max     every dtype, but min and max not for complex; on bool: sum, max = or; product, min = and
//   avg, premul_sum            floating point and complex
//   band, bor, bxor            integers and bool
//   logaddexp                  floating point
// Dtypes that are only moved (core/types.h) have none.
bool supports(DType dtype, ReduceOp op);

// dst[i] = srcs[0][i] op srcs[1][i] op ..., evaluated from left to right, for i in [0, count) and each of the `dsts`.
// At least one of both. A dst may be one of `srcs` (same pointer), not otherwise overlap them or another dst. No
// alignment is required. float16, bfloat16 and float8 operands are widened to float32, combined there and rounded once,
// to nearest even; float8_e4m3fn, which has no infinities, saturates: whatever is too large becomes 448, as in torch
// from 2.12 on. min and max return NaN where any operand is NaN. avg and premul_sum combine as sum. logaddexp is
// within 6 units in the last place of the larger of its result and its operands. Where `divisor` is
// not 1 the result is divided by it before that one rounding (avg; floating point and complex only). The divisor is
// first rounded to the type in which elements are combined, as is the factor of scale(). Where there are `weights`, one
// for each of `srcs`, its widened elements are multiplied by it first. Preconditions: supports(dtype, op); weights only
// for avg of a narrow_float().
void accumulate(DType dtype, ReduceOp op, std::span<void* const> dsts, std::span<const void* const> srcs,
                std::size_t count, double divisor = 1.0, std::span<const float> weights = {});

// Copies `bytes` bytes of src to each of the dsts, which must not overlap it or each other.
void copy(std::span<void* const> dsts, const void* src, std::size_t bytes);

// The same to one dst and past the caches: for what nobody reads soon. Complete, for other threads too, when it
// returns. Not worth it for fewer than kLeastStreamed bytes.
void stream(void* dst, const void* src, std::size_t bytes);
inline constexpr std::size_t kLeastStreamed = 4096;

// dst[i] = src[i] * factor, rounded once to dtype (premul_sum). `dst` may be `src`. Floating point and complex only.
void scale(DType dtype, void* dst, const void* src, std::size_t count, double factor);

// The instruction set in use: "avx512", "avx2", "neon" or "baseline".
std::string_view instruction_set();

// Has all later calls use the named instruction set; false, and nothing changes, where this CPU cannot run it. For
// tests and benchmarks.
bool select_instruction_set(std::string_view name);

}  // namespace ringreduce::kernels
