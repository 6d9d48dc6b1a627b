// The parts of ringreduce._C.
#pragma once

#include <pybind11/pybind11.h>

namespace ringreduce {

// The shortest way from Python to a synchronous collective on plain tensors: all_reduce_now(group, tensor, op) and its
// likes, which the functions of ringreduce.api try first. Each returns whether it has made the call. If not, nothing
// has happened, and the caller takes the general way, which also says what is wrong with the arguments.
// memory_of(tensor, like, writes) is the same for calls that take an address.
void bind_direct_calls(pybind11::module_& m);
// The decorator tries_first(now, *names). The decorated function first passes its arguments of these names to `now`, in
// this order, if all its others are None or False. If `now` returns True, that was the call. What `now` raises is
// raised.
void bind_direct_function(pybind11::module_& m);
// Operators of the user's own.
void bind_operators(pybind11::module_& m);
void bind_gpus(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);

}  // namespace ringreduce
