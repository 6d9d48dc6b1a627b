// What ringreduce.gpu needs of the module ringreduce._C to bring a group's GPUs together. Its stubs are in
// ringreduce/_C.pyi.
#include "process_group/gpu_bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/gpu/peer_engine.h"
#include "engine/gpu/trial.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

py::bytes bytes_of(const cuda::Handle& handle) { return {reinterpret_cast<const char*>(&handle), sizeof(handle)}; }

std::vector<cuda::Handle> handles_of(const std::vector<std::string>& all) {
  std::vector<cuda::Handle> handles(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != sizeof(cuda::Handle))
      throw Error(ErrorKind::invalid_argument, "handle " + std::to_string(r) + " has " + std::to_string(all[r].size()) +
                                                   " bytes; it must have " + std::to_string(sizeof(cuda::Handle)));
    std::memcpy(&handles[r], all[r].data(), sizeof(cuda::Handle));
  }
  return handles;
}

}  // namespace

void bind_gpus(py::module_& m) {
  m.def("cuda_unavailable", &cuda::unavailable);
  m.def(
      "make_stream_wait",
      [](int ordinal, std::uintptr_t waiting, std::uintptr_t for_what) {
        const auto device = std::make_shared<const cuda::Device>(ordinal);
        const cuda::Event now(device);
        const auto stream = [&](std::uintptr_t handle) {
          return cuda::Stream::borrowed(device, reinterpret_cast<cuda::CUstream>(handle));  // NOLINT
        };
        stream(for_what).record(now);
        stream(waiting).wait(now);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("ordinal"), py::arg("waiting"), py::arg("for_what"));

  py::class_<cuda::Device, std::shared_ptr<cuda::Device>>(m, "CudaDevice")
      .def(py::init<int>(), py::arg("ordinal"))
      .def_static("count", &cuda::Device::count)
      .def_property_readonly("capability",
                             [](const cuda::Device& d) { return std::pair(d.capability() / 10, d.capability() % 10); })
      .def_property_readonly("multiprocessors", &cuda::Device::multiprocessors)
      .def_property_readonly("pci_bus_id", &cuda::Device::pci_bus_id)
      .def("__str__", &cuda::Device::describe);

  py::class_<cuda::OwnMemory, std::shared_ptr<cuda::OwnMemory>>(m, "GpuRegion")
      .def(py::init([](const std::shared_ptr<cuda::Device>& device, std::size_t bytes) {
             return std::make_shared<cuda::OwnMemory>(device, bytes);
           }),
           py::arg("device"), py::arg("bytes"))
      .def_property_readonly("handle", [](const cuda::OwnMemory& memory) { return bytes_of(memory.handle()); });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine");

  using Shape = PeerEngine::Shape;
  py::class_<Shape>(m, "RegionShape")
      .def(py::init([](std::uint32_t lanes, bool one_lane, std::uint32_t depth, std::uint32_t slot_bytes) {
             return Shape{lanes, one_lane, depth, slot_bytes};
           }),
           py::kw_only(), py::arg("lanes"), py::arg("one_lane"), py::arg("depth"), py::arg("slot_bytes"))
      .def(
          "bytes", [](const Shape& shape, int ranks) { return PeerEngine::region_bytes(ranks, shape); },
          py::arg("ranks"));

  py::class_<GpuEngine, std::shared_ptr<GpuEngine>>(m, "GpuEngine")
      .def(
          "add_plan",
          [](GpuEngine& engine, const std::string& collective, std::vector<std::int32_t> lowered, std::uint64_t digest,
             std::uint64_t most_bytes, std::size_t slice_bytes) {
            const Operation operation = operation_named(collective);
            engine.choose(operation, most_bytes, engine.add_plan(operation, std::move(lowered), digest), slice_bytes);
          },
          py::arg("collective"), py::arg("lowered"), py::arg("digest"), py::arg("most_bytes"),
          py::arg("slice_bytes") = 0)
      .def(
          "try_out",
          [](GpuEngine& engine, double timeout) { try_out(engine, static_cast<Nanoseconds>(timeout * 1e9)); },
          py::call_guard<py::gil_scoped_release>(), py::arg("timeout"));

  m.def("takes_steps", [](const std::vector<std::string>& handles, int rank) {
    return PeerEngine::mode_for(handles_of(handles), rank) == PeerEngine::Mode::steps;
  });
  m.def(
      "peer_engine",
      [](const std::shared_ptr<Engine>& host, const std::shared_ptr<cuda::Device>& device,
         const std::shared_ptr<cuda::OwnMemory>& region, const std::vector<std::string>& handles, const Shape& shape,
         bool steps, cuda::Images images, int slices, std::size_t least_slice_bytes) -> std::shared_ptr<GpuEngine> {
        return std::make_shared<PeerEngine>(
            std::make_shared<TrialHost>(host), std::make_shared<cuda::Kernels>(device, std::move(images)), device,
            region, handles_of(handles), shape, steps ? PeerEngine::Mode::steps : PeerEngine::Mode::run,
            Engine::Options{.slices = slices, .least_slice_bytes = least_slice_bytes});
      },
      py::call_guard<py::gil_scoped_release>(), py::kw_only(), py::arg("host"), py::arg("device"), py::arg("region"),
      py::arg("handles"), py::arg("shape"), py::arg("steps"), py::arg("images"), py::arg("slices"),
      py::arg("least_slice_bytes"));
}

}  // namespace ringreduce
