// One instruction set that the kernels are compiled for.
#pragma once

#include <cstddef>
#include <string_view>

#include "core/types.h"

namespace ringreduce::kernels {

// The arguments of accumulate(), copy() and stream() (count in bytes), and scale(). The last two have one of dsts.
struct Job {
  void* const* dsts;
  int copies;
  const void* const* srcs;
  int n;
  std::size_t count;
  double factor;  // the divisor of accumulate(), the factor of scale()
};

struct Target {
  std::string_view name;
  void (*accumulate)(DType dtype, ReduceOp op, const Job& job);
  void (*copy)(const Job& job);
  void (*stream)(const Job& job);
  void (*scale)(DType dtype, const Job& job);
};

// Each is defined in the source file of its name.
namespace baseline {
extern const Target target;
}
namespace avx2 {
extern const Target target;
}
namespace avx512 {
extern const Target target;
}

}  // namespace ringreduce::kernels
