// The Python module ringreduce._C. Its stubs are in ringreduce/_C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>

#include "core/interrupt.h"
#include "engine/observe.h"
#include "engine/probe.h"
#include "parameter_server/bindings.h"
#include "process_group/arena_allocator.h"
#include "process_group/arguments.h"
#include "process_group/bindings.h"
#include "process_group/keywords.h"
#include "process_group/one_thread.h"
#include "process_group/process_group_ring.h"
#include "transport/links.h"

namespace py = pybind11;

namespace {

using namespace ringreduce;

// Lets Python see Error as its class in ringreduce.errors, wherever pybind11 is the way out.
void translate(std::exception_ptr thrown) {
  if (!thrown) return;
  const auto error = error_in(thrown);
  if (!error) std::rethrow_exception(thrown);  // another translator knows it
  raise(*error);
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
    interrupted = interrupted || raised.matches(PyExc_KeyboardInterrupt);
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

// Of Python's module for signals, for the life of the process: calling it runs no bytecode, so no other signal's
// handler.
PyObject *getsignal = nullptr, *default_int_handler = nullptr;

// Only Ctrl-C that would raise KeyboardInterrupt: a handler of the program's own runs after the call, as it may make
// calls itself.
bool take_ctrl_c_of_python() {
  if (Py_IsInitialized() == 0) return false;
  const py::gil_scoped_acquire gil;
  const py::error_scope kept;
  if (PyOS_InterruptOccurred() == 0) return false;
  const auto handler = py::reinterpret_steal<py::object>(PyObject_CallFunction(getsignal, "i", SIGINT));
  if (handler.ptr() == default_int_handler) return true;
  PyErr_SetInterrupt();
  return false;
}

// Raises `raised` once more in the main thread, when that runs Python code of the program again.
void put_off(py::error_already_set& raised) {
  const auto again = [](void* value) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), static_cast<PyObject*>(value));
    Py_DECREF(static_cast<PyObject*>(value));
    return -1;
  };
  PyObject* const value = raised.value().inc_ref().ptr();
  if (Py_AddPendingCall(again, value) != 0) Py_DECREF(value);  // there are too many others
}

// (collective, root, bytes, in_order, few_roundings) -> (lowered, digest, least_bytes, most_bytes, slice_bytes)
using AskPython =
    std::function<std::tuple<std::vector<std::int32_t>, std::uint64_t, std::uint64_t, std::uint64_t, std::size_t>(
        const std::string&, int, std::uint64_t, bool, bool)>;

Engine::Ask asked_of(AskPython ask) {
  return [ask = std::move(ask)](Operation operation, int root, std::uint64_t bytes, const Engine::Needs& needs) {
    Engine::PlanFor answer{};
    const auto once = [&] {
      auto [words, digest, least_bytes, most_bytes, slice_bytes] =
          ask(std::string(name(operation)), root, bytes, needs.in_order, needs.few_roundings);
      answer = {{operation, std::move(words), digest}, most_bytes, slice_bytes, least_bytes};
    };
    with_python_errors(-1, [&] {
      try {
        once();
      } catch (py::error_already_set& raised) {
        // A signal's handler may run in there. What it raises (Ctrl-C, sys.exit()) is for the program, after the call.
        if (raised.matches(PyExc_Exception)) throw;
        put_off(raised);
        once();
      }
    });
    return answer;
  };
}

using Group = ProcessGroupRing;

// A method that takes a plan, as one that takes what a plan is made of.
template <class Method>
auto with_plan(Method method) {
  return [method](Group& group, const std::string& collective, std::vector<std::int32_t> lowered, std::uint64_t digest,
                  std::uint64_t most_bytes, std::size_t slice_bytes) {
    (group.*method)({{operation_named(collective), std::move(lowered), digest}, most_bytes, slice_bytes});
  };
}

// Square roots with torch's bits, for update rules of the parameter server. Some builds of torch (MKL) would compute
// them in several threads, which takes longer than such a short computation.
void roots(DType dtype, void* out, const void* in, std::size_t count) {
  // MKL chooses its code at the first call. Several threads that come first at once may have got one of less precision.
  static std::once_flag chosen;
  std::call_once(chosen, [] {
    for (const auto type : {at::kFloat, at::kDouble}) at::ones({1}, type).sqrt_();
  });
  const OneThread one_thread;
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(dtype == DType::float64 ? at::kDouble : at::kFloat);
  const auto size = static_cast<std::int64_t>(count);
  at::Tensor result = at::from_blob(out, {size}, options);
  at::sqrt_out(result, at::from_blob(const_cast<void*>(in), {size}, options));
}

// The setter of an option of a group's engine.
template <class Value>
auto engine_option(Value Engine::Options::* option) {
  return [option](Group::Settings& settings, Value value) { settings.engine.*option = value; };
}

void bind_arguments(py::module_& m) {
  m.def(
      "check_tensor",
      [](const char* name, const at::Tensor& tensor, bool written) {
        check_tensor(tensor, name);
        if (written) check_outputs({tensor}, name);
      },
      py::arg("name"), py::arg("tensor"), py::kw_only(), py::arg("written"));
}

// The memory that peers read in place, which is the process's and not a group's.
void bind_arena(py::module_& m) {
  m.def(
      "open_arena",
      [](std::size_t bytes, std::size_t keep_bytes) { return Arena::open({bytes, keep_bytes})->descriptor(); },
      py::arg("bytes"), py::arg("keep_bytes"));
  m.def(
      "empty_in_arena", [](long size, at::ScalarType dtype) { return empty_in_arena({size}, dtype); },
      py::call_guard<py::gil_scoped_release>(), py::arg("size"), py::arg("dtype"));
  m.def(
      "share_allocations",
      [](std::optional<std::size_t> least_bytes) { share_allocations(least_bytes.value_or(kNever)); },
      py::arg("least_bytes"));
  m.def("arena_statistics", [] {
    const std::shared_ptr<Arena> arena = Arena::of_process();
    const Arena::Statistics s = arena ? arena->statistics() : Arena::Statistics{};
    return py::make_tuple(arena ? arena->bytes() : 0, s.in_use, s.kept, s.held, s.lost, s.refusals);
  });
}

// A word of memory that processes share, for ringreduce/coordination/ledger.py. Keeps the memory's object alive.
class SharedWord {
 public:
  SharedWord(const py::buffer& memory, std::size_t at) : memory_(memory.request(true)) {
    const auto bytes = static_cast<std::size_t>(memory_.size * memory_.itemsize);
    if (at % sizeof(std::uint64_t) != 0 || at > bytes || bytes - at < sizeof(std::uint64_t))
      throw Error(ErrorKind::invalid_argument, "SharedWord: at is " + std::to_string(at) + " in a buffer of " +
                                                   std::to_string(bytes) + " bytes; it must be a multiple of 8 in it");
    word_ = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(memory_.ptr) + at);
  }
  std::uint64_t load() const { return std::atomic_ref(*word_).load(std::memory_order_acquire); }
  // A thread that loads the new value sees everything that was written before it.
  bool compare_set(std::uint64_t expected, std::uint64_t desired) {
    return std::atomic_ref(*word_).compare_exchange_strong(expected, desired, std::memory_order_acq_rel);
  }
  std::uint64_t add(std::uint64_t value) { return std::atomic_ref(*word_).fetch_add(value); }

 private:
  py::buffer_info memory_;
  std::uint64_t* word_;
};

void bind_shared_word(py::module_& m) {
  py::class_<SharedWord>(m, "SharedWord")
      .def(py::init<const py::buffer&, std::size_t>(), py::arg("memory"), py::arg("at"))
      .def("load", &SharedWord::load)
      .def("compare_set", &SharedWord::compare_set, py::arg("expected"), py::arg("desired"))
      .def("add", &SharedWord::add, py::arg("value"));
}

void bind_transport(py::module_& m) {
  using Counters = Links::Counters;
  py::class_<Counters> counters(m, "LinkCounters");
  bind_members(counters, "peer", &Counters::peer, "paths", &Counters::paths, "bytes_out", &Counters::bytes_out,
               "bytes_in", &Counters::bytes_in, "frames_out", &Counters::frames_out, "frames_in", &Counters::frames_in,
               "resent", &Counters::resent)
      .def_property_readonly("round_trip",
                             [](const Counters& self) { return 1e-9 * static_cast<double>(self.round_trip); });

  using G = Geometry;
  py::class_<G> geometry(m, "Geometry");
  bind_members(geometry, "ranks", &G::ranks, "channels", &G::channels, "depth", &G::depth, "slot_bytes", &G::slot_bytes,
               "mailbox_depth", &G::mailbox_depth, "mailbox_slot_bytes", &G::mailbox_slot_bytes)
      .def(init_by_keywords<G>())
      .def("segment_bytes", &G::segment_bytes);

  py::class_<OpenMemory, std::shared_ptr<OpenMemory>>(m, "OpenMemory")
      .def(py::init())
      .def_property_readonly("key", [](const OpenMemory& memory) {
        const OpenMemory::Key& key = memory.key();
        return std::tuple(key.thread, key.address, key.word);
      });
  m.def("can_access",
        [](int thread, std::uint64_t address, std::uint64_t word) { return can_access({thread, address, word}); });
}

// What `ringreduce top` shows.
void bind_observe(py::module_& m) {
  using G = GroupSeen;
  py::class_<G> group(m, "GroupSeen");
  bind_members(group, "name", &G::name, "job", &G::job, "size", &G::size, "ranks", &G::ranks);
  using R = RankSeen;
  py::class_<R> rank(m, "RankSeen");
  bind_members(rank, "rank", &R::rank, "global_rank", &R::global_rank, "pid", &R::pid, "left", &R::left, "entered",
               &R::entered, "completed", &R::completed, "waits_for", &R::waits_for, "call", &R::call, "number",
               &R::number, "recent", &R::recent)
      .def_property_readonly("since_sign", [](const R& its) { return seconds(its.since_sign); });
  m.def("observe", &observe, py::call_guard<py::gil_scoped_release>(), py::arg("memfd"));
}

void bind_settings(py::module_& m) {
  using S = Group::Settings;
  py::class_<S> settings(m, "Settings");
  bind_members(settings, "name", &S::name, "global_ranks", &S::global_ranks, "recorded_calls", &S::recorded_calls,
               "dump_when_broken", &S::dump_when_broken, "print_calls", &S::print_calls, "regroup", &S::regroup,
               "join_gpus", &S::join_gpus, "topology", &S::topology, "number", &S::number, "id", &S::id, "job", &S::job)
      .def(init_by_keywords<S>())
      .def_property("patience", nullptr,
                    [](S& s, const std::tuple<int, int, bool, bool>& patience) {
                      Engine::Options& its = s.engine;
                      std::tie(its.patience.looks, its.patience.yields, its.keeps_core, its.looks_by_mates) = patience;
                    })
      .def_property("slices", nullptr, engine_option(&Engine::Options::slices))
      .def_property("least_slice_bytes", nullptr, engine_option(&Engine::Options::least_slice_bytes))
      .def_property("most_slice_bytes", nullptr, engine_option(&Engine::Options::most_slice_bytes))
      .def_property("least_fetch_bytes", nullptr, engine_option(&Engine::Options::least_fetch_bytes))
      .def_property("most_fetch_bytes", nullptr, engine_option(&Engine::Options::most_fetch_bytes))
      .def_property("stream_bytes", nullptr, engine_option(&Engine::Options::stream_bytes))
      .def_property("spread_bytes", nullptr, engine_option(&Engine::Options::spread_bytes))
      .def_property("wire_dtype", nullptr, [](S& s, const std::string& dtype) { s.packing = packing_named(dtype); })
      .def_property(
          "timeout", nullptr,
          [](S& s, double seconds) { s.timeout = std::chrono::milliseconds(nanoseconds(seconds) / kMillisecond); })
      .def_property("ask", nullptr, [](S& s, AskPython ask) { s.ask = asked_of(std::move(ask)); });
}

// The arguments of ProcessGroupRing().
struct Members : Roster {
  Group::Settings settings;
};

// Host, pid and RankName::global of each rank.
using Names = std::vector<std::tuple<std::string, std::int64_t, int>>;

std::vector<RankName> rank_names(const Names& names) {
  std::vector<RankName> all;
  for (const auto& [host, pid, global] : names) all.push_back({host, pid, global});
  return all;
}

void cannot_take_part(int memfd, int rank, const Names& names, const std::string& why) {
  Segment::cannot_take_part(memfd, rank, rank_names(names).at(static_cast<std::size_t>(rank)), why);
}

// For a rank that has no memory for the arguments with which it would join the others.
void give_up(const py::kwargs& given, const std::exception& error) {
  const FileDescriptor memfd(given["memfd"].cast<int>());
  cannot_take_part(memfd.get(), given["rank"].cast<int>(), given["names"].cast<Names>(), reason(error));
  for (const char* const each : {"pidfds", "arenas"})
    for (const py::handle fd : given[each]) FileDescriptor(fd.cast<int>());
}

// Takes the descriptors, also if it throws.
c10::intrusive_ptr<Group> make_group(const py::kwargs& given) {
  Members members;
  Roster roster;
  try {
    members = from_keywords<Members>(given);
    // Not TORCH_WARN: inside of backward(), Python keeps those until the call that waits is over.
    members.warn = [](const std::string& text) {
      pollfd error{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
      if (poll(&error, 1, 0) == 1) LOG(WARNING) << text;  // a call may not wait for who reads a pipe
    };
    members.group = {members.settings.name, members.settings.job};
    roster = members;
  } catch (const std::exception& error) {  // Python's MemoryError, mostly
    give_up(given, error);
    throw;
  }
  return c10::make_intrusive<Group>(Team::of(std::move(roster)), std::move(members.settings));
}

void bind_roster(py::module_& m) {
  m.def("cannot_take_part", &cannot_take_part, py::arg("memfd"), py::arg("rank"), py::arg("names"), py::arg("reason"));
  using M = Members;
  py::class_<M> members(m, "Members");
  bind_members(members, "memfd", &M::memfd, "geometry", &M::geometry, "rank", &M::rank, "pidfds", &M::pidfds, "memory",
               &M::memory, "memory_threads", &M::threads, "arenas", &M::arenas, "elsewhere", &M::elsewhere, "settings",
               &M::settings)
      .def_property("names", nullptr, [](M& members, const Names& names) { members.names = rank_names(names); })
      .def_property("warn_after", nullptr, [](M& members, double after) { members.warn_after = nanoseconds(after); })
      .def_property("lends_arena", nullptr,
                    [](M& members, bool lends) { members.arena = lends ? Arena::of_process() : nullptr; })
      .def_property("connect", nullptr,
                    [](M& members, std::function<void(int, double)> connect) {
                      members.connect = [connect = std::move(connect)](int peer, Nanoseconds timeout) {
                        with_python_errors(peer, [&] { connect(peer, seconds(timeout)); });
                      };
                    })
      .def_property("disconnect", nullptr, [](M& members, std::function<void()> disconnect) {
        if (!disconnect) return;
        members.disconnect = [disconnect = std::move(disconnect)] {
          without_errors(disconnect, "disconnect of a group");
        };
      });
}

void bind_feedback(py::module_& m) {
  py::class_<Feedback, std::shared_ptr<Feedback>>(
      m, "Feedback",
      "What all_reduce has cut off one tensor's values on this rank, to be added the next time. It holds nothing until "
      "the first call, and starts anew when the number of elements, the operation, the group, the wire_dtype or the "
      "plan changes, and after a call that failed.")
      .def(py::init<>())
      .def("reset", &Feedback::reset, "Forgets what was cut off.")
      .def_property_readonly("bytes", &Feedback::bytes, "Of memory: four for each element that this rank rounds.");
}

void bind_group(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "ProcessGroupRing")
      .def(py::init(&make_group))
      .def("add_link", &Group::add_link, no_gil, py::arg("peer"), py::arg("socket"), py::arg("path"))
      .def("links", &Group::links, no_gil)
      .def("set_least_slice_bytes", &Group::set_least_slice_bytes, py::arg("bytes"))
      // Not a constructor, since pybind11 does not convert keyword-only arguments of overloads.
      .def_static(
          "over",
          [](c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, const Names& names,
             int channels, Group::Settings settings) {
            auto wire = std::make_shared<C10dPointToPoint>(std::move(backend), std::move(store), rank_names(names));
            return c10::make_intrusive<Group>(std::move(wire), channels, std::move(settings));
          },
          py::kw_only(), py::arg("backend"), py::arg("store"), py::arg("names"), py::arg("channels"),
          py::arg("settings"))
      .def_property_readonly("topology", &Group::topology)
      .def_property_readonly("number", &Group::number)
      .def_property_readonly("job", &Group::job_id)
      .def("ended", &Group::ended, no_gil)
      .def("throw_own_failure", &Group::throw_own_failure, no_gil)
      .def("fail", &Group::fail, no_gil, py::arg("why"))
      .def("notice", &Group::notice, no_gil)
      .def("survivors_go_on", &Group::survivors_go_on, no_gil)
      // c10d's method of this name calls allocateTensor(), which is for DistributedDataParallel.
      .def(
          "allocate_tensor",
          [](Group& group, long size, at::ScalarType dtype, at::Device device) {
            return group.allocate(size, at::TensorOptions().dtype(dtype).device(device));
          },
          no_gil, py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"))
      // These two are virtual functions of c10d that torch does not bind for every backend.
      .def_property_readonly("options", &Group::getBackendOptions)
      .def("get_error", &Group::getError)
      .def("show_as_gloo", &Group::show_as_gloo)
      .def("add_plan", with_plan(&Group::add_plan), no_gil, py::arg("collective"), py::arg("lowered"),
           py::arg("digest"), py::arg("most_bytes"), py::arg("slice_bytes") = 0)
      .def("register_plan", with_plan(&Group::register_plan), no_gil, py::arg("collective"), py::arg("lowered"),
           py::arg("digest"), py::arg("most_bytes"), py::arg("slice_bytes") = 0)
      .def(
          "allreduce_packed",
          [](Group& group, std::vector<at::Tensor> tensors, const std::optional<std::string>& wire_dtype,
             std::shared_ptr<Feedback> feedback, const c10d::AllreduceOptions& options) {
            const auto packing = wire_dtype ? std::optional(packing_named(*wire_dtype)) : std::nullopt;
            return group.allreduce_packed(tensors, packing, std::move(feedback), options);
          },
          no_gil, py::arg("tensors"), py::arg("wire_dtype"), py::arg("feedback"), py::arg("options"))
      .def("allreduce_by", &Group::allreduce_by, no_gil, py::arg("op"), py::arg("tensor"))
      .def("why_not", &Group::why_not, py::arg("element_bytes"))
      .def_property_readonly("engine", &Group::engine)
      .def("use_nccl", &Group::use_nccl, no_gil, py::arg("index"), py::arg("communicator"))
      .def("use", &Group::use, no_gil, py::arg("engine"));
}

void bind_reports(py::module_& m) {
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
                        "copy_scratch"_a = p.copy_scratch, "fetch_scratch"_a = p.fetch_scratch,
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
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator(translate);
  const py::module_ signals = py::module_::import("_signal");
  getsignal = py::object(signals.attr("getsignal")).release().ptr();
  default_int_handler = py::object(signals.attr("default_int_handler")).release().ptr();
  take_ctrl_c = take_ctrl_c_of_python;
  py::module_::import("torch._C._distributed_c10d");  // knows the base class
  bind_transport(m);
  bind_gpus(m);
  bind_direct_calls(m);
  bind_direct_function(m);
  bind_arguments(m);
  bind_arena(m);
  bind_shared_word(m);
  parameter_server::bind(m, roots);
  bind_settings(m);
  bind_observe(m);
  bind_roster(m);
  bind_operators(m);
  bind_feedback(m);
  bind_group(m);
  bind_reports(m);
  bind_kernels(m);
}
