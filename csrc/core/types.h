// Element types and reduction operations, as every layer below the process group names them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace ringreduce {

enum class DType : std::uint8_t {
  float64,
  float32,
  float16,
  bfloat16,
  float8_e4m3fn,
  float8_e5m2,
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean,
  complex64,
  complex128,
  // More are moved between ranks and never reduced. They follow here in the order of kDTypes, and need no names.
};

// Elements that are combined as float32, and rounded when they are stored.
constexpr bool narrow_float(DType d) { return d >= DType::float16 && d <= DType::float8_e5m2; }

// The operations of c10d::ReduceOp, and logaddexp. `premul_sum` multiplies each rank's input by a factor before the
// sum; `avg` divides the sum by the number of ranks; `logaddexp` is log(exp(a) + exp(b)).
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum, logaddexp };

namespace detail {
struct DTypeInfo {
  std::string_view name;
  std::size_t size;  // bytes per element
};
inline constexpr DTypeInfo kDTypes[] = {
    {"float64", 8},
    {"float32", 4},
    {"float16", 2},
    {"bfloat16", 2},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"uint8", 1},
    {"bool", 1},
    {"complex64", 8},
    {"complex128", 16},
    {"complex32", 4},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"float4_e2m1fn_x2", 1},
    {"bits16", 2},
    {"bits8", 1},
    {"bits4x2", 1},
    {"bits2x4", 1},
    {"bits1x8", 1},
    {"bit", 1},
    {"int1", 1},
    {"int2", 1},
    {"int3", 1},
    {"int4", 1},
    {"int5", 1},
    {"int6", 1},
    {"int7", 1},
    {"uint1", 1},
    {"uint2", 1},
    {"uint3", 1},
    {"uint4", 1},
    {"uint5", 1},
    {"uint6", 1},
    {"uint7", 1},
};
inline constexpr std::array<std::string_view, 10> kReduceOps{"sum",  "avg", "product", "min",        "max",
                                                             "band", "bor", "bxor",    "premul_sum", "logaddexp"};
}  // namespace detail

inline constexpr std::size_t kDTypeCount = std::size(detail::kDTypes);
inline constexpr auto kReducedDTypeCount = static_cast<std::size_t>(DType::complex128) + 1;
inline constexpr std::size_t kReduceOpCount = detail::kReduceOps.size();

constexpr std::string_view name(DType dtype) { return detail::kDTypes[static_cast<std::size_t>(dtype)].name; }
constexpr std::size_t size_of(DType dtype) { return detail::kDTypes[static_cast<std::size_t>(dtype)].size; }
constexpr bool moves_only(DType dtype) { return static_cast<std::size_t>(dtype) >= kReducedDTypeCount; }
constexpr std::optional<DType> find_dtype(std::string_view wanted) {
  for (std::size_t i = 0; i < kDTypeCount; ++i)
    if (detail::kDTypes[i].name == wanted) return static_cast<DType>(i);
  return std::nullopt;
}
constexpr std::string_view name(ReduceOp op) { return detail::kReduceOps[static_cast<std::size_t>(op)]; }

}  // namespace ringreduce
