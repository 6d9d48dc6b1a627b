// A call in plain numbers, as ranks tell one another of it. What the numbers mean is in engine/call.h.
#pragma once

#include <cstdint>

namespace ringreduce {

struct CallHeader {
  std::uint64_t seq;          // among the group's calls; the first is 1
  std::uint64_t fingerprint;  // equal for equal calls
  std::uint64_t number;       // for the user, who may count otherwise
  std::uint64_t count, plan;
  std::uint32_t operation, dtype;
  std::uint32_t reduce_op;  // kOperator: an operator of the user's own; `count` is then in bytes
  std::int32_t root;
  std::uint32_t part;  // 1: a part of the user's call, which is several of the engine's
  std::uint32_t packing;
};

}  // namespace ringreduce
