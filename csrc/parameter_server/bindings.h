// The Python classes of the parameter server. Does not include torch, whose headers take long to compile.
#pragma once

#include <pybind11/pybind11.h>

#include "parameter_server/block/rules.h"

namespace ringreduce::parameter_server {

// Adds ParameterServer, ParameterClient and the classes they use to the module. `roots` is torch's square root.
void bind(pybind11::module_& m, Roots roots);

}  // namespace ringreduce::parameter_server
