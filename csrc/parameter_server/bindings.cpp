#include "parameter_server/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>

#include "core/error.h"
#include "parameter_server/client/client.h"
#include "parameter_server/names.h"
#include "parameter_server/server/server.h"
#include "process_group/keywords.h"

namespace py = pybind11;

// ---- What Python gives and gets for types of C++ --------------------------------------------------------------------

namespace ringreduce::parameter_server {
// The blocks of a key, converted from Python once.
struct Parts {
  using Tuple = std::tuple<std::uint32_t, BlockId, std::size_t, std::size_t, std::size_t>;

  Parts(const std::vector<Tuple>& tuples, const std::string& push_wire, const std::string& pull_wire)
      : push_wire(packing_named(push_wire)), pull_wire(packing_named(pull_wire)) {
    for (const auto& [server, block, begin, bytes, offset] : tuples)
      parts.push_back({server, block, begin, bytes, offset});
  }

  std::vector<Part> parts;
  Packing push_wire, pull_wire;  // how values are packed to and from other hosts
};

namespace {

// Python gives seconds, or None for no limit.
using Timeout = std::optional<double>;

Nanoseconds duration(Timeout seconds) { return seconds && *seconds <= 1e9 ? nanoseconds(*seconds) : kForever; }

std::byte* address(std::uintptr_t a) { return reinterpret_cast<std::byte*>(a); }  // NOLINT(performance-no-int-to-ptr)
std::uintptr_t number(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

}  // namespace
}  // namespace ringreduce::parameter_server

namespace pybind11::detail {

namespace ps = ringreduce::parameter_server;

// Memory is given as its address.
template <>
struct type_caster<std::byte> {
  static constexpr auto name = const_name("int");
  template <class>
  using cast_op_type = std::byte*;
  bool load(handle from, bool convert) { return at.load(from, convert); }
  explicit operator std::byte*() { return ps::address(at); }
  type_caster<std::uintptr_t> at;
};

// A vector of parts is given as Parts.
template <>
struct type_caster<std::vector<ps::Part>> {
  static constexpr auto name = const_name("ParameterParts");
  template <class>
  using cast_op_type = const std::vector<ps::Part>&;
  bool load(handle from, bool convert) { return of.load(from, convert); }
  explicit operator const std::vector<ps::Part>&() { return cast_op<const ps::Parts&>(of).parts; }
  make_caster<ps::Parts> of;
};

}  // namespace pybind11::detail

namespace ringreduce::parameter_server {
namespace {

const py::call_guard<py::gil_scoped_release> no_gil;

template <class F>
auto without_gil(F&& body) {
  const py::gil_scoped_release released;
  return body();
}

// A method whose Nanoseconds are timeouts.
template <class T>
using Given = std::conditional_t<std::is_same_v<T, Nanoseconds>, Timeout, T>;
template <class T>
T taken(Given<T>& given) {
  if constexpr (std::is_same_v<T, Nanoseconds>)
    return duration(given);
  else
    return static_cast<T>(given);
}
template <class R, class C, class... T>
auto timed(R (C::*method)(T...)) {
  return [method](C& self, Given<T>... given) { return (self.*method)(taken<T>(given)...); };
}

// A setter for a member of a member.
template <class S, class M, class V>
auto inner(M S::* outer, V M::* member) {
  return [=](S& self, Given<V> value) { self.*outer.*member = taken<V>(value); };
}

// A table as a worker sees it.
struct TableHandle {
  TableHandle(std::vector<BlockId> blocks, DType dtype, std::size_t width)
      : place{std::move(blocks), dtype, width}, owners(owners_of_slots(place.blocks.size())) {}

  RowSet rows(const std::byte* ids, std::size_t count) const {
    return {{reinterpret_cast<const std::int64_t*>(ids), count}, owners, place.blocks.size()};
  }

  TablePlace place;
  std::vector<std::uint32_t> owners;  // the server of each slot (row_ids.h)
};

// Memory as a NumPy array, which calls `release` at its end.
py::array_t<std::uint8_t> array_of(std::byte* memory, std::size_t bytes, std::function<void()> release) {
  using Release = std::function<void()>;
  const py::capsule owner(new Release(std::move(release)), [](void* of) {
    const std::unique_ptr<Release> last(static_cast<Release*>(of));
    (*last)();
  });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(bytes), reinterpret_cast<std::uint8_t*>(memory), owner);
}

// A method of a server's replica.
template <class R, class... Arguments>
auto asks(R (Replica::*method)(Arguments...) const) {
  return [method](Server& server, std::decay_t<Arguments>... arguments) {
    return server.ask([&](const Replica& replica) { return (replica.*method)(arguments...); });
  };
}

// Runs Python's signal handlers; an exception raised by one ends the wait. Has no effect outside the main thread.
void look_for_ctrl_c() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// What a turn of a server calls in Python.
template <class F>
void call_python(F&& body) {
  const NoQuestions no_questions;
  const py::gil_scoped_acquire gil;
  body();
}

void warn(const std::string& text) {
  call_python([&] {
    try {
      py::module_::import("logging").attr("getLogger")("ringreduce.parameter_server").attr("warning")("%s", text);
    } catch (const py::error_already_set&) {  // raised by a handler of the program's: the server goes on
    }
  });
}

// (block, version, value, out, gradient, (worker, clock, pulled, weight) of each push, the rule's numbers)
using PythonFunction =
    std::function<void(BlockId, std::uint64_t, std::uintptr_t, std::uintptr_t, std::uintptr_t,
                       const std::vector<std::tuple<WorkerId, std::uint64_t, std::uint64_t, double>>&,
                       const std::array<double, Rule::kNumbers>&)>;

std::shared_ptr<Server> make_server(std::size_t capacity, PythonFunction function, bool backed_up, Roots roots) {
  Server::Hooks hooks;
  hooks.enter = [](const std::function<void()>& body) { call_python(body); };
  hooks.update = [call = std::move(function)](const PythonUpdate& update) {
    std::vector<std::tuple<WorkerId, std::uint64_t, std::uint64_t, double>> pushes;
    for (const Contribution& each : update.contributions)
      pushes.emplace_back(each.worker, each.clock, each.pulled, each.weight);
    call(update.block, update.version, number(update.value), number(update.out), number(update.gradient), pushes,
         update.rule.numbers());
  };
  hooks.roots = roots;
  hooks.warn = warn;
  // The destructor joins the server's thread, which may be waiting for the GIL, so it runs without the GIL. The last
  // reference may be dropped by a client's destructor, which does not have the GIL.
  return {new Server(capacity, std::move(hooks), backed_up), [](Server* server) {
            std::optional<py::gil_scoped_release> released;
            if (PyGILState_Check() == 1) released.emplace();
            delete server;
          }};
}

// A method that takes the members of a struct by their names.
template <class Struct, class Method>
auto by_keywords(Method method) {
  return [method](Server& server, const py::kwargs& members) {
    auto made = from_keywords<Struct>(members);
    return without_gil([&] { return std::invoke(method, server, std::move(made)); });
  };
}

auto with_far(void (Server::*method)(std::unique_ptr<Partner>)) {
  return [method](Server& server, std::function<void(const std::string&)> on_silence, std::string name) {
    const auto call = [function = std::move(on_silence)](const std::string& why) {
      call_python([&] {
        try {
          function(why);
        } catch (py::error_already_set& error) {
          error.discard_as_unraisable("a parameter server's callback");
        }
      });
    };
    (server.*method)(std::make_unique<FarPartner>(server.bell_words(), call, std::move(name)));
  };
}

Rule rule_of(const py::dict& members) { return from_keywords<Rule>(py::kwargs(members)); }

void bind_specifications(py::module_& m) {
  using R = Rule;
  py::class_<R> rule(m, "Rule");
  bind_members(rule, "kind", &R::kind, "op", &R::op, "average", &R::average, "lr", &R::lr, "momentum", &R::momentum,
               "dampening", &R::dampening, "weight_decay", &R::weight_decay, "beta1", &R::beta1, "beta2", &R::beta2,
               "eps", &R::eps, "lr_decay", &R::lr_decay, "alpha", &R::alpha, "initial_accumulator_value",
               &R::initial_accumulator_value, "nesterov", &R::nesterov, "maximize", &R::maximize, "centered",
               &R::centered, "decoupled", &R::decoupled, "fused", &R::fused);
  using B = BlockSpec;
  py::class_<B> block(m, "BlockSpec");
  bind_members(block, "dtype", &B::dtype, "count", &B::count, "width", &B::width, "note", &B::note)
      .def_property("rule", nullptr, [](B& self, const py::dict& rule) { self.rule = rule_of(rule); })
      .def_property("mode", nullptr, inner(&B::mode, &Mode::consistency))
      .def_property("quorum", nullptr, inner(&B::mode, &Mode::quorum))
      .def_property("grace", nullptr, inner(&B::mode, &Mode::grace))
      .def_property("staleness", nullptr, inner(&B::mode, &Mode::staleness))
      .def_property("group", nullptr, inner(&B::mode, &Mode::group))
      .def_property("seed", nullptr, inner(&B::first, &FirstValues::seed))
      .def_property("low", nullptr, inner(&B::first, &FirstValues::low))
      .def_property("high", nullptr, inner(&B::first, &FirstValues::high));
  using W = WorkerSpec;
  py::class_<W> worker(m, "WorkerSpec");
  bind_members(worker, "id", &W::id, "group", &W::group, "window_bytes", &W::window_bytes, "servers", &W::servers,
               "lane", &W::lane, "name", &W::name);
  bind_descriptors(worker, "window", &W::window, "pidfd", &W::pidfd, "news", &W::news);
  using P = PartnerSpec;
  py::class_<P> partner(m, "PartnerSpec");
  bind_members(partner, "capacity", &P::capacity, "name", &P::name, "address", &P::address);
  bind_descriptors(partner, "log", &P::log, "bell", &P::bell, "values", &P::values, "pidfd", &P::pidfd, "passage",
                   &P::passage);
  using S = ServerSpec;
  py::class_<S> server(m, "ServerSpec");
  bind_members(server, "capacity", &S::capacity, "name", &S::name, "turn", &S::turn);
  bind_descriptors(server, "values", &S::values, "bell", &S::bell, "pidfd", &S::pidfd);
}

py::object next_piece(Server& server) {
  const auto ask = [](Replica& replica) { return replica.blocks.next_piece(); };
  auto piece = without_gil([&] { return server.ask(ask); });
  if (!piece) return py::none();
  std::byte* const bytes = piece->bytes.release();
  return py::make_tuple(piece->block, piece->first, piece->rows,
                        array_of(bytes, piece->size, [bytes] { delete[] bytes; }));
}

auto begin_snapshot(Server& server) {
  std::vector<std::tuple<BlockId, std::uint64_t, std::uint64_t, std::size_t, int, std::array<double, Rule::kNumbers>>>
      found;
  for (const auto& [block, version, steps, rows, states, numbers] : server.begin_snapshot())
    found.emplace_back(block, version, steps, rows, states, numbers);
  return found;
}

py::dict statistics(Server& server) {
  const auto s = without_gil([&] { return server.statistics(); });
  using namespace py::literals;
  return py::dict("requests"_a = s.requests, "updates"_a = s.updates, "bytes"_a = s.bytes, "workers"_a = s.workers,
                  "blocks"_a = s.blocks, "memory"_a = s.memory, "capacity"_a = s.capacity, "rows"_a = s.rows,
                  "waiting"_a = s.waiting.requests, "waits_for"_a = s.waiting.workers, "clocks"_a = s.clocks,
                  "saving"_a = s.saving, "backup"_a = s.backup, "lag"_a = s.lag);
}

template <class T>
auto standing(T Server::Standing::* member) {
  return [member](Server& server) { return server.standing().*member; };
}

void bind_server(py::module_& m, Roots roots) {
  py::class_<Server, std::shared_ptr<Server>> bound(m, "ParameterServer");
  bound
      .def(py::init([roots](std::size_t capacity, PythonFunction update, bool backed_up) {
             return make_server(capacity, std::move(update), backed_up, roots);
           }),
           py::arg("capacity"), py::arg("update"), py::arg("backed_up") = false)
      .def("join", by_keywords<WorkerSpec>(&Server::join))
      .def("join_far", &Server::join_far, no_gil, py::kw_only(), py::arg("id"), py::arg("group"), py::arg("window"),
           py::arg("name") = "")
      .def("connect", &Server::connect, no_gil, py::arg("worker"), py::arg("socket"), py::arg("path"))
      .def("create", by_keywords<BlockSpec>(&Server::create))
      .def_static("log", [] { return NearLog::make().release(); })
      .def("lead", by_keywords<PartnerSpec>([](Server& server, PartnerSpec its) {
             server.lead(std::make_unique<NearPartner>(std::move(its), true));
           }))
      .def("follow", by_keywords<PartnerSpec>([](Server& server, PartnerSpec its) {
             server.follow(std::make_unique<NearPartner>(std::move(its), false));
           }))
      .def("lead_far", with_far(&Server::lead), no_gil, py::arg("on_silence"), py::arg("name") = "")
      .def("follow_far", with_far(&Server::follow), no_gil, py::arg("on_silence"), py::arg("name") = "")
      .def("connect_partner", &Server::connect_partner, no_gil, py::arg("socket"), py::arg("path"))
      .def("decided", &Server::decided, no_gil, py::arg("goes_on"))
      .def("die_at", &Server::die_at, no_gil, py::arg("step"), py::arg("times"))
      .def("begin_snapshot", &begin_snapshot, no_gil)
      .def("next_piece", &next_piece)
      .def("lose", &Server::lose, no_gil, py::arg("worker"))
      .def("awaited", asks(&Replica::awaited), no_gil, py::arg("block"))
      .def("absent", asks(&Replica::absent), no_gil, py::arg("group"))
      .def("failure", asks(&Replica::failure), no_gil, py::arg("block"))
      .def("statistics", &statistics);
  bind_properties(
      bound, "values", &Server::values, "bell", [](Server& server) { return server.bell(); }, "capacity",
      &Server::capacity, "leaves", &Server::leaves, "serves", &Server::serves, "has_ended", &Server::has_ended);
  using S = Server::Standing;
  bind_properties(bound, "backup_follows", standing(&S::backup_follows), "backup_starts", standing(&S::backup_starts),
                  "confirmed", standing(&S::confirmed), "is_heir", standing(&S::is_heir), "turn", standing(&S::turn),
                  "has_backup", standing(&S::has_backup), "failed_alone", &Server::failed_alone);
  bind_methods(
      bound, "count_backup", &Server::count_backup, "abandon_backup", &Server::abandon_backup, "freeze",
      &Server::freeze, "unfreeze", &Server::unfreeze, "leave_to_backup", &Server::leave_to_backup, "serve_alone",
      &Server::serve_alone, "notes", asks(&Replica::notes), "holds_back", &Server::holds_back, "end_snapshot",
      [](Server& server) { server.ask([](Replica& replica) { replica.blocks.end_snapshot(); }); }, "missing",
      &Server::missing, "workers", asks(&Replica::workers), "stop", &Server::stop);
}

bool went_well(const Call& call) {
  return std::all_of(call.answers.begin(), call.answers.end(), [](const auto& each) {
    return each.outcome != Outcome::late && each.outcome != Outcome::failed && each.outcome != Outcome::refused;
  });
}

// The versions of the new values of a push_pull; nothing if none were wanted or some have not been copied yet.
std::optional<std::vector<std::uint64_t>> new_versions(const Call& call) {
  const NewValues& values = call.new_values;
  if (values.parts.empty() || !values.complete()) return std::nullopt;
  return values.versions;
}

auto answers(const Call& call) {
  std::vector<std::tuple<std::uint32_t, BlockId, Outcome, std::uint64_t>> found;
  for (const auto& [server, block, outcome, version] : call.answers)
    found.emplace_back(server, block, outcome, version);
  return found;
}

// Each tensor's parts, values and place for new values.
using Tensors = std::vector<std::tuple<const Parts*, std::byte*, std::byte*>>;

auto push(Client& client, const Tensors& tensors, std::int32_t priority, double weight, Timeout timeout) {
  std::vector<Client::Pushed> pushed;
  for (const auto& [parts, values, out] : tensors) pushed.push_back({&parts->parts, values, parts->push_wire, out});
  return client.push(pushed, {priority, weight, duration(timeout)});
}

std::shared_ptr<Client> make_client(WorkerId worker, std::size_t servers, std::size_t data) {
  return {new Client(worker, servers, data, look_for_ctrl_c), [](Client* client) {
            const py::gil_scoped_release released;  // the destructor waits for connections to other hosts
            delete client;
          }};
}

void bind_client(py::module_& m) {
  const py::arg_v timeout = py::arg("timeout") = py::none();
  py::class_<Client, std::shared_ptr<Client>>(m, "ParameterClient")
      .def(py::init(&make_client), py::arg("worker"), py::arg("servers"), py::arg("data"))
      .def_property_readonly("window", &Client::window)
      .def_property_readonly("window_bytes", &Client::window_bytes)
      .def(
          "attach",
          [](Client& client, std::uint32_t server, const py::kwargs& members) {
            client.attach(server, from_keywords<ServerSpec>(members));
          },
          py::arg("server"))
      .def_property_readonly("news", &Client::news)
      .def("close_news", &Client::close_news)
      .def("served_by", timed(&Client::served_by), no_gil, py::arg("server"), py::arg("known"), py::arg("timeout"))
      .def("attach_far", &Client::attach_far, no_gil, py::arg("server"), py::arg("name"), py::arg("replica") = 0)
      .def("attach_far_backup", &Client::attach_far_backup, no_gil, py::arg("server"), py::arg("name"),
           py::arg("replica") = 1)
      .def("seek", &Client::seek, no_gil)
      .def("give_up", &Client::give_up, no_gil, py::arg("server"), py::arg("why"))
      .def("asks", &Client::asks, no_gil, py::arg("server"))
      .def("is_near", &Client::is_near, py::arg("server"))
      .def("host", &Client::host, py::arg("server"))
      .def("connect", &Client::connect, no_gil, py::arg("server"), py::arg("socket"), py::arg("path"),
           py::arg("replica") = 0)
      .def("allocate",
           [](Client& client, std::size_t bytes) {
             const OwnWindow::Piece piece = client.allocate(bytes);
             return array_of(piece.get(), bytes, [piece] {});
           })
      .def("push", &push, no_gil, py::arg("tensors"), py::kw_only(), py::arg("priority") = 0, py::arg("weight") = 1.0,
           timeout)
      .def(
          "send",
          [](Client& client, RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor, Timeout most) {
            return client.send(kind, parts, tensor, {.timeout = duration(most)});
          },
          no_gil, py::arg("kind"), py::arg("parts"), py::arg("tensor"), py::kw_only(), timeout)
      .def(
          "pull",
          [](Client& client, const Parts& parts, std::byte* tensor, Timeout most) {
            return client.pull(parts.parts, tensor, duration(most), parts.pull_wire);
          },
          no_gil, py::arg("parts"), py::arg("tensor"), py::kw_only(), timeout)
      .def("change", timed(&Client::change), no_gil, py::arg("parts"), py::arg("place"), py::arg("number"),
           py::kw_only(), timeout)
      .def("cancel", &Client::cancel, no_gil, py::arg("call"))
      .def("tell", timed(&Client::ask), no_gil, py::arg("kind"), py::arg("servers"), py::kw_only(), timeout)
      .def("wait", timed(&Client::wait), no_gil, py::arg("call"), py::arg("timeout"))
      .def("read", timed(&Client::read), no_gil, py::arg("parts"), py::arg("tensor"), py::arg("timeout"))
      .def("read_round", timed(&Client::read_round), no_gil, py::arg("parts"), py::arg("places"), py::arg("timeout"))
      .def("round_of", &Client::round_of, py::arg("parts"))
      .def("drain", timed(&Client::drain), no_gil, py::arg("timeout"))
      .def("check_caller", [](Client& client) { client.of_this_process(); })
      .def("abort", &Client::abort)
      .def_property_readonly("outstanding", &Client::outstanding)
      .def("unanswered_push", &Client::unanswered_push);
}

void bind_calls_and_rows(py::module_& m) {
  py::class_<Parts>(m, "ParameterParts")
      .def(py::init<const std::vector<Parts::Tuple>&, const std::string&, const std::string&>(), py::arg("parts"),
           py::kw_only(), py::arg("push_wire") = "float32", py::arg("pull_wire") = "float32");
  py::class_<Call, std::shared_ptr<Call>>(m, "ParameterCall")
      .def_property_readonly("went_well", &went_well)
      .def_readonly("asked", &Call::asked)
      .def_property_readonly("versions", &new_versions)
      .def("drop_new_values", [](Call& call) { call.new_values.to = nullptr; })
      .def_property_readonly("answers", &answers);
  const py::arg_v timeout = py::arg("timeout") = py::none();
  py::class_<RowSet>(m, "ParameterRows")
      .def_property_readonly("count", &RowSet::count)
      .def_property_readonly("distinct", &RowSet::distinct)
      .def_property_readonly("begins", &RowSet::begins)
      .def(
          "copy_ids",
          [](const RowSet& rows, std::byte* to) { std::memcpy(to, rows.ids().data(), rows.ids().size_bytes()); },
          py::arg("to"))
      .def(
          "copy_positions",
          [](const RowSet& rows, std::byte* to) {
            std::memcpy(to, rows.positions().data(), rows.positions().size_bytes());
          },
          py::arg("to"));
  py::class_<TableHandle>(m, "ParameterTable")
      .def(py::init<std::vector<BlockId>, DType, std::size_t>(), py::arg("blocks"), py::arg("dtype"), py::arg("width"))
      .def_property_readonly("blocks", [](const TableHandle& table) { return table.place.blocks; })
      .def("rows", &TableHandle::rows, no_gil, py::arg("ids"), py::arg("count"))
      .def(
          "push",
          [](const TableHandle& table, Client& client, const RowSet& rows, const std::byte* values, bool distinct,
             std::int32_t priority, double weight, Timeout most) {
            return client.push_rows(table.place, rows, values, distinct, {priority, weight, duration(most)});
          },
          no_gil, py::arg("client"), py::arg("rows"), py::arg("values"), py::kw_only(), py::arg("distinct"),
          py::arg("priority") = 0, py::arg("weight") = 1.0, timeout)
      .def(
          "pull",
          [](const TableHandle& table, Client& client, const RowSet& rows, Timeout most) {
            return client.pull_rows(table.place, rows, duration(most));
          },
          no_gil, py::arg("client"), py::arg("rows"), py::kw_only(), timeout)
      .def(
          "take",
          [](const TableHandle& table, Client& client, const RowSet& rows, Call& call, std::byte* out, bool distinct) {
            client.take_rows(table.place, rows, call, out, distinct);
          },
          no_gil, py::arg("client"), py::arg("rows"), py::arg("call"), py::arg("out"), py::kw_only(),
          py::arg("distinct"));
}

}  // namespace

void bind(py::module_& m, Roots roots) {
  bind_specifications(m);
  bind_server(m, roots);
  bind_calls_and_rows(m);
  bind_client(m);
  // For tests of the rules: computes one update of `count` elements.
  m.def(
      "parameter_update",
      [roots](const py::dict& rule, DType dtype, std::uint64_t step, std::size_t count, std::byte* value,
              std::byte* gradient, std::byte* out, const std::vector<std::byte*>& state) {
        std::vector<std::byte> scratch(count * size_of(dtype));
        Update of{step, count, 1, value, gradient, out, {}, scratch.data(), roots};
        std::copy_n(state.begin(), std::min<std::size_t>(state.size(), std::size(of.state)), of.state);
        update(rule_of(rule), dtype, of);
      },
      py::arg("rule"), py::arg("dtype"), py::arg("step"), py::arg("count"), py::arg("value"), py::arg("gradient"),
      py::arg("out"), py::arg("state"));
}

}  // namespace ringreduce::parameter_server
