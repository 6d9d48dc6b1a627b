// A reduction of the user's own: its function, and by what ranks tell it from others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace ringreduce {

struct Operator {
  // Combines `count` elements: out[i] = a[i] op b[i]. `out` may be `a` or `b`, and shares no memory with them
  // otherwise. Not 0: it failed.
  using Function = std::function<int(const void* a, const void* b, void* out, std::size_t count)>;

  Function function;
  std::size_t element_bytes = 1;
  std::uint64_t digest = 0;            // of all that ranks must agree on
  std::string name;                    // with the kind of its elements, for texts of errors
  std::string failure;                 // what it means that the function fails
  std::size_t most_tile_bytes = 8192;  // of each operand at a time; so few stay in the L1 cache

  // What the function gets of each operand at a time: whole elements, and one at least.
  std::size_t tile_bytes() const;

  // dst[i] = srcs[0][i] op srcs[1][i] op ..., evaluated from left to right, for i in [0, count) and each of the `dsts`,
  // of which a dst may be one of `srcs`. There are at least two of `srcs`. `scratch` has tile_bytes(), and is not
  // used for two. Returns whether the function succeeded; what is in `dsts` is undefined if not.
  bool fold(std::span<void* const> dsts, std::span<const void* const> srcs, std::size_t count,
            std::byte* scratch) const;
};

}  // namespace ringreduce
