// torch's tensors in this process's arena (transport/arena.h), where the peers of any group read them in place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <limits>

namespace ringreduce {

// An allocator for the arena. One that has no room throws Error(system). Lives as long as the process.
c10::Allocator* arena_allocator();

// A tensor in the arena. Throws Error(system) if it has no room, or if there is no arena.
at::Tensor empty_in_arena(at::IntArrayRef sizes, at::ScalarType type);

// Memory of this library's own for values on their way: in the arena, if they are worth it and there is room, else
// where torch has it.
c10::DataPtr staging_memory(std::size_t bytes);
at::Tensor empty_for_staging(at::IntArrayRef sizes, at::ScalarType type);

// From now on torch's allocator for CPU tensors puts those of `least_bytes` and more in the arena, as long as there is
// one and it has room; kNever stops that. A forked child begins without an arena, and so with ordinary memory. Throws
// Error(system) if another library does not let go of torch's allocator.
inline constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
void share_allocations(std::size_t least_bytes);

}  // namespace ringreduce
