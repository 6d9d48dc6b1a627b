// Operators of the user's own as Python makes them: of a function in machine code, or of one in Python, which runs with
// the GIL while its group moves data. Their stubs are in ringreduce/_C.pyi.
#include "process_group/operator_bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/history.h"
#include "engine/operator.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

Operator checked(Operator op) {
  if (op.name.size() >= CallHistory::kNameBytes)
    throw Error(ErrorKind::invalid_argument, "name has " + std::to_string(op.name.size()) + " bytes");
  return op;
}

// A function in Python: function(a, b, out) of tensors of rows, one an element. The engine calls it in any thread,
// without the GIL. What it raises is kept here, since the engine's call goes on.
class PythonOperator : public Operator {
 public:
  PythonOperator(py::function python, at::ScalarType dtype, std::vector<std::int64_t> row_shape, bool copies,
                 std::size_t most_bytes, std::size_t element_bytes, std::uint64_t digest, std::string name)
      : Operator(checked({.element_bytes = element_bytes,
                          .digest = digest,
                          .name = std::move(name),
                          .failure = "its function raised an error",
                          .most_bytes = most_bytes})),
        python_(std::move(python)),
        dtype_(dtype),
        shape_(std::move(row_shape)),
        copies_(copies) {
    shape_.insert(shape_.begin(), 0);
    function = [this](const void* a, const void* b, void* out, std::size_t count) { return call(a, b, out, count); };
  }
  PythonOperator(const PythonOperator&) = delete;
  PythonOperator& operator=(const PythonOperator&) = delete;

  py::object take_error() { return std::exchange(error_, py::none()); }

 private:
  int call(const void* a, const void* b, void* out, std::size_t count) {
    const at::NoGradGuard no_grad;
    const py::gil_scoped_acquire gil;
    try {
      const at::Tensor left = rows(a, count), right = rows(b, count);
      python_(copies_ ? left.clone() : left, copies_ ? right.clone() : right, rows(out, count));
      return 0;
    } catch (py::error_already_set& raised) {
      if (error_.is_none()) error_ = raised.value();
      return 1;
    }
  }

  at::Tensor rows(const void* place, std::size_t count) {
    shape_[0] = static_cast<std::int64_t>(count);
    return at::from_blob(const_cast<void*>(place), shape_, at::TensorOptions(dtype_));
  }

  py::function python_;
  at::ScalarType dtype_;
  std::vector<std::int64_t> shape_;  // the number of rows, and what one has
  bool copies_;
  py::object error_ = py::none();
};

}  // namespace

void bind_operators(py::module_& m) {
  py::class_<Operator>(m, "Operator")
      .def(py::init([](std::uintptr_t function, std::size_t element_bytes, std::uint64_t digest, std::string name,
                       std::string failure) {
             auto* const place = reinterpret_cast<void*>(function);  // NOLINT(performance-no-int-to-ptr)
             return checked({.function = reinterpret_cast<int (*)(const void*, const void*, void*, std::size_t)>(place),
                             .element_bytes = element_bytes,
                             .digest = digest,
                             .name = std::move(name),
                             .failure = std::move(failure)});
           }),
           py::kw_only(), py::arg("function"), py::arg("element_bytes"), py::arg("digest"), py::arg("name"),
           py::arg("failure"));
  py::class_<PythonOperator, Operator>(m, "PythonOperator")
      .def(py::init<py::function, at::ScalarType, std::vector<std::int64_t>, bool, std::size_t, std::size_t,
                    std::uint64_t, std::string>(),
           py::kw_only(), py::arg("function"), py::arg("dtype"), py::arg("row_shape"), py::arg("copies"),
           py::arg("most_bytes"), py::arg("element_bytes"), py::arg("digest"), py::arg("name"))
      .def("take_error", &PythonOperator::take_error, "What the function has raised first since the last time.");
}

}  // namespace ringreduce
