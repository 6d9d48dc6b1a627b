// The part of ringreduce._C that is about GPUs.
#pragma once

#include <pybind11/pybind11.h>

namespace ringreduce {

void bind_gpus(pybind11::module_& m);

}  // namespace ringreduce
