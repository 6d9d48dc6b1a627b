// Our errors as Python and torch's futures see them. Kept free of pybind11, which takes long to compile.
#pragma once

#include <Python.h>

#include <exception>
#include <optional>

#include "core/error.h"

namespace ringreduce {

// The class of ringreduce.errors for a kind; a new reference, or null with Python's error set. Needs the GIL.
PyObject* error_class(ErrorKind kind);

// Makes it the exception that is raised in this thread. Needs the GIL.
void raise(const Error& error);

// The same error, for a future. Whoever waits for one inside torch, as DDP does in backward(), lets exceptions out
// through code that knows the exceptions of torch only. The Python exception has no culprit then: torch makes it of the
// message.
std::exception_ptr for_future(const std::exception_ptr& error);

// The Error that was thrown, or that `for_future` made it of; none if it is neither.
std::optional<Error> error_in(const std::exception_ptr& thrown);

}  // namespace ringreduce
