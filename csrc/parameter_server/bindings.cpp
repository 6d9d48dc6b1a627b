#include "parameter_server/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "kernels/accumulate.h"
#include "parameter_server/client.h"
#include "parameter_server/server.h"

namespace py = pybind11;

namespace ringreduce::parameter_server {
namespace {

using PartTuple = std::tuple<std::uint32_t, BlockId, std::size_t, std::size_t, std::size_t>;

std::byte* address(std::uintptr_t a) { return reinterpret_cast<std::byte*>(a); }  // NOLINT(performance-no-int-to-ptr)
std::uintptr_t number(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// Converts a timeout in seconds; None: no limit.
Nanoseconds duration(const std::optional<double>& seconds) {
  if (!seconds || *seconds > 1e9) return kForever;
  return static_cast<Nanoseconds>(*seconds * kSecond);
}

template <std::size_t n, class Names>
std::size_t index_of(const Names& names, const std::string& wanted, const char* what) {
  for (std::size_t i = 0; i < n; ++i)
    if (names(i) == wanted) return i;
  throw Error(ErrorKind::invalid_argument, std::string("unknown ") + what + " '" + wanted + "'");
}

DType dtype_of(const std::string& wanted) {
  return static_cast<DType>(
      index_of<kReducedDTypeCount>([](std::size_t i) { return name(static_cast<DType>(i)); }, wanted, "dtype"));
}

ReduceOp op_of(const std::string& wanted) {
  return static_cast<ReduceOp>(
      index_of<kReduceOpCount>([](std::size_t i) { return name(static_cast<ReduceOp>(i)); }, wanted, "operation"));
}

Rule::Kind kind_of(const std::string& wanted) {
  static constexpr std::string_view kKinds[] = {"assign",  "reduce",          "sgd",   "adam", "adagrad",
                                                "rmsprop", "rowwise_adagrad", "python"};
  return static_cast<Rule::Kind>(index_of<8>([](std::size_t i) { return kKinds[i]; }, wanted, "update"));
}

Consistency consistency_of(const std::string& wanted) {
  static constexpr std::string_view kNames[] = {"sync", "asynchronous", "ssp"};
  return static_cast<Consistency>(index_of<3>([](std::size_t i) { return kNames[i]; }, wanted, "mode"));
}

std::string outcome_name(Outcome outcome) {
  static constexpr const char* kNames[] = {"",      "applied", "late",   "initialised", "kept",
                                           "ready", "done",    "failed", "refused"};
  const auto index = static_cast<std::size_t>(outcome);
  return index < std::size(kNames) ? kNames[index] : "refused";
}

Rule rule_of(const py::dict& fields) {
  static const std::map<std::string, double Rule::*> kNumbers{
      {"lr", &Rule::lr},
      {"momentum", &Rule::momentum},
      {"dampening", &Rule::dampening},
      {"beta1", &Rule::beta1},
      {"beta2", &Rule::beta2},
      {"weight_decay", &Rule::weight_decay},
      {"eps", &Rule::eps},
      {"lr_decay", &Rule::lr_decay},
      {"alpha", &Rule::alpha},
      {"initial_accumulator_value", &Rule::initial_accumulator_value}};
  static const std::map<std::string, bool Rule::*> kFlags{
      {"average", &Rule::average},   {"nesterov", &Rule::nesterov},   {"maximize", &Rule::maximize},
      {"centered", &Rule::centered}, {"decoupled", &Rule::decoupled}, {"fused", &Rule::fused}};
  Rule rule;
  for (const auto& [key, value] : fields) {
    const auto field = key.cast<std::string>();
    if (field == "kind")
      rule.kind = kind_of(value.cast<std::string>());
    else if (field == "op")
      rule.op = op_of(value.cast<std::string>());
    else if (kNumbers.count(field) > 0)
      rule.*kNumbers.at(field) = value.cast<double>();
    else if (kFlags.count(field) > 0)
      rule.*kFlags.at(field) = value.cast<bool>();
    else
      throw Error(ErrorKind::invalid_argument, "an update has no field '" + field + "'");
  }
  return rule;
}

// The blocks of a key, converted from Python once.
struct Parts {
  Parts(const std::vector<PartTuple>& tuples, const std::string& push_wire, const std::string& pull_wire)
      : push_wire(packing_named(push_wire)), pull_wire(packing_named(pull_wire)) {
    for (const auto& [server, block, begin, bytes, offset] : tuples)
      parts.push_back({server, block, begin, bytes, offset});
  }

  std::vector<Part> parts;
  Packing push_wire, pull_wire;  // how values are packed to and from other hosts
};

// A table as a worker sees it.
struct TableHandle {
  TableHandle(std::vector<BlockId> blocks, const std::string& dtype, std::size_t width)
      : place{std::move(blocks), dtype_of(dtype), width}, owners(owners_of_slots(place.blocks.size())) {}

  TablePlace place;
  std::vector<std::uint32_t> owners;  // the server of each slot (row_ids.h)
};

// Wraps a Python function for threads without the GIL. The thread that drops the last reference takes the GIL.
std::shared_ptr<py::function> held(py::function function) {
  return {new py::function(std::move(function)), [](py::function* of) {
            const py::gil_scoped_acquire gil;
            delete of;
          }};
}

std::function<void()> callback(py::function function) {
  return [call = held(std::move(function))] {
    const py::gil_scoped_acquire gil;
    try {
      (*call)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a parameter server's callback");
    }
  };
}

std::shared_ptr<Server> make_server(std::size_t capacity, py::function update, bool backed_up, Roots roots) {
  const std::shared_ptr<py::function> call = held(std::move(update));
  Server::Hooks hooks;
  hooks.enter = [](const std::function<void()>& body) {
    const py::gil_scoped_acquire gil;
    body();
  };
  hooks.update = [call](const PythonUpdate& update) {
    py::list pushes;
    for (const Contribution& each : update.contributions)
      pushes.append(py::make_tuple(each.worker, each.clock, each.pulled, each.weight));
    (*call)(update.block, update.version, number(update.value), number(update.out), number(update.gradient), pushes,
            update.rule.numbers());
  };
  hooks.roots = roots;
  hooks.warn = [](const std::string& text) {
    const py::gil_scoped_acquire gil;
    try {
      py::module_::import("logging").attr("getLogger")("ringreduce.parameter_server").attr("warning")("%s", text);
    } catch (const py::error_already_set&) {  // raised by a handler of the program's: the server goes on
    }
  };
  // The destructor joins the server's thread, which may be waiting for the GIL, so it runs without the GIL. The last
  // reference may be dropped by a client's destructor, which does not have the GIL.
  return {new Server(capacity, std::move(hooks), backed_up), [](Server* server) {
            std::optional<py::gil_scoped_release> no_gil;
            if (PyGILState_Check() == 1) no_gil.emplace();
            delete server;
          }};
}

// Memory in a client's window, with the buffer protocol. Keeps the client alive.
class Piece {
 public:
  Piece(std::shared_ptr<Client> client, std::size_t bytes)
      : client_(std::move(client)), bytes_(bytes), at_(client_->allocate(bytes)) {}
  ~Piece() { client_->release(at_); }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;

  py::buffer_info buffer() const {
    return {at_, 1, py::format_descriptor<std::uint8_t>::format(), static_cast<py::ssize_t>(bytes_)};
  }

 private:
  std::shared_ptr<Client> client_;
  std::size_t bytes_;
  std::byte* at_;
};

// Runs Python's signal handlers; an exception raised by one ends the wait. Has no effect outside the main thread.
void look_for_ctrl_c() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

RequestKind request_of(const std::string& wanted) {
  static constexpr std::string_view kNames[] = {"",      "initialise", "push",  "pull",
                                                "clock", "barrier",    "leave", "restore"};
  return static_cast<RequestKind>(index_of<8>([](std::size_t i) { return kNames[i]; }, wanted, "request"));
}

void bind_server(py::module_& m, Roots roots) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Server, std::shared_ptr<Server>>(m, "ParameterServer")
      .def(py::init([roots](std::size_t capacity, py::function update, bool backed_up) {
             return make_server(capacity, std::move(update), backed_up, roots);
           }),
           py::arg("capacity"), py::arg("update"), py::arg("backed_up") = false)
      .def_property_readonly("values", &Server::values)
      .def_property_readonly("bell", &Server::bell)
      .def_property_readonly("capacity", &Server::capacity)
      .def(
          "join",
          [](Server& server, WorkerId id, const std::string& group, int window, std::size_t window_bytes,
             std::size_t servers, std::size_t lane, int pidfd, int news, const std::string& name) {
            const py::gil_scoped_release released;
            server.join({id, group, window, window_bytes, servers, lane, pidfd, news, name});
          },
          py::kw_only(), py::arg("id"), py::arg("group"), py::arg("window"), py::arg("window_bytes"),
          py::arg("servers"), py::arg("lane"), py::arg("pidfd"), py::arg("news") = -1, py::arg("name") = "")
      .def(
          "join_far",
          [](Server& server, WorkerId id, const std::string& group, std::size_t window, const std::string& name) {
            const py::gil_scoped_release released;
            server.join(id, group, window, name);
          },
          py::kw_only(), py::arg("id"), py::arg("group"), py::arg("window"), py::arg("name") = "")
      .def("connect", &Server::connect, no_gil, py::arg("worker"), py::arg("socket"), py::arg("path"))
      .def(
          "create",
          [](Server& server, const std::string& dtype, std::size_t count, const std::string& mode, std::uint32_t quorum,
             double grace, std::uint64_t staleness, const std::string& group, const py::dict& rule, std::size_t width,
             std::uint64_t seed, float low, float high, const std::string& note) {
            BlockSpec spec{dtype_of(dtype),
                           count,
                           {consistency_of(mode), quorum, duration(grace), staleness, group},
                           rule_of(rule),
                           width,
                           {seed, low, high},
                           note};
            const bool floats = spec.dtype == DType::float32 || spec.dtype == DType::float64;
            if (width > 0 && (!floats || !spec.rule.native(spec.dtype)))
              throw Error(ErrorKind::invalid_argument, "a table of " + dtype + " has no such update");
            if (spec.rule.kind == Rule::Kind::reduce && !kernels::supports(spec.dtype, spec.rule.op))
              throw Error(ErrorKind::invalid_argument,
                          "there is no reduction '" + std::string(name(spec.rule.op)) + "' of " + dtype);
            const py::gil_scoped_release released;
            return server.create(spec);
          },
          py::kw_only(), py::arg("dtype"), py::arg("count"), py::arg("mode"), py::arg("quorum"), py::arg("grace"),
          py::arg("staleness"), py::arg("group"), py::arg("rule"), py::arg("width") = 0, py::arg("seed") = 0,
          py::arg("low") = 0.0F, py::arg("high") = 0.0F, py::arg("note") = "")
      .def_static("journal", [] { return Journal::make().release(); })
      .def(
          "lead",
          [](Server& server, int journal, int bell, int values, int pidfd, int passage, std::size_t capacity,
             const std::string& name, const std::string& address) {
            const py::gil_scoped_release released;
            server.lead({journal, bell, values, pidfd, passage, capacity, name, address});
          },
          py::kw_only(), py::arg("journal"), py::arg("bell"), py::arg("values"), py::arg("pidfd"), py::arg("passage"),
          py::arg("capacity"), py::arg("name"), py::arg("address"))
      .def(
          "follow",
          [](Server& server, int journal, int bell, int values, int pidfd, int passage, const std::string& name,
             const std::string& address) {
            const py::gil_scoped_release released;
            server.follow({journal, bell, values, pidfd, passage, 0, name, address});
          },
          py::kw_only(), py::arg("journal"), py::arg("bell"), py::arg("values"), py::arg("pidfd"), py::arg("passage"),
          py::arg("name"), py::arg("address"))
      .def(
          "lead_far",
          [](Server& server, py::function on_silence, const std::string& name) {
            auto call = callback(std::move(on_silence));
            const py::gil_scoped_release released;
            server.lead_far(std::move(call), name);
          },
          py::arg("on_silence"), py::arg("name") = "")
      .def(
          "follow_far",
          [](Server& server, py::function on_silence) {
            auto call = callback(std::move(on_silence));
            const py::gil_scoped_release released;
            server.follow_far(std::move(call));
          },
          py::arg("on_silence"))
      .def("connect_partner", &Server::connect_partner, no_gil, py::arg("socket"), py::arg("path"))
      .def("decided", &Server::decided, no_gil, py::arg("goes_on"))
      .def_property_readonly("backup_follows", py::cpp_function(&Server::backup_follows, no_gil))
      .def_property_readonly("backup_starts", py::cpp_function(&Server::backup_starts, no_gil))
      .def("count_backup", &Server::count_backup, no_gil)
      .def("abandon_backup", &Server::abandon_backup, no_gil)
      .def("freeze", &Server::freeze, no_gil)
      .def("unfreeze", &Server::unfreeze, no_gil)
      .def_property_readonly("confirmed", py::cpp_function(&Server::confirmed, no_gil))
      .def("leave_to_backup", &Server::leave_to_backup, no_gil)
      .def_property_readonly("leaves", &Server::leaves)
      .def_property_readonly("is_heir", py::cpp_function(&Server::is_heir, no_gil))
      .def("serve_alone", &Server::serve_alone, no_gil)
      .def_property_readonly("serves", &Server::serves)
      .def_property_readonly("has_ended", &Server::has_ended)
      .def_property_readonly("turn", py::cpp_function(&Server::its_turn, no_gil))
      .def_property_readonly("has_backup", py::cpp_function(&Server::has_backup, no_gil))
      .def("notes", &Server::notes, no_gil)
      .def(
          "die_at",
          [](Server& server, const std::string& step, std::uint64_t times) {
            static constexpr std::string_view kSteps[] = {"never",       "taken",    "journalled",  "updated",
                                                          "carried out", "answered", "gives",       "takes",
                                                          "leaves",      "inherits", "taking over", "serving"};
            const auto found = index_of<12>([](std::size_t i) { return kSteps[i]; }, step, "step");
            server.die_at(static_cast<Server::Step>(found), times);
          },
          no_gil, py::arg("step"), py::arg("times"))
      .def("begin_snapshot",
           [](Server& server) {
             std::vector<Snapshot::Entry> entries;
             {
               const py::gil_scoped_release released;
               entries = server.begin_snapshot();
             }
             py::list found;
             for (const Snapshot::Entry& each : entries)
               found.append(py::make_tuple(each.block, each.version, each.steps, each.rows, each.states, each.numbers));
             return found;
           })
      .def("next_piece",
           [](Server& server) -> py::object {
             std::optional<Snapshot::Piece> piece;
             {
               const py::gil_scoped_release released;
               piece = server.next_piece();
             }
             if (!piece) return py::none();
             auto* const bytes = reinterpret_cast<std::uint8_t*>(piece->bytes.release());
             const py::capsule owner(bytes, [](void* at) { delete[] static_cast<std::byte*>(at); });
             return py::make_tuple(piece->block, piece->first, piece->rows,
                                   py::array_t<std::uint8_t>(static_cast<py::ssize_t>(piece->size), bytes, owner));
           })
      .def("holds_back", &Server::holds_back, no_gil)
      .def("end_snapshot", &Server::end_snapshot, no_gil)
      .def("lose", &Server::lose, no_gil, py::arg("worker"))
      .def("awaited", &Server::awaited, no_gil, py::arg("block"))
      .def("absent", &Server::absent, no_gil, py::arg("group"))
      .def("failure", &Server::failure, no_gil, py::arg("block"))
      .def("missing", &Server::missing, no_gil)
      .def("workers", &Server::workers, no_gil)
      .def("statistics",
           [](Server& server) {
             Server::Statistics s;
             {
               const py::gil_scoped_release released;
               s = server.statistics();
             }
             using namespace py::literals;
             return py::dict("requests"_a = s.requests, "updates"_a = s.updates, "bytes"_a = s.bytes,
                             "workers"_a = s.workers, "blocks"_a = s.blocks, "memory"_a = s.memory,
                             "capacity"_a = s.capacity, "rows"_a = s.rows, "waiting"_a = s.waiting.requests,
                             "waits_for"_a = s.waiting.workers, "clocks"_a = s.clocks, "saving"_a = s.saving,
                             "backup"_a = s.backup, "lag"_a = s.lag);
           })
      .def("stop", &Server::stop, no_gil);
}

void bind_client(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Parts>(m, "ParameterParts")
      .def(py::init<const std::vector<PartTuple>&, const std::string&, const std::string&>(), py::arg("parts"),
           py::kw_only(), py::arg("push_wire") = "float32", py::arg("pull_wire") = "float32");
  py::class_<Call, std::shared_ptr<Call>>(m, "ParameterCall")
      .def_property_readonly("went_well",
                             [](const Call& call) {
                               return std::all_of(call.answers.begin(), call.answers.end(), [](const auto& each) {
                                 return each.outcome != Outcome::late && each.outcome != Outcome::failed &&
                                        each.outcome != Outcome::refused;
                               });
                             })
      .def_property_readonly("asked", [](const Call& call) { return call.asked; })
      // The versions of the new values of a push_pull; None if none were wanted or some have not been copied yet.
      .def_property_readonly("versions",
                             [](const Call& call) -> std::optional<std::vector<std::uint64_t>> {
                               const NewValues& values = call.new_values;
                               if (values.parts.empty() || !values.complete()) return std::nullopt;
                               return values.versions;
                             })
      .def("drop_new_values", [](Call& call) { call.new_values.to = nullptr; })
      .def_property_readonly("answers", [](const Call& call) {
        py::list answers;
        for (const Call::Answer& each : call.answers)
          answers.append(py::make_tuple(each.server, each.block, outcome_name(each.outcome), each.version));
        return answers;
      });
  py::class_<Piece>(m, "ParameterPiece", py::buffer_protocol()).def_buffer(&Piece::buffer);
  py::class_<Client, std::shared_ptr<Client>>(m, "ParameterClient")
      .def(py::init([](WorkerId worker, std::size_t servers, std::size_t data) {
             return std::shared_ptr<Client>(new Client(worker, servers, data, look_for_ctrl_c), [](Client* client) {
               const py::gil_scoped_release no_gil;  // the destructor waits for connections to other hosts
               delete client;
             });
           }),
           py::arg("worker"), py::arg("servers"), py::arg("data"))
      .def_property_readonly("window", &Client::window)
      .def_property_readonly("window_bytes", &Client::window_bytes)
      .def(
          "attach",
          [](Client& client, std::uint32_t server, int values, int bell, int pidfd, std::size_t capacity,
             const std::string& name,
             std::uint32_t turn) { client.attach(server, {values, bell, pidfd, capacity, name, turn, 0, ""}); },
          py::kw_only(), py::arg("server"), py::arg("values"), py::arg("bell"), py::arg("pidfd"), py::arg("capacity"),
          py::arg("name"), py::arg("turn") = 0)
      .def_property_readonly("news", &Client::news)
      .def("close_news", &Client::close_news)
      .def(
          "served_by",
          [](Client& client, std::uint32_t server, std::uint32_t known, std::optional<double> timeout) {
            return client.served_by(server, known, duration(timeout));
          },
          no_gil, py::arg("server"), py::arg("known"), py::arg("timeout"))
      .def(
          "attach_far",
          [](Client& client, std::uint32_t server, const std::string& name, std::uint32_t replica) {
            client.attach(server, name, replica);
          },
          no_gil, py::arg("server"), py::arg("name"), py::arg("replica") = 0)
      .def("attach_far_backup", &Client::attach_far_backup, no_gil, py::arg("server"), py::arg("name"),
           py::arg("replica") = 1)
      .def("seek", &Client::seek, no_gil)
      .def("give_up", &Client::give_up, no_gil, py::arg("server"), py::arg("why"))
      .def("asks", &Client::asks, no_gil, py::arg("server"))
      .def("is_near", &Client::is_near, py::arg("server"))
      .def("host", &Client::host, py::arg("server"))
      .def("connect", &Client::connect, no_gil, py::arg("server"), py::arg("socket"), py::arg("path"),
           py::arg("replica") = 0)
      .def("allocate", [](std::shared_ptr<Client> client,
                          std::size_t bytes) { return std::make_unique<Piece>(std::move(client), bytes); })
      .def(
          "push",
          [](Client& client, const std::vector<std::tuple<const Parts*, std::uintptr_t, std::uintptr_t>>& tensors,
             std::int32_t priority, double weight, std::optional<double> timeout) {
            const py::gil_scoped_release released;
            std::vector<Client::Pushed> pushed;
            for (const auto& [parts, values, out] : tensors)
              pushed.push_back({&parts->parts, address(values), parts->push_wire, address(out)});
            return client.push(pushed, {priority, weight, duration(timeout)});
          },
          py::arg("tensors"), py::kw_only(), py::arg("priority") = 0, py::arg("weight") = 1.0,
          py::arg("timeout") = py::none())
      .def(
          "send",
          [](Client& client, const std::string& kind, const Parts& parts, std::uintptr_t tensor,
             std::optional<double> timeout) {
            const py::gil_scoped_release released;
            return client.send(request_of(kind), parts.parts, address(tensor), {.timeout = duration(timeout)});
          },
          py::arg("kind"), py::arg("parts"), py::arg("tensor"), py::kw_only(), py::arg("timeout") = py::none())
      .def(
          "pull",
          [](Client& client, const Parts& parts, std::uintptr_t tensor, std::optional<double> timeout) {
            const py::gil_scoped_release released;
            return client.pull(parts.parts, address(tensor), {0, 1, duration(timeout), parts.pull_wire});
          },
          py::arg("parts"), py::arg("tensor"), py::kw_only(), py::arg("timeout") = py::none())
      .def(
          "change",
          [](Client& client, const Parts& parts, std::uint64_t place, double number, std::optional<double> timeout) {
            return client.change(parts.parts, place, number, duration(timeout));
          },
          no_gil, py::arg("parts"), py::arg("place"), py::arg("number"), py::kw_only(), py::arg("timeout") = py::none())
      .def("cancel", &Client::cancel, no_gil, py::arg("call"))
      .def(
          "tell",
          [](Client& client, const std::string& kind, const std::vector<std::uint32_t>& servers,
             std::optional<double> timeout) {
            const py::gil_scoped_release released;
            return client.ask(request_of(kind), servers, {0, 1, duration(timeout)});
          },
          py::arg("kind"), py::arg("servers"), py::kw_only(), py::arg("timeout") = py::none())
      .def(
          "wait",
          [](Client& client, Call& call, std::optional<double> timeout) {
            return client.wait(call, duration(timeout));
          },
          no_gil, py::arg("call"), py::arg("timeout"))
      .def(
          "read",
          [](Client& client, const Parts& parts, std::uintptr_t tensor, std::optional<double> timeout) {
            const py::gil_scoped_release released;
            return client.read(parts.parts, address(tensor), duration(timeout));
          },
          py::arg("parts"), py::arg("tensor"), py::arg("timeout"))
      .def(
          "read_round",
          [](Client& client, const Parts& parts, const std::vector<std::uintptr_t>& places,
             std::optional<double> timeout) {
            if (places.size() != parts.parts.size())
              throw Error(ErrorKind::invalid_argument, "there must be a place for each part");
            std::vector<std::byte*> to;
            for (const std::uintptr_t place : places) to.push_back(address(place));
            const py::gil_scoped_release released;
            return client.read_round(parts.parts, to, duration(timeout));
          },
          py::arg("parts"), py::arg("places"), py::arg("timeout"))
      .def(
          "round_of", [](Client& client, const Parts& parts) { return client.round_of(parts.parts); }, py::arg("parts"))
      .def(
          "drain", [](Client& client, std::optional<double> timeout) { return client.drain(duration(timeout)); },
          no_gil, py::arg("timeout"))
      .def("abort", &Client::abort)
      .def_property_readonly("outstanding", &Client::outstanding)
      .def("unanswered_push", &Client::unanswered_push);
}

void bind_rows(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<RowSet>(m, "ParameterRows")
      .def_property_readonly("count", &RowSet::count)
      .def_property_readonly("distinct", &RowSet::distinct)
      .def_property_readonly("begins",
                             [](const RowSet& rows) {
                               std::vector<std::size_t> begins;
                               for (std::size_t i = 0; i <= rows.servers(); ++i) begins.push_back(rows.begin(i));
                               return begins;
                             })
      .def(
          "copy_positions",
          [](const RowSet& rows, std::uintptr_t to) {
            std::copy(rows.positions().begin(), rows.positions().end(), reinterpret_cast<std::int64_t*>(address(to)));
          },
          py::arg("to"));
  py::class_<TableHandle>(m, "ParameterTable")
      .def_property_readonly("blocks", [](const TableHandle& table) { return table.place.blocks; })
      .def(py::init<std::vector<BlockId>, const std::string&, std::size_t>(), py::arg("blocks"), py::arg("dtype"),
           py::arg("width"))
      .def(
          "rows",
          [](const TableHandle& table, std::uintptr_t ids, std::size_t count) {
            return RowSet({reinterpret_cast<const std::int64_t*>(address(ids)), count}, table.owners,
                          table.place.blocks.size());
          },
          no_gil, py::arg("ids"), py::arg("count"))
      .def(
          "push",
          [](const TableHandle& table, Client& client, const RowSet& rows, std::uintptr_t values, bool distinct,
             std::int32_t priority, double weight, std::optional<double> timeout) {
            const py::gil_scoped_release released;
            return client.push_rows(table.place, rows, address(values), distinct,
                                    {priority, weight, duration(timeout)});
          },
          py::arg("client"), py::arg("rows"), py::arg("values"), py::kw_only(), py::arg("distinct"),
          py::arg("priority") = 0, py::arg("weight") = 1.0, py::arg("timeout") = py::none())
      .def(
          "pull",
          [](const TableHandle& table, Client& client, const RowSet& rows, std::optional<double> timeout) {
            const py::gil_scoped_release released;
            return client.pull_rows(table.place, rows, {0, 1, duration(timeout)});
          },
          py::arg("client"), py::arg("rows"), py::kw_only(), py::arg("timeout") = py::none())
      .def(
          "take",
          [](const TableHandle& table, Client& client, const RowSet& rows, Call& call, std::uintptr_t out,
             bool distinct) {
            const py::gil_scoped_release released;
            client.take_rows(table.place, rows, call, address(out), distinct);
          },
          py::arg("client"), py::arg("rows"), py::arg("call"), py::arg("out"), py::kw_only(), py::arg("distinct"));
}

}  // namespace

void bind(py::module_& m, Roots roots) {
  bind_server(m, roots);
  bind_client(m);
  bind_rows(m);
  // For tests of the rules: computes one update of `count` elements.
  m.def(
      "parameter_update",
      [roots](const py::dict& rule, const std::string& dtype, std::uint64_t step, std::size_t count,
              std::uintptr_t value, std::uintptr_t gradient, std::uintptr_t out,
              const std::vector<std::uintptr_t>& state) {
        Update of;
        of.step = step;
        of.count = count;
        of.value = address(value);
        of.gradient = address(gradient);
        of.out = address(out);
        for (std::size_t i = 0; i < state.size() && i < 3; ++i) of.state[i] = address(state[i]);
        std::vector<std::byte> scratch(count * size_of(dtype_of(dtype)));
        of.scratch = scratch.data();
        of.roots = roots;
        update(rule_of(rule), dtype_of(dtype), of);
      },
      py::arg("rule"), py::arg("dtype"), py::arg("step"), py::arg("count"), py::arg("value"), py::arg("gradient"),
      py::arg("out"), py::arg("state"));
}

}  // namespace ringreduce::parameter_server
