// The parameters of the kernels in kernels.cpp.
#pragma once

#include <cstdint>

struct Add {
  std::uint64_t words, count, value;  // words[i] += value for i in [0, count)
};

struct Meet {
  std::uint64_t counter;
};
