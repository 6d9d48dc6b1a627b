#include "process_group/call_log.h"

#include <c10/util/ApproximateClock.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TraceUtils.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <utility>

#include "core/boot_id.h"
#include "core/fork.h"
#include "process_group/compat.h"

namespace ringreduce {
namespace {

using c10d::OpType;

struct CallName {
  OpType type;
  const char* name;
};
constexpr CallName kCalls[] = {
    {OpType::BROADCAST, "broadcast"},
    {OpType::ALLREDUCE, "all_reduce"},
    {OpType::ALLREDUCE_COALESCED, "all_reduce"},
    {OpType::_ALLREDUCE_SPARSE, "sparse_all_reduce"},
    {OpType::REDUCE, "reduce"},
    {OpType::ALLGATHER, "all_gather"},
    {OpType::_ALLGATHER_BASE, "all_gather"},
    {OpType::ALLGATHER_COALESCED, "all_gather"},
    {OpType::REDUCE_SCATTER, "reduce_scatter"},
    {OpType::_REDUCE_SCATTER_BASE, "reduce_scatter"},
    {OpType::GATHER, "gather"},
    {OpType::SCATTER, "scatter"},
    {OpType::ALLTOALL, "all_to_all"},
    {OpType::ALLTOALL_BASE, "all_to_all"},
    {OpType::BARRIER, "barrier"},
    {OpType::SEND, "send"},
    {OpType::RECV, "recv"},
    {OpType::RECVANYSOURCE, "recvAnySource"},
    {OpType::COALESCED, "coalesced"},
};

const char* find(OpType type) {
  const auto* found =
      std::find_if(std::begin(kCalls), std::end(kCalls), [&](const CallName& call) { return call.type == type; });
  return found == std::end(kCalls) ? "unknown" : found->name;
}

struct Registry {
  std::mutex mutex;
  std::vector<const CallLog*> logs;
};

std::uint64_t thread_id() {
  static thread_local const auto id = static_cast<std::uint64_t>(syscall(SYS_gettid));
  return id;
}

bool is_message(OpType type) { return c10d::isP2POp(type); }

// Whether a variable says where torch's own writer writes; else all jobs of a user have the same files. Not to be asked
// in a thread of ours: the program may be setting a variable meanwhile. So the writer, too, reads it here.
bool told_where_to_dump(int global_rank) {
  if (!std::getenv("TORCH_FR_DUMP_TEMP_FILE") && !std::getenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")) return false;
  try {
    c10d::DebugInfoWriter::getWriter(global_rank);
  } catch (const std::exception&) {  // write_dump() will say so
  }
  return true;
}

}  // namespace

const char* name_of(OpType type) { return find(type == OpType::RECVANYSOURCE ? OpType::RECV : type); }

const char* profiling_title(OpType type, bool as_gloo) {
  static const auto titles = [] {
    std::map<std::string_view, std::array<std::string, 2>> made{{"unknown", {"ringreduce:unknown", "gloo:unknown"}}};
    for (const auto& [_, name] : kCalls) made[name] = {std::string("ringreduce:") + name, std::string("gloo:") + name};
    return made;
  }();
  return titles.at(find(type))[as_gloo].c_str();
}

CallLog::CallLog(std::size_t entries, bool print, Group group)
    : capacity_(entries),
      print_(print),
      group_(std::move(group)),
      told_where_(told_where_to_dump(static_cast<int>(global_rank()))) {
  group_.made = c10::getTime();
  Registry& registry = process_wide<Registry>();
  std::lock_guard lock(registry.mutex);
  registry.logs.push_back(this);
}

CallLog::~CallLog() {
  Registry& registry = process_wide<Registry>();
  std::lock_guard lock(registry.mutex);
  std::erase(registry.logs, this);
}

void CallLog::describe(const std::string& description) {
  std::lock_guard lock(mutex_);
  group_.description = description;
}

void CallLog::append(Entry& entry, at::TensorList tensors) {
  for (const at::Tensor& t : tensors) {
    entry.sizes.append(t.sizes().begin(), t.sizes().end());
    entry.dims.push_back(t.dim());
    entry.dtypes.push_back(t.scalar_type());
  }
}

std::uint64_t CallLog::begin(const Call& call, at::TensorList inputs, at::TensorList outputs, bool starts) {
  const auto bytes_of = [](at::TensorList tensors) {
    std::uint64_t bytes = 0;
    for (const at::Tensor& t : tensors) bytes += static_cast<std::uint64_t>(t.numel()) * t.element_size();
    return bytes;
  };
  const std::uint64_t bytes = std::max(bytes_of(inputs), bytes_of(outputs));
  std::lock_guard lock(mutex_);
  if (entries_.size() < capacity_ && next_id_ == entries_.size()) entries_.emplace_back();  // first: it may throw
  Counters& counters = counters_[static_cast<std::size_t>(call.type) % kTypes];
  ++counters.calls;
  counters.bytes += bytes;
  const std::uint64_t id = next_id_++;
  if (capacity_ == 0) return id;
  Entry& entry = entries_[id % capacity_];
  entry.call = call;
  entry.id = id;
  entry.nth = is_message(call.type) ? ++messages_[{call.type, call.peer}] : 0;
  entry.sizes.clear();
  entry.dims.clear();
  entry.dtypes.clear();
  append(entry, inputs);
  append(entry, outputs);
  entry.inputs = inputs.size();
  entry.begun = c10::getTime();
  entry.started = starts ? entry.begun : 0;
  entry.ended = 0;
  entry.succeeded = false;
  entry.thread = thread_id();
  return id;
}

CallLog::Entry* CallLog::find(std::uint64_t id) {
  if (capacity_ == 0) return nullptr;
  Entry& entry = entries_[id % capacity_];
  return entry.id == id ? &entry : nullptr;
}

void CallLog::start(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(id)) entry->started = c10::getTime();
}

void CallLog::end(std::uint64_t id, OpType type, bool succeeded, const Tally& tally) {
  std::array<char, 40> after{};  // how long it took, if that is recorded
  {
    std::lock_guard lock(mutex_);
    Counters& counters = counters_[static_cast<std::size_t>(type) % kTypes];
    counters.failed += succeeded ? 0 : 1;
    counters.tally += tally;
    if (Entry* entry = find(id)) {
      entry->ended = c10::getTime();
      entry->succeeded = succeeded;
      const double took = static_cast<double>(entry->ended - entry->begun) / kMillisecond;
      if (print_) std::snprintf(after.data(), after.size(), " after %.3f ms", took);
    }
  }
  if (!print_) return;
  const Group& group = group_;  // its name and rank never change
  std::fprintf(stderr, "[ringreduce rank %d of %s] %s #%llu %s%s, %.3f ms of it waiting\n", group.rank,
               group.name.c_str(), name_of(type), static_cast<unsigned long long>(id), succeeded ? "done" : "failed",
               after.data(), static_cast<double>(tally.waited) / kMillisecond);
}

CallLog::Statistics CallLog::statistics() const {
  Statistics statistics;
  std::lock_guard lock(mutex_);
  for (std::size_t type = 0; type < kTypes; ++type) {
    const Counters& counters = counters_[type];
    if (counters.calls == 0) continue;
    Counters& sum = statistics[name_of(static_cast<OpType>(type))];
    sum.calls += counters.calls;
    sum.failed += counters.failed;
    sum.bytes += counters.bytes;
    sum.tally += counters.tally;
  }
  return statistics;
}

std::map<std::string, CallLog::Statistics> CallLog::all_statistics() {
  std::map<std::string, Statistics> all;
  Registry& registry = process_wide<Registry>();
  std::lock_guard lock(registry.mutex);
  for (const CallLog* log : registry.logs) all[log->group_.name] = log->statistics();
  return all;
}

// How a call stands in a dump. `torchfrtrace` expects every call of all ranks of its group, which a message is not. So
// messages from one rank to another are a group of these two; those from any rank, of the receiver alone.
CallLog::Heading CallLog::heading(const Call& call, const Group& group) {
  const OpType known = call.type == OpType::_ALLREDUCE_SPARSE ? OpType::ALLREDUCE : call.type;
  const std::string name = std::string(kAnalysedAs) + (known == OpType::BARRIER ? kAnalysedBarrier : name_of(known));
  if (!is_message(call.type)) return {name, group};
  const bool sends = call.type == OpType::SEND;
  if (call.peer < 0)
    return {name + " 0<-0",
            {group.name + ":any to " + std::to_string(group.rank),
             group.description,
             {group.ranks[static_cast<std::size_t>(group.rank)]}}};
  const int from = sends ? group.rank : call.peer, to = sends ? call.peer : group.rank;
  const std::int64_t first = group.ranks[static_cast<std::size_t>(from)],
                     second = group.ranks[static_cast<std::size_t>(to)];
  const bool ascending = first < second;  // ranks of a group are numbered by their global ranks
  return {c10::str(name, " ", sends ? !ascending : ascending, sends ? "->" : "<-", sends ? ascending : !ascending),
          {c10::str(group.name, ":", from, " to ", to), group.description, {first, second}}};
}

// An entry as the analyser reads it.
c10::Dict<c10::IValue, c10::IValue> CallLog::to_dict(const Entry& e, const Heading& heading, std::size_t group_number,
                                                     std::size_t number) {
  const bool message = is_message(e.call.type);
  const auto sequence = static_cast<std::int64_t>(message ? e.nth : e.call.sequence);
  const auto time = [](std::int64_t t) { return t == 0 ? c10::IValue() : c10::IValue(t); };
  std::size_t read = 0;
  const auto sizes = [&](std::size_t from, std::size_t to, OpType joined) {
    std::vector<std::vector<std::int64_t>> shapes;
    for (std::size_t i = from; i < to; ++i) {
      const auto* first = e.sizes.data() + read;
      shapes.emplace_back(first, first + e.dims[i]);
      read += static_cast<std::size_t>(e.dims[i]);
    }
    // A list of one tensor for each rank stands as a single tensor, as the analyser knows it from NCCL.
    if (e.call.type == joined && !shapes.empty() && std::equal(shapes.begin() + 1, shapes.end(), shapes.begin())) {
      shapes[0].insert(shapes[0].begin(), static_cast<std::int64_t>(shapes.size()));
      shapes.resize(1);
    }
    return shapes;
  };
  const auto dtypes = [&](std::size_t from, std::size_t to) {
    std::vector<std::string> names;
    for (std::size_t i = from; i < to; ++i) names.emplace_back(c10::toString(e.dtypes[i]));
    return names;
  };
  auto d = c10d::new_dict();
  d.insert(c10d::record_id_key, static_cast<std::int64_t>(number));
  d.insert(c10d::pg_id_key, static_cast<std::int64_t>(group_number));
  d.insert(c10d::pg_name_key, std::make_tuple(heading.group.name, heading.group.description));
  d.insert(c10d::thread_id_key, std::to_string(e.thread));
  d.insert(c10d::thread_name_key, "");
  d.insert(c10d::collective_seq_id_key, sequence);
  d.insert(c10d::p2p_seq_id_key, message ? sequence : std::int64_t{0});
  d.insert(c10d::op_id_key, static_cast<std::int64_t>(e.call.sequence));
  d.insert(c10d::is_p2p_key, message);
  d.insert(c10d::profiling_name_key, heading.name);
  d.insert(c10d::input_sizes_key, sizes(0, e.inputs, OpType::REDUCE_SCATTER));
  d.insert(c10d::output_sizes_key, sizes(e.inputs, e.dims.size(), OpType::ALLGATHER));
  d.insert(c10d::input_dtypes_key, dtypes(0, e.inputs));
  d.insert(c10d::output_dtypes_key, dtypes(e.inputs, e.dims.size()));
  d.insert(c10d::time_created_key, e.begun);
  d.insert(c10d::time_discovered_started_key, time(e.started));
  d.insert(c10d::time_discovered_completed_key, time(e.succeeded ? e.ended : 0));
  if (e.succeeded) d.insert(c10d::duration_key, static_cast<double>(e.ended - e.started) / kMillisecond);
  d.insert(c10d::state_key, e.succeeded      ? c10d::completed_state
                            : e.started != 0 ? c10d::started_state
                                             : c10d::scheduled_state);
  d.insert(c10d::retired_key, e.ended != 0);
  d.insert(c10d::timeout_key, static_cast<std::int64_t>(e.call.timeout.count()));
  d.insert(c10d::frames_key, c10d::new_list());
  // What the analyser does not know, for `ringreduce trace`.
  if (e.call.root >= 0) d.insert("root", static_cast<std::int64_t>(e.call.root));
  if (e.call.own_op != 0) d.insert("reduce_op", c10::str("operator ", std::hex, e.call.own_op));
  if (!e.call.reduce_op.empty()) d.insert("reduce_op", std::string(e.call.reduce_op));
  if (!e.call.splits.empty()) d.insert("splits", e.call.splits);
  return d;
}

CallLog::Snapshot CallLog::snapshot() {
  Snapshot result;
  Registry& registry = process_wide<Registry>();
  std::lock_guard lock(registry.mutex);
  for (const CallLog* log : registry.logs) {
    std::lock_guard log_lock(log->mutex_);
    for (const Entry& entry : log->entries_) result.entries.emplace_back(result.groups.size(), entry);
    result.groups.push_back(log->group_);
  }
  return result;
}

// Whose record it is, so that nobody takes records of different jobs for those of one; and by what clock its times are,
// which is one for all processes of a machine until that is started anew. The groups are numbered as in `pg_id`.
c10::Dict<c10::IValue, c10::IValue> CallLog::origin(const std::vector<Group>& groups) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  auto ids = c10d::new_list();
  for (const Group& group : groups) {
    auto of_group = c10d::new_dict();
    of_group.insert("name", group.name);
    of_group.insert("ranks", group.ranks);
    of_group.insert("id", group.id);
    of_group.insert("job", group.job);
    of_group.insert("made_ns", group.made);
    ids.push_back(of_group);
  }
  auto result = c10d::new_dict();
  result.insert("host", std::string(host.data()));
  result.insert("pid", static_cast<std::int64_t>(getpid()));
  result.insert("boot", boot_id());
  result.insert("groups", ids);
  return result;
}

std::string CallLog::pickle(Snapshot snapshot) {
  struct Latest {
    std::int64_t begun = -1, started = -1, ended = -1;  // collectives
  };
  std::vector<Latest> latest(snapshot.groups.size());
  std::map<std::string, Group> groups;
  for (const Group& group : snapshot.groups) groups[group.name] = group;
  std::stable_sort(snapshot.entries.begin(), snapshot.entries.end(),
                   [](const auto& a, const auto& b) { return a.second.begun < b.second.begun; });

  auto entries = c10d::new_list();
  for (const auto& [number, entry] : snapshot.entries) {
    const Heading listed = heading(entry.call, snapshot.groups[number]);
    entries.push_back(to_dict(entry, listed, number, entries.size()));
    groups.emplace(listed.group.name, listed.group);
    if (is_message(entry.call.type)) continue;
    const auto sequence = static_cast<std::int64_t>(entry.call.sequence);
    Latest& of = latest[number];
    of.begun = std::max(of.begun, sequence);
    if (entry.started != 0) of.started = std::max(of.started, sequence);
    if (entry.succeeded) of.ended = std::max(of.ended, sequence);
  }
  auto statuses = c10d::new_dict();
  for (const Latest& of : latest) {
    auto status = c10d::new_dict();
    status.insert("last_enqueued_collective", of.begun);
    status.insert("last_started_collective", of.started);
    status.insert("last_completed_collective", of.ended);
    statuses.insert(std::to_string(statuses.size()), status);
  }
  auto config = c10d::new_dict();
  for (const auto& [name, group] : groups) {
    auto info = c10d::new_dict();
    info.insert("name", name);
    info.insert("desc", group.description);
    info.insert("ranks", c10::str("[", c10::Join(", ", group.ranks), "]"));
    config.insert(name, info);
  }
  auto result = c10d::new_dict();
  result.insert(c10d::version_key, c10d::version_val);
  result.insert(c10d::pg_config_key, config);
  result.insert(c10d::pg_status_key, statuses);
  result.insert(c10d::entries_key, entries);
  result.insert("ringreduce", origin(snapshot.groups));
  return c10d::pickle_str(result);
}

std::string CallLog::dump() { return pickle(snapshot()); }

}  // namespace ringreduce
