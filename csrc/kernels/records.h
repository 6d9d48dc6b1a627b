// Operators on records: the record whose key comes first, the moments of two samples, the best k of two lists.
//
// Each is out[i] = a[i] op b[i] for i in [0, count). `out` may be `a` or `b`, and shares no memory with them otherwise.
// No alignment is required, and nothing is allocated. Results are for the default floating-point environment.
#pragma once

#include <cstddef>
#include <optional>

#include "core/types.h"

namespace ringreduce::kernels {

struct Field {
  DType dtype;
  std::size_t offset;  // in its record
};

// Which of two records comes first: the one with the higher key, or the lower one; NaN comes before all numbers.
// Between equal keys the lower index does, and without an index the record of `a`.
struct Order {
  Field key;                   // float32, float64, an integer or bool
  std::optional<Field> index;  // int32 or int64
  bool highest;
};

// Whether there is such an order.
bool supports(const Order& order);

// The record that comes first.
void choose(const Order& order, std::size_t record_bytes, const void* a, const void* b, void* out, std::size_t count);

// A record has k keys in the order of their places, the first one at order.key, and as many indices. The result has the
// k of both that come first.
void merge_best(const Order& order, std::size_t k, std::size_t record_bytes, const void* a, const void* b, void* out,
                std::size_t count);

// A record has the size of a sample, its mean, and the sum of its squared distances from the mean, all of `dtype`,
// float32 or float64. The result is of both samples together.
void merge_moments(DType dtype, const void* a, const void* b, void* out, std::size_t count);

}  // namespace ringreduce::kernels
