#include "kernels/gpu/accumulate.h"

namespace ringreduce::gpu {
namespace {

constexpr bool is_integer(DType dtype) { return dtype >= DType::int8 && dtype <= DType::uint8; }

Kernel named(std::string_view elements, std::string_view operation, std::size_t parts = 1) {
  return {std::string(elements) + "_" + std::string(operation), static_cast<std::uint32_t>(parts)};
}

// The operation of one kernel or another.
std::string_view operation_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::avg:
    case ReduceOp::premul_sum:
      return "sum";
    case ReduceOp::band:
      return "and";
    case ReduceOp::bor:
      return "or";
    case ReduceOp::bxor:
      return "xor";
    default:
      return name(op);
  }
}

std::string_view operation_on_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
      return "and";
    case ReduceOp::bxor:
      return "xor";
    default:
      return "or";
  }
}

}  // namespace

Kernel kernel_for(DType dtype, ReduceOp op) {
  if (dtype == DType::boolean) return named("bool", operation_on_bool(op));
  const std::string_view operation = operation_of(op);
  if (op == ReduceOp::product || operation == "sum") {
    if (is_integer(dtype)) return named("uint" + std::to_string(8 * size_of(dtype)), operation);
    if (operation == "sum" && dtype == DType::complex64) return named("float32", operation, 2);
    if (operation == "sum" && dtype == DType::complex128) return named("float64", operation, 2);
  }
  if (op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor)
    return named("bits", operation, size_of(dtype));
  return named(name(dtype), operation);
}

Kernel copy_kernel() { return {"bits_or", 1}; }

}  // namespace ringreduce::gpu
