#include "kernels/accumulate.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>

#include "core/float_environment.h"
#include "kernels/target.h"

namespace ringreduce::kernels {
namespace {

// From the most to the least capable.
constexpr const Target* kTargets[] = {
#if defined(__x86_64__)
    &avx512::target,
    &avx2::target,
#endif
    &baseline::target,
};

#if defined(__x86_64__)
// Not by __builtin_cpu_supports: clang 14 does not know the name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

// Whether this CPU and its operating system run `target`.
bool can_run(const Target* target) {
#if defined(__x86_64__)
  if (target == &avx512::target)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (target == &avx2::target) return __builtin_cpu_supports("avx2") && has_f16c();
#endif
  return target == &baseline::target;
}

const Target* best_target() {
  for (const Target* target : kTargets)
    if (can_run(target)) return target;
  return &baseline::target;
}

std::atomic<const Target*>& chosen_target() {
  static std::atomic<const Target*> chosen{best_target()};
  return chosen;
}

bool is_floating(DType dtype) { return dtype <= DType::float8_e5m2; }
bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

}  // namespace

const Target& current_target() { return *chosen_target().load(std::memory_order_relaxed); }

bool supports(DType dtype, ReduceOp op) {
  if (moves_only(dtype)) return false;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::product:
      return true;
    case ReduceOp::min:
    case ReduceOp::max:
      return !is_complex(dtype);
    case ReduceOp::avg:
    case ReduceOp::premul_sum:
      return is_floating(dtype) || is_complex(dtype);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      return !is_floating(dtype) && !is_complex(dtype);
    case ReduceOp::logaddexp:
      return is_floating(dtype);
  }
  return false;
}

void accumulate(DType dtype, ReduceOp op, std::span<void* const> dsts, std::span<const void* const> srcs,
                std::size_t count, double divisor, std::span<const float> weights) {
  const DefaultFloatEnvironment environment;
  current_target().accumulate(dtype, op,
                              {dsts.data(), static_cast<int>(dsts.size()), srcs.data(), static_cast<int>(srcs.size()),
                               count, divisor, weights.empty() ? nullptr : weights.data()});
}

void copy(std::span<void* const> dsts, const void* src, std::size_t bytes) {
  constexpr std::size_t kSmall = 4096;  // what the first memcpy leaves in the L1 cache for the next
  if (bytes >= kSmall) return current_target().copy({dsts.data(), static_cast<int>(dsts.size()), &src, 1, bytes, 1});
  for (void* const dst : dsts)
    if (bytes > 0) std::memcpy(dst, src, bytes);
}

void stream(void* dst, const void* src, std::size_t bytes) { current_target().stream({&dst, 1, &src, 1, bytes, 1}); }

void scale(DType dtype, void* dst, const void* src, std::size_t count, double factor) {
  const DefaultFloatEnvironment environment;
  current_target().scale(dtype, {&dst, 1, &src, 1, count, factor});
}

std::string_view instruction_set() { return current_target().name; }

bool select_instruction_set(std::string_view name) {
  for (const Target* target : kTargets) {
    if (target->name != name || !can_run(target)) continue;
    chosen_target().store(target, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace ringreduce::kernels
