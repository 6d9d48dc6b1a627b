// One instruction set that the kernels are compiled for.
#pragma once

#include <cstddef>
#include <string_view>

#include "core/types.h"
#include "kernels/packing.h"

namespace ringreduce::kernels {

// The arguments of accumulate(), copy() and stream() (count in bytes), and scale(). The last two have one of dsts.
struct Job {
  void* const* dsts;
  int copies;
  const void* const* srcs;
  int n;
  std::size_t count;
  double factor;  // the divisor of accumulate(), the factor of scale()
  const float* weights = nullptr;
};

// The arguments of pack(), in whole blocks of kPackedTogether values, and of round(): see packing.h.
struct PackJob {
  const char* values;
  char* to;
  bool packs;  // to bytes; else to rounded values
  char* rest;  // or null
  std::size_t blocks;
};

struct Target {
  std::string_view name;
  void (*accumulate)(DType dtype, ReduceOp op, const Job& job);
  void (*copy)(const Job& job);
  void (*stream)(const Job& job);
  void (*scale)(DType dtype, const Job& job);
  void (*pack)(Packing packing, const PackJob& job);
  void (*unpack)(Packing packing, char* values, const char* packed, std::size_t blocks);
};

// The one in use.
const Target& current_target();

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
