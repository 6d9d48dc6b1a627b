// The part of ringreduce._C that is about GPUs.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/types.h"

namespace ringreduce {

// For tests and benchmarks, which call kernels by name. They throw Error(invalid_argument).
DType dtype_named(const std::string& wanted);
ReduceOp reduce_op_named(const std::string& wanted);

void bind_gpus(pybind11::module_& m);

}  // namespace ringreduce
