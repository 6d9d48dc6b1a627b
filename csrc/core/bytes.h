// Memory for bytes that are written before they are read.
#pragma once

#include <cstddef>
#include <memory>

namespace ringreduce {

// As std::make_shared_for_overwrite, which GCC 11 does not have.
inline std::shared_ptr<std::byte[]> unwritten_bytes(std::size_t count) {
  return std::shared_ptr<std::byte[]>(new std::byte[count]);
}

}  // namespace ringreduce
