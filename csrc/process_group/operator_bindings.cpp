// Operators as Python makes them: of the library's own kernels, of a function of the user's in machine code, or of one
// in Python, which runs with the GIL while its group moves data. Their stubs are in ringreduce/_C.pyi.
#include "process_group/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/types.h"
#include "engine/history.h"
#include "engine/operator.h"
#include "kernels/accumulate.h"
#include "kernels/records.h"
#include "process_group/keywords.h"
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

// An operator whose function is a kernel, which cannot fail.
template <class Kernel>
Operator built_in(std::size_t element_bytes, std::uint64_t digest, std::string name, Kernel kernel) {
  return checked({.function =
                      [kernel](const void* a, const void* b, void* out, std::size_t count) {
                        kernel(a, b, out, count);
                        return 0;
                      },
                  .element_bytes = element_bytes,
                  .digest = digest,
                  .name = std::move(name),
                  .failure = ""});
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

// A field in Python: its dtype, and its offset in its record.
using FieldTuple = std::pair<DType, std::size_t>;

kernels::Order order_of(const FieldTuple& key, const std::optional<FieldTuple>& index, bool highest) {
  kernels::Order order{.key = {key.first, key.second}, .index = {}, .highest = highest};
  if (index) order.index = {index->first, index->second};
  if (!kernels::supports(order)) throw Error(ErrorKind::invalid_argument, "there are no such keys and indices");
  return order;
}

void* place_of(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

using Operators = py::class_<Operator>;

// All are made with what ranks compare, by keyword.
template <class Make, class... Own>
void def(Operators& operators, const char* name, Make make, Own... own) {
  operators.def_static(name, make, py::kw_only(), own..., py::arg("element_bytes"), py::arg("digest"), py::arg("name"));
}

void bind_functions(Operators& operators) {
  def(
      operators, "at_address",
      [](std::uintptr_t function, std::string failure, std::size_t element_bytes, std::uint64_t digest,
         std::string name) {
        return checked(
            {.function = reinterpret_cast<int (*)(const void*, const void*, void*, std::size_t)>(place_of(function)),
             .element_bytes = element_bytes,
             .digest = digest,
             .name = std::move(name),
             .failure = std::move(failure)});
      },
      py::arg("function"), py::arg("failure"));
  def(
      operators, "in_python",
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
      py::arg("function"), py::arg("errors"), py::arg("dtype"), py::arg("row_shape"), py::arg("most_tile_bytes"));
}

void bind_built_in(Operators& operators) {
  def(
      operators, "reduction",
      [](DType dtype, ReduceOp op, std::size_t element_bytes, std::uint64_t digest, std::string name) {
        if (!kernels::supports(dtype, op)) throw Error(ErrorKind::invalid_argument, "there is no such reduction");
        const std::size_t numbers = element_bytes / size_of(dtype);
        return built_in(element_bytes, digest, std::move(name),
                        [=](const void* a, const void* b, void* out, std::size_t count) {
                          const void* const srcs[] = {a, b};
                          kernels::accumulate(dtype, op, {&out, 1}, srcs, count * numbers);
                        });
      },
      py::arg("dtype"), py::arg("op"));
  def(
      operators, "first_of",
      [](const FieldTuple& key, const std::optional<FieldTuple>& index, bool highest, std::size_t element_bytes,
         std::uint64_t digest, std::string name) {
        return built_in(element_bytes, digest, std::move(name),
                        [order = order_of(key, index, highest), element_bytes](const void* a, const void* b, void* out,
                                                                               std::size_t count) {
                          kernels::choose(order, element_bytes, a, b, out, count);
                        });
      },
      py::arg("key"), py::arg("index"), py::arg("highest"));
  def(
      operators, "first_k_of",
      [](const FieldTuple& key, const FieldTuple& index, bool highest, std::size_t k, std::size_t element_bytes,
         std::uint64_t digest, std::string name) {
        return built_in(element_bytes, digest, std::move(name),
                        [order = order_of(key, index, highest), k, element_bytes](const void* a, const void* b,
                                                                                  void* out, std::size_t count) {
                          kernels::merge_best(order, k, element_bytes, a, b, out, count);
                        });
      },
      py::arg("key"), py::arg("index"), py::arg("highest"), py::arg("k"));
  def(
      operators, "moments",
      [](DType dtype, std::size_t element_bytes, std::uint64_t digest, std::string name) {
        return built_in(element_bytes, digest, std::move(name),
                        [dtype](const void* a, const void* b, void* out, std::size_t count) {
                          kernels::merge_moments(dtype, a, b, out, count);
                        });
      },
      py::arg("dtype"));
}

}  // namespace

void bind_operators(py::module_& m) {
  Operators operators(m, "Operator");
  bind_functions(operators);
  bind_built_in(operators);
  operators.def(
      "combine",
      [](const Operator& op, std::uintptr_t a, std::uintptr_t b, std::uintptr_t out, std::size_t count) {
        void* const dsts[] = {place_of(out)};
        const void* const srcs[] = {place_of(a), place_of(b)};
        return op.fold(dsts, srcs, count, nullptr);  // which two operands do not need
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("a"), py::arg("b"), py::arg("out"), py::arg("count"));
  m.def("begin_no_calls", &NoCalls::begin, "From here to end_no_calls() this thread may make no calls of groups.");
  m.def("end_no_calls", &NoCalls::end);
}

}  // namespace ringreduce
