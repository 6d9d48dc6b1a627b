// Our errors as Python sees them.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>

#include "core/error.h"

namespace ringreduce {

// The class of ringreduce.errors for a kind; a new reference. Needs the GIL.
inline PyObject* error_class(ErrorKind kind) {
  static constexpr const char* kClasses[] = {
      "", "InvalidArgument", "PeerLost", "CollectiveTimeout", "CollectiveMismatch", "Aborted", "SystemFailure"};
  PyObject* module = PyImport_ImportModule("ringreduce.errors");
  PyObject* found = module == nullptr ? nullptr : PyObject_GetAttrString(module, kClasses[static_cast<int>(kind)]);
  Py_XDECREF(module);
  return found;
}

// Makes it the exception that is raised in this thread. Needs the GIL.
inline void raise(const Error& error) {
  const auto type = pybind11::reinterpret_steal<pybind11::object>(error_class(error.kind()));
  if (!type) throw pybind11::error_already_set();
  PyErr_SetObject(type.ptr(), type(error.what(), error.culprit()).ptr());
}

// An Error for futures. Whoever waits for one inside torch, as DDP does in backward(), lets exceptions out through code
// that knows the exceptions of torch only. The Python exception has no culprit then: torch makes it of the message.
class FutureError : public torch::PyTorchError {
 public:
  explicit FutureError(const Error& error) : PyTorchError(error.what()), error(error) {}
  PyObject* python_type() override { return error_class(error.kind()); }

  const Error error;
};

// The same error, for a future.
inline std::exception_ptr for_future(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return std::make_exception_ptr(FutureError(known));
  } catch (...) {
    return error;
  }
}

}  // namespace ringreduce
