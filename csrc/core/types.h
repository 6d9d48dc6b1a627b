// Element types and reduction operations, as every layer below the process group names them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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
};

// The operations of c10d::ReduceOp. `premul_sum` multiplies each rank's input by a factor before the sum; `avg` divides
// the sum by the number of ranks.
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };

namespace detail {
struct DTypeInfo {
  std::string_view name;
  std::size_t size;  // bytes per element
};
inline constexpr std::array<DTypeInfo, 14> kDTypes{{{"float64", 8},
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
                                                    {"complex128", 16}}};
inline constexpr std::array<std::string_view, 9> kReduceOps{"sum",  "avg", "product", "min",       "max",
                                                            "band", "bor", "bxor",    "premul_sum"};
}  // namespace detail

inline constexpr std::size_t kDTypeCount = detail::kDTypes.size();
inline constexpr std::size_t kReduceOpCount = detail::kReduceOps.size();

constexpr std::string_view name(DType dtype) { return detail::kDTypes[static_cast<std::size_t>(dtype)].name; }
constexpr std::size_t size_of(DType dtype) { return detail::kDTypes[static_cast<std::size_t>(dtype)].size; }
constexpr std::string_view name(ReduceOp op) { return detail::kReduceOps[static_cast<std::size_t>(op)]; }

}  // namespace ringreduce
