#include "process_group/python_error.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "core/interrupt.h"

namespace ringreduce {

namespace {

class FutureError : public torch::PyTorchError {
 public:
  explicit FutureError(const Error& error) : PyTorchError(error.what()), error(error) {}
  PyObject* python_type() override { return error_class(error.kind()); }

  const Error error;
};

}  // namespace

PyObject* error_class(ErrorKind kind) {
  static constexpr const char* kClasses[] = {
      "",        "InvalidArgument", "PeerLost",   "CollectiveTimeout", "CollectiveMismatch",
      "Aborted", "SystemFailure",   "ServerLost", "OperatorFailed"};
  PyObject* module = PyImport_ImportModule("ringreduce.errors");
  PyObject* found = module == nullptr ? nullptr : PyObject_GetAttrString(module, kClasses[static_cast<int>(kind)]);
  Py_XDECREF(module);
  return found;
}

void raise(const Error& error) {
  if (std::exchange(interrupted, false)) return PyErr_SetNone(PyExc_KeyboardInterrupt);
  const auto type = pybind11::reinterpret_steal<pybind11::object>(error_class(error.kind()));
  if (!type) throw pybind11::error_already_set();
  PyErr_SetObject(type.ptr(), type(error.what(), error.culprit()).ptr());
}

std::exception_ptr for_future(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return std::make_exception_ptr(FutureError(known));
  } catch (...) {
    return error;
  }
}

std::optional<Error> error_in(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error;
  } catch (const FutureError& failed) {
    return failed.error;
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace ringreduce
