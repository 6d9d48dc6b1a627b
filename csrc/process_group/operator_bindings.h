// The classes of ringreduce._C for operators of the user's own.
#pragma once

#include <pybind11/pybind11.h>

namespace ringreduce {

void bind_operators(pybind11::module_& m);

}  // namespace ringreduce
