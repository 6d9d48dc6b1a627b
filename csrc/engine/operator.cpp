#include "engine/operator.h"

#include <algorithm>

#include "core/float_environment.h"
#include "core/partition.h"

namespace ringreduce {

std::size_t Operator::tile_bytes() const {
  return std::max(most_tile_bytes / element_bytes, std::size_t{1}) * element_bytes;
}

bool Operator::fold(std::span<void* const> dsts, std::span<const void* const> srcs, std::size_t count,
                    std::byte* scratch) const {
  const DefaultFloatEnvironment environment;  // where all ranks combine all, they must get the same bits
  const std::size_t bytes = count * element_bytes, tile = tile_bytes();
  for (std::size_t begin = 0; begin < bytes; begin += tile) {
    const std::size_t some = lesser(tile, bytes - begin);
    std::byte* const made = static_cast<std::byte*>(dsts[0]) + begin;
    const std::byte* folded = static_cast<const std::byte*>(srcs[0]) + begin;
    for (std::size_t i = 1; i < srcs.size(); ++i) {
      std::byte* const out = i + 1 < srcs.size() ? scratch : made;
      if (function(folded, static_cast<const std::byte*>(srcs[i]) + begin, out, some / element_bytes) != 0)
        return false;
      folded = out;
    }
    for (void* const dst : dsts)
      if (std::byte* const to = static_cast<std::byte*>(dst) + begin; to != folded) std::copy_n(folded, some, to);
  }
  return true;
}

}  // namespace ringreduce
