// The Python module ringreduce._C. Its stubs are in ringreduce/_C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "engine/probe.h"
#include "kernels/accumulate.h"
#include "parameter_server/bindings.h"
#include "process_group/direct_calls.h"
#include "process_group/gpu_bindings.h"
#include "process_group/process_group_ring.h"
#include "transport/links.h"

namespace py = pybind11;

namespace {

using namespace ringreduce;

// Lets Python see Error as its class in ringreduce.errors, wherever pybind11 is the way out.
void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(error);
  } catch (const FutureError& failed) {
    raise(failed.error);
  }
}

// Calls Python; what it raises is thrown on as Error, about `culprit`.
template <class F>
void with_python_errors(int culprit, F&& call) {
  const py::gil_scoped_acquire gil;
  try {
    call();
  } catch (py::error_already_set& raised) {
    ErrorKind kind = ErrorKind::system;
    for (const ErrorKind each : {ErrorKind::invalid_argument, ErrorKind::peer_lost, ErrorKind::timeout,
                                 ErrorKind::mismatch, ErrorKind::aborted}) {
      const auto type = py::reinterpret_steal<py::object>(error_class(each));
      if (type && raised.matches(type)) kind = each;
    }
    throw Error(kind, py::str(raised.value()).cast<std::string>(), culprit);
  }
}

// Calls Python where nothing may be thrown. Ctrl-C comes once more, in the program's own code; other errors go to
// sys.unraisablehook.
void without_errors(const std::function<void()>& call, const char* what) {
  const py::gil_scoped_acquire gil;
  try {
    call();
  } catch (py::error_already_set& raised) {
    if (raised.matches(PyExc_KeyboardInterrupt))
      PyErr_SetInterrupt();
    else
      raised.discard_as_unraisable(what);
  }
}

// (lowered, digest, most_bytes, slice_bytes) of each.
using RootedPlans = std::vector<std::tuple<std::vector<std::int32_t>, std::uint64_t, std::uint64_t, std::size_t>>;

Engine::PlansForRoot asked_of(std::function<RootedPlans(const std::string&, int)> plans_for_root) {
  if (!plans_for_root) return nullptr;
  return [ask = std::move(plans_for_root)](Operation operation, int root) {
    std::vector<Engine::RootedPlan> plans;
    with_python_errors(-1, [&] {
      for (auto& [lowered, digest, most_bytes, slice_bytes] : ask(std::string(name(operation)), root))
        plans.push_back({std::move(lowered), digest, most_bytes, slice_bytes});
    });
    return plans;
  };
}

}  // namespace

DType ringreduce::dtype_named(const std::string& wanted) {
  for (std::size_t i = 0; i < kDTypeCount; ++i)
    if (name(static_cast<DType>(i)) == wanted) return static_cast<DType>(i);
  throw Error(ErrorKind::invalid_argument, "unknown dtype '" + wanted + "'");
}
ReduceOp ringreduce::reduce_op_named(const std::string& wanted) {
  for (std::size_t i = 0; i < kReduceOpCount; ++i)
    if (name(static_cast<ReduceOp>(i)) == wanted) return static_cast<ReduceOp>(i);
  throw Error(ErrorKind::invalid_argument, "unknown reduce op '" + wanted + "'");
}

namespace {

// A method that takes a plan, as one that takes what a plan is made of.
template <class Method>
auto with_plan(Method method) {
  return [method](ProcessGroupRing& group, const std::string& collective, std::vector<std::int32_t> lowered,
                  std::uint64_t digest, std::uint64_t most_bytes, std::size_t slice_bytes) {
    (group.*method)({operation_named(collective), std::move(lowered), digest, most_bytes, slice_bytes});
  };
}

// Square roots with torch's bits, for update rules of the parameter server.
void roots(DType dtype, void* out, const void* in, std::size_t count) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(dtype == DType::float64 ? at::kDouble : at::kFloat);
  const auto size = static_cast<std::int64_t>(count);
  at::Tensor result = at::from_blob(out, {size}, options);
  at::sqrt_out(result, at::from_blob(const_cast<void*>(in), {size}, options));
}

void* address(std::uintptr_t a) { return reinterpret_cast<void*>(a); }  // NOLINT(performance-no-int-to-ptr)

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::register_exception_translator(translate);
  py::module_::import("torch._C._distributed_c10d");  // knows the base class
  parameter_server::bind(m, roots);

  py::class_<Links::Counters>(m, "LinkCounters")
      .def_readonly("peer", &Links::Counters::peer)
      .def_readonly("paths", &Links::Counters::paths)
      .def_readonly("bytes_out", &Links::Counters::bytes_out)
      .def_readonly("bytes_in", &Links::Counters::bytes_in)
      .def_readonly("frames_out", &Links::Counters::frames_out)
      .def_readonly("frames_in", &Links::Counters::frames_in)
      .def_property_readonly("round_trip",
                             [](const Links::Counters& self) { return 1e-9 * static_cast<double>(self.round_trip); })
      .def_readonly("resent", &Links::Counters::resent);

  py::class_<Geometry>(m, "Geometry")
      .def(py::init([](std::uint32_t ranks, std::uint32_t channels, std::uint32_t depth, std::uint32_t slot_bytes,
                       std::uint32_t mailbox_depth, std::uint32_t mailbox_slot_bytes, std::uint64_t arena_bytes) {
             return Geometry{ranks, channels, depth, slot_bytes, mailbox_depth, mailbox_slot_bytes, arena_bytes};
           }),
           py::kw_only(), py::arg("ranks"), py::arg("channels"), py::arg("depth"), py::arg("slot_bytes"),
           py::arg("mailbox_depth"), py::arg("mailbox_slot_bytes"), py::arg("arena_bytes") = 0)
      .def("segment_bytes", &Geometry::segment_bytes);

  py::class_<OpenMemory, std::shared_ptr<OpenMemory>>(m, "OpenMemory")
      .def(py::init())
      .def_property_readonly("key", [](const OpenMemory& memory) {
        const OpenMemory::Key& key = memory.key();
        return std::tuple(key.thread, key.address, key.word);
      });
  m.def("can_access",
        [](int thread, std::uint64_t address, std::uint64_t word) { return can_access({thread, address, word}); });

  bind_gpus(m);
  bind_direct_calls(m);

  using Group = ProcessGroupRing;
  using Names = std::vector<std::pair<std::string, std::int64_t>>;
  const auto rank_names = [](const Names& names) {
    std::vector<RankName> all;
    for (const auto& [host, pid] : names) all.push_back({host, pid});
    return all;
  };
  py::class_<Group::Settings>(m, "Settings")
      .def(py::init([](std::pair<int, int> patience, int slices, std::size_t least_slice_bytes,
                       std::size_t most_slice_bytes, std::size_t least_fetch_bytes, const std::string& wire_dtype,
                       double timeout, std::string name, std::vector<std::int64_t> global_ranks,
                       std::size_t recorded_calls, bool dump_when_broken, bool print_calls, Group::Regroup regroup,
                       Group::JoinGpus join_gpus, std::string topology,
                       std::function<RootedPlans(const std::string&, int)> plans_for_root) {
             return Group::Settings{.engine = {{patience.first, patience.second},
                                               slices,
                                               least_slice_bytes,
                                               most_slice_bytes,
                                               least_fetch_bytes,
                                               packing_named(wire_dtype)},
                                    .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000)),
                                    .name = std::move(name),
                                    .global_ranks = std::move(global_ranks),
                                    .recorded_calls = recorded_calls,
                                    .dump_when_broken = dump_when_broken,
                                    .print_calls = print_calls,
                                    .regroup = std::move(regroup),
                                    .join_gpus = std::move(join_gpus),
                                    .plans_for_root = asked_of(std::move(plans_for_root)),
                                    .topology = std::move(topology)};
           }),
           py::kw_only(), py::arg("patience") = std::pair(Patience{}.looks, Patience{}.yields), py::arg("slices"),
           py::arg("least_slice_bytes"), py::arg("most_slice_bytes"),
           py::arg("least_fetch_bytes") = Engine::Options{}.least_fetch_bytes, py::arg("wire_dtype") = "float32",
           py::arg("timeout"), py::arg("name"), py::arg("global_ranks"), py::arg("recorded_calls"),
           py::arg("dump_when_broken"), py::arg("print_calls"), py::arg("regroup"), py::arg("join_gpus"),
           py::arg("topology"), py::arg("plans_for_root") = nullptr);

  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "ProcessGroupRing")
      .def(
          py::init([rank_names](int memfd, const Geometry& geometry, int rank, std::vector<int> pidfds,
                                const Names& names, std::shared_ptr<OpenMemory> memory, std::vector<int> memory_threads,
                                std::vector<bool> elsewhere, std::function<void(int, double)> connect,
                                std::function<void()> disconnect, Group::Settings settings) {
            auto segment =
                std::make_shared<Segment>(memfd, geometry, rank, std::move(pidfds), rank_names(names),
                                          PeerMemory{std::move(memory), std::move(memory_threads)},
                                          Hosts{std::move(elsewhere),
                                                [connect = std::move(connect)](int peer, Nanoseconds timeout) {
                                                  with_python_errors(peer, [&] { connect(peer, seconds(timeout)); });
                                                },
                                                [disconnect = std::move(disconnect)] {
                                                  if (disconnect) without_errors(disconnect, "disconnect of a group");
                                                }});
            return c10::make_intrusive<Group>(std::move(segment), std::move(settings));
          }),
          py::kw_only(), py::arg("memfd"), py::arg("geometry"), py::arg("rank"), py::arg("pidfds"), py::arg("names"),
          py::arg("memory"), py::arg("memory_threads"), py::arg("elsewhere") = std::vector<bool>{},
          py::arg("connect") = std::function<void(int, double)>{}, py::arg("disconnect") = std::function<void()>{},
          py::arg("settings"))
      .def("add_link", &Group::add_link, py::call_guard<py::gil_scoped_release>(), py::arg("peer"), py::arg("socket"),
           py::arg("path"))
      .def("links", &Group::links, py::call_guard<py::gil_scoped_release>())
      // Not a constructor, since pybind11 does not convert keyword-only arguments of overloads.
      .def_static(
          "over",
          [rank_names](c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                       const Names& names, int channels, Group::Settings settings) {
            auto wire = std::make_shared<C10dPointToPoint>(std::move(backend), std::move(store), rank_names(names));
            return c10::make_intrusive<Group>(std::move(wire), channels, std::move(settings));
          },
          py::kw_only(), py::arg("backend"), py::arg("store"), py::arg("names"), py::arg("channels"),
          py::arg("settings"))
      .def_property_readonly("topology", &Group::topology)
      // c10d's method of this name calls allocateTensor(), which is for DistributedDataParallel.
      .def(
          "allocate_tensor",
          [](Group& group, long size, at::ScalarType dtype, at::Device device) {
            return group.allocate(size, at::TensorOptions().dtype(dtype).device(device));
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"))
      // These two are virtual functions of c10d that torch does not bind for every backend.
      .def_property_readonly("options", &Group::getBackendOptions)
      .def("get_error", &Group::getError)
      .def("add_plan", with_plan(&Group::add_plan), py::call_guard<py::gil_scoped_release>(), py::arg("collective"),
           py::arg("lowered"), py::arg("digest"), py::arg("most_bytes"), py::arg("slice_bytes") = 0)
      .def("register_plan", with_plan(&Group::register_plan), py::call_guard<py::gil_scoped_release>(),
           py::arg("collective"), py::arg("lowered"), py::arg("digest"), py::arg("most_bytes"),
           py::arg("slice_bytes") = 0)
      .def_property_readonly("engine", &Group::engine)
      .def("use_nccl", &Group::use_nccl, py::call_guard<py::gil_scoped_release>(), py::arg("index"),
           py::arg("communicator"))
      .def("use", &Group::use, py::call_guard<py::gil_scoped_release>(), py::arg("engine"));

  m.def(
      "probe",
      [](const std::vector<int>& cores) {
        if (cores.empty()) throw Error(ErrorKind::invalid_argument, "probe: cores is empty; name at least one");
        Probe p;
        {
          const py::gil_scoped_release no_gil;
          p = probe(cores);
        }
        using namespace py::literals;
        return py::dict("hop"_a = p.hop, "turn"_a = p.turn, "wake"_a = p.wake, "copy_cached"_a = p.copy_cached,
                        "add_cached"_a = p.add_cached, "copy_memory"_a = p.copy_memory,
                        "copy_memory_all"_a = p.copy_memory_all, "add_memory_all"_a = p.add_memory_all,
                        "staging"_a = Probe::kStaging, "put"_a = p.put, "take"_a = p.take);
      },
      py::arg("cores"));

  m.def("statistics", [] {
    py::dict groups;
    for (const auto& [group, statistics] : CallLog::all_statistics()) {
      py::dict calls;
      for (const auto& [call, c] : statistics)
        calls[py::str(call)] = py::make_tuple(c.calls, c.failed, c.bytes, seconds(c.tally.waited), c.tally.lent);
      groups[py::str(group)] = calls;
    }
    return groups;
  });
  m.def("shutdown_all", &Group::shutdown_all);
  m.def("flight_record", [] {
    std::string pickle;
    {
      const py::gil_scoped_release no_gil;
      pickle = CallLog::dump();
    }
    return py::bytes(pickle);
  });

  m.def("kernel_supports", [](const std::string& dtype, const std::string& op) {
    return kernels::supports(dtype_named(dtype), reduce_op_named(op));
  });
  m.def(
      "accumulate",
      [](const std::string& dtype, const std::string& op, const std::vector<std::uintptr_t>& dsts,
         const std::vector<std::uintptr_t>& srcs, std::size_t count, double divisor) {
        std::vector<const void*> sources;
        for (std::uintptr_t src : srcs) sources.push_back(address(src));
        std::vector<void*> results;
        for (std::uintptr_t dst : dsts) results.push_back(address(dst));
        kernels::accumulate(dtype_named(dtype), reduce_op_named(op), results.data(), static_cast<int>(results.size()),
                            sources.data(), static_cast<int>(sources.size()), count, divisor);
      },
      py::arg("dtype"), py::arg("op"), py::arg("dsts"), py::arg("srcs"), py::arg("count"), py::arg("divisor") = 1.0);
  m.def("scale", [](const std::string& dtype, std::uintptr_t dst, std::uintptr_t src, std::size_t count,
                    double factor) { kernels::scale(dtype_named(dtype), address(dst), address(src), count, factor); });
  m.def("stream", [](std::uintptr_t dst, std::uintptr_t src, std::size_t bytes) {
    kernels::stream(address(dst), address(src), bytes);
  });
  m.def("pack", [](const std::string& wire_dtype, std::uintptr_t src, std::size_t count) {
    const Packing packing = packing_named(wire_dtype);
    std::string packed(packed_bytes(packing, count), '\0');
    pack(packing, reinterpret_cast<std::byte*>(packed.data()), static_cast<const std::byte*>(address(src)), count);
    return py::bytes(packed);
  });
  m.def("unpack", [](const std::string& wire_dtype, std::uintptr_t dst, const std::string& packed, std::size_t count) {
    const Packing packing = packing_named(wire_dtype);
    if (packed.size() != packed_bytes(packing, count))
      throw Error(ErrorKind::invalid_argument, "unpack: packed has " + std::to_string(packed.size()) + " bytes; " +
                                                   std::to_string(count) + " values have " +
                                                   std::to_string(packed_bytes(packing, count)));
    unpack(packing, static_cast<std::byte*>(address(dst)), reinterpret_cast<const std::byte*>(packed.data()), count);
  });
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
