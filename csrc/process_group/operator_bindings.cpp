// Operators of the user's own as Python makes them: of a function in machine code, or of one in Python, which runs with
// the GIL while its group moves data. Their stubs are in ringreduce/_C.pyi.
#include "process_group/operator_bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/history.h"
#include "engine/operator.h"
#include "process_group/no_calls.h"
#include "process_group/one_thread.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

Operator checked(Operator op) {
  if (op.name.size() >= CallHistory::kNameBytes)
    throw Error(ErrorKind::invalid_argument, "name has " + std::to_string(op.name.size()) + " bytes");
  return op;
}

// function(a, b, out) in Python, of tensors of rows, one an element, which may have memory of peers. What it raises
// goes to `errors`, since the engine's call goes on; it is not called again.
class PythonFunction {
 public:
  PythonFunction(py::function function, py::list errors, at::ScalarType dtype, std::vector<std::int64_t> row_shape)
      : function_(std::move(function)), errors_(std::move(errors)), dtype_(dtype), row_shape_(std::move(row_shape)) {}

  // In the thread that makes the call, which holds no GIL meanwhile.
  int operator()(const void* a, const void* b, void* out, std::size_t count) {
    const NoCalls no_calls;
    const at::NoGradGuard no_grad;
    const OneThread one_thread;  // others have a floating-point environment of their own
    const py::gil_scoped_acquire gil;
    if (!errors_.empty()) return 1;
    try {
      function_(rows(a, count), rows(b, count), rows(out, count));
      return 0;
    } catch (py::error_already_set& raised) {
      // Without the frame of function_, which knows tensors whose memory goes away.
      if (raised.trace()) PyException_SetTraceback(raised.value().ptr(), raised.trace().attr("tb_next").ptr());
      errors_.append(raised.value());
    } catch (const std::exception& error) {
      errors_.append(py::module_::import("builtins").attr("RuntimeError")(error.what()));
    }
    return 1;
  }

 private:
  at::Tensor rows(const void* place, std::size_t count) const {
    std::vector<std::int64_t> shape{static_cast<std::int64_t>(count)};
    shape.insert(shape.end(), row_shape_.begin(), row_shape_.end());
    return at::from_blob(const_cast<void*>(place), shape, at::TensorOptions(dtype_));
  }

  py::function function_;
  py::list errors_;
  at::ScalarType dtype_;
  std::vector<std::int64_t> row_shape_;
};

}  // namespace

void bind_operators(py::module_& m) {
  py::class_<Operator> operators(m, "Operator");
  operators.def(
      py::init([](std::uintptr_t function, std::size_t element_bytes, std::uint64_t digest, std::string name,
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
  operators.def_static(
      "in_python",
      [](py::function function, py::list errors, at::ScalarType dtype, std::vector<std::int64_t> row_shape,
         std::size_t most_tile_bytes, std::size_t element_bytes, std::uint64_t digest, std::string name) {
        // Python destroys the operator, and with it the function: so the GIL is held.
        const auto owned =
            std::make_shared<PythonFunction>(std::move(function), std::move(errors), dtype, std::move(row_shape));
        return checked({.function = [owned](const void* a, const void* b, void* out,
                                            std::size_t count) { return (*owned)(a, b, out, count); },
                        .element_bytes = element_bytes,
                        .digest = digest,
                        .name = std::move(name),
                        .failure = "its function raised an error",
                        .most_tile_bytes = most_tile_bytes});
      },
      py::kw_only(), py::arg("function"), py::arg("errors"), py::arg("dtype"), py::arg("row_shape"),
      py::arg("most_tile_bytes"), py::arg("element_bytes"), py::arg("digest"), py::arg("name"));
  m.def("begin_no_calls", &NoCalls::begin, "From here to end_no_calls() this thread may make no calls of groups.");
  m.def("end_no_calls", &NoCalls::end);
}

}  // namespace ringreduce
