// The kernels by themselves, mostly for tests and benchmarks.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/accumulate.h"
#include "kernels/packing.h"
#include "process_group/bindings.h"
#include "process_group/keywords.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

void* address(std::uintptr_t a) { return reinterpret_cast<void*>(a); }  // NOLINT(performance-no-int-to-ptr)
std::byte* bytes_at(std::uintptr_t a) { return static_cast<std::byte*>(address(a)); }

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("kernel_supports", &kernels::supports);
  m.def(
      "accumulate",
      [](DType dtype, ReduceOp op, const std::vector<std::uintptr_t>& dsts, const std::vector<std::uintptr_t>& srcs,
         std::size_t count, double divisor, const std::vector<float>& weights) {
        std::vector<const void*> sources;
        for (std::uintptr_t src : srcs) sources.push_back(address(src));
        std::vector<void*> results;
        for (std::uintptr_t dst : dsts) results.push_back(address(dst));
        kernels::accumulate(dtype, op, results, sources, count, divisor, weights);
      },
      py::arg("dtype"), py::arg("op"), py::arg("dsts"), py::arg("srcs"), py::arg("count"), py::arg("divisor") = 1.0,
      py::arg("weights") = std::vector<float>{});
  m.def("scale", [](DType dtype, std::uintptr_t dst, std::uintptr_t src, std::size_t count, double factor) {
    kernels::scale(dtype, address(dst), address(src), count, factor);
  });
  m.def("stream", [](std::uintptr_t dst, std::uintptr_t src, std::size_t bytes) {
    kernels::stream(address(dst), address(src), bytes);
  });
  m.def("packed_bytes", [](const std::string& wire_dtype, std::size_t count) {
    return packed_bytes(packing_named(wire_dtype), count);
  });
  m.def(
      "pack",
      [](const std::string& wire_dtype, std::uintptr_t packed, std::uintptr_t values, std::size_t count,
         std::uintptr_t rest) {
        pack(packing_named(wire_dtype), bytes_at(packed), bytes_at(values), count, bytes_at(rest));
      },
      py::arg("wire_dtype"), py::arg("packed"), py::arg("values"), py::arg("count"), py::arg("rest") = 0,
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "unpack",
      [](const std::string& wire_dtype, std::uintptr_t values, std::uintptr_t packed, std::size_t count) {
        unpack(packing_named(wire_dtype), bytes_at(values), bytes_at(packed), count);
      },
      py::arg("wire_dtype"), py::arg("values"), py::arg("packed"), py::arg("count"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "round",
      [](const std::string& wire_dtype, std::uintptr_t values, std::size_t count, std::uintptr_t rest) {
        round(packing_named(wire_dtype), bytes_at(values), count, bytes_at(rest));
      },
      py::arg("wire_dtype"), py::arg("values"), py::arg("count"), py::arg("rest") = 0,
      py::call_guard<py::gil_scoped_release>());
  m.def("instruction_set", [] { return std::string(kernels::instruction_set()); });
  m.def("select_instruction_set", [](const std::string& wanted) { return kernels::select_instruction_set(wanted); });

  m.def("split", [](std::size_t begin, std::size_t end, std::size_t parts, std::size_t index, std::size_t unit) {
    const Range r = split({begin, end}, parts, index, unit);
    return std::pair(r.begin, r.end);
  });
  m.def("stripe", [](std::size_t count, std::uint32_t begin, std::uint32_t end, std::uint32_t total, std::size_t unit) {
    const Range r = stripe(count, {begin, end, total}, unit);
    return std::pair(r.begin, r.end);
  });
}

}  // namespace ringreduce
