// How a tensor is cut: tensor > stripe (one per channel) > chunk > slice. All arithmetic on element ranges is here.
//
// Boundaries fall on multiples of `unit` elements, so that every part but the last starts on a cache line when the
// tensor does; parts differ by at most one unit and may be empty. Source of the vocabulary: NCCL (channel, chunk,
// slice).
#pragma once

#include "core/device.h"

namespace ringreduce {

// Elements [begin, end) of a tensor.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  RINGREDUCE_BOTH constexpr std::size_t size() const { return end - begin; }
};

// Whether [a, a + a_bytes) and [b, b + b_bytes) have a byte in common.
RINGREDUCE_BOTH bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  return a_bytes > 0 && b_bytes > 0 && left < right + b_bytes && right < left + a_bytes;
}

inline constexpr std::size_t kCacheLine = 64;

RINGREDUCE_BOTH constexpr std::size_t lesser(std::size_t a, std::size_t b) { return a < b ? a : b; }
RINGREDUCE_BOTH constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Elements in one cache line, or one that is larger: the unit in which tensors are cut.
RINGREDUCE_BOTH constexpr std::size_t unit_of(std::size_t element_size) {
  return element_size < kCacheLine ? kCacheLine / element_size : 1;
}

// The first element of part `index` (of `parts`) of `whole`; `index` may be `parts`, which gives the end.
RINGREDUCE_BOTH constexpr std::size_t split_point(Range whole, std::size_t parts, std::size_t index, std::size_t unit) {
  const std::size_t units = ceil_div(whole.size(), unit);
  const std::size_t before = index * (units / parts) + lesser(index, units % parts);
  return lesser(whole.begin + before * unit, whole.end);
}

RINGREDUCE_BOTH constexpr Range split(Range whole, std::size_t parts, std::size_t index, std::size_t unit) {
  if (parts == 1) return whole;
  return {split_point(whole, parts, index, unit), split_point(whole, parts, index + 1, unit)};
}

// A channel's share of a tensor, as cumulative weights: [begin, end) of `total`.
struct Share {
  std::uint32_t begin = 0;
  std::uint32_t end = 1;
  std::uint32_t total = 1;
};

RINGREDUCE_BOTH constexpr Range stripe(std::size_t count, Share share, std::size_t unit) {
  const std::size_t units = ceil_div(count, unit);
  return {lesser(units * share.begin / share.total * unit, count),
          lesser(units * share.end / share.total * unit, count)};
}

// Slice `round` of a chunk cut in slices of `slice_size` elements; empty past the end.
RINGREDUCE_BOTH constexpr Range slice(Range chunk, std::size_t round, std::size_t slice_size) {
  const std::size_t begin = lesser(chunk.begin + round * slice_size, chunk.end);
  return {begin, lesser(begin + slice_size, chunk.end)};
}

// The largest chunk that `split` makes of a stripe.
RINGREDUCE_BOTH constexpr std::size_t largest_chunk(Range stripe, std::size_t chunks, std::size_t unit) {
  return lesser(ceil_div(ceil_div(stripe.size(), unit), chunks) * unit, stripe.size());
}

}  // namespace ringreduce
