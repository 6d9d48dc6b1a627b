// The parameter server as Python sees it. Without torch, whose headers take long to compile.
#pragma once

#include <pybind11/pybind11.h>

#include "parameter_server/rules.h"

namespace ringreduce::parameter_server {

// Adds ParameterServer and ParameterClient to the module. `roots` is torch's.
void bind(pybind11::module_& m, Roots roots);

}  // namespace ringreduce::parameter_server
