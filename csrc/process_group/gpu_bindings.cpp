// The bindings in ringreduce._C with which ringreduce.gpu brings a group's GPUs together. Their stubs are in
// ringreduce/_C.pyi.
#include "process_group/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/gpu/nccl_engine.h"
#include "engine/gpu/peer_engine.h"
#include "engine/gpu/stream_device.h"
#include "engine/gpu/trial.h"
#include "kernels/accumulate.h"
#include "kernels/gpu/accumulate.h"
#include "nccl/communicator.h"
#include "process_group/keywords.h"

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

// dst = op(src...) in `stream`, for benchmarks and for tests of the kernels by themselves; see put_accumulate.
void accumulate(const cuda::DevicePtr& device, cuda::Kernels& kernels, DType dtype, ReduceOp op, std::uintptr_t dst,
                const std::vector<std::uintptr_t>& srcs, std::size_t count, std::uintptr_t stream, unsigned blocks) {
  if (!kernels::supports(dtype, op))
    throw Error(ErrorKind::invalid_argument,
                "there is no " + std::string(name(op)) + " of " + std::string(name(dtype)));
  if (srcs.empty() || srcs.size() > gpu::kMostRanks)
    throw Error(ErrorKind::invalid_argument, "srcs has " + std::to_string(srcs.size()) +
                                                 " pointers; a kernel takes 1 to " + std::to_string(gpu::kMostRanks));
  if (count == 0) return;
  const gpu::Kernel kernel = gpu::kernel_for(dtype, op);
  gpu::Accumulate job{};
  job.dsts[0] = reinterpret_cast<void*>(dst);
  for (std::size_t i = 0; i < srcs.size(); ++i) job.srcs[i] = reinterpret_cast<const void*>(srcs[i]);
  job.count = count * kernel.parts;
  job.factor = job.divisor = 1;
  job.copies = 1;
  job.n = static_cast<std::int32_t>(srcs.size());
  job.scaled = -1;
  put_accumulate(cuda::Stream::borrowed(device, reinterpret_cast<cuda::CUstream>(stream)),
                 kernels.get("accumulate", "accumulate_", kernel.name), job, count * size_of(dtype), blocks);
}

// The arguments of peer_engine() and nccl_engine().
struct Joined {
  std::shared_ptr<Engine> host;
  std::shared_ptr<cuda::Device> device;
  cuda::Images images;
  Engine::Options options;
  // Over the GPUs' memory.
  std::shared_ptr<cuda::OwnMemory> region;
  std::vector<std::string> handles;
  PeerEngine::Shape shape;
  std::vector<bool> steps;
  // Over NCCL.
  std::vector<std::string> ids;
  std::uint64_t communicator = 0;
  int communicators = 1, channels = 1;
  double timeout = 0;
};

std::shared_ptr<GpuEngine> peer_engine(const py::kwargs& members) {
  const auto joined = from_keywords<Joined>(members);
  const py::gil_scoped_release no_gil;
  std::vector<PeerEngine::Mode> modes;
  for (const bool its : joined.steps) modes.push_back(its ? PeerEngine::Mode::steps : PeerEngine::Mode::run);
  return std::make_shared<PeerEngine>(PeerEngine::Setup{.host = std::make_shared<TrialHost>(joined.host),
                                                        .kernels = cuda::Kernels::of(joined.device, joined.images),
                                                        .device = joined.device,
                                                        .own = joined.region,
                                                        .handles = handles_of(joined.handles),
                                                        .shape = joined.shape,
                                                        .modes = std::move(modes),
                                                        .options = joined.options});
}

std::shared_ptr<GpuEngine> nccl_engine(const py::kwargs& members) {
  const auto joined = from_keywords<Joined>(members);
  const py::gil_scoped_release no_gil;
  const int rank = joined.host->rank(), size = joined.host->size();
  const Nanoseconds timeout = nanoseconds(joined.timeout);
  auto made = joined.communicator != 0
                  ? nccl::adopt(joined.communicator, joined.communicators, joined.device, rank, size, timeout)
                  : nccl::make(joined.ids, joined.communicators, joined.device, rank, size, timeout);
  return std::make_shared<NcclEngine>(std::make_shared<TrialHost>(joined.host),
                                      cuda::Kernels::of(joined.device, joined.images), joined.device, std::move(made),
                                      joined.channels, joined.options);
}

void bind_engines(py::module_& m) {
  using J = Joined;
  py::class_<J> joined(m, "JoinedGpus");
  bind_members(joined, "host", &J::host, "device", &J::device, "images", &J::images, "region", &J::region, "handles",
               &J::handles, "shape", &J::shape, "steps", &J::steps, "ids", &J::ids, "communicator", &J::communicator,
               "communicators", &J::communicators, "channels", &J::channels, "timeout", &J::timeout)
      .def_property("slices", nullptr, [](J& joined, int slices) { joined.options.slices = slices; })
      .def_property("least_slice_bytes", nullptr,
                    [](J& joined, std::size_t bytes) { joined.options.least_slice_bytes = bytes; });
  m.def("peer_engine", &peer_engine);
  m.def("nccl_engine", &nccl_engine);
}

void bind_nccl(py::module_& m) {
  m.def(
      "nccl_version", [](const std::vector<std::string>& places) { return nccl::library(places).version(); },
      py::arg("places"));
  m.def("nccl_device_of", &nccl::device_of, py::arg("communicator"));
  m.def(
      "check_nccl",
      [](std::uint64_t communicator, const std::shared_ptr<cuda::Device>& device, int rank, int size) {
        const nccl::Communicator fits(reinterpret_cast<nccl::ncclComm_t>(communicator), false, device, rank, size);
      },
      py::arg("communicator"), py::arg("device"), py::arg("rank"), py::arg("size"));
  m.def(
      "nccl_ids",
      [](int communicators) {
        std::vector<py::bytes> ids;
        for (const std::string& id : nccl::unique_ids(communicators)) ids.emplace_back(id);
        return ids;
      },
      py::arg("communicators"));
}

void bind_devices(py::module_& m) {
  m.def("cuda_unavailable", &cuda::unavailable);
  m.def(
      "make_stream_wait",
      [](int ordinal, std::uintptr_t waiting, std::uintptr_t for_what) {
        const auto device = std::make_shared<const cuda::Device>(ordinal);
        const cuda::PooledEvent now(device);
        const auto stream = [&](std::uintptr_t handle) {
          return cuda::Stream::borrowed(device, reinterpret_cast<cuda::CUstream>(handle));  // NOLINT
        };
        stream(for_what).record(*now);
        stream(waiting).wait(*now);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("ordinal"), py::arg("waiting"), py::arg("for_what"));

  m.def("cuda_version", [] {
    int version = 0;
    cuda::driver().cuDriverGetVersion(&version);
    return std::pair(version / 1000, version % 1000 / 10);
  });

  using Info = cuda::DeviceInfo;
  py::class_<Info, std::shared_ptr<Info>>(m, "CudaDeviceInfo")
      .def(py::init<int>(), py::arg("ordinal"))
      .def_static("count", &Info::count)
      .def_property_readonly("capability",
                             [](const Info& d) { return std::pair(d.capability() / 10, d.capability() % 10); })
      .def_property_readonly("multiprocessors", &Info::multiprocessors)
      .def_property_readonly("name", &Info::name)
      .def_property_readonly("pci_bus_id", &Info::pci_bus_id)
      .def_property_readonly("has_stream_values", &Info::has_stream_values)
      .def("can_access", &Info::can_access, py::arg("other"))
      .def("__str__", &Info::describe);
  py::class_<cuda::Device, Info, std::shared_ptr<cuda::Device>>(m, "CudaDevice")
      .def(py::init<int>(), py::arg("ordinal"));

  py::class_<cuda::Kernels, std::shared_ptr<cuda::Kernels>>(m, "GpuKernels")
      .def(py::init([](const std::shared_ptr<cuda::Device>& device, cuda::Images images) {
             return std::make_shared<cuda::Kernels>(device, std::move(images));
           }),
           py::arg("device"), py::arg("images"));
}

void bind_memory(py::module_& m) {
  m.def("gpu_accumulate", &accumulate, py::call_guard<py::gil_scoped_release>(), py::arg("device"), py::arg("kernels"),
        py::arg("dtype"), py::arg("op"), py::arg("dst"), py::arg("srcs"), py::arg("count"), py::arg("stream"),
        py::arg("blocks") = 0);

  py::class_<cuda::OwnMemory, std::shared_ptr<cuda::OwnMemory>>(m, "GpuRegion")
      .def(py::init([](const std::shared_ptr<cuda::Device>& device, std::size_t bytes,
                       std::optional<bool> descriptors_first) {
             using Kind = cuda::Handle::Kind;
             const Kind otherwise = cuda::OwnMemory::kFirst;
             const Kind first =
                 descriptors_first ? (*descriptors_first ? Kind::file_descriptor : Kind::ipc) : otherwise;
             return std::make_shared<cuda::OwnMemory>(device, bytes, first);
           }),
           py::arg("device"), py::arg("bytes"), py::kw_only(), py::arg("descriptors_first") = py::none())
      .def_property_readonly("handle", [](const cuda::OwnMemory& memory) { return bytes_of(memory.handle()); })
      // How other processes come to it; "" if they cannot.
      .def_property_readonly("shared_by", [](const cuda::OwnMemory& memory) {
        switch (memory.handle().kind) {
          case cuda::Handle::Kind::ipc:
            return "IPC handles";
          case cuda::Handle::Kind::file_descriptor:
            return "file descriptors";
          default:
            return "";
        }
      });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine");
}

void bind_peers(py::module_& m) {
  using Shape = PeerEngine::Shape;
  py::class_<Shape>(m, "RegionShape")
      .def(py::init([](std::uint32_t lanes, std::uint32_t depth, std::uint32_t slot_bytes) {
             return Shape{lanes, depth, slot_bytes};
           }),
           py::kw_only(), py::arg("lanes"), py::arg("depth"), py::arg("slot_bytes"))
      .def_readonly("slot_bytes", &Shape::slot_bytes)
      .def(
          "bytes", [](const Shape& shape, int ranks) { return PeerEngine::region_bytes(ranks, shape); },
          py::arg("ranks"));

  py::class_<GpuEngine, std::shared_ptr<GpuEngine>>(m, "GpuEngine")
      .def(
          "add_plan",
          [](GpuEngine& engine, const std::string& collective, std::vector<std::int32_t> lowered, std::uint64_t digest,
             std::uint64_t most_bytes, std::size_t slice_bytes) {
            engine.add({{operation_named(collective), std::move(lowered), digest}, most_bytes, slice_bytes});
          },
          py::arg("collective"), py::arg("lowered"), py::arg("digest"), py::arg("most_bytes"),
          py::arg("slice_bytes") = 0)
      .def(
          "try_out", [](GpuEngine& engine, double timeout) { try_out(engine, nanoseconds(timeout)); },
          py::call_guard<py::gil_scoped_release>(), py::arg("timeout"));

  m.def(
      "ranks_on_gpu",
      [](const std::vector<std::string>& handles, int rank) {
        return PeerEngine::ranks_on_gpu(handles_of(handles), rank);
      },
      py::arg("handles"), py::arg("rank"));
}

}  // namespace

void bind_gpus(py::module_& m) {
  bind_devices(m);
  bind_memory(m);
  bind_peers(m);
  bind_engines(m);
  bind_nccl(m);
}

}  // namespace ringreduce
