// Translates c10d's arguments for the engine, and throws errors for those that have no meaning there.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "core/error.h"
#include "core/partition.h"
#include "core/types.h"
#include "engine/call.h"

namespace ringreduce {

using TensorList = std::vector<at::Tensor>;

// Throws invalid_argument with the parts as its message.
template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw Error(ErrorKind::invalid_argument, c10::str(parts...));
}

// `what` is the call, for the error's sake, here and below.
DType dtype_of(at::ScalarType type, const char* what);
ReduceOp reduce_op_of(const c10d::ReduceOp& op);
// The factor of premul_sum; 1 for other ops.
double factor_of(const c10d::ReduceOp& op);

// The one tensor of a list that c10d allows to be longer.
const at::Tensor& only(const TensorList& tensors, const char* what);

// Whether a tensor's elements lie in memory that is its own, of the CPU or a GPU.
inline bool has_memory(const at::Tensor& t) {
  return t.layout() == at::kStrided && (t.is_cpu() || t.is_cuda()) && !t.is_nested() && !t._is_zerotensor() &&
         t.has_storage() && t.storage().data() != nullptr;
}
// The memory from the first element of a tensor to the last, of which there must be one.
struct Extent {
  const std::byte *begin, *end;
};
Extent extent_of(const at::Tensor& tensor);
// Throws for a tensor of which that is not true, saying why; an empty one needs no memory.
void check_tensor(const at::Tensor& tensor, const char* what);
// Throws for tensors that cannot be written without harm to each other or to themselves.
void check_outputs(const TensorList& tensors, const char* what);
// A tensor that is in the list twice is written once: the second time a copy of it takes its place.
void copy_repeated(TensorList& tensors);
void check_count(const char* what, std::size_t is, std::size_t must);
void check_list(const char* what, std::size_t is, int must);
void check_pairs(std::string_view what, const TensorList& outputs, const TensorList& inputs);

// The sizes of the `size` equal parts of a tensor.
std::vector<std::size_t> equal_blocks(const at::Tensor& tensor, int size, const char* what);
// The same for parts of as many rows of the first dimension as `splits` says; empty `splits` stand for equal parts.
std::vector<std::size_t> split_blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                      const char* what);

// Fills in the size of a call whose blocks this rank knows all of.
void size_from(Call& call, const std::vector<std::size_t>& counts);

// Makes an all_reduce one of `count` elements by an operator of the user's own.
void set_operator(Call& call, const Operator& op, std::size_t count);

// is_plain(): whether a tensor's memory is its elements one after the other, and on `device`, if one is given. plain():
// the tensor itself if it is plain on `device`, otherwise a copy that is.
inline bool is_plain(const at::Tensor& t) { return t.is_contiguous() && !t.is_conj() && !t.is_neg(); }
inline bool is_plain(const at::Tensor& t, at::Device device) { return t.device() == device && is_plain(t); }
at::Tensor plain(const at::Tensor& t, at::Device device);
// Copies between tensors of the same dtype and sizes, in whatever mode `to` was made.
void copy_elements(const at::Tensor& to, const at::Tensor& from);

}  // namespace ringreduce
