// The shortest way from Python to a synchronous collective on plain tensors. The functions of ringreduce.api try it
// first.
#pragma once

#include <pybind11/pybind11.h>

namespace ringreduce {

// Adds all_reduce_now(group, tensor, op) and its likes to the module. Each returns whether it has made the call. If
// not, nothing has happened, and the caller takes the general way, which also says what is wrong with the arguments.
// memory_of(tensor, like, writes) is the same for calls that take an address.
void bind_direct_calls(pybind11::module_& m);

}  // namespace ringreduce
